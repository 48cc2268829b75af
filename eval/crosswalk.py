"""The same run as other tools would print it: one trace, many definitions of "acceptance".

All counts are of the raw run (drafts accepted behind EOS included), as these tools count them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval import metrics
from eval.metrics import Pair
from eval.records import Record, Run


def crosswalk(records: Sequence[Record], *, tau: float | None, alpha: float | None) -> list[dict[str, Any]]:
    """Rows of {"tool", "number", "value", "formula"}; a value is a float, a list by position, or None (uncounted).

    Args:
        records: one temperature.
        tau: tokens per target forward of these records.
        alpha: their expected acceptance.
    """
    runs = [record["speculative"] for record in records]
    rate, length = (
        metrics.total(_each(runs, metrics.draft_acceptance_rate)),
        metrics.total(_each(runs, metrics.mean_accepted_length)),
    )
    return [
        _row("vLLM", "Draft acceptance rate", rate, "accepted / drafted"),
        _row("vLLM", "Mean acceptance length", length, "1 + accepted / rounds that drafted"),
        _row(
            "vLLM",
            "Per-position acceptance rate",
            _joint_rates(runs),
            "rounds with a >= k / rounds that drafted (joint: falls with k even for a steady draft)",
        ),
        _row(
            "SGLang",
            "accept length",
            metrics.total([(len(run["tokens"]), len(run["num_emitted"])) for run in runs]),
            "completion tokens / verify forwards (the prefill's token is counted, trimmed tokens are not)",
        ),
        _row("llama.cpp", "accept", rate, "n_accept / n_drafted"),
        _row(
            "Spec-Bench",
            "Mean accepted tokens",
            _per_forward(runs),
            "(accepted + 1) per target forward, bonus token included",
        ),
        _row(
            "Spec-Bench",
            "Speedup ratio",
            _spec_bench_speedup(records),
            "mean over prompts of tokens/s, speculative / plain, prefill time included (not paired)",
        ),
        _row(
            "gpt-fast",
            "Mean Accepted",
            None if length is None else length - 1.0,
            "accepted per round that drafted, bonus token excluded",
        ),
        _row("papers", "alpha", alpha, "mean of sum min(p, q) on the target's text (2211.17192)"),
        _row(
            "papers",
            "tau",
            tau,
            "tokens per target forward, trimmed (2401.15077 and others: average acceptance length)",
        ),
        _row(
            "papers",
            "tau from alpha",
            _implied_tau(runs, alpha),
            "(1 - alpha^(K+1)) / (1 - alpha) at the mean K (2211.17192, eq. 1: assumes independent tokens)",
        ),
    ]


def _row(tool: str, number: str, value: float | list[float] | None, formula: str) -> dict[str, Any]:
    return {"tool": tool, "number": number, "value": value, "formula": formula}


def _each(runs: Sequence[Run], metric: Any) -> list[Pair]:
    return [metric(run) for run in runs]


def _joint_rates(runs: Sequence[Run]) -> list[float]:
    histogram = metrics.accepted_length_histogram(runs)
    drafted = sum(histogram)
    return [sum(histogram[k:]) / drafted for k in range(1, len(histogram))] if drafted else []


def _per_forward(runs: Sequence[Run]) -> float | None:
    return metrics.total(
        [(sum(run["num_accepted"]) + len(run["num_accepted"]), len(run["num_accepted"])) for run in runs]
    )


def _spec_bench_speedup(records: Sequence[Record]) -> float | None:
    means = []
    for name in ("speculative", "plain"):
        sums: dict[str, list[float]] = {}
        for record in records:
            tokens, seconds = metrics.tokens_per_s_end_to_end(record[name])
            entry = sums.setdefault(record["prompt_id"], [0.0, 0.0])
            entry[0] += tokens
            entry[1] += seconds
        speeds = [tokens / seconds for tokens, seconds in sums.values() if seconds]
        if not speeds:
            return None
        means.append(sum(speeds) / len(speeds))
    return means[0] / means[1]


def _implied_tau(runs: Sequence[Run], alpha: float | None) -> float | None:
    length = metrics.total([(sum(run["num_drafts"]), sum(k > 0 for k in run["num_drafts"])) for run in runs])
    if alpha is None or length is None:
        return None
    return length + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (length + 1.0)) / (1.0 - alpha)
