"""The cost model: what a round costs on this device, in units of one plain target step.

c = one draft step, v(n) = target forward over n tokens, h = host overhead of a round; measured at the given
context, dtype and threads. Predicted speedup = tau / (K c + v(K+1) + h). The textbook formula (2211.17192,
theorem 3.8) assumes v = 1 and h = 0.
"""

import itertools
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from specdec.cache import Runner
from specdec.head import Head
from specdec.pair import LanguageModel

REPEATS = 12


@torch.inference_mode()
def measure(
    target: LanguageModel,
    draft: LanguageModel,
    *,
    vocab_size: int,
    context: int = 128,
    max_draft_length: int = 8,
) -> dict[str, Any]:
    """Time plain and draft steps side by side, interleaved; returns c, v, h and the times in ms (medians)."""
    steps = {f"v{n}": _step(target, vocab_size, n, context) for n in range(1, max_draft_length + 2)}
    steps["draft"] = _step(draft, vocab_size, 1, context)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(REPEATS + 2):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if repeat >= 2:  # the first two rounds warm caches and allocators
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    plain = median["v1"]
    return {
        "c": median["draft"] / plain,
        "v": {str(n): median[f"v{n}"] / plain for n in range(1, max_draft_length + 2)},
        "h": 0.0,
        "plain_step_ms": plain * 1e3,
        "draft_step_ms": median["draft"] * 1e3,
        "context_tokens": context,
        "batch_size": 1,
    }


def _step(model: LanguageModel, vocab_size: int, num_tokens: int, context: int) -> Callable[[], None]:
    runner, head = Runner(model.model, context + num_tokens + 1), Head(model, vocab_size)
    tokens = torch.ones(1, context, dtype=torch.long, device=model.device)
    runner.prefill(tokens, torch.tensor([context], device=model.device))
    start = torch.tensor([context], device=model.device)

    def step() -> None:
        head(runner.forward(tokens[:, :num_tokens], start)).argmax(dim=-1).tolist()

    return step


def accepted_length(acceptance: float | Sequence[float], draft_length: int) -> float:
    """tau = 1 + a_1 + a_1 a_2 + ...: tokens a round emits when draft k is accepted with chance a_k behind the others.

    One number stands for every position: (1 - alpha^(K+1)) / (1 - alpha), 2211.17192, eq. 1.
    """
    chances = [acceptance] * draft_length if isinstance(acceptance, int | float) else acceptance[:draft_length]
    return float(1.0 + sum(itertools.accumulate(chances, operator.mul)))


def predicted_speedup(cost: Mapping[str, Any], acceptance: float | Sequence[float], draft_length: int) -> float:
    """tau / (K c + v(K+1) + h); exactly 1 at K = 0, which is plain decoding."""
    if draft_length == 0:
        return 1.0
    return accepted_length(acceptance, draft_length) / float(
        draft_length * cost["c"] + cost["v"][str(draft_length + 1)] + cost["h"]
    )


def best_draft_length(cost: Mapping[str, Any], acceptance: float) -> int:
    """The K with the best predicted speedup; 0 where no K pays."""
    return max(range(len(cost["v"])), key=lambda k: predicted_speedup(cost, acceptance, k))


def break_even_acceptance(cost: Mapping[str, Any]) -> float | None:
    """The lowest alpha (in steps of 0.005) at which some K pays; None where none does."""
    return next((a / 200 for a in range(201) if best_draft_length(cost, a / 200) > 0), None)


def confidence_threshold(cost: Mapping[str, Any], acceptance: float) -> float:
    """Draft on while the chain's chance of acceptance is worth more than the token costs.

    One more draft costs c plus v's slope and saves `speedup` plain steps' worth of time when it is accepted.
    """
    slope = (cost["v"][str(len(cost["v"]))] - 1.0) / max(len(cost["v"]) - 1, 1)
    best = max(predicted_speedup(cost, acceptance, k) for k in range(len(cost["v"])))
    return float(min(0.9, (cost["c"] + max(slope, 0.0)) * best))
