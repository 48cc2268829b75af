"""Ratios of sums with 95 % intervals, resampled by prompt, and the verdict that is read off an interval.

Tokens of one answer are not independent, so whole prompts (all turns) are drawn with replacement, numerators and
denominators together: a cluster bootstrap, 2,000 resamples, percentile interval, seeded.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any, Literal, TypedDict

import numpy as np

from eval.metrics import Pair

NUM_RESAMPLES = 2000
Verdict = Literal["pays", "does not pay", "within noise"]


class Statistic(TypedDict):
    """A number as it stands in the report."""

    value: float | None
    ci95: list[float] | None
    n: int


def ratio_of_sums(clusters: Sequence[Hashable], pairs: Sequence[Pair], *, seed: int = 0) -> Statistic:
    """sum(numerators) / sum(denominators) over `pairs`, resampled by cluster.

    `n` counts the prompts with a denominator. Without any, value and interval are None; one prompt has a value
    but no interval.
    """
    return _statistic(clusters, np.asarray(pairs, dtype=float).reshape(-1, 2), seed)


def ratio_of_ratios(
    clusters: Sequence[Hashable], above: Sequence[Pair], below: Sequence[Pair], *, seed: int = 0
) -> Statistic:
    """(sum n1 / sum d1) / (sum n2 / sum d2), paired: both ratios come from the same resampled prompts."""
    columns = [np.asarray(side, dtype=float).reshape(-1, 2) for side in (above, below)]
    return _statistic(clusters, np.concatenate(columns, axis=1), seed)


def mean_of_clusters(clusters: Sequence[Hashable], pairs: Sequence[Pair], *, seed: int = 0) -> Statistic:
    """Macro mean: each prompt's own ratio counts once, however long its answer."""
    names, sums = _by_cluster(clusters, np.asarray(pairs, dtype=float).reshape(-1, 2))
    kept = sums[:, 1] != 0
    ratios = [(float(n / d), 1.0) for n, d in sums[kept]]
    return ratio_of_sums([name for name, keep in zip(names, kept, strict=True) if keep], ratios, seed=seed)


def verdict(speedup: Statistic) -> Verdict:
    """pays: the interval's lower end is above 1; does not pay: its upper end is below 1; otherwise within noise."""
    interval = speedup["ci95"]
    if interval is not None and interval[0] > 1.0:
        return "pays"
    if interval is not None and interval[1] < 1.0:
        return "does not pay"
    return "within noise"


def _statistic(clusters: Sequence[Hashable], columns: np.ndarray[Any, Any], seed: int) -> Statistic:
    assert len(clusters) == len(columns), (len(clusters), len(columns))
    _, sums = _by_cluster(clusters, columns)
    sums = sums[(sums != 0).any(axis=1)]  # a prompt that counts nothing tells nothing
    if not len(sums):
        return {"value": None, "ci95": None, "n": 0}
    value = float(_ratio(*sums.T))
    if not np.isfinite(value):
        return {"value": None, "ci95": None, "n": len(sums)}
    return {"value": value, "ci95": _interval(sums, seed), "n": len(sums)}


def _interval(sums: np.ndarray[Any, Any], seed: int) -> list[float] | None:
    if len(sums) < 2:
        return None
    from scipy.stats import DegenerateDataWarning, bootstrap

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # resamples without a ratio are dealt with below
        result = bootstrap(
            tuple(sums.T),
            _ratio,
            paired=True,
            vectorized=True,
            n_resamples=NUM_RESAMPLES,
            batch=250,
            method="percentile",
            random_state=np.random.default_rng(seed),
        )
    # A resample may miss every prompt that has a denominator: it has no ratio and is left out.
    drawn = result.bootstrap_distribution[np.isfinite(result.bootstrap_distribution)]
    if not len(drawn):
        return None
    low, high = np.percentile(drawn, [2.5, 97.5])
    return [float(low), float(high)]


def _ratio(*columns: np.ndarray[Any, Any], axis: int = -1) -> Any:
    """n1 / d1, or n1 d2 / (d1 n2), of column sums over `axis`; NaN where a divisor is 0."""
    sums = [np.asarray(column).sum(axis=axis) for column in columns]
    above, below = (sums[0], sums[1]) if len(sums) == 2 else (sums[0] * sums[3], sums[1] * sums[2])
    return np.divide(above, below, out=np.full(np.shape(above), np.nan), where=np.asarray(below) != 0)


def _by_cluster(
    clusters: Sequence[Hashable], columns: np.ndarray[Any, Any]
) -> tuple[list[Hashable], np.ndarray[Any, Any]]:
    """Sum rows of the same cluster, in order of first appearance -> names [C], sums [C, columns]."""
    index = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    sums = np.zeros((len(index), columns.shape[1]))
    np.add.at(sums, [index[name] for name in clusters], columns)
    return list(index), sums
