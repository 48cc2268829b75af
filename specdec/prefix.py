"""What stands before a position, and how it changes the logits there: penalties, bans, minimum length.

Applied to target and draft alike, and at every verified position with that position's own prefix: the committed
tokens and the drafts before it. Letters: B rows, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdec.errors import UserError
from specdec.sampling import Sampling, at_least_fp32


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Token counts before one position of each row."""

    prompt: Tensor
    """[..., V] bool: the ids of the prompt."""
    answer: Tensor
    """[..., V] how often each id is in the answer so far."""
    num_new: Tensor
    """[...] tokens of the answer so far."""
    eos_ids: tuple[int, ...]
    """Ids that end an answer."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[int]],
        prompt_tokens: Sequence[int],
        *,
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device,
    ) -> Prefix:
        """The prefix of whole rows, of which the first prompt_tokens[b] ids are the prompt."""
        prompt, answer = torch.zeros(2, len(rows), vocab_size, dtype=torch.long)
        for b, (row, size) in enumerate(zip(rows, prompt_tokens, strict=True)):
            prompt[b] = torch.bincount(torch.tensor(row[:size]), minlength=vocab_size)[:vocab_size]
            answer[b] = torch.bincount(
                torch.tensor(row[size:], dtype=torch.long), minlength=vocab_size
            )[:vocab_size]
        new = torch.tensor([len(row) - size for row, size in zip(rows, prompt_tokens, strict=True)])
        return cls(
            prompt=(prompt > 0).to(device), answer=answer.to(device), num_new=new.to(device), eos_ids=tuple(eos_ids)
        )

    def then(self, tokens: Tensor) -> Prefix:  # [B]
        """The prefix one token later."""
        one = torch.ones_like(tokens).unsqueeze(-1)
        answer = self.answer.scatter_add(-1, tokens.unsqueeze(-1), one)
        return replace(self, answer=answer, num_new=self.num_new + 1)

    def along(self, drafts: Tensor) -> Prefix:  # [B, K] -> [B, K+1, ...]
        """The prefixes before each of K drafts, and behind the last."""
        steps = [self]
        for column in drafts.unbind(dim=1):
            steps.append(steps[-1].then(column))
        return replace(
            self,
            prompt=self.prompt.unsqueeze(1),
            answer=torch.stack([s.answer for s in steps], dim=1),
            num_new=torch.stack([s.num_new for s in steps], dim=1),
        )


def adjust(
    logits: Tensor,  # [..., V], or [..., M] with `ids`
    sampling: Sampling,
    prefix: Prefix | None,
    ids: Tensor | None = None,  # [M] the ids that the columns stand for; None: columns are ids
) -> Tensor:
    """Logits after bans, minimum length and penalties; unchanged where `prefix` is None.

    The answer's ids are penalised by presence and frequency as OpenAI's interface and vLLM do, those of prompt and
    answer by repetition as transformers does.
    """
    if prefix is None:
        return logits
    width = logits.shape[-1]
    prompt = prefix.prompt[..., :width] if ids is None else prefix.prompt[..., ids]
    answer = prefix.answer[..., :width] if ids is None else prefix.answer[..., ids]
    logits = logits.to(at_least_fp32(logits))
    if sampling.repetition_penalty != 1:
        factor = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        logits = torch.where(prompt | (answer > 0), logits * factor.to(logits.dtype), logits)
    if sampling.presence_penalty or sampling.frequency_penalty:
        logits = logits - (sampling.presence_penalty * (answer > 0) + sampling.frequency_penalty * answer)
    logits = logits.masked_fill(_columns(sampling.banned, width, ids, logits.device), float("-inf"))
    if sampling.min_new_tokens:
        early = (prefix.num_new < sampling.min_new_tokens).unsqueeze(-1)
        logits = logits.masked_fill(early & _columns(prefix.eos_ids, width, ids, logits.device), float("-inf"))
    return logits


def _columns(wanted: Sequence[int], width: int, ids: Tensor | None, device: torch.device) -> Tensor:  # [M] bool
    columns = torch.arange(width, device=device) if ids is None else ids
    return torch.isin(columns, torch.tensor(wanted, dtype=torch.long, device=device))


_TAKEN = {
    "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens", "suppress_tokens", "do_sample", "temperature",
}  # fmt: skip
_HARMLESS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "max_new_tokens",
    "use_cache", "transformers_version", "_from_model_config", "return_dict_in_generate", "output_scores",
    "output_logits", "output_attentions", "output_hidden_states", "cache_implementation", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "is_assistant", "low_memory", "prefill_chunk_size", "stop_strings", "max_time",
    "disable_compile", "cache_config", "compile_config", "assistant_early_exit", "target_lookbehind",
    "assistant_lookbehind", "cache", "return_legacy_cache", "trust_remote_code",
}  # fmt: skip
"""Settings that say nothing of the distribution tokens are drawn from."""


def from_generation_config(config: GenerationConfig) -> Sampling:
    """transformers' sampling settings as ours.

    Raises:
        UserError: a setting that changes the distribution and that the decoder does not know, by name.
    """
    changed: dict[str, Any] = {
        k: v for k, v in config.to_diff_dict().items() if v is not None and k not in _HARMLESS
    }
    unknown = sorted(
        k for k, v in changed.items() if k not in _TAKEN and not (k in ("num_beams", "num_return_sequences") and v == 1)
    )
    if unknown:
        raise UserError(
            "generation setting not supported",
            got=", ".join(f"{k}={changed[k]}" for k in unknown),
            expected=f"among {', '.join(sorted(_TAKEN))}",
            fix="leave it out; ignoring it would measure another distribution than the one you serve",
        )
    sampled = bool(changed.get("do_sample", False))
    return Sampling(
        temperature=float(changed.get("temperature", 1.0)) if sampled else 0.0,
        top_k=int(changed.get("top_k", 50 if sampled and config.top_k is None else 0)),
        top_p=float(changed.get("top_p", 1.0)),
        min_p=float(changed.get("min_p", 0.0)),
        repetition_penalty=float(changed.get("repetition_penalty", 1.0)),
        banned=tuple(changed.get("suppress_tokens", ())),
        min_new_tokens=int(changed.get("min_new_tokens", 0)),
    )
