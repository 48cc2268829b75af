"""Answers: made once, captured while they are sampled, the same in any batch."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from distill import generate as module
from distill.answers import Answers, GenerateJob
from distill.store import Store, captured_path, responses_path
from specdec.errors import UserError
from specdec.pair import LanguageModel, load_model
from specdec.settings import load


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    records = ({"id": i, "prompt": "hello " * (1 + i % 4) + str(i)} for i in range(20))
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def make_job(target: Path, prompts: Path, run_dir: Path, *more: str) -> GenerateJob:
    items = [
        f"run.dir={run_dir}", f"target.path={target}", "target.dtype=float32", "target.device=cpu",
        f"prompts.sources=[{{name: {prompts}}}]", "prompts.held_out=0.2", "generate.temperatures=[0.8]",
        "generate.max_new_tokens=12", "generate.batch_size=4", "capture.top_k=5", *more,
    ]  # fmt: skip
    return load(GenerateJob, None, items)


def make(job: GenerateJob, target: LanguageModel) -> Answers:
    answers = Answers(job)
    assert answers.make(lambda: target) == "done"
    return answers


def answer_map(run_dir: Path) -> dict[str, Any]:
    lines = [line for path in sorted((run_dir / "responses").iterdir()) for line in path.read_text().splitlines()]
    return {record["answer_id"]: record for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> LanguageModel:
    return load_model(load(GenerateJob, None, [f"target.path={tiny_target_dir}", "target.dtype=float32"]).target)


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, target: LanguageModel) -> Path:
    """The target with noise in its weights: some of what it drafts is accepted, some is not."""
    folder = tmp_path_factory.mktemp("draft")
    draft, generator = copy.deepcopy(target.model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.3 * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator)
    draft.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("drafting", [False, True])
def test_captured_rows_are_the_distributions_of_a_fresh_forward(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, target: LanguageModel, draft_dir: Path, drafting: bool
) -> None:
    more = [f"generate.draft={draft_dir}"] if drafting else []
    make(make_job(tiny_target_dir, prompts, tmp_path / "run", *more), target)
    store = Store(tmp_path / "run")
    examples = [*store.examples("train"), *store.examples("selection")]
    assert len(examples) == 18
    for example in examples:
        tokens = torch.tensor([[*example.prompt_ids, *example.answer_ids[:-1]]])
        with torch.no_grad():
            logits = target.model(input_ids=tokens).logits[0, len(example.prompt_ids) - 1 :]
        expected = logits.log_softmax(-1).topk(5)
        torch.testing.assert_close(example.log_probs.float(), expected.values, atol=2e-3, rtol=0)
        agree = (example.token_ids.long() == expected.indices).float().mean()
        assert agree > 0.98  # fp16 rounding may swap near-equal neighbours, nothing more
        assert len(example.answer_ids) <= 12
        ended = example.answer_ids[-1] in target.eos_ids
        assert ended or len(example.answer_ids) == 12
        assert not set(example.answer_ids[:-1]) & target.eos_ids


def test_a_draft_changes_no_greedy_answer_and_saves_forwards(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, target: LanguageModel, draft_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    forwards: Counter[str] = Counter()
    observe = module.Captured.observe

    def counted(self: module.Captured, *args: Any) -> None:
        forwards[name] += 1
        observe(self, *args)

    monkeypatch.setattr(module.Captured, "observe", counted)
    for name, more in (("plain", []), ("drafted", [f"generate.draft={draft_dir}", "generate.draft_length=4"])):
        job = make_job(tiny_target_dir, prompts, tmp_path / name, "generate.temperatures=[0.0]", *more)
        make(job, target)
    assert answer_map(tmp_path / "drafted") == answer_map(tmp_path / "plain")
    assert forwards["drafted"] < 0.9 * forwards["plain"]
    plain, drafted = (list(Store(tmp_path / name).examples("train")) for name in ("plain", "drafted"))
    for one, other in zip(plain, drafted, strict=True):
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=2e-3, rtol=0)


def test_an_answer_depends_on_nothing_but_itself(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, target: LanguageModel
) -> None:
    for size in (1, 4, 7):
        job = make_job(tiny_target_dir, prompts, tmp_path / f"run{size}", f"generate.batch_size={size}")
        make(job, target)
    one, four, seven = (answer_map(tmp_path / f"run{size}") for size in (1, 4, 7))
    assert one.keys() == four.keys() == seven.keys()
    assert {k: v["answer_ids"] for k, v in one.items()} == {k: v["answer_ids"] for k, v in four.items()}
    assert {k: v["answer_ids"] for k, v in one.items()} == {k: v["answer_ids"] for k, v in seven.items()}


def test_finished_shards_are_never_made_again(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    job = make_job(tiny_target_dir, prompts, run_dir)
    made: list[int] = []
    whole = module.write_shard

    def fragile(folder: Any, number: int, *rest: Any) -> Any:
        made.append(number)
        if len(made) == 3:
            raise KeyboardInterrupt
        return whole(folder, number, *rest)

    monkeypatch.setattr(module, "write_shard", fragile)
    with pytest.raises(KeyboardInterrupt):
        Answers(job).make(lambda: target)
    kept = {path: path.stat().st_mtime_ns for path in (run_dir / "responses").iterdir()}
    assert len(kept) == 2
    captured_path(run_dir, made[1]).unlink()  # half a shard is no shard
    answers = Answers(job)
    assert answers.make(lambda: target) == "done"
    assert len(made) == 3 + len(answers.shards) - 1
    assert made[0] not in made[1:]
    whole_one = responses_path(run_dir, made[0])
    assert whole_one.stat().st_mtime_ns == kept[whole_one]
    assert Answers(job).make(lambda: pytest.fail("the target is not needed")) == "skipped, done"
    make(make_job(tiny_target_dir, prompts, tmp_path / "other"), target)
    assert answer_map(run_dir) == answer_map(tmp_path / "other")


def test_ranks_share_the_shards(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, target: LanguageModel
) -> None:
    job = make_job(tiny_target_dir, prompts, tmp_path / "run")
    assert Answers(job).make(lambda: target, rank=0, world=2) == "waiting for other processes"
    assert not Answers(job).done
    assert Answers(job).make(lambda: target, rank=1, world=2) == "done"
    assert Answers(job).done


def test_splits_temperatures_and_answers_per_prompt(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, target: LanguageModel
) -> None:
    more = ["generate.temperatures=[0.0,0.8]", "generate.answers_per_prompt=2", "generate.max_prompts=10"]
    make(make_job(tiny_target_dir, prompts, tmp_path / "run", *more), target)
    records = answer_map(tmp_path / "run").values()
    assert Counter((r["split"], r["temperature"]) for r in records) == {
        ("train", 0.0): 10, ("train", 0.8): 10, ("selection", 0.0): 2,
    }  # fmt: skip


def test_another_config_is_refused(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, target: LanguageModel
) -> None:
    make(make_job(tiny_target_dir, prompts, tmp_path / "run"), target)
    other = Answers(make_job(tiny_target_dir, prompts, tmp_path / "run", "generate.max_new_tokens=13"))
    with pytest.raises(UserError, match=r"different generate\.max_new_tokens"):
        other.make(lambda: pytest.fail("refused before the target is loaded"))


def test_prompt_beyond_the_context(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"id": "long", "prompt": "1234567890 " * 200}
    prompts.write_text(prompts.read_text() + json.dumps(long) + "\n")
    more = ["prompts.held_out=0.1"]
    with pytest.raises(UserError, match=r"prompt 'long' is too long.*tokens.*at most 511"):
        Answers(make_job(tiny_target_dir, prompts, tmp_path / "run", *more, "run.seed=2"))
    skipped = Answers(
        make_job(tiny_target_dir, prompts, tmp_path / "run", *more, "run.seed=2", "generate.too_long=skip")
    )
    assert "long" not in {t.prompt.id for shard in skipped.shards for t in shard}
    assert "skipped: prompt 'long'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
