"""The decoder: plain and speculative decoding of a ragged batch, one loop for both.

A round (Leviathan et al. 2211.17192): draft K tokens, one target forward over K+1 positions, keep the accepted
drafts plus one token of the target's own. Plain decoding is the same loop without a proposer, so the two are
timed on the same engine. Letters: B rows, K drafts, P prompt, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.cache import Runner
from specdec.errors import UserError
from specdec.head import Head
from specdec.pair import LanguageModel
from specdec.propose import Proposer
from specdec.sampling import Purpose, Sampling, draw, uniform, warp
from specdec.trace import Times, Trace
from specdec.verify import Proposal, greedy_rule, token_rule


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to answer."""

    prompt_ids: Sequence[int]
    """Token ids, at least one."""
    seed: int = 0
    """The row's own random stream."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When an answer ends."""

    max_new_tokens: int
    """Tokens emitted at most."""
    eos_ids: frozenset[int] = frozenset()
    """Ids that end an answer, kept as its last token."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; the token that completes one is the last."""


Observer = Callable[[list[int], Tensor], None]
"""Called with the request indices [B] and the target's raw logits [B, V] before each emitted token (plain decoding)."""
Streamer = Callable[[int, list[int], int], None]
"""Called with the request index, the round's emitted tokens and how many of them are accepted drafts."""


class Decoder:
    """Decodes one batch. Build a new one per call: all state lives here and in the two caches."""

    def __init__(
        self,
        target: LanguageModel,
        requests: Sequence[Request],
        *,
        limits: Limits,
        sampling: Sampling,
        vocab_size: int | None = None,
        proposer: Proposer | None = None,
        observer: Observer | None = None,
        streamer: Streamer | None = None,
    ) -> None:
        check_requests(target, requests, limits)
        self.target, self.requests, self.limits, self.sampling = target, requests, limits, sampling
        self.proposer, self.observer, self.streamer = proposer, observer, streamer
        self.runner = Runner(
            target.model, slots_needed(requests, limits, proposer.max_length if proposer else 0)
        )
        self.head = Head(target, vocab_size or target.vocab_size)
        self.rows = [
            list(r.prompt_ids) for r in requests
        ]  # committed tokens; the last one is not in the cache yet
        self.traces = [Trace(prompt_tokens=len(r.prompt_ids)) for r in requests]
        self.active = list(range(len(requests)))  # request index of each batch row
        self.seeds = torch.tensor([r.seed for r in requests], dtype=torch.int64, device=target.device)
        self.times = Times()
        # A token spells at least one byte, so this many tokens at the end hold a whole stop string.
        self.stop_window = max([64, *(len(s.encode()) for s in limits.stop)])

    @torch.inference_mode()
    def run(self) -> list[Trace]:
        """Decode until every row has finished; returns one trace a request, in their order."""
        self._prefill()
        while any(not self.traces[i].finish for i in self.active):
            self._drop_finished()
            self._round()
        for trace in self.traces:
            trace.check()
        return self.traces

    def _prefill(self) -> None:
        began = time.perf_counter()
        lengths = torch.tensor([len(r) for r in self.rows], device=self.target.device)
        tokens = torch.zeros(len(self.rows), int(lengths.max()), dtype=torch.long)
        for b, row in enumerate(self.rows):
            tokens[b, : len(row)] = torch.tensor(row)
        tokens = tokens.to(self.target.device)
        logits = self.head(self.runner.prefill(tokens, lengths))
        if self.proposer:
            self.proposer.prefill(tokens, lengths)
        if self.observer:
            self.observer(self.active, logits)
        first = self._sample(logits, lengths)
        for index, token in zip(self.active, first.tolist(), strict=True):
            self._emit(index, [token], 0)
        self.times.prefill_s += time.perf_counter() - began

    def _sample(self, logits: Tensor, positions: Tensor) -> Tensor:  # [B, V], [B] -> [B]
        if self.sampling.greedy:
            return logits.argmax(dim=-1)
        return draw(warp(logits, self.sampling), uniform(self.seeds, positions, Purpose.NEXT))

    def _round(self) -> None:
        began = time.perf_counter()
        rows = [self.rows[i] for i in self.active]
        lengths = torch.tensor([len(r) for r in rows], device=self.target.device)
        # 1. Draft, never more than a row can still emit beside the target's own token.
        proposal = self._propose(rows)
        drafted = time.perf_counter()
        # 2. One target forward over the last committed token and the drafts.
        last = torch.tensor([[r[-1]] for r in rows], device=self.target.device)
        logits = self.head(self.runner.forward(torch.cat([last, proposal.tokens], dim=1), lengths - 1))
        verified = time.perf_counter()
        # 3. Verify; then one transfer to the host carries the whole round.
        accepted, following = self._verify(logits, proposal, lengths)
        if self.observer:
            self.observer(self.active, logits[:, 0])
        table = torch.cat(
            [
                proposal.num_drafts.unsqueeze(1),
                accepted.unsqueeze(1),
                following.unsqueeze(1),
                proposal.tokens,
            ],
            dim=1,
        ).tolist()
        for index, (num_drafts, num_accepted, token, *drafts) in zip(self.active, table, strict=True):
            if not self.traces[index].finish:
                self._commit(index, num_drafts, num_accepted, [*drafts[:num_accepted], token])
        self.times.draft_s += drafted - began
        self.times.verify_s += verified - drafted
        self.times.host_s += time.perf_counter() - verified

    def _propose(self, rows: list[list[int]]) -> Proposal:
        none = torch.zeros(len(rows), 0, dtype=torch.long, device=self.target.device)
        if self.proposer is None:
            return Proposal(tokens=none, num_drafts=none.sum(dim=1), probs=None)
        room = [
            max(self._budget(i) - len(self.traces[i].tokens) - 1, 0) if not self.traces[i].finish else 0
            for i in self.active
        ]
        limits = torch.tensor(room, device=self.target.device).clamp(max=self.proposer.max_length)
        return self.proposer.propose(rows, limits, self.seeds)

    def _verify(self, logits: Tensor, proposal: Proposal, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if self.sampling.greedy:
            return greedy_rule(logits.argmax(dim=-1), proposal)
        num_columns = proposal.tokens.shape[1]
        positions = lengths.unsqueeze(-1) + torch.arange(num_columns + 1, device=lengths.device)
        seeds = self.seeds.unsqueeze(-1)
        # The next token's uniform belongs to the position it lands on; no position is drawn twice.
        u_next = uniform(seeds, positions, Purpose.NEXT)
        u_accept = uniform(seeds, positions[:, :num_columns], Purpose.ACCEPT)
        return token_rule(warp(logits, self.sampling), proposal, u_accept, u_next)

    def _commit(self, index: int, num_drafts: int, num_accepted: int, new: list[int]) -> None:
        emitted = self._emit(index, new, num_accepted)
        trace = self.traces[index]
        trace.num_drafts.append(num_drafts)
        trace.num_accepted.append(num_accepted)
        trace.num_emitted.append(emitted)

    def _emit(self, index: int, new: list[int], num_accepted: int) -> int:
        """Append `new` up to and including the token that ends the answer; returns how many were kept."""
        trace, kept = self.traces[index], 0
        for token in new:
            trace.tokens.append(token)
            self.rows[index].append(token)
            kept += 1
            trace.finish = self._finish(index)
            if trace.finish:
                break
        if self.streamer:
            self.streamer(index, new[:kept], min(num_accepted, kept))
        return kept

    def _finish(self, index: int) -> str:
        tokens = self.traces[index].tokens
        if tokens[-1] in self.limits.eos_ids:
            return "eos"
        if self.limits.stop:
            text = self.target.tokenizer.decode(tokens[-self.stop_window :])
            if any(s in text for s in self.limits.stop):
                return "stop"
        return "length" if len(tokens) >= self._budget(index) else ""

    def _budget(self, index: int) -> int:
        return min(
            self.limits.max_new_tokens, self.target.context_length - len(self.requests[index].prompt_ids)
        )

    def _drop_finished(self) -> None:
        """Once half the rows have finished, the rest move together: amortised, a row is copied once a halving."""
        living = [b for b, i in enumerate(self.active) if not self.traces[i].finish]
        if len(living) * 2 > len(self.active):
            return
        rows = torch.tensor(living, device=self.target.device)
        self.runner.cache.keep(rows)
        if self.proposer:
            self.proposer.keep(rows)
        self.seeds = self.seeds[rows]
        self.active = [self.active[b] for b in living]


def slots_needed(requests: Sequence[Request], limits: Limits, draft_length: int) -> int:
    """Slots for the longest row, with room for a round of rejected drafts."""
    return max(len(r.prompt_ids) for r in requests) + limits.max_new_tokens + draft_length + 2


def check_requests(target: LanguageModel, requests: Sequence[Request], limits: Limits) -> None:
    """Refuse what cannot be decoded: no rows, an empty prompt, a prompt that fills the context."""
    if not requests:
        raise UserError("nothing to decode", got="0 prompts", expected="at least one")
    if limits.max_new_tokens < 1:
        raise UserError("max_new_tokens is out of range", got=limits.max_new_tokens, expected="1 or more")
    if "" in limits.stop:
        raise UserError("a stop string is empty", got=list(limits.stop), expected="text")
    for number, request in enumerate(requests):
        size = len(request.prompt_ids)
        if not 0 < size < target.context_length:
            raise UserError(
                f"prompt {number} does not fit",
                got=f"{size} tokens",
                expected=f"1 to {target.context_length - 1}, the context length less one",
                fix="shorten the prompt",
            )
