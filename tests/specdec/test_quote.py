"""Measuring a pair, and `draftsmith cost`: what it prints follows from what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from draftsmith import main
from specdec.cost import predicted_speedup
from specdec.measure import measure
from specdec.pair import LanguageModel
from specdec.quote import table, told

COST: dict[str, Any] = {
    "c": 0.1, "v": {"1": 1.0, "2": 1.1, "3": 1.2}, "h": 0.05, "plain_step_ms": 20.0, "draft_step_ms": 2.0,
    "context_tokens": 64, "batch_size": 1,
}  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 3])
def test_measure_times_steps_and_rounds(
    target: LanguageModel, drafts: dict[str, LanguageModel], batch_size: int
) -> None:
    cost = measure(
        target, drafts["random"], vocab_size=target.vocab_size, context=32, max_draft_length=2, batch_size=batch_size
    )
    assert set(cost["v"]) == {"1", "2", "3"}
    assert cost["context_tokens"] == 32 and cost["batch_size"] == batch_size
    assert cost["c"] == pytest.approx(cost["draft_step_ms"] / cost["plain_step_ms"])
    assert cost["c"] >= 0 and math.isfinite(cost["c"])  # its size: benchmarks
    assert all(math.isfinite(x) and x > 0 for x in (*cost["v"].values(), cost["plain_step_ms"]))
    assert cost["h"] >= 0


def test_measure_with_a_draft_that_is_always_right(
    target: LanguageModel, drafts: dict[str, LanguageModel]
) -> None:
    """Few rounds are needed then; some are whole ones still."""
    cost = measure(target, drafts["self"], vocab_size=target.vocab_size, context=8, max_draft_length=8)
    assert math.isfinite(cost["h"])


def test_told_by_hand() -> None:
    record = told(COST, [0.1, 0.5])
    assert record["break_even_acceptance"] == pytest.approx(0.255)  # 1 + a > 0.1 + 1.1 + 0.05
    low, high = record["at_acceptance"]
    assert low == {"acceptance": 0.1, "best_draft_length": 0, "predicted_speedup": 1.0}
    assert high["best_draft_length"] == 2 and high["predicted_speedup"] == pytest.approx(1.75 / 1.45)


def test_table_by_hand() -> None:
    dear = {**COST, "c": 2.0, "batch_size": 16}
    lines = table([told(COST, [0.5]), told(dear, [0.5])]).splitlines()
    assert [line.split() for line in lines] == [
        ["batch", "context", "plain", "ms", "c", "v(3)", "h", "breaks", "even", "at", "a=0.5"],
        ["1", "64", "20.0", "0.100", "1.20", "0.05", "0.255", "K=2", "1.21x"],
        ["16", "64", "20.0", "2.000", "1.20", "0.05", "never", "K=0", "1.00x"],
    ]
    assert len({len(line) for line in lines}) == 1


@pytest.fixture
def config(tmp_path: Path, tiny_target_dir: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"target": {"path": str(tiny_target_dir), "dtype": "float32", "device": "cpu"}}))
    return path


def cost_of(config: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["cost", str(config), *options], catch_exceptions=False)


def test_cost_of_a_pair(config: Path, tiny_target_dir: Path) -> None:
    """The target as its own draft: one record for each batch size and context."""
    options = ("--draft", str(tiny_target_dir), "--max-draft-length", "2", "--acceptance", "0.25,1")
    result = cost_of(config, *options, "--batch-sizes", "1,2", "--contexts", "8,16", "--json")
    assert result.exit_code == 0, result.output
    records = json.loads(result.stdout)
    assert [(r["batch_size"], r["context_tokens"]) for r in records] == [(1, 8), (1, 16), (2, 8), (2, 16)]
    for record in records:
        for entry in record["at_acceptance"]:
            want = predicted_speedup(record, entry["acceptance"], entry["best_draft_length"])
            assert entry["predicted_speedup"] == pytest.approx(want)
    shown = cost_of(config, *options)
    assert shown.exit_code == 0 and len(shown.stdout.strip().splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-sizes", "0"], ["--batch-sizes", "got 0"]),
        (["--batch-sizes", "two"], ["--batch-sizes", "got two"]),
        (["--batch-sizes", ","], ["--batch-sizes", "got nothing"]),
        (["--contexts", "-3"], ["--contexts", "got -3"]),
        (["--contexts", "100000"], ["--contexts", "got 100000", "at most"]),
        (["--max-draft-length", "0"], ["--max-draft-length", "got 0"]),
        (["--acceptance", "1.5"], ["--acceptance", "got 1.5"]),
        (["--acceptance", "nan"], ["--acceptance", "got nan"]),
        (["--draft", "/no/such"], ["/no/such"]),
    ],
)
def test_wrong_requests(config: Path, tiny_target_dir: Path, options: list[str], words: list[str]) -> None:
    result = cost_of(config, "--draft", str(tiny_target_dir), *options)
    assert result.exit_code == 2, result.output
    assert all(word in result.stderr for word in words), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
