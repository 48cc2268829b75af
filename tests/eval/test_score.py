"""Scoring end to end on tiny models: turns, batches, temperatures, resuming, and who owns a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eval import speed
from eval.score import EvalJob, evaluate
from specdec.errors import UserError
from specdec.settings import load

SUITE = [
    {"question_id": 1, "category": "chat", "turns": ["hello world", "and again, shorter"]},
    {"question_id": 2, "category": "chat", "turns": ["the quick brown fox"]},
    {"question_id": 3, "category": "code", "turns": ["<|im_end|> é 👩", "more <script>"]},
    {"id": "c", "category": "code", "messages": [{"role": "user", "content": "x"}]},
]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in SUITE))
    return path


def job(suite: Path, target: Path, draft: Path, out: Path, *more: str) -> EvalJob:
    items = [
        f"target.path={target}", "target.dtype=float32", "target.device=cpu", f"eval.suite={suite}",
        f"eval.draft={draft}", f"eval.out={out}", "eval.draft_length=3", "eval.max_new_tokens=10",
        "eval.lossless_prompts=2", "eval.baseline_prompts=0", *more,
    ]  # fmt: skip
    return load(EvalJob, None, items)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("batch", [1, 3])
def test_turns_temperatures_and_batches(
    suite: Path, tiny_target_dir: Path, tiny_draft_dir: Path, tmp_path: Path, batch: int
) -> None:
    more = (f"eval.batch_size={batch}", "eval.temperatures=[0.0,0.9]")
    report, out = evaluate(job(suite, tiny_target_dir, tiny_draft_dir, tmp_path / "out", *more))
    found = records(out)
    keys = sorted((r["prompt_id"], r["turn"], r["temperature"]) for r in found)
    turns = [("1", 0), ("1", 1), ("2", 0), ("3", 0), ("3", 1), ("c", 0)]
    assert keys == sorted((*turn, t) for turn in turns for t in (0.0, 0.9))
    assert report["overall"]["prompts"] == 4 and set(report["domains"]) == {"chat", "code"}
    assert report["lossless"]["identical"] == report["lossless"]["prompts"] == 2
    for record in found:
        if record["temperature"] == 0.0:  # float32: plain and speculative text agree
            assert record["plain"]["tokens"] == record["speculative"]["tokens"]
        assert 0 <= record["expected"]["sum"] <= record["expected"]["n"] == len(record["plain"]["tokens"])
        assert "".join(record["plain"]["pieces"]) == record["plain"]["text"]
    # Turn 2 sees the target's own answer to turn 1.
    first, second = (next(r for r in found if r["prompt_id"] == "1" and r["turn"] == t) for t in (0, 1))
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    history = [
        {"role": "user", "content": "hello world"},
        {"role": "assistant", "content": first["plain"]["text"]},
        {"role": "user", "content": "and again, shorter"},
    ]
    if not any(word in first["plain"]["text"] for word in tokenizer.all_special_tokens):
        expected = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=True)
        assert second["prompt_tokens"] == len(expected["input_ids"])
    assert second["prompt"] == "and again, shorter"


def test_text_does_not_depend_on_the_batch(
    suite: Path, tiny_target_dir: Path, tiny_draft_dir: Path, tmp_path: Path
) -> None:
    texts = []
    for batch in (1, 3):
        more = (f"eval.batch_size={batch}", "eval.temperatures=[0.9]", "eval.lossless_prompts=0")
        _, out = evaluate(job(suite, tiny_target_dir, tiny_draft_dir, tmp_path / str(batch), *more))
        texts.append({(r["prompt_id"], r["turn"]): r["speculative"]["tokens"] for r in records(out)})
    assert texts[0] == texts[1]


def test_a_killed_evaluation_goes_on(
    suite: Path, tiny_target_dir: Path, tiny_draft_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = speed.Bench.race, []

    def fragile(self: speed.Bench, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(speed.Bench, "race", fragile)
    given = job(suite, tiny_target_dir, tiny_draft_dir, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        evaluate(given)
    with (tmp_path / "out" / "prompts.jsonl").open("a") as file:
        file.write('{"prompt_id": "c", "tur')  # torn by the kill
    before = records_of_whole_lines(tmp_path / "out")
    evaluate(given)
    assert records(tmp_path / "out")[: len(before)] == before and len(before) == 3
    assert len(records(tmp_path / "out")) == 6 and len(calls) == 7


def records_of_whole_lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()[:-1]]


def test_another_evaluation_is_refused_the_folder(
    suite: Path, tiny_target_dir: Path, tiny_draft_dir: Path, tmp_path: Path
) -> None:
    evaluate(job(suite, tiny_target_dir, tiny_draft_dir, tmp_path / "out"))
    with pytest.raises(UserError, match=r"holds another evaluation.*different eval"):
        evaluate(job(suite, tiny_target_dir, tiny_draft_dir, tmp_path / "out", "eval.max_new_tokens=11"))
    with pytest.raises(UserError, match=r"eval\.out"):
        evaluate(job(suite, tiny_target_dir, tiny_draft_dir, tmp_path / "out", "eval.out=null"))


def test_max_prompts_takes_each_domain_in_turn(
    suite: Path, tiny_target_dir: Path, tiny_draft_dir: Path, tmp_path: Path
) -> None:
    more = ("eval.max_prompts=2", "eval.lossless_prompts=0")
    report, _ = evaluate(job(suite, tiny_target_dir, tiny_draft_dir, tmp_path / "out", *more))
    assert {name: block["prompts"] for name, block in report["domains"].items()} == {"chat": 1, "code": 1}


def test_rule_and_sampling_settings_hold_for_every_number(
    suite: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """The target as its own draft: under one law for both, expected and measured acceptance are 1, whatever the law."""
    law = ("eval.top_p=0.8", "eval.repetition_penalty=1.5", "eval.presence_penalty=0.3", "eval.rule=block")
    texts = {}
    for name, more in (("plain", ()), ("law", law)):
        settings = (*more, "eval.temperatures=[0.0,0.9]", "eval.lossless_prompts=0")
        report, out = evaluate(job(suite, tiny_target_dir, tiny_target_dir, tmp_path / name, *settings))
        for record in records(out):
            assert record["expected"]["sum"] == pytest.approx(record["expected"]["n"], abs=1e-3)
            assert record["speculative"]["num_accepted"] == record["speculative"]["num_drafts"]
        texts[name] = [r["plain"]["tokens"] for r in records(out)]
        assert report["settings"]["rule"] == ("block" if more else "token")
    assert texts["plain"] != texts["law"]
