"""Measured speed: prompts decoded plainly and speculatively by the same engine, interleaved and paired."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.logging import set_verbosity_error

from specdec.decoder import Decoder, Limits, Request
from specdec.length import Fixed, LengthPolicy
from specdec.pair import LanguageModel
from specdec.propose import DraftModel, PromptLookup, Proposer
from specdec.sampling import Sampling
from specdec.text import pieces
from specdec.trace import Times, Trace

LOOKUP_LENGTH = 4  # tokens that prompt lookup copies at most; longer copies rarely survive outside summaries

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A pair ready to be raced: the same prompts, limits and sampling for every contestant."""

    target: LanguageModel
    draft: LanguageModel
    vocab_size: int
    """Shared vocabulary of the pair."""
    policy: LengthPolicy
    max_new_tokens: int

    def race(
        self, prompts: Prompts, seeds: Sequence[int], *, temperature: float, order: int, lookup: bool
    ) -> list[dict[str, Any]]:
        """One batch through all contestants -> for each prompt its RUN records by contestant.

        `order` rotates who goes first. Seconds of a batch are shared out evenly among its prompts.
        """
        sampling = Sampling(temperature=temperature)
        longest = max(len(ids) for ids in prompts)
        contestants: list[tuple[str, Callable[[], Proposer | None]]] = [
            ("plain", lambda: None),
            ("speculative", lambda: self.draft_model(longest, sampling)),
        ]
        if lookup:
            contestants.append(("lookup", self.prompt_lookup))
        shift = order % len(contestants)
        found: list[dict[str, Any]] = [{"lookup": None} for _ in prompts]
        for name, make in contestants[shift:] + contestants[:shift]:
            traces, times = self.run(prompts, seeds, sampling, make())
            for entry, trace in zip(found, traces, strict=True):
                entry[name] = self.record(trace, times, len(prompts))
        return found

    def run(
        self, prompts: Prompts, seeds: Sequence[int], sampling: Sampling, proposer: Proposer | None
    ) -> tuple[list[Trace], Times]:
        """Decode one batch; `proposer` None is plain decoding."""
        decoder = Decoder(
            self.target,
            [Request(prompt_ids=ids, seed=seed) for ids, seed in zip(prompts, seeds, strict=True)],
            limits=Limits(max_new_tokens=self.max_new_tokens, eos_ids=self.target.eos_ids),
            sampling=sampling,
            vocab_size=self.vocab_size,
            proposer=proposer,
        )
        return decoder.run(), decoder.times

    def draft_model(self, prompt_tokens: int, sampling: Sampling) -> DraftModel:
        """The draft as a proposer for prompts of up to `prompt_tokens` tokens."""
        slots = prompt_tokens + self.max_new_tokens + self.policy.max_length + 2
        return DraftModel(
            self.draft, vocab_size=self.vocab_size, num_slots=slots, policy=self.policy, sampling=sampling
        )

    def prompt_lookup(self) -> PromptLookup:
        """The free baseline."""
        return PromptLookup(policy=Fixed(max_length=LOOKUP_LENGTH), device=self.target.device)

    def record(self, trace: Trace, times: Times, num_rows: int) -> dict[str, Any]:
        """A trace as a RUN record."""
        return {
            **trace.record(),
            "text": self.target.tokenizer.decode(trace.tokens, skip_special_tokens=True),
            "pieces": pieces(self.target.tokenizer, trace.tokens),
            **{
                name: seconds / num_rows
                for name, seconds in (
                    ("prefill_s", times.prefill_s),
                    ("decode_s", times.decode_s),
                    ("draft_s", times.draft_s),
                    ("verify_s", times.verify_s),
                    ("host_s", times.host_s),
                )
            },
        }


@torch.inference_mode()
def hf_baseline(bench: Bench, prompts: Prompts) -> dict[str, Any]:
    """transformers' greedy `generate`, alone and assisted by the draft, beside our plain and speculative decoding.

    The same prompts one by one, interleaved, prefill included in all four: the outside yardstick.
    """
    seconds = dict.fromkeys(("hf", "assisted", "plain", "speculative"), 0.0)
    tokens = dict.fromkeys(seconds, 0)
    greedy = Sampling()
    for number, ids in enumerate([prompts[0], *prompts]):
        shift = number % len(seconds)  # who runs behind whom changes, as in a race
        for name in [*seconds][shift:] + [*seconds][:shift]:
            began = time.perf_counter()
            if name in ("hf", "assisted"):
                made = _hf_generate(bench, ids, assisted=name == "assisted")
            else:
                proposer = bench.draft_model(len(ids), greedy) if name == "speculative" else None
                made = len(bench.run([ids], [0], greedy, proposer)[0][0].tokens)
            if number:  # the first round warms up
                seconds[name] += time.perf_counter() - began
                tokens[name] += made
    speeds = {name: tokens[name] / seconds[name] for name in seconds}
    return {
        "tokens_per_s": speeds["hf"],
        "assisted_tokens_per_s": speeds["assisted"],
        "plain_tokens_per_s": speeds["plain"],
        "speculative_tokens_per_s": speeds["speculative"],
        "prompts": len(prompts),
        "num_tokens": tokens["hf"],
    }


def _hf_generate(bench: Bench, ids: Sequence[int], *, assisted: bool) -> int:
    set_verbosity_error()  # assisted generation warns of arguments that it passes itself
    inputs = torch.tensor([list(ids)], device=bench.target.device)
    extra = {"assistant_model": bench.draft.model} if assisted else {}
    output = bench.target.model.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=bench.max_new_tokens,
        do_sample=False,
        pad_token_id=min(bench.target.eos_ids, default=0),
        **extra,
    )
    return int(output.shape[1] - inputs.shape[1])
