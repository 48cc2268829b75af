"""Measured speed: prompts decoded plainly and speculatively by the same engine, interleaved and paired."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    rule: str = "token"

    def race(
        self, prompts: Prompts, seeds: Sequence[int], *, sampling: Sampling, order: int, lookup: bool
    ) -> list[dict[str, Any]]:
        """One batch through all contestants -> for each prompt its RUN records by contestant.

        `order` rotates who goes first. Seconds of a batch are shared out evenly among its prompts.
        """
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
            rule=self.rule,
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
