"""Prompts: sources, strictness of files, splits that never share a group."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from distill.prompts import PromptsSection, SourceSection, load_prompts, read_suite
from specdec.errors import UserError


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def section(*names: object, **extra: object) -> PromptsSection:
    return PromptsSection(sources=tuple(SourceSection(name=str(n)) for n in names), **extra)  # type: ignore[arg-type]


def test_builtin_splits_share_no_group_and_lose_no_prompt() -> None:
    splits = load_prompts(PromptsSection(held_out=0.1), seed=0)
    parts = (splits.train, splits.selection, splits.report)
    groups = [{p.group for p in part} for part in parts]
    assert not (groups[0] & groups[1] or groups[0] & groups[2] or groups[1] & groups[2])
    total = sum(len(part) for part in parts)
    assert total >= 2000
    assert len(splits.selection) + len(splits.report) == pytest.approx(0.1 * total, rel=0.05)
    for part in parts:
        # Any prefix is a fair sample of the domains.
        assert set(Counter(p.domain for p in part[:40]).values()) == {10}
        assert {p.domain for p in part} == {"code", "structured", "factual", "prose"}


def test_same_seed_same_splits_other_seed_other_splits() -> None:
    first, again, other = (load_prompts(PromptsSection(), seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert {p.id for p in first.report} != {p.id for p in other.report}


def test_a_group_stays_together(tmp_path: Path) -> None:
    records = [{"id": i, "prompt": f"q {i}", "group": f"g{i % 5}"} for i in range(50)]
    splits = load_prompts(section(write(tmp_path / "p.jsonl", *records), held_out=0.4), seed=3)
    held = {p.group for p in (*splits.selection, *splits.report)}
    assert len(held) == 2 and not held & {p.group for p in splits.train}
    assert len(splits.train) == 30


def test_texts_that_occur_twice_are_kept_once(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *({"id": i, "prompt": f"q {i}"} for i in range(10)))
    b = write(tmp_path / "b.jsonl", *({"id": f"b{i}", "prompt": f"q {i}", "domain": "a"} for i in range(12)))
    splits = load_prompts(section(a, b), seed=0)
    assert sum(map(len, (splits.train, splits.selection, splits.report))) == 12


def test_weights_and_limits(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *({"id": i, "prompt": f"a {i}"} for i in range(40)))
    b = write(tmp_path / "b.jsonl", *({"id": i, "prompt": f"b {i}"} for i in range(40)))
    sources = (SourceSection(name=str(a), weight=2.0), SourceSection(name=str(b), weight=1.0, domain="other"))
    splits = load_prompts(PromptsSection(sources=sources), seed=0)
    counts = Counter(p.domain for part in (splits.train, splits.selection, splits.report) for p in part)
    assert counts == {"a": 40, "other": 20}
    sources = (SourceSection(name=str(a), max_prompts=7),)
    assert len(load_prompts(PromptsSection(sources=sources), seed=0).train) == 5


def test_datasets_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", *({"prompt": f"q {i}", "category": "x"} for i in range(9)))
    splits = load_prompts(section(tmp_path / "set"), seed=0)
    assert {p.domain for p in splits.train} == {"x"} and len(splits.train) == 7


def test_three_shapes_of_records(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
    path = write(
        tmp_path / "s.jsonl",
        {"question_id": 1, "category": "code", "turns": ["first", "second"], "reference": ["x"]},
        {"id": "b", "messages": chat},
        {"prompt": "plain"},
    )
    one, two, three = read_suite(path)
    assert (one.id, one.domain, one.later_turns) == ("1", "code", ("second",))
    assert [m["role"] for m in two.messages] == ["system", "user"]  # the recorded answer is not asked
    assert (three.id, three.domain) == ("3", "s")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"question_id": 1, "turns": ["a"]}\n{"question_id": 2, "turns": ["un\n', ["line 2"]),
        (b'{"question_id": 1, "category": "code"}\n', ["line 1", "turns"]),
        (b'{"question_id": 1, "turns": "text"}\n', ["line 1", "turns", "a list"]),
        (b'{"question_id": 7, "turns": ["a"]}\n{"question_id": 7, "turns": ["b"]}\n', ["line 2", "'7'", "twice"]),
        (b'{"question_id": 9, "turns": [" \\n "]}\n', ["'9'", "empty"]),
        (b'{"question_id": 9, "turns": [5]}\n', ["'9'", "text"]),
        (b'{"id": "m", "messages": [{"role": "robot", "content": "x"}]}\n', ["'m'", "robot"]),
        (b'{"id": "m", "messages": [{"role": "system", "content": "x"}]}\n', ["'m'", "no user message"]),
        (b'{"question_id": 1, "turns": ["hei\xdft"]}\n', ["line 1", "UTF-8"]),
        (b"", ["no prompts"]),
        (b"\n \n", ["no prompts"]),
    ],
)
def test_bad_files_are_one_line_naming_the_place(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_suite(path)
    message = str(caught.value)
    assert "\n" not in message and "bad.jsonl" in message
    assert all(word in message for word in words), message


def test_missing_sources(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.jsonl"):
        load_prompts(section(tmp_path / "nothing.jsonl"), seed=0)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_prompts(section(tmp_path / "no-such-folder"), seed=0)


def test_too_few_prompts_to_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="split has no prompts"):
        load_prompts(section(write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"})), seed=0)
