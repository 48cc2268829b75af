"""Proposers: where draft tokens come from. One small interface; the decoder knows nothing else about them.

Letters: B rows, K drafts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.cache import Runner
from specdec.head import Head
from specdec.length import LengthPolicy
from specdec.pair import LanguageModel
from specdec.prefix import Prefix, adjust
from specdec.sampling import Purpose, Sampling, draw, uniform, warp
from specdec.verify import Proposal


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The running batch as a round finds it."""

    rows: Sequence[Sequence[int]]
    """Committed tokens of each row: prompt and answer so far."""
    limits: Sequence[int]
    """Most drafts of each row in this round."""
    seeds: Tensor
    """[B] the rows' random streams."""
    prefix: Prefix | None = None
    """Token counts of the rows, where the sampling settings ask for them."""


class Proposer(Protocol):
    """Drafts tokens behind the committed text of each row."""

    policy: LengthPolicy
    """How many tokens a row drafts; the decoder asks it before a round and tells it after."""

    def prefill(self, tokens: Tensor, lengths: Sequence[int], rows: Sequence[int] | None) -> None:
        """Read the prompts [R, P], right-padded: those of a new batch, or of these rows of the running one."""
        ...

    def propose(self, batch: Committed) -> Proposal:
        """Draft at most limits[b] tokens behind row b; at least one of the limits is above 0."""
        ...

    def roll_back(self, lengths: Sequence[int]) -> None:
        """After every round: row b has lengths[b] committed tokens now, and drafts that are not among them are void."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
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
        self.device = draft.device
        # Reading a result early costs a wait for the device, except where host and device are one.
        self.may_look = draft.device.type == "cpu"

    def prefill(self, tokens: Tensor, lengths: Sequence[int], rows: Sequence[int] | None = None) -> None:
        if rows is None:
            self.runner.prefill(tokens, lengths)
        else:
            self.runner.refill(rows, tokens, lengths)

    def roll_back(self, lengths: Sequence[int]) -> None:
        # The last committed token is the target's own: whatever lies in its slot is not it.
        self.runner.filled = [min(pair) for pair in zip(self.runner.filled, (n - 1 for n in lengths), strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        self.runner.keep(rows)

    def propose(self, batch: Committed) -> Proposal:
        lengths = [len(row) for row in batch.rows]
        limits = torch.tensor(batch.limits, device=self.device)
        positions = torch.tensor(lengths, device=self.device)
        hidden = self._catch_up(batch.rows)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        prefix = batch.prefix
        counts, going = torch.zeros_like(limits), limits > 0
        chain = torch.ones(len(lengths), device=self.device)
        for k in range(max(batch.limits)):
            if k:
                hidden = self.runner.forward(tokens[-1].unsqueeze(-1), [n + k - 1 for n in lengths])[:, -1]
            logits = adjust(self.head(hidden), self.sampling, prefix, self.head.ids)
            token, q = self._pick(logits, batch.seeds, positions + k)
            tokens.append(token)
            if q is not None:
                probs.append(q)
            counts = counts + going
            chain, signal = self._signal(chain, logits, token, q)
            going = going & (counts < limits) & self.policy.go_on(signal)
            if self.may_look and not bool(going.any()):
                break
            prefix = prefix and prefix.then(token)
        return Proposal(
            tokens=torch.stack(tokens, dim=1), num_drafts=counts, probs=torch.stack(probs, dim=1) if probs else None
        )

    def _catch_up(self, rows: Sequence[Sequence[int]]) -> Tensor:  # -> [B, H] hidden state of each last token
        """Read what the draft has not seen of the committed tokens.

        Two tokens as a rule: after a fully accepted round the last draft is not in the draft's cache yet, and a
        rewrite of a slot that is costs nothing. No hole, one shape. More after rounds that drafted nothing.
        """
        held = [min(filled, len(row) - 1) for filled, row in zip(self.runner.filled, rows, strict=True)]
        width = min(max(2, *(len(row) - n for row, n in zip(rows, held, strict=True))), max(map(len, rows)))
        starts = [max(len(row) - width, 0) for row in rows]
        seen = [list(row[start:]) + [0] * (width - len(row) + start) for row, start in zip(rows, starts, strict=True)]
        hidden = self.runner.forward(torch.tensor(seen, device=self.device), starts)
        self.runner.filled = [len(row) for row in rows]
        ends = torch.tensor([len(row) - start - 1 for row, start in zip(rows, starts, strict=True)], device=self.device)
        return hidden[torch.arange(len(rows), device=self.device), ends]

    def _signal(self, chain: Tensor, logits: Tensor, token: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
        """(probability of the chain so far, what the policy reads), both [B]."""
        if self.policy.reads == "nothing":
            return chain, chain
        log_probs = logits.float().log_softmax(dim=-1) if q is None else q.log()
        if self.policy.reads == "entropy":
            return chain, torch.special.entr(log_probs.exp()).sum(dim=-1)
        top = log_probs.amax(dim=-1) if q is None else log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        chain = chain * top.exp()
        return chain, chain

    def _pick(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [B, M] -> token [B], the distribution it was drawn from [B, V] (None: one-hot)."""
        if self.sampling.greedy:
            return self.head.token_ids(logits.argmax(dim=-1)), None
        q = self.head.widen(warp(logits, self.sampling))
        return draw(q, uniform(seeds, positions, Purpose.DRAFT)), q


class PromptLookup:
    """Copies what followed the last n-gram earlier in the text: the free baseline a trained draft has to beat."""

    def __init__(self, *, policy: LengthPolicy, max_ngram: int = 3, device: torch.device) -> None:
        self.policy, self.max_ngram, self.device = policy, max_ngram, device

    def prefill(self, tokens: Tensor, lengths: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Nothing to read: the committed tokens arrive with every round."""

    def roll_back(self, lengths: Sequence[int]) -> None:
        """Nothing is kept per row."""

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing is kept per row."""

    def propose(self, batch: Committed) -> Proposal:
        found = [self._find(list(row), limit) for row, limit in zip(batch.rows, batch.limits, strict=True)]
        width = max(len(f) for f in found)
        padded = [f + [0] * (width - len(f)) for f in found]
        return Proposal(
            tokens=torch.tensor(padded, dtype=torch.long, device=self.device).view(len(found), width),
            num_drafts=torch.tensor([len(f) for f in found], device=self.device),
            probs=None,
        )

    def _find(self, row: list[int], limit: int) -> list[int]:
        for size in range(min(self.max_ngram, len(row) - 1), 0, -1):
            tail = row[-size:]
            for start in range(len(row) - size - 1, -1, -1):
                if row[start : start + size] == tail:
                    return row[start + size : start + size + limit]
        return []
