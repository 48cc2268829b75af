"""Measures the cost model of a pair on this device: c, v(n) and h in units of a plain decoding step."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.cache import Runner
from specdec.decoder import Decoder, Limits, Request, slots_needed
from specdec.head import Head
from specdec.length import Fixed
from specdec.pair import LanguageModel
from specdec.propose import DraftModel
from specdec.sampling import Sampling, choose
from specdec.trace import Round

BLOCKS = 8  # steps and whole rounds take turns, so that a slow moment of the machine meets both
STEPS = 2  # times every step is taken in a block
ROUNDS = 5  # of plain decoding and of each draft length in a block
CHAIN = 4  # draft steps behind a first one that c is taken from
HOST_LENGTHS = range(1, 6)  # draft lengths of the rounds that h is taken from


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
    head and the choice of a token, in that unit. c is one draft step more: a chain's first, which may find the draft's
    weights pushed out of the CPU's caches by the target, is the round's. h is what speculative rounds take beyond
    K c + v(K+1), the median over several K, 0 at least. `context` is the number of tokens in each row's cache.
    """
    pair = _Pair(target=target, draft=draft, vocab_size=vocab_size, context=context, batch_size=batch_size)
    steps = {f"v{n}": pair.step(n) for n in range(1, max_draft_length + 2)}
    steps |= {"first": pair.chain(1), "chain": pair.chain(1 + CHAIN)}
    lengths = [k for k in HOST_LENGTHS if k <= max_draft_length]
    seconds: dict[str, list[float]] = {name: [] for name in (*steps, *(f"round{k}" for k in (0, *lengths)))}
    for step in steps.values():  # warms caches and allocators
        step()
    for _ in range(BLOCKS):
        for _ in range(STEPS):
            for name, step in steps.items():
                began = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - began)
        for k in (0, *lengths):
            seconds[f"round{k}"] += pair.rounds(k)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    plain, draft_step = median["round0"], _one_more(median["first"], median["chain"])
    c, v = draft_step / plain, {str(n): median[f"v{n}"] / plain for n in range(1, max_draft_length + 2)}
    rest = [median[f"round{k}"] / plain - k * c - v[str(k + 1)] for k in lengths]
    return {
        "c": c,
        "v": v,
        "h": max(statistics.median(rest), 0.0),
        "plain_step_ms": plain * 1e3,
        "draft_step_ms": draft_step * 1e3,
        "context_tokens": context,
        "batch_size": batch_size,
    }


@torch.inference_mode()
def draft_steps(
    drafts: Sequence[LanguageModel], *, vocab_size: int, context: int = 128, batch_size: int = 1
) -> list[float]:
    """Seconds of one draft step more, for each of several drafts; they take turns: all meet the same machine."""
    chains = []
    for draft in drafts:
        pair = _Pair(target=draft, draft=draft, vocab_size=vocab_size, context=context, batch_size=batch_size)
        chains += [pair.chain(1), pair.chain(1 + CHAIN)]
    seconds: list[list[float]] = [[] for _ in chains]
    for turn in range(1 + BLOCKS * STEPS):
        for chain, found in zip(chains, seconds, strict=True):
            began = time.perf_counter()
            chain()
            if turn:  # the first warms caches and allocators
                found.append(time.perf_counter() - began)
    medians = [statistics.median(found) for found in seconds]
    return [_one_more(first, chain) for first, chain in zip(medians[::2], medians[1::2], strict=True)]


def _one_more(first: float, chain: float) -> float:
    """Seconds of a step behind the first; a machine that hiccups cannot make it negative."""
    return max(chain - first, 0.0) / CHAIN


@dataclass(frozen=True, kw_only=True)
class _Pair:
    target: LanguageModel
    draft: LanguageModel
    vocab_size: int
    context: int
    batch_size: int

    def step(self, num_tokens: int) -> Callable[[], None]:
        """One target forward over `num_tokens` tokens a row, down to the chosen tokens on the host."""
        tokens, forward = self._reader(self.target, num_tokens)

        def step() -> None:
            forward(tokens[:, :num_tokens], 0).tolist()

        return step

    def chain(self, length: int) -> Callable[[], None]:
        """Draft steps as a round takes them: each feeds the next, the host waits for the last alone."""
        tokens, forward = self._reader(self.draft, length)

        def steps() -> None:
            token = tokens[:, :1]
            for k in range(length):
                token = forward(token, k)
            token.tolist()

        return steps

    def _reader(self, model: LanguageModel, num_tokens: int) -> tuple[Tensor, Callable[[Tensor, int], Tensor]]:
        """A context's tokens [B, context] that `model` has read, and its choice behind tokens [B, N] put `k` after."""
        runner = Runner(model.model, self.context + num_tokens + 1, eager=model.eager)
        head = Head(model, self.vocab_size)
        tokens = torch.ones(self.batch_size, self.context, dtype=torch.long, device=model.device)
        runner.prefill(tokens, [self.context] * self.batch_size)
        return tokens, lambda new, k: head.token_ids(
            choose(head(runner.forward(new, [self.context + k] * self.batch_size)))
        )

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
