"""The block of statistics over a set of records, and what each of them means.

Every statistic is {"value", "ci95", "n"}; a speedup compares two runs of the same prompts by the same engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from eval import metrics, stats
from eval.metrics import Pair
from eval.records import Record, Run
from eval.stats import Statistic, mean_of_clusters, ratio_of_ratios, ratio_of_sums

Block = dict[str, Any]
Measure = Callable[[Run], Pair]

OF_RUN: dict[str, Measure] = {
    "draft_acceptance_rate": metrics.draft_acceptance_rate,
    "draft_acceptance_rate_trimmed": metrics.draft_acceptance_rate_trimmed,
    "mean_accepted_length": metrics.mean_accepted_length,
    "tokens_per_target_forward": metrics.tokens_per_target_forward,
    "mean_draft_length": metrics.mean_draft_length,
}
"""Ratios of sums over the speculative runs."""


def speedup_decode(records: Sequence[Record], seed: int) -> Statistic:
    """Speculative over plain tokens/s behind the first token: same engine, prompts and settings, in turn.

    Paired: both speeds of a resample come from the same prompts.
    """
    return _speedup(records, metrics.tokens_per_s_decode, "speculative", seed)


def speedup_end_to_end(records: Sequence[Record], seed: int) -> Statistic:
    """Speculative over plain tokens/s with the prefill's token and time included."""
    return _speedup(records, metrics.tokens_per_s_end_to_end, "speculative", seed)


def speedup_lookup_decode(records: Sequence[Record], seed: int) -> Statistic:
    """Prompt lookup (drafts are copied from the text so far) over plain tokens/s, behind the first token.

    Only over the records that were decoded with lookup as well.
    """
    raced = [r for r in records if r.get("lookup") is not None]
    return _speedup(raced, metrics.tokens_per_s_decode, "lookup", seed)


SPEEDUPS: dict[str, Callable[[Sequence[Record], int], Statistic]] = {
    "speedup_decode": speedup_decode,
    "speedup_end_to_end": speedup_end_to_end,
    "speedup_lookup_decode": speedup_lookup_decode,
}


def block(records: Sequence[Record], seed: int) -> Block:
    """Every statistic over these records, resampled by prompt; `prompts` counts them."""
    clusters = _clusters(records)
    runs = [r["speculative"] for r in records]
    found: Block = {
        "prompts": len(set(clusters)),
        "expected_acceptance": ratio_of_sums(
            clusters, [metrics.expected_acceptance(r) for r in records], seed=seed
        ),
        "acceptance_by_position": [
            ratio_of_sums(clusters, [metrics.acceptance_at_position(run, k) for run in runs], seed=seed)
            for k in range(1, metrics.longest_draft(runs) + 1)
        ],
    }
    for name, measure in OF_RUN.items():
        found[name] = over_runs(records, "speculative", measure, seed)
    found["mean_accepted_length_macro"] = mean_of_clusters(
        clusters, [metrics.mean_accepted_length(run) for run in runs], seed=seed
    )
    for name, speedup in SPEEDUPS.items():
        found[name] = speedup(records, seed)
    for contestant in ("plain", "speculative"):
        found[f"tokens_per_s_{contestant}"] = over_runs(
            records, contestant, metrics.tokens_per_s_decode, seed
        )
    return found


def over_runs(records: Sequence[Record], contestant: str, measure: Measure, seed: int) -> Statistic:
    """A ratio of sums over the plain or the speculative runs."""
    return ratio_of_sums(_clusters(records), [measure(r[contestant]) for r in records], seed=seed)


def round_parts(records: Sequence[Record]) -> dict[str, float | None]:
    """Milliseconds of a speculative round by what they went to, and of a plain step; None without a round."""
    parts = {}
    for name in ("draft_s", "verify_s", "host_s"):
        seconds = metrics.total([metrics.seconds_per_round(r["speculative"], name) for r in records])
        parts[name.removesuffix("_s")] = None if seconds is None else seconds * 1e3
    plain = metrics.total([metrics.seconds_per_round(r["plain"], "decode_s") for r in records])
    return {**parts, "plain_step": None if plain is None else plain * 1e3}


def definitions() -> dict[str, str]:
    """What each number means: the first paragraph of the docstring of the one function that defines it."""
    from specdec import cost  # loads torch

    functions: dict[str, Callable[..., Any]] = {
        "expected_acceptance": metrics.expected_acceptance,
        "acceptance_by_position": metrics.acceptance_at_position,
        **OF_RUN,
        "mean_accepted_length_macro": mean_of_clusters,
        **SPEEDUPS,
        "tokens_per_s_plain": metrics.tokens_per_s_decode,
        "tokens_per_s_speculative": metrics.tokens_per_s_decode,
        "plain_tokens_per_s_end_to_end": metrics.tokens_per_s_end_to_end,
        "histogram": metrics.accepted_length_histogram,
        "predicted_speedup": cost.predicted_speedup,
        "best_draft_length": cost.best_draft_length,
        "break_even_acceptance": cost.break_even_acceptance,
        "verdict": stats.verdict,
    }
    found = {name: _first_paragraph(inspect.getdoc(function)) for name, function in functions.items()}
    return {**found, "ci95": (stats.__doc__ or "").split("\n\n", 1)[1].replace("\n", " ").strip()}


def _first_paragraph(doc: str | None) -> str:
    return " ".join((doc or "").split("\n\n")[0].split())


def _clusters(records: Sequence[Record]) -> list[str]:
    """The turns of a prompt are resampled together."""
    return [r["prompt_id"] for r in records]


def _speedup(records: Sequence[Record], speed: Measure, contestant: str, seed: int) -> Statistic:
    above, below = ([speed(r[name]) for r in records] for name in (contestant, "plain"))
    return ratio_of_ratios(_clusters(records), above, below, seed=seed)
