from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.errors import UserError
from specdec.settings import load
from train import checkpoint
from train.build import train
from train.config import Config
from train.loop import Outcome, Trainer
from train.optim import learning_rate
from train.runtime import check_processes

STEPS = 24


def make_config(run_dir: Path, target: Path, **train_settings: Any) -> Config:
    values = {
        "steps": STEPS,
        "batch_tokens": 256,
        "max_length": 128,
        "lr": 5e-3,
        "eval_every": 8,
        "save_every": 8,
        "keep": 2,
        "precision": "fp32",
        **train_settings,
    }
    items = [f"train.{k}={v}" for k, v in values.items()]
    return load(
        Config,
        None,
        [
            f"run.dir={run_dir}",
            f"target.path={target}",
            "target.dtype=float32",
            "target.device=cpu",
            "draft.layers=[0]",
            "generate.max_new_tokens=32",
            *items,
        ],
    )


def records(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows]


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in load_file(outcome.folder / "model.safetensors").items()}


def crash_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    whole = Trainer.one_step

    def fragile(self: Trainer, *, stop: bool = False) -> Any:
        if self.step > step:
            raise KeyboardInterrupt
        return whole(self, stop=stop)

    monkeypatch.setattr(Trainer, "one_step", fragile)


def test_loss_falls_and_the_run_folder_is_complete(run_dir: Path, tiny_target_dir: Path) -> None:
    outcome = train(
        make_config(
            run_dir, tiny_target_dir, steps=60, lr=0.03, save_every=30, eval_every=15, precision="bf16"
        )
    )
    rows = records(run_dir)
    losses = [r["loss"] for r in rows if "loss" in r]
    assert outcome.finished and len(losses) == 60
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    evals = [r for r in rows if "eval/expected_acceptance" in r]
    assert [r["step"] for r in evals] == [15, 30, 45, 60]
    assert evals[-1]["eval/expected_acceptance"] > evals[0]["eval/expected_acceptance"]
    assert {
        "eval/expected_acceptance/chat",
        "eval/expected_acceptance/code",
        "eval/greedy_agreement",
        "eval/loss",
    } <= evals[0].keys()
    assert [p.name for p in checkpoint.all_checkpoints(run_dir)] == ["step-000030", "step-000060"]
    assert (run_dir / "best").resolve() == (checkpoint.best(run_dir) or Path()).resolve()
    assert json.loads((run_dir / "provenance.json").read_text())["versions"]["torch"] == torch.__version__
    assert load(Config, run_dir / "run.yaml", []) == make_config(
        run_dir, tiny_target_dir, steps=60, lr=0.03, save_every=30, eval_every=15, precision="bf16"
    )


@pytest.mark.parametrize("died_at", [11, 16])
def test_resume_is_bit_exact(
    tmp_path: Path, run_dir: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, died_at: int
) -> None:
    broken = shutil.copytree(run_dir, tmp_path / "broken")
    whole = train(make_config(run_dir, tiny_target_dir))
    with monkeypatch.context() as patch:
        crash_after(patch, died_at)
        with pytest.raises(KeyboardInterrupt):
            train(make_config(broken, tiny_target_dir))
    again = train(make_config(broken, tiny_target_dir))
    assert records(broken) == records(run_dir)
    ours, theirs = weights(again), weights(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_damaged_newest_checkpoint_is_passed_over(
    run_dir: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = weights(train(make_config(run_dir, tiny_target_dir)))
    newest = checkpoint.folder_of(run_dir, STEPS) / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    capsys.readouterr()
    again = train(make_config(run_dir, tiny_target_dir))
    message = capsys.readouterr().err
    assert (
        f"step-{STEPS:06d} skipped: model.safetensors is damaged" in message
        and "resumed from" in message
        and "step-000016" in message
    )
    assert all(torch.equal(value, whole[key]) for key, value in weights(again).items())


def test_signal_saves_and_the_next_start_goes_on(
    run_dir: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Trainer.one_step

    def interrupted(self: Trainer, *, stop: bool = False) -> Any:
        if self.step == 5:
            signal.raise_signal(signal.SIGUSR1)
        return whole(self, stop=stop)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "one_step", interrupted)
        outcome = train(make_config(run_dir, tiny_target_dir))
    assert not outcome.finished and outcome.step == 6 and outcome.folder.is_dir()
    assert train(make_config(run_dir, tiny_target_dir)).finished


def test_non_finite_steps_are_skipped_then_stop_by_answer(
    run_dir: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train import loop

    collate = loop.collate

    def poisoned(examples: Any, device: Any) -> Any:
        batch = collate(examples, device)
        batch.log_probs.fill_(float("nan"))
        return batch

    monkeypatch.setattr(loop, "collate", poisoned)
    with pytest.raises(UserError, match=r"not finite 3 steps in a row.*answers [01]/\d+"):
        train(make_config(run_dir, tiny_target_dir, max_bad_steps=3))
    assert [r.get("skipped") for r in records(run_dir)] == [True, True]


def test_accumulation_does_not_change_the_step(tmp_path: Path, run_dir: Path, tiny_target_dir: Path) -> None:
    other = shutil.copytree(run_dir, tmp_path / "other")
    train(make_config(run_dir, tiny_target_dir, steps=8))
    train(make_config(other, tiny_target_dir, steps=8, accumulate=3))
    pairs = [
        (a["loss"], b["loss"]) for a, b in zip(records(run_dir), records(other), strict=True) if "loss" in a
    ]
    assert len(pairs) == 8 and all(abs(a - b) < 1e-4 for a, b in pairs)


def test_cross_entropy_is_judged_by_the_captured_distributions(
    tmp_path: Path, run_dir: Path, tiny_target_dir: Path
) -> None:
    found = []
    for kind in ("forward_kl", "cross_entropy"):
        other = shutil.copytree(run_dir, tmp_path / kind)
        config = make_config(other, tiny_target_dir, steps=30)
        train(config.model_copy(update={"objective": config.objective.model_copy(update={"kind": kind})}))
        found.append([r for r in records(other) if "loss" in r])
    divergence, text = found
    for key in ("expected_acceptance", "supervised_tokens"):
        assert text[0][key] == pytest.approx(divergence[0][key], abs=1e-6)
    assert text[-1]["expected_acceptance"] > text[0]["expected_acceptance"]
    assert text[-1]["loss"] > divergence[-1]["loss"]  # the text's entropy is in it


@pytest.mark.parametrize("kind", ["tv", "log_acceptance"])
def test_block_weights_change_the_loss_but_not_what_it_is_judged_by(
    tmp_path: Path, run_dir: Path, tiny_target_dir: Path, kind: str
) -> None:
    found = []
    for name, length in (("tokens", 1), ("blocks", 3)):
        other = shutil.copytree(run_dir, tmp_path / name)
        config = make_config(other, tiny_target_dir, steps=8)
        objective = config.objective.model_copy(update={"kind": kind, "block_length": length})
        train(config.model_copy(update={"objective": objective}))
        found.append([r for r in records(other) if "loss" in r])
    tokens, blocks = found
    assert blocks[0]["expected_acceptance"] == pytest.approx(tokens[0]["expected_acceptance"], abs=1e-6)
    assert blocks[0]["supervised_tokens"] == tokens[0]["supervised_tokens"]
    assert blocks[0]["loss"] > tokens[0]["loss"] and blocks[0]["grad_norm"] != tokens[0]["grad_norm"]
    assert blocks[-1]["expected_acceptance"] > blocks[0]["expected_acceptance"]


def test_learning_rate_shape(tmp_path: Path) -> None:
    section = make_config(tmp_path, tmp_path, warmup=0.1, lr=1.0).train
    rates = [learning_rate(step, 100, section) for step in range(1, 101)]
    assert (
        rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == 1.0 and rates[-1] == pytest.approx(0.1)
    )
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize(("parallel", "started"), [("none", 2), ("ddp", 1)])
def test_processes_have_to_match_the_config(parallel: str, started: int) -> None:
    check_processes("none", 1)
    check_processes("ddp", 2)
    with pytest.raises(UserError, match="fix:"):
        check_processes(parallel, started)
