"""The decoder: plain and speculative decoding of a ragged, refilled batch, one loop for both.

A round (Leviathan et al. 2211.17192): draft K tokens, one target forward over K+1 positions, keep the accepted
drafts plus one token of the target's own. Plain decoding is the same loop without a proposer, so the two are
timed on the same engine. Letters: B rows, K drafts, P prompt, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.cache import Runner
from specdec.errors import UserError
from specdec.head import Head
from specdec.pair import LanguageModel
from specdec.prefix import Prefix, adjust
from specdec.propose import Committed, Proposer
from specdec.sampling import Purpose, Sampling, choose, draw, of_round, uniform, warp
from specdec.trace import Round, Stopwatch, Times, Trace
from specdec.verify import RULES, Proposal, greedy_rule


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


Observer = Callable[[list[int], Tensor, list[int]], None]
"""Called once a forward with the request indices [B], the target's raw logits [B, N, V], and how many of each row's
columns gave a token (before trimming): column j is the distribution behind the row's next token but j."""
Streamer = Callable[[int, list[int], int], None]
"""Called with the request index, the round's emitted tokens and how many of them are accepted drafts."""


class Decoder:
    """Decodes requests. Build a new one per call: all state lives here and in the two caches.

    At most `max_rows` of them run at a time; as rows finish, the requests that wait take their places (continuous
    batching), so that a long answer does not leave the others' places empty.
    """

    def __init__(
        self,
        target: LanguageModel,
        requests: Sequence[Request],
        *,
        limits: Limits,
        sampling: Sampling,
        vocab_size: int | None = None,
        proposer: Proposer | None = None,
        rule: str = "token",
        max_rows: int | None = None,
        observer: Observer | None = None,
        streamer: Streamer | None = None,
    ) -> None:
        check_requests(target, requests, limits)
        self.target, self.requests, self.limits, self.sampling = target, requests, limits, sampling
        self.proposer, self.rule = proposer, RULES[rule]
        self.observer, self.streamer = observer, streamer
        self.vocab_size = vocab_size or target.vocab_size
        self.runner = Runner(
            target.model,
            slots_needed(requests, limits, proposer.policy.max_length if proposer else 0),
            eager=target.eager,
        )
        self.head = Head(target, self.vocab_size)
        # Committed tokens of every request; the last one is not in the cache yet.
        self.rows = [list(r.prompt_ids) for r in requests]
        self.traces = [Trace(prompt_tokens=len(r.prompt_ids)) for r in requests]
        self.active: list[int] = []  # request index of each batch row; finished rows ride along until they are replaced
        self.waiting = deque(range(len(requests)))
        self.ended: deque[int] = deque()  # in the order they ended, until `finished` has told them
        self.max_rows = min(max_rows or len(requests), len(requests))
        self.times = Times()
        # A token spells at least one byte, so this many tokens at the end hold a whole stop string.
        self.stop_window = max([64, *(len(s.encode()) for s in limits.stop)])

    def run(self) -> list[Trace]:
        """Decode until every request has its answer; returns one trace a request, in their order."""
        for _ in self.finished():
            pass
        return self.traces

    def finished(self) -> Iterator[tuple[int, Trace]]:
        """Decode, yielding (request index, trace) as answers end."""
        if self.proposer:
            self.proposer.policy.start()
        step: Callable[[], None] | None = self._begin
        while step:
            with torch.inference_mode():  # not around the yield, where it would be the caller's mode, too
                step()
            while self.ended:
                index = self.ended.popleft()
                self.traces[index].check()
                yield index, self.traces[index]
            step = self._step if any(not self.traces[i].finish for i in self.active) else None

    def _begin(self) -> None:
        self.active = [self.waiting.popleft() for _ in range(self.max_rows)]
        self._read(self.active, None)
        self._tidy()

    def _step(self) -> None:
        self._round()
        self._tidy()

    def _tidy(self) -> None:
        """Free the places of finished rows."""
        self._refill()
        self._drop_finished()

    def _refill(self) -> None:
        """Requests that wait take the places of finished rows, an eighth of the batch at a time: a prefill of few
        rows costs nearly as much as one of many."""
        while self.waiting:
            free = [b for b, i in enumerate(self.active) if self.traces[i].finish]
            if not free or len(free) < min(self.max_rows // 8, len(self.waiting)):
                return
            places = free[: len(self.waiting)]
            new = [self.waiting.popleft() for _ in places]
            for b, index in zip(places, new, strict=True):
                self.active[b] = index
            self._read(new, places)

    def _read(self, indices: list[int], places: list[int] | None) -> None:
        """Prefill these requests, as a new batch or into places of the running one, and emit their first tokens."""
        began = time.perf_counter()
        lengths = [len(self.rows[i]) for i in indices]
        padded = torch.zeros(len(indices), max(lengths), dtype=torch.long)
        for b, index in enumerate(indices):
            padded[b, : lengths[b]] = torch.tensor(self.rows[index])
        tokens = padded.to(self.target.device)
        read = self.runner.prefill(tokens, lengths) if places is None else self.runner.refill(places, tokens, lengths)
        logits = self.head(read)
        if self.proposer:
            self.proposer.prefill(tokens, lengths, places)
        if self.observer:
            self.observer(indices, logits.unsqueeze(1), [1] * len(indices))
        for index, token in zip(indices, self._first(indices, logits, lengths), strict=True):
            self._emit(index, [token], 0)
        self.times.prefill_s += time.perf_counter() - began

    def _first(self, indices: list[int], logits: Tensor, lengths: list[int]) -> list[int]:
        logits = adjust(logits, self.sampling, self._prefix(indices))
        if self.sampling.greedy:
            return [int(i) for i in choose(logits).tolist()]
        positions = torch.tensor(lengths, device=logits.device)
        numbers = uniform(self._seeds(indices), positions, Purpose.NEXT)
        return [int(i) for i in draw(warp(logits, self.sampling), numbers).tolist()]

    def _seeds(self, indices: list[int]) -> Tensor:  # [B]
        return torch.tensor([self.requests[i].seed for i in indices], dtype=torch.int64, device=self.target.device)

    def _prefix(self, indices: list[int]) -> Prefix | None:
        if not self.sampling.adjusts:
            return None
        return Prefix.of(
            [self.rows[i] for i in indices],
            [self.traces[i].prompt_tokens for i in indices],
            vocab_size=self.vocab_size,
            eos_ids=self.limits.eos_ids,
            device=self.target.device,
        )

    def _round(self) -> None:
        watch = Stopwatch(self.target.device)
        rows = [self.rows[i] for i in self.active]
        starts = [len(r) - 1 for r in rows]
        seeds = self._seeds(self.active)
        if not self.sampling.greedy:
            seeds = of_round(seeds, torch.tensor(starts, device=self.target.device))
        prefix = self._prefix(self.active)
        # 1. Draft, never more than a row can still emit beside the target's own token.
        proposal = self._propose(rows, seeds, prefix)
        watch.mark()
        # 2. One target forward over the last committed token and the drafts.
        last = torch.tensor([[r[-1]] for r in rows], device=self.target.device)
        logits = self.head(self.runner.forward(torch.cat([last, proposal.tokens], dim=1), starts))
        watch.mark()
        # 3. Verify; then one transfer to the host carries the whole round.
        along = prefix and prefix.along(proposal.tokens)
        accepted, following = self._verify(adjust(logits, self.sampling, along), proposal, starts, seeds)
        counts = torch.stack([proposal.num_drafts, accepted, following], dim=1)
        table = torch.cat([counts, proposal.tokens], dim=1).tolist()
        if self.observer:
            self.observer(self.active, logits, [accepted + 1 for _, accepted, *_ in table])
        for index, (num_drafts, num_accepted, token, *drafts) in zip(self.active, table, strict=True):
            if not self.traces[index].finish:
                self._commit(index, num_drafts, num_accepted, [*drafts[:num_accepted], token])
        if self.proposer:
            self.proposer.roll_back([len(row) for row in rows])
        draft_s, verify_s, host_s = watch.split()
        self.times.rounds.append(
            Round(
                num_rows=len(rows), num_columns=logits.shape[1], draft_s=draft_s, verify_s=verify_s, host_s=host_s
            )
        )

    def _propose(self, rows: list[list[int]], seeds: Tensor, prefix: Prefix | None) -> Proposal:
        wanted = self.proposer.policy.lengths(self.active) if self.proposer else [0] * len(rows)
        room = [
            0 if trace.finish else max(self._budget(i) - len(trace.tokens) - 1, 0)
            for i, trace in ((i, self.traces[i]) for i in self.active)
        ]
        limits = [min(pair) for pair in zip(wanted, room, strict=True)]
        if self.proposer and any(limits):
            return self.proposer.propose(Committed(rows=rows, limits=limits, seeds=seeds, prefix=prefix))
        none = torch.zeros(len(rows), 0, dtype=torch.long, device=self.target.device)
        return Proposal(tokens=none, num_drafts=none.sum(dim=1), probs=None)

    def _verify(
        self, logits: Tensor, proposal: Proposal, starts: list[int], seeds: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.sampling.greedy:
            return greedy_rule(choose(logits), proposal)
        num_columns = proposal.tokens.shape[1]
        first = torch.tensor(starts, device=logits.device).unsqueeze(-1) + 1
        positions = first + torch.arange(num_columns + 1, device=logits.device)
        seeds = seeds.unsqueeze(-1)
        # A round's numbers are its own: block verification looks at those of drafts that it does not keep.
        u_next = uniform(seeds, positions, Purpose.NEXT)
        u_accept = uniform(seeds, positions[:, :num_columns], Purpose.ACCEPT)
        return self.rule(warp(logits, self.sampling), proposal, u_accept, u_next)

    def _commit(self, index: int, num_drafts: int, num_accepted: int, new: list[int]) -> None:
        emitted = self._emit(index, new, num_accepted)
        trace = self.traces[index]
        trace.num_drafts.append(num_drafts)
        trace.num_accepted.append(num_accepted)
        trace.num_emitted.append(emitted)
        if self.proposer:
            self.proposer.policy.observe(index, num_drafts, num_accepted)

    def _emit(self, index: int, new: list[int], num_accepted: int) -> int:
        """Append `new` up to and including the token that ends the answer; returns how many were kept."""
        trace, kept = self.traces[index], 0
        for token in new:
            trace.tokens.append(token)
            self.rows[index].append(token)
            kept += 1
            trace.finish = self._finish(index)
            if trace.finish:
                self.ended.append(index)
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
        """Once nobody waits and half the rows have finished, the rest move together: amortised, a row is copied once
        a halving."""
        living = [b for b, i in enumerate(self.active) if not self.traces[i].finish]
        if self.waiting or not living or len(living) * 2 > len(self.active):
            return
        self.runner.keep(living)
        if self.proposer:
            self.proposer.keep(living)
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
