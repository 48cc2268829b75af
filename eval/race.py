"""Wall-clock races between decoders that need not be ours: tokens per second, prefill included, interleaved."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils.logging import set_verbosity_error

from eval.speed import Bench, Prompts
from specdec.propose import Proposer
from specdec.sampling import Sampling

Contestant = Callable[[Prompts], int]
"""Decodes prompts side by side, greedily; returns how many tokens it made."""


@dataclass(frozen=True)
class Tally:
    """Seconds and tokens of a contestant by domain."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def speed(self, domain: str | None = None) -> float:
        """Tokens per second on one domain, or on all."""
        if domain is None:
            return sum(self.tokens.values()) / sum(self.seconds.values())
        return self.tokens[domain] / self.seconds[domain]


def race(contestants: Mapping[str, Contestant], batches: Iterable[tuple[str, Prompts]]) -> dict[str, Tally]:
    """Every batch of (domain, prompts) through every contestant; the first batch also goes through once to warm up."""
    tallies = {name: Tally() for name in contestants}
    names = list(contestants)
    for number, (domain, prompts) in enumerate(batches):
        shift = number % len(names)  # who runs behind whom changes
        for counted in (True,) if number else (False, True):
            for name in names[shift:] + names[:shift]:
                began = time.perf_counter()
                made = contestants[name](prompts)
                if counted:
                    tallies[name].seconds[domain] += time.perf_counter() - began
                    tallies[name].tokens[domain] += made
    return tallies


def ours(bench: Bench, proposer: Callable[[Prompts], Proposer | None]) -> Contestant:
    """Our decoder with the proposer that is made for each batch; None is plain decoding."""

    def decode(prompts: Prompts) -> int:
        traces, _ = bench.run(prompts, [0] * len(prompts), Sampling(), proposer(prompts))
        return sum(len(trace.tokens) for trace in traces)

    return decode


def plain(prompts: Prompts) -> None:
    """No proposer."""


def drafted(bench: Bench) -> Callable[[Prompts], Proposer]:
    """The draft, under the policy of `bench`."""
    return lambda prompts: bench.draft_model(max(map(len, prompts)), Sampling())


def hf_generate(bench: Bench, assistant: Mapping[str, Any] | None = None, **arguments: Any) -> Contestant:
    """transformers' `generate`; with `assistant` the draft assists, under these generation settings of its own."""

    @torch.inference_mode()
    def decode(prompts: Prompts) -> int:
        set_verbosity_error()  # assisted generation warns of arguments that it passes itself
        longest, pad = max(map(len, prompts)), min(bench.target.eos_ids, default=0)
        inputs = torch.tensor([[pad] * (longest - len(ids)) + list(ids) for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        extra: dict[str, Any] = dict(arguments)
        if assistant is not None:
            extra["assistant_model"] = bench.draft.model
            bench.draft.model.generation_config.update(**assistant)
        output = bench.target.model.generate(  # type: ignore[operator]
            inputs.to(bench.target.device), attention_mask=mask.to(bench.target.device),
            max_new_tokens=bench.max_new_tokens, do_sample=False, pad_token_id=pad, **extra,
        )  # fmt: skip
        return sum(_length(row, bench.target.eos_ids) for row in output[:, longest:].tolist())

    return decode


def _length(tokens: list[int], eos_ids: frozenset[int]) -> int:
    return next((n + 1 for n, token in enumerate(tokens) if token in eos_ids), len(tokens))


def hf_baseline(bench: Bench, prompts: Prompts) -> dict[str, Any]:
    """transformers' greedy `generate`, alone and assisted by the draft, beside our plain and speculative decoding.

    The same prompts one by one, the outside yardstick.
    """
    contestants = {
        "hf": hf_generate(bench),
        "assisted": hf_generate(bench, {}),
        "plain": ours(bench, plain),
        "speculative": ours(bench, drafted(bench)),
    }
    tallies = race(contestants, [("", [ids]) for ids in prompts])
    return {
        "tokens_per_s": tallies["hf"].speed(),
        "assisted_tokens_per_s": tallies["assisted"].speed(),
        "plain_tokens_per_s": tallies["plain"].speed(),
        "speculative_tokens_per_s": tallies["speculative"].speed(),
        "prompts": len(prompts),
        "num_tokens": tallies["hf"].tokens[""],
    }
