"""Measured speed: each prompt decoded plainly and speculatively by the same engine, interleaved and paired."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.decoder import Decoder, Limits, Request
from specdec.length import LengthPolicy
from specdec.pair import LanguageModel
from specdec.propose import DraftModel, Proposer, PromptLookup
from specdec.sampling import Sampling
from specdec.trace import Times, Trace

LOOKUP_LENGTH = 4  # tokens that prompt lookup copies at most; longer copies rarely survive outside summaries


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A pair ready to be raced: the same prompts, limits and sampling for every contestant."""

    target: LanguageModel
    draft: LanguageModel
    vocab_size: int
    """Shared vocabulary of the pair."""
    policy: LengthPolicy
    max_new_tokens: int

    def race(self, prompt_ids: Sequence[int], *, temperature: float, seed: int, order: int, lookup: bool) -> dict[str, Any]:
        """One prompt through all contestants -> their RUN records. `order` rotates who goes first."""
        sampling = Sampling(temperature=temperature)
        contestants: list[tuple[str, Callable[[], Proposer | None]]] = [
            ("plain", lambda: None),
            ("speculative", lambda: self.draft_model(len(prompt_ids), sampling)),
        ]
        if lookup:
            contestants.append(("lookup", lambda: PromptLookup(max_length=LOOKUP_LENGTH, device=self.target.device)))
        shift = order % len(contestants)
        runs: dict[str, Any] = {"lookup": None}
        for name, make in contestants[shift:] + contestants[:shift]:
            trace, times = self.run(prompt_ids, sampling, seed, make())
            runs[name] = self.record(trace, times)
        return runs

    def run(self, prompt_ids: Sequence[int], sampling: Sampling, seed: int, proposer: Proposer | None) -> tuple[Trace, Times]:
        limits = Limits(max_new_tokens=self.max_new_tokens, eos_ids=self.target.eos_ids)
        decoder = Decoder(self.target, [Request(prompt_ids=prompt_ids, seed=seed)], limits=limits, sampling=sampling,
                          vocab_size=self.vocab_size, proposer=proposer)
        return decoder.run()[0], decoder.times

    def draft_model(self, prompt_tokens: int, sampling: Sampling) -> DraftModel:
        slots = prompt_tokens + self.max_new_tokens + self.policy.max_length + 2
        return DraftModel(self.draft, vocab_size=self.vocab_size, num_slots=slots, policy=self.policy, sampling=sampling)

    def record(self, trace: Trace, times: Times) -> dict[str, Any]:
        decode = self.target.tokenizer.decode
        return {
            **trace.record(),
            "text": decode(trace.tokens, skip_special_tokens=True),
            "pieces": [decode([t]) for t in trace.tokens],
            "prefill_s": times.prefill_s, "decode_s": times.decode_s,
            "draft_s": times.draft_s, "verify_s": times.verify_s, "host_s": times.host_s,
        }


@torch.inference_mode()
def hf_baseline(target: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> dict[str, Any]:
    """transformers' own greedy `generate` on the same prompts, prefill included: the outside yardstick for "plain"."""
    tokens, seconds = 0, 0.0
    model = target.model
    for number, ids in enumerate([prompts[0], *prompts]):
        inputs = torch.tensor([list(ids)], device=target.device)
        began = time.perf_counter()
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False,
                                pad_token_id=min(target.eos_ids, default=0))
        if number:  # the first call warms up
            seconds += time.perf_counter() - began
            tokens += output.shape[1] - inputs.shape[1]
    return {"tokens_per_s": tokens / seconds, "assisted_tokens_per_s": None, "prompts": len(prompts), "num_tokens": tokens}
