"""Intervals that can be worked out by hand, and the verdict that is read off them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from eval.stats import Statistic, mean_of_clusters, ratio_of_ratios, ratio_of_sums, verdict


def test_a_ratio_of_sums_is_no_mean_of_ratios() -> None:
    """Two prompts have three resamples: 1/2 (a quarter of the draws), 10/12 (half), 9/10 (a quarter)."""
    found = ratio_of_sums(["a", "b"], [(1, 2), (9, 10)])
    assert found == {"value": pytest.approx(10 / 12), "ci95": pytest.approx([1 / 2, 9 / 10]), "n": 2}
    macro = mean_of_clusters(["a", "b"], [(1, 2), (9, 10)])
    assert macro == {
        "value": pytest.approx((1 / 2 + 9 / 10) / 2),
        "ci95": pytest.approx([1 / 2, 9 / 10]),
        "n": 2,
    }


def test_one_prompt_has_a_value_and_no_interval() -> None:
    assert ratio_of_sums(["a", "a"], [(1, 2), (2, 2)]) == {"value": 0.75, "ci95": None, "n": 1}


@pytest.mark.parametrize("pairs", [[], [(0, 0), (0, 0)]])
def test_nothing_counted_is_no_number(pairs: list[tuple[float, float]]) -> None:
    nothing = {"value": None, "ci95": None, "n": 0}
    assert ratio_of_sums(["a", "b"][: len(pairs)], pairs) == nothing
    assert ratio_of_ratios(["a", "b"][: len(pairs)], pairs, pairs) == nothing
    assert mean_of_clusters(["a", "b"][: len(pairs)], pairs) == nothing


def test_a_prompt_that_counts_nothing_is_not_counted() -> None:
    found = ratio_of_sums(["a", "b", "c"], [(1, 2), (0, 0), (9, 10)])
    assert found == ratio_of_sums(["a", "c"], [(1, 2), (9, 10)])
    assert mean_of_clusters(["a", "b"], [(1, 2), (0, 0)]) == {"value": 0.5, "ci95": None, "n": 1}


def test_a_zero_is_a_count() -> None:
    assert ratio_of_sums(["a", "b"], [(0, 5), (0, 5)]) == {"value": 0.0, "ci95": [0.0, 0.0], "n": 2}


def test_turns_are_drawn_together() -> None:
    """Ten equal turns of a prompt tell no more than one: the interval does not narrow."""
    pairs = [(float(i % 4), 4.0) for i in range(12)]
    single = ratio_of_sums(range(12), pairs, seed=3)
    tenfold = ratio_of_sums(
        [i for i in range(12) for _ in range(10)], [p for p in pairs for _ in range(10)], seed=3
    )
    assert tenfold["n"] == 12
    assert tenfold["value"] == pytest.approx(single["value"]) and tenfold["ci95"] == pytest.approx(
        single["ci95"]
    )
    free = ratio_of_sums(range(120), [p for p in pairs for _ in range(10)], seed=3)
    assert _width(free) < 0.5 * _width(single)


def test_speeds_of_a_resample_come_from_the_same_prompts() -> None:
    """Prompts differ in speed a hundredfold, each is twice as fast: paired, there is nothing uncertain."""
    seconds = [0.1, 1.0, 10.0, 3.0]
    above = [(100.0, s) for s in seconds]
    below = [(100.0, 2 * s) for s in seconds]
    found = ratio_of_ratios(range(4), above, below)
    assert found == {"value": pytest.approx(2.0), "ci95": pytest.approx([2.0, 2.0]), "n": 4}


def test_a_ratio_of_ratios_sums_first() -> None:
    """(4 tokens / 2 s) / (6 tokens / 12 s)."""
    found = ratio_of_ratios(["a", "b"], [(1, 0.5), (3, 1.5)], [(2, 2), (4, 10)])
    assert found["value"] == pytest.approx(2.0 / 0.5)


def test_the_seed_fixes_the_interval() -> None:
    pairs = [(float(i * i % 7), 7.0) for i in range(9)]
    first, again, other = (ratio_of_sums(range(9), pairs, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first["ci95"] != other["ci95"] and first["value"] == other["value"]


def test_a_resample_without_denominator_is_left_out() -> None:
    """Only b's plain run took time: a resample of a alone has no speedup, and no NaN comes of it."""
    found = ratio_of_ratios(["a", "b"], [(1, 1), (1, 1)], [(0, 0), (1, 2)])
    assert found["value"] == pytest.approx(2.0)
    assert found["ci95"] is not None and np.isfinite(found["ci95"]).all()


def test_a_zero_divisor_is_no_number() -> None:
    assert ratio_of_sums(["a", "b"], [(1, 0), (2, 0)])["value"] is None
    assert ratio_of_ratios(["a", "b"], [(1, 1), (1, 1)], [(0, 1), (0, 1)])["value"] is None


def test_an_interval_is_as_wide_as_theory_says() -> None:
    """Mean of 200 normal draws: 1.96 standard errors either way, where a 90 % interval would have 1.64."""
    draws = np.random.default_rng(2).normal(10.0, 1.0, 200)
    found = ratio_of_sums(range(200), [(float(x), 1.0) for x in draws])
    error = float(draws.std()) / 200**0.5
    assert found["value"] == pytest.approx(float(draws.mean()))
    assert found["ci95"] is not None
    assert found["ci95"] == pytest.approx(
        [draws.mean() - 1.96 * error, draws.mean() + 1.96 * error], abs=0.2 * error
    )


def test_intervals_cover_the_truth() -> None:
    """Per-prompt rates around 0.6, counts of 10 to 40: about 95 of 100 intervals hold 0.6."""
    rng = random.Random(11)
    held = 0
    for trial in range(100):
        pairs = []
        for _ in range(40):
            n, rate = rng.randint(10, 40), rng.uniform(0.4, 0.8)
            pairs.append((sum(rng.random() < rate for _ in range(n)), n))
        low, high = ratio_of_sums(range(40), pairs, seed=trial)["ci95"] or (2, 2)
        held += low <= 0.6 <= high
    assert 87 <= held <= 100


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ([1.01, 1.5], "pays"),
        ([0.5, 0.99], "does not pay"),
        ([0.9, 1.5], "within noise"),
        ([1.0, 1.5], "within noise"),
        ([0.5, 1.0], "within noise"),
        (None, "within noise"),
    ],
)
def test_the_verdict_is_the_intervals(interval: list[float] | None, expected: str) -> None:
    assert verdict({"value": 1.4, "ci95": interval, "n": 9}) == expected


def _width(found: Statistic) -> float:
    assert found["ci95"] is not None
    return found["ci95"][1] - found["ci95"][0]
