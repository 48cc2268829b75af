"""Each tool's number from one hand-made trace."""

from __future__ import annotations

from typing import Any

import pytest

from eval.crosswalk import crosswalk


def rows(records: list[dict[str, Any]], tau: float | None, alpha: float | None) -> dict[tuple[str, str], Any]:
    return {(row["tool"], row["number"]): row["value"] for row in crosswalk(records, tau=tau, alpha=alpha)}


def test_two_prompts_by_hand(make: Any) -> None:
    assert rows(make.two_prompts(), tau=8 / 5, alpha=0.4) == {
        ("vLLM", "Draft acceptance rate"): pytest.approx(5 / 8),
        ("vLLM", "Mean acceptance length"): pytest.approx(1 + 5 / 4),
        ("vLLM", "Per-position acceptance rate"): pytest.approx([3 / 4, 2 / 4]),
        ("SGLang", "accept length"): pytest.approx(10 / 5),
        ("llama.cpp", "accept"): pytest.approx(5 / 8),
        ("Spec-Bench", "Mean accepted tokens"): pytest.approx((5 + 5) / 5),
        ("Spec-Bench", "Speedup ratio"): pytest.approx(((6 / 3.5 + 4 / 2.5) / 2) / ((6 / 6 + 4 / 4) / 2)),
        ("gpt-fast", "Mean Accepted"): pytest.approx(5 / 4),
        ("papers", "alpha"): 0.4,
        ("papers", "tau"): 8 / 5,
        ("papers", "tau from alpha"): pytest.approx(1 + 0.4 + 0.16),
    }


def test_every_definition_differs(make: Any) -> None:
    """Rounds (K, a): (3, 3) (3, 0) (0, 0) (3, 2), the last trimmed to a token: 1 + 4 + 1 + 1 + 1 tokens."""
    run = make.run([3, 3, 0, 3], [3, 0, 0, 2], [4, 1, 1, 1])
    found = rows([make.record("a", run)], tau=7 / 4, alpha=None)
    assert found["vLLM", "Mean acceptance length"] == pytest.approx(1 + 5 / 3)  # rounds that drafted
    assert found["gpt-fast", "Mean Accepted"] == pytest.approx(5 / 3)  # the bonus token is excluded
    assert found["SGLang", "accept length"] == pytest.approx(8 / 4)  # the prefill's token is counted
    assert found["Spec-Bench", "Mean accepted tokens"] == pytest.approx((5 + 4) / 4)  # untrimmed, all rounds
    assert found["papers", "tau"] == 7 / 4  # trimmed, without the prefill's token


def test_vllms_rates_by_position_are_joint(make: Any) -> None:
    """Of four rounds 3, 2 and 1 come as far as positions 1, 2 and 3; given the one before: 3/4, 2/3, 1/2."""
    run = make.run([3, 3, 3, 3], [0, 1, 2, 3], [1, 2, 3, 4])
    found = rows([make.record("a", run)], tau=None, alpha=None)
    assert found["vLLM", "Per-position acceptance rate"] == pytest.approx([3 / 4, 2 / 4, 1 / 4])


def test_spec_bench_adds_up_the_turns_of_a_prompt(make: Any) -> None:
    """Prompt a: 6 + 4 tokens in 6 s against 10 s plain."""
    first, second = make.two_prompts()
    found = rows([first, {**second, "prompt_id": "a", "turn": 1}], tau=None, alpha=None)
    assert found["Spec-Bench", "Speedup ratio"] == pytest.approx((10 / 6) / (10 / 10))


@pytest.mark.parametrize(("alpha", "tau"), [(1.0, 3.0), (0.0, 1.0), (0.5, 1.75)])
def test_tau_implied_by_alpha_at_two_drafts(make: Any, alpha: float, tau: float) -> None:
    records = [make.record("a", make.run([2], [1], [2]))]
    assert rows(records, tau=None, alpha=alpha)["papers", "tau from alpha"] == pytest.approx(tau)


def test_without_drafts_there_is_no_acceptance(make: Any) -> None:
    found = rows([make.record("a", make.plain(4))], tau=1.0, alpha=None)
    assert found["vLLM", "Draft acceptance rate"] is None and found["llama.cpp", "accept"] is None
    assert found["vLLM", "Per-position acceptance rate"] == []
    assert found["gpt-fast", "Mean Accepted"] is None and found["papers", "tau from alpha"] is None
    assert found["Spec-Bench", "Mean accepted tokens"] == 1.0
