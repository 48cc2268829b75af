"""Proposers: where draft tokens come from. One small interface; the decoder knows nothing else about them.

Letters: B rows, K drafts, V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.cache import Runner
from specdec.head import Head
from specdec.length import LengthPolicy
from specdec.pair import LanguageModel
from specdec.sampling import Purpose, Sampling, draw, uniform, warp
from specdec.verify import Proposal


class Proposer(Protocol):
    """Drafts tokens behind the committed text of each row."""

    max_length: int

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:  # [B, P] right-padded, [B]
        """Read the prompts."""
        ...

    def propose(self, rows: Sequence[Sequence[int]], limits: Tensor, seeds: Tensor) -> Proposal:
        """Draft at most limits[b] tokens behind row b's committed tokens."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        ...


class DraftModel:
    """Autoregressive drafting with a small model and its own slot cache."""

    def __init__(
        self,
        draft: LanguageModel,
        *,
        vocab_size: int,
        num_slots: int,
        policy: LengthPolicy,
        sampling: Sampling,
    ) -> None:
        self.runner = Runner(draft.model, num_slots)
        self.head = Head(draft, vocab_size)
        self.policy, self.sampling = policy, sampling
        self.max_length = policy.max_length
        self.device = draft.device

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        self.runner.prefill(tokens, lengths)

    def keep(self, rows: Tensor) -> None:
        self.runner.cache.keep(rows)

    def propose(self, rows: Sequence[Sequence[int]], limits: Tensor, seeds: Tensor) -> Proposal:
        lengths = torch.tensor([len(r) for r in rows], device=self.device)
        # The first step reads the last *two* committed tokens: after a fully accepted round the last draft is not
        # in the draft's cache yet, and a rewrite of a slot that is costs nothing. No hole, one shape.
        first = torch.tensor([list(r[-2:]) for r in rows], device=self.device)
        tokens, probs = [], []
        counts = torch.zeros_like(lengths)
        going = limits > 0
        chain = torch.ones(len(rows), device=self.device)
        step_tokens, starts = first, lengths - first.shape[1]
        for k in range(min(self.max_length, int(limits.max()))):
            hidden = self.runner.forward(step_tokens, starts)[:, -1]
            token, q, confidence = self._pick(self.head(hidden), seeds, lengths + k)
            tokens.append(token)
            if q is not None:
                probs.append(q)
            counts = counts + going
            chain = chain * confidence
            going = going & (counts < limits) & self.policy.go_on(chain)
            if not bool(going.any()):
                break
            step_tokens, starts = token.unsqueeze(-1), lengths + k
        width = len(tokens)
        stacked = torch.stack(tokens, dim=1) if width else first.new_zeros(len(rows), 0)
        return Proposal(tokens=stacked, num_drafts=counts, probs=torch.stack(probs, dim=1) if probs else None)

    def _pick(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits [B, M] -> token [B], the distribution it was drawn from [B, V] (None: one-hot), its confidence [B]."""
        if self.sampling.greedy:
            column = logits.argmax(dim=-1)
            confidence = torch.ones(len(column), device=column.device)
            if self.policy.needs_confidence:
                top = logits.gather(-1, column.unsqueeze(-1)).float().squeeze(-1)
                confidence = (top - logits.float().logsumexp(dim=-1)).exp()
            return self.head.token_ids(column), None, confidence
        q = self.head.widen(warp(logits, self.sampling))
        token = draw(q, uniform(seeds, positions, Purpose.DRAFT))
        return token, q, q.gather(-1, token.unsqueeze(-1)).squeeze(-1)


class PromptLookup:
    """Copies what followed the last n-gram earlier in the text: the free baseline a trained draft has to beat."""

    def __init__(self, *, max_length: int, max_ngram: int = 3, device: torch.device) -> None:
        self.max_length, self.max_ngram, self.device = max_length, max_ngram, device

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Nothing to read: the committed tokens arrive with every round."""

    def keep(self, rows: Tensor) -> None:
        """Nothing is kept per row."""

    def propose(self, rows: Sequence[Sequence[int]], limits: Tensor, seeds: Tensor) -> Proposal:
        found = [
            self._find(list(row), min(int(limit), self.max_length))
            for row, limit in zip(rows, limits.tolist(), strict=True)
        ]
        width = max(len(f) for f in found)
        padded = torch.tensor(
            [f + [0] * (width - len(f)) for f in found], dtype=torch.long, device=self.device
        ).view(len(rows), width)
        return Proposal(
            tokens=padded, num_drafts=torch.tensor([len(f) for f in found], device=self.device), probs=None
        )

    def _find(self, row: list[int], limit: int) -> list[int]:
        for size in range(min(self.max_ngram, len(row) - 1), 0, -1):
            tail = row[-size:]
            for start in range(len(row) - size - 1, -1, -1):
                if row[start : start + size] == tail:
                    return row[start + size : start + size + limit]
        return []
