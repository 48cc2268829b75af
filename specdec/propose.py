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
from specdec.sampling import Purpose, Sampling, choose, draw, uniform, warp
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
        self.runner = Runner(draft.model, num_slots, eager=draft.eager)
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
        prefix, stop = batch.prefix, _Stop(self.policy, limits, may_look=self.may_look)
        for k in range(max(batch.limits)):
            if k:
                hidden = self.runner.forward(tokens[-1].unsqueeze(-1), [n + k - 1 for n in lengths])[:, -1]
            logits = adjust(self.head(hidden), self.sampling, prefix, self.head.ids)
            token, q = self._pick(logits, batch.seeds, positions + k)
            tokens.append(token)
            if q is not None:
                probs.append(q)
            if stop.after(logits, token, q):
                break
            prefix = prefix and prefix.then(token)
        q_all = torch.stack(probs, dim=1) if probs else None
        return Proposal(tokens=torch.stack(tokens, dim=1), num_drafts=stop.counts, probs=q_all)

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

    def _pick(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [B, M] -> token [B], the distribution it was drawn from [B, V] (None: one-hot)."""
        if self.sampling.greedy:
            return self.head.token_ids(choose(logits)), None
        q = self.head.widen(warp(logits, self.sampling))
        return draw(q, uniform(seeds, positions, Purpose.DRAFT)), q


class _Stop:
    """Counts each row's drafts, and ends the drafting when the policy wants no more of them."""

    def __init__(self, policy: LengthPolicy, limits: Tensor, *, may_look: bool) -> None:
        self.policy, self.limits, self.may_look = policy, limits, may_look
        self.blind = policy.reads == "nothing"  # then a row drafts to its limit, and there is nothing to compute
        self.counts = limits if self.blind else torch.zeros_like(limits)
        self.going = limits > 0
        self.chain = torch.ones(limits.shape, device=limits.device)

    def after(self, logits: Tensor, token: Tensor, q: Tensor | None) -> bool:  # [B, M], [B], [B, V]
        """Told of a drafted token of each row and what it was drawn from; True when no row goes on."""
        if self.blind:
            return False
        self.counts = self.counts + self.going
        self.going = self.going & (self.counts < self.limits) & self.policy.go_on(self._signal(logits, token, q))
        return self.may_look and not bool(self.going.any())

    def _signal(self, logits: Tensor, token: Tensor, q: Tensor | None) -> Tensor:  # -> [B]
        log_probs = logits.float().log_softmax(dim=-1) if q is None else q.log()
        if self.policy.reads == "entropy":
            entropy: Tensor = torch.special.entr(log_probs.exp()).sum(dim=-1)
            return entropy
        top = log_probs.amax(dim=-1) if q is None else log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        self.chain = self.chain * top.exp()
        return self.chain


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
