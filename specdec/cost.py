"""The cost model: what a round costs on this device, in units of one plain decoding step.

c = one draft step, v(n) = target forward over n tokens, h = everything else of a round; measured by
`specdec.measure` at the given context, batch, dtype and threads. Predicted speedup = tau / (K c + v(K+1) + h).
The textbook formula (2211.17192, theorem 3.8) assumes v = 1 and h = 0.
"""

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

ASSUMED_ACCEPTANCE = 0.5
"""Of a draft that nothing has measured yet."""


def accepted_length(acceptance: float | Sequence[float], draft_length: int) -> float:
    """tau = 1 + a_1 + a_1 a_2 + ...: tokens a round emits when draft k is accepted with chance a_k behind the others.

    One number stands for every position: (1 - alpha^(K+1)) / (1 - alpha), 2211.17192, eq. 1.
    """
    chances = [acceptance] * draft_length if isinstance(acceptance, int | float) else acceptance[:draft_length]
    return float(1.0 + sum(itertools.accumulate(chances, operator.mul)))


def plain_steps(cost: Mapping[str, Any], draft_length: int) -> float:
    """K c + v(K+1) + h: what a round of K drafts takes, in plain steps; 1 at K = 0."""
    if draft_length == 0:
        return 1.0
    return float(draft_length * cost["c"] + cost["v"][str(draft_length + 1)] + cost["h"])


def predicted_speedup(cost: Mapping[str, Any], acceptance: float | Sequence[float], draft_length: int) -> float:
    """tau / (K c + v(K+1) + h); exactly 1 at K = 0, which is plain decoding."""
    return accepted_length(acceptance, draft_length) / plain_steps(cost, draft_length)


def best_draft_length(cost: Mapping[str, Any], acceptance: float) -> int:
    """The K with the best predicted speedup; 0 where no K pays."""
    return max(range(len(cost["v"])), key=lambda k: predicted_speedup(cost, acceptance, k))


def break_even_acceptance(cost: Mapping[str, Any]) -> float | None:
    """The lowest alpha (in steps of 0.005) at which some K pays; None where none does."""
    return next((a / 200 for a in range(201) if best_draft_length(cost, a / 200) > 0), None)


def confidence_threshold(cost: Mapping[str, Any], acceptance: float) -> float:
    """Draft on while the next draft's chance of acceptance is worth more than it costs.

    One more draft costs c plus v's slope, and saves 1 / speedup plain steps when it is accepted: the chain so far has
    to be, and then the draft itself, with chance `acceptance`.
    """
    slope = (cost["v"][str(len(cost["v"]))] - 1.0) / max(len(cost["v"]) - 1, 1)
    best = max(predicted_speedup(cost, acceptance, k) for k in range(len(cost["v"])))
    return float(min(0.9, (cost["c"] + max(slope, 0.0)) * best / max(acceptance, 0.01)))
