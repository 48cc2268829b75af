"""The cost model, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.cost import (
    accepted_length,
    best_draft_length,
    break_even_acceptance,
    confidence_threshold,
    predicted_speedup,
)

COST: dict[str, Any] = {"c": 0.1, "v": {"1": 1.0, "2": 1.1, "3": 1.2, "4": 1.5}, "h": 0.05}
FREE: dict[str, Any] = {"c": 0.0, "v": {str(n): 1.0 for n in range(1, 6)}, "h": 0.0}
DEAR: dict[str, Any] = {"c": 1.0, "v": {"1": 1.0, "2": 2.0, "3": 3.0}, "h": 0.1}


def test_accepted_length_by_hand() -> None:
    assert accepted_length(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert accepted_length(0.5, 3) == pytest.approx((1 - 0.5**4) / (1 - 0.5))  # theorem 1 of 2211.17192
    assert accepted_length(1.0, 4) == 5
    assert accepted_length(0.0, 4) == 1
    assert accepted_length(0.7, 0) == 1


def test_predicted_speedup_by_hand() -> None:
    assert predicted_speedup(COST, 0.5, 1) == pytest.approx(1.5 / (0.1 + 1.1 + 0.05))
    assert predicted_speedup(COST, 0.5, 2) == pytest.approx(1.75 / (0.2 + 1.2 + 0.05))
    assert predicted_speedup(COST, 1.0, 3) == pytest.approx(4 / (0.3 + 1.5 + 0.05))
    assert predicted_speedup(COST, 0.9, 0) == 1.0  # plain decoding has no overhead of a round
    assert predicted_speedup(DEAR, 1.0, 1) == pytest.approx(2 / 3.1)


def test_best_draft_length_by_hand() -> None:
    """At 0.5: 1, 1.2, 1.207, 1.014; at 0.1 no draft pays; a free draft is worth all that were measured."""
    assert best_draft_length(COST, 0.5) == 2
    assert best_draft_length(COST, 0.3) == 1
    assert best_draft_length(COST, 0.1) == 0
    assert best_draft_length(FREE, 0.2) == 4
    assert best_draft_length(DEAR, 1.0) == 0


def test_break_even_by_hand() -> None:
    """K = 1 pays where 1 + a > 1.25, K = 2 only where a + a^2 > 0.45: the first on the grid is 0.255."""
    assert break_even_acceptance(COST) == pytest.approx(0.255)
    assert break_even_acceptance(DEAR) is None
    assert break_even_acceptance(FREE) == pytest.approx(0.005)


def test_confidence_threshold_by_hand() -> None:
    slope = (1.5 - 1) / 3
    assert confidence_threshold(COST, 0.5) == pytest.approx((0.1 + slope) * (1.75 / 1.45) / 0.5)
    assert confidence_threshold(COST, 0.8) == pytest.approx((0.1 + slope) * (2.44 / 1.45) / 0.8)
    assert confidence_threshold(FREE, 0.5) == 0.0
    assert (
        confidence_threshold(DEAR, 0.5) == 0.9
    )  # a draft that costs too much is stopped early, never for good
