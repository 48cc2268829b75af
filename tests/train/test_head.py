"""The short list's size: weighed by what is measured, chosen once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.settings import load
from train import head
from train.build import train
from train.config import Config

COST = {"c": 0.5, "v": {str(n): 1 + 0.02 * (n - 1) for n in range(1, 10)}, "h": 0.02, "plain_step_ms": 10.0}


def best(steps: dict[int, float], coverage: dict[int, float]) -> int:
    return int(max(head.weigh(COST, steps, coverage), key=lambda row: row["speedup"])["size"])


def test_a_list_pays_where_it_saves_more_than_it_misses() -> None:
    cheap_misses_half = {100: 0.05, 1000: 0.06}, {100: 0.5, 1000: 0.98}
    assert best(*cheap_misses_half) == 1000
    wide_is_dear = {100: 0.05, 1000: 0.30}, {100: 0.9, 1000: 1.0}
    assert best(*wide_is_dear) == 100


def test_weighed_by_the_cost_model() -> None:
    """tau / (K c + v(K+1) + h) at half the coverage, by hand for the K that is best."""
    [row] = head.weigh(COST, {100: 0.1}, {100: 0.8})
    alpha = 0.4
    by_hand = {k: sum(alpha**i for i in range(k + 1)) / (k * 0.1 + 1 + 0.02 * k + 0.02) for k in range(1, 9)}
    assert row["speedup"] == pytest.approx(max(by_hand.values()))
    assert row["c"] == 0.1 and row["coverage"] == 0.8


def make_config(run_dir: Path, target: Path, **more: Any) -> Config:
    values = {"steps": 4, "batch_tokens": 256, "max_length": 128, "save_every": 2, "eval_every": 2, **more}
    return load(
        Config, None,
        [f"run.dir={run_dir}", f"target.path={target}", "target.dtype=float32", "target.device=cpu",
         "draft.layers=[0]", "draft.head_size=auto", *(f"train.{k}={v}" for k, v in values.items())],
    )  # fmt: skip


def test_auto_is_chosen_once_for_a_run(
    run_dir: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are measured for real; a run that starts again before its first checkpoint keeps the choice."""
    monkeypatch.setattr(head, "SIZES", (16, 64, 128))
    whole: Callable[..., int] = head.auto_size
    chosen = []

    def noted(*args: Any, **more: Any) -> int:
        chosen.append(whole(*args, **more))
        return chosen[-1]

    monkeypatch.setattr(head, "auto_size", noted)
    train(make_config(run_dir, tiny_target_dir))
    record = json.loads((run_dir / head.CHOICE_FILE).read_text())
    assert [row["size"] for row in record["weighed"]][:3] == [16, 64, 128]
    coverage = [row["coverage"] for row in record["weighed"]]
    assert coverage == sorted(coverage) and coverage[-1] == pytest.approx(1.0) and coverage[0] < 1
    assert record["size"] == max(record["weighed"], key=lambda row: row["speedup"])["size"] == chosen[0]
    record["size"] = 64
    (run_dir / head.CHOICE_FILE).write_text(json.dumps(record))
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "best").unlink()
    train(make_config(run_dir, tiny_target_dir))
    assert chosen[1] == 64
