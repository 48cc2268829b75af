"""Numbers of single runs, worked out by hand, and laws that tie them together on random runs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from eval import metrics
from eval.numbers import block


def test_one_run_by_hand(make: Any) -> None:
    """Rounds (K, a, e): (3, 3, 4) (3, 0, 1) (0, 0, 1) (2, 1, 2); the prefill gave one token more."""
    run = make.run([3, 3, 0, 2], [3, 0, 0, 1], [4, 1, 1, 2], decode_s=2.0, prefill_s=0.5)
    assert metrics.draft_acceptance_rate(run) == (4, 8)
    assert metrics.draft_acceptance_rate_trimmed(run) == (4, 8)  # nothing was trimmed
    assert metrics.mean_accepted_length(run) == (3 + 4, 3)  # the round without drafts is left out
    assert metrics.tokens_per_target_forward(run) == (8, 4)  # and here it counts
    assert metrics.mean_draft_length(run) == (8, 4)
    assert metrics.tokens_per_s_decode(run) == (8, 2.0)
    assert metrics.tokens_per_s_end_to_end(run) == (9, 2.5)
    assert metrics.seconds_per_round(run, "verify_s") == (pytest.approx(1.4), 4)
    assert metrics.longest_draft([run]) == 3
    assert metrics.accepted_length_histogram([run]) == [1, 1, 0, 1]


def test_a_position_counts_only_where_it_was_judged(make: Any) -> None:
    run = make.run([3, 3, 0, 2], [3, 0, 0, 1], [4, 1, 1, 2])
    # k = 1 in three rounds; k = 2 after an accepted first; k = 3 in the first round: the last drafted two.
    assert [metrics.acceptance_at_position(run, k) for k in (1, 2, 3, 4)] == [(2, 3), (1, 2), (1, 1), (0, 0)]


@pytest.mark.parametrize(
    ("last", "raw", "trimmed"),
    [
        ((4, 4, 1), (4, 4), (1, 1)),  # EOS was the first draft: the three behind it are not of the answer
        ((4, 2, 2), (2, 4), (2, 2)),  # EOS was the last accepted draft: no token of the target's own is kept
        ((4, 2, 3), (2, 4), (2, 4)),  # EOS was the target's own token: all four drafts were judged
        ((4, 0, 1), (0, 4), (0, 4)),
    ],
)
def test_drafts_behind_the_end(
    make: Any, last: tuple[int, int, int], raw: tuple[int, int], trimmed: tuple[int, int]
) -> None:
    run = make.run(*[[value] for value in last])
    assert metrics.draft_acceptance_rate(run) == raw
    assert metrics.draft_acceptance_rate_trimmed(run) == trimmed


def test_plain_decoding_has_one_token_a_forward_and_no_acceptance(make: Any) -> None:
    run = make.plain(5, decode_s=2.0)
    assert metrics.total([metrics.tokens_per_target_forward(run)]) == 1.0
    assert metrics.total([metrics.draft_acceptance_rate(run)]) is None
    assert metrics.total([metrics.mean_accepted_length(run)]) is None
    assert metrics.accepted_length_histogram([run]) == [0]


def test_an_answer_of_one_token_counts_nothing_behind_the_prefill(make: Any) -> None:
    run = make.run([], [], [], decode_s=0.0, prefill_s=0.5)
    assert metrics.total([metrics.tokens_per_s_decode(run)]) is None
    assert metrics.total([metrics.tokens_per_s_end_to_end(run)]) == 2.0


def test_unmeasured_expected_acceptance_counts_nothing() -> None:
    assert metrics.expected_acceptance({"expected": None}) == (0, 0)
    assert metrics.expected_acceptance({}) == (0, 0)
    assert metrics.expected_acceptance({"expected": {"sum": 1.5, "n": 3}}) == (1.5, 3)


def test_two_prompts_by_hand(make: Any) -> None:
    found = block(make.two_prompts(), seed=0)
    value = {name: s["value"] for name, s in found.items() if isinstance(s, dict)}
    assert value == pytest.approx(
        {
            "expected_acceptance": 4 / 10,
            "draft_acceptance_rate": 5 / 8,
            "draft_acceptance_rate_trimmed": 4 / 7,
            "mean_accepted_length": 1 + 5 / 4,
            "mean_accepted_length_macro": (7 / 3 + 2) / 2,
            "tokens_per_target_forward": 8 / 5,
            "mean_draft_length": 8 / 5,
            "tokens_per_s_speculative": 8 / 4,
            "tokens_per_s_plain": 8 / 8,
            "speedup_decode": 2.0,
            "speedup_end_to_end": (10 / 6) / (10 / 10),
            "speedup_lookup_decode": None,
        }
    )
    assert [s["value"] for s in found["acceptance_by_position"]] == pytest.approx([3 / 4, 2 / 3])
    assert found["prompts"] == found["speedup_decode"]["n"] == 2
    assert found["speedup_lookup_decode"] == {"value": None, "ci95": None, "n": 0}


def test_lookup_is_raced_on_its_own_prompts(make: Any) -> None:
    """Only prompt a was decoded with lookup: 5 tokens in 4 s, against plain's 5 in 5 s."""
    records = make.two_prompts()
    records[0]["lookup"] = make.run([1, 1], [1, 1], [2, 2], decode_s=4.0)
    records[0]["lookup"] |= {"tokens": list(range(5))}
    found = block(records, seed=0)["speedup_lookup_decode"]
    assert found == {"value": pytest.approx((4 / 4) / (5 / 5)), "ci95": None, "n": 1}


def test_turns_of_a_prompt_are_one_prompt(make: Any) -> None:
    first, second = make.two_prompts()
    found = block([first, {**second, "prompt_id": "a", "turn": 1}], seed=0)
    assert found["prompts"] == found["tokens_per_target_forward"]["n"] == 1
    assert found["tokens_per_target_forward"]["value"] == pytest.approx(8 / 5)
    assert found["mean_accepted_length_macro"]["value"] == pytest.approx(1 + 5 / 4)  # its turns together


@pytest.mark.parametrize("seed", range(20))
def test_laws_of_random_runs(make: Any, seed: int) -> None:
    rng = random.Random(seed)
    run = make.random_run(
        rng, num_tokens=rng.randint(2, 80), chance=rng.random(), max_drafts=rng.randint(1, 6)
    )
    rounds = metrics.rounds(run)
    assert metrics.tokens_per_target_forward(run)[0] == len(run["tokens"]) - 1
    positions = [metrics.acceptance_at_position(run, k) for k in range(1, metrics.longest_draft([run]) + 1)]
    assert sum(hits for hits, _ in positions) == sum(a for _, a, _ in rounds)
    assert all(0 <= hits <= tried for hits, tried in positions)
    histogram = metrics.accepted_length_histogram([run])
    assert sum(histogram) == metrics.mean_accepted_length(run)[1]
    assert sum(a * count for a, count in enumerate(histogram)) == metrics.draft_acceptance_rate(run)[0]
    raw, trimmed = metrics.draft_acceptance_rate(run), metrics.draft_acceptance_rate_trimmed(run)
    assert 0 <= trimmed[0] <= trimmed[1] <= raw[1] and trimmed[0] <= raw[0]


def test_conditional_rates_multiply_to_joint_rates_where_k_is_fixed(make: Any) -> None:
    """A constant K judges position k wherever k - 1 was accepted: the chain rule holds exactly."""
    rng = random.Random(5)
    accepted = [next((i for i in range(4) if rng.random() > 0.7), 4) for _ in range(200)]
    run = make.run([4] * 200, accepted, [a + 1 for a in accepted])
    chain = 1.0
    for k in range(1, 5):
        hits, tried = metrics.acceptance_at_position(run, k)
        chain *= hits / tried
        assert chain == pytest.approx(sum(a >= k for a in accepted) / 200)
