"""Measures the cost model of a pair on this device: c, v(n) and h in units of a plain decoding step."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.cache import Runner
from specdec.decoder import Decoder, Limits, Request, slots_needed
from specdec.head import Head
from specdec.length import Fixed
from specdec.pair import LanguageModel
from specdec.propose import DraftModel
from specdec.sampling import Sampling, choose
from specdec.trace import Round

BLOCKS = 4  # steps and whole rounds take turns, so that a slow moment of the machine meets both
STEPS = 3  # times every step is taken in a block
ROUNDS = 10  # of plain and of speculative decoding in a block
HOST_LENGTH = 3  # draft length of the rounds that h is taken from


@torch.inference_mode()
def measure(
    target: LanguageModel,
    draft: LanguageModel,
    *,
    vocab_size: int,
    context: int = 128,
    max_draft_length: int = 8,
    batch_size: int = 1,
) -> dict[str, Any]:
    """Time draft and target steps and whole rounds, interleaved; medians.

    A plain step is a whole round of plain decoding as the decoder runs it; c and v(n) are bare forwards with the
    head and the choice of a token, in that unit; h is what a speculative round takes beyond K c + v(K+1), 0 at
    least. `context` is the number of tokens in each row's cache.
    """
    pair = _Pair(target=target, draft=draft, vocab_size=vocab_size, context=context, batch_size=batch_size)
    steps = {f"v{n}": pair.step(target, n) for n in range(1, max_draft_length + 2)}
    steps["draft"] = pair.step(draft, 1)
    seconds: dict[str, list[float]] = {name: [] for name in (*steps, "plain", "round")}
    for step in steps.values():  # warms caches and allocators
        step()
    length = min(HOST_LENGTH, max_draft_length)
    for _ in range(BLOCKS):
        for _ in range(STEPS):
            for name, step in steps.items():
                began = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - began)
        seconds["plain"] += pair.rounds(0)
        seconds["round"] += pair.rounds(length)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    plain = median["plain"]
    c, v = median["draft"] / plain, {str(n): median[f"v{n}"] / plain for n in range(1, max_draft_length + 2)}
    return {
        "c": c,
        "v": v,
        "h": max(median["round"] / plain - length * c - v[str(length + 1)], 0.0),
        "plain_step_ms": plain * 1e3,
        "draft_step_ms": median["draft"] * 1e3,
        "context_tokens": context,
        "batch_size": batch_size,
    }


@dataclass(frozen=True, kw_only=True)
class _Pair:
    target: LanguageModel
    draft: LanguageModel
    vocab_size: int
    context: int
    batch_size: int

    def step(self, model: LanguageModel, num_tokens: int) -> Callable[[], None]:
        """One forward of `model` over `num_tokens` tokens a row, down to the chosen token on the host."""
        runner = Runner(model.model, self.context + num_tokens + 1, eager=model.eager)
        head = Head(model, self.vocab_size)
        tokens = torch.ones(self.batch_size, self.context, dtype=torch.long, device=model.device)
        starts = [self.context] * self.batch_size
        runner.prefill(tokens, starts)

        def step() -> None:
            choose(head(runner.forward(tokens[:, :num_tokens], starts))).tolist()

        return step

    def rounds(self, draft_length: int) -> Sequence[float]:
        """Seconds of whole rounds of `draft_length` drafts; 0 is plain decoding."""
        requests = [Request(prompt_ids=[1] * self.context, seed=row) for row in range(self.batch_size)]
        limits = Limits(max_new_tokens=ROUNDS + draft_length + 1)
        proposer = None
        if draft_length:
            slots = slots_needed(requests, limits, draft_length)
            proposer = DraftModel(
                self.draft, vocab_size=self.vocab_size, num_slots=slots, policy=Fixed(max_length=draft_length),
                sampling=Sampling(),
            )  # fmt: skip
        decoder = Decoder(
            self.target, requests, limits=limits, sampling=Sampling(), vocab_size=self.vocab_size, proposer=proposer
        )
        decoder.run()
        return [r.total_s for r in decoder.times.rounds if self._whole(r, draft_length)]

    def _whole(self, r: Round, draft_length: int) -> bool:
        return r.num_columns == draft_length + 1 and r.num_rows == self.batch_size
