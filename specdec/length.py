"""Draft length policies: how many tokens a round drafts. A policy is one small class and a line in `make_policy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from specdec.cost import ASSUMED_ACCEPTANCE, predicted_speedup
from specdec.errors import UserError

MAX_AUTO_LENGTH = 6
NAMED = ("auto", "confidence", "entropy", "history", "cost")
Reads = Literal["nothing", "chain", "entropy"]


class LengthPolicy(Protocol):
    """Decides, row by row, how much to draft.

    1. `lengths` before a round: at most how many tokens each row drafts; 0 is plain decoding.
    2. `go_on` inside it, after each drafted token. It must not drop a token already drafted: whether a drawn token is
       proposed may not depend on which token it is, or the output's law would change.
    3. `observe` after it. A row's decisions may rest on that row's own past alone, so that its answer does not
       depend on its batch mates.
    """

    @property
    def max_length(self) -> int:
        """Most tokens a round may draft."""
        ...

    @property
    def reads(self) -> Reads:
        """What `go_on` is given: nothing, the chain's probability, or the entropy of the last token's q."""
        ...

    def start(self) -> None:
        """Forget the rows of the call before."""
        ...

    def lengths(self, rows: Sequence[int]) -> list[int]:
        """For each row (by its request's number): at most this many drafts in the round to come."""
        ...

    def go_on(self, signal: Tensor) -> Tensor:  # [B] what it reads -> [B] bool
        """True where one more token is worth drafting."""
        ...

    def observe(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """What became of a row's round."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Always K tokens."""

    max_length: int
    reads: Reads = "nothing"

    def start(self) -> None:
        """Nothing is kept."""

    def lengths(self, rows: Sequence[int]) -> list[int]:
        return [self.max_length] * len(rows)

    def go_on(self, signal: Tensor) -> Tensor:
        return torch.ones_like(signal, dtype=torch.bool)

    def observe(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Nothing is learned."""


@dataclass(frozen=True, kw_only=True)
class Confidence(Fixed):
    """Draft on while the chance that the whole chain so far is accepted, as the draft sees it, is above a threshold."""

    threshold: float
    reads: Reads = "chain"

    def go_on(self, signal: Tensor) -> Tensor:
        return signal > self.threshold


@dataclass(frozen=True, kw_only=True)
class EntropyBound(Fixed):
    """Draft on while 1 - sqrt(gamma H(q)) >= threshold: a lower bound on acceptance (AdaEDL, 2410.18351, eq. 6).

    H in nats, at the token just drafted; threshold and gamma stay as given, where the paper adapts the threshold.
    """

    threshold: float = 0.3
    gamma: float = 0.2
    reads: Reads = "entropy"

    def go_on(self, signal: Tensor) -> Tensor:
        return 1 - (self.gamma * signal).clamp(min=0).sqrt() >= self.threshold


@dataclass(kw_only=True)
class History:
    """Two more after a round accepted in full, one fewer after any other, at least 1 (transformers' heuristic)."""

    max_length: int
    first: int = 3
    reads: Reads = "nothing"
    _now: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    def start(self) -> None:
        self._now.clear()

    def lengths(self, rows: Sequence[int]) -> list[int]:
        return [min(self._now.get(row, self.first), self.max_length) for row in rows]

    def go_on(self, signal: Tensor) -> Tensor:
        return torch.ones_like(signal, dtype=torch.bool)

    def observe(self, row: int, num_drafts: int, num_accepted: int) -> None:
        if num_drafts:
            now = self._now.get(row, self.first)
            full = num_accepted == num_drafts
            self._now[row] = min(now + 2, self.max_length) if full else max(now - 1, 1)


@dataclass
class _Counts:
    """Judged and accepted drafts by position; fractions where the past has faded."""

    judged: list[float]
    accepted: list[float]

    @classmethod
    def of(cls, parts: Sequence[_Counts]) -> _Counts:
        """The sum of several."""
        return cls(
            [sum(column) for column in zip(*(part.judged for part in parts), strict=True)],
            [sum(column) for column in zip(*(part.accepted for part in parts), strict=True)],
        )

    def faded(self, factor: float) -> _Counts:
        """The same acceptance, counting for less."""
        return _Counts([n * factor for n in self.judged], [n * factor for n in self.accepted])


@dataclass(kw_only=True)
class _Row:
    """What a row has seen, and where the policy stands."""

    counts: _Counts
    length: int = 0
    idle: int = 0
    """Rounds since the last draft."""
    wait: int = 0
    """Rounds without drafts before the next probe; 0 while drafting."""


@dataclass(kw_only=True)
class CostOptimal:
    """The K with the best predicted speedup: acceptance estimated online by position, costs measured beforehand.

    Estimates are counts that fade, on top of a prior. K changes only for a gain above `margin`, so that it cannot
    flip-flop; at K = 0 the row decodes plainly and probes with one draft after a pause that grows from `PAUSE` rounds
    to `LONGEST_PAUSE`, times the rows of a batch, because one row that drafts widens the forward of all.
    Inside a round it stops like `Confidence` where `threshold` is above 0.
    """

    cost: Mapping[str, Any]
    """c, v and h of `specdec.measure.measure`, for the batch size that is served."""
    max_length: int
    prior: float = ASSUMED_ACCEPTANCE
    """Acceptance before anything is known."""
    prior_weight: float = 2.0
    """Drafts that the prior counts for."""
    threshold: float = 0.0
    """Chain probability below which a round stops drafting."""
    keep: bool = False
    """Whether a call starts from what the calls before it saw, rather than from the prior alone."""
    reads: Reads = "nothing"
    _rows: dict[int, _Row] = field(default_factory=dict, repr=False, compare=False)
    _seen: _Counts | None = field(default=None, repr=False, compare=False)
    _num_rows: int = field(init=False, repr=False)

    PAUSE = 8
    LONGEST_PAUSE = 64
    FADE = 0.95
    CALL_FADE = 0.95
    CALLS_WEIGHT = 4.0  # drafts that earlier calls count for: what they answered may be of another kind
    MARGIN = 0.01

    def __post_init__(self) -> None:
        self.max_length = min(self.max_length, len(self.cost["v"]) - 1)
        self._num_rows = int(self.cost.get("batch_size", 1))
        self.reads = "chain" if self.threshold > 0 else "nothing"

    def start(self) -> None:
        if self.keep and self._rows:
            calls = [self._seen.faded(self.CALL_FADE)] if self._seen else []
            self._seen = _Counts.of([*calls, *(row.counts for row in self._rows.values())])
        self._rows.clear()

    def lengths(self, rows: Sequence[int]) -> list[int]:
        return [self._length(self._row(row)) for row in rows]

    def go_on(self, signal: Tensor) -> Tensor:
        return signal > self.threshold if self.threshold > 0 else torch.ones_like(signal, dtype=torch.bool)

    def observe(self, row: int, num_drafts: int, num_accepted: int) -> None:
        now = self._row(row)
        if not num_drafts:
            now.idle += 1
            return
        judged, accepted = now.counts.judged, now.counts.accepted
        for k in range(min(num_accepted + 1, num_drafts)):  # the position of the first rejection is judged, too
            judged[k] = judged[k] * self.FADE + 1
            accepted[k] = accepted[k] * self.FADE + (k < num_accepted)
        self._choose(now)

    def _length(self, now: _Row) -> int:
        if now.length == 0 and now.idle >= now.wait:
            return 1
        return now.length

    def _choose(self, now: _Row) -> None:
        gains = self._gains(now.counts)
        best = max(range(len(gains)), key=gains.__getitem__)
        probing = now.length == 0
        if gains[best] > gains[now.length] * (1 + self.MARGIN):
            now.length = best
        if now.length == 0:
            longest = self.LONGEST_PAUSE * self._num_rows
            now.wait = min(2 * now.wait, longest) if probing else self.PAUSE * self._num_rows
        now.idle = 0

    def _acceptance(self, counts: _Counts) -> list[float]:
        """Conditional acceptance by position. What was not judged follows the position before it."""
        level, found = self.prior, []
        for judged, accepted in zip(counts.judged, counts.accepted, strict=True):
            level = (accepted + self.prior_weight * level) / (judged + self.prior_weight)
            found.append(level)
        return found

    def _gains(self, counts: _Counts) -> list[float]:
        acceptance = self._acceptance(counts)
        return [predicted_speedup(self.cost, acceptance, k) for k in range(self.max_length + 1)]

    def _row(self, row: int) -> _Row:
        if row not in self._rows:
            counts = _Counts([0.0] * self.max_length, [0.0] * self.max_length)
            if self._seen is not None and self.max_length:
                counts = self._seen.faded(self.CALLS_WEIGHT / max(self._seen.judged[0], self.CALLS_WEIGHT))
            gains = self._gains(counts)
            length = max(range(len(gains)), key=gains.__getitem__)
            self._rows[row] = _Row(counts=counts, length=length, wait=0 if length else self.PAUSE * self._num_rows)
        return self._rows[row]


def make_policy(
    draft_length: int | str, *, threshold: float = 0.3, cost: Mapping[str, Any] | None = None, keep: bool = False
) -> LengthPolicy:
    """A number -> that fixed length; a name of `NAMED` -> that policy. `auto` is the confidence stop.

    `threshold` is the confidence stop's; `cost` (`specdec.measure.measure`) is needed by the policy of that name alone,
    which starts every call from what the calls before it saw if `keep`.
    Raises UserError for anything else.
    """
    if draft_length in ("auto", "confidence"):
        return Confidence(max_length=MAX_AUTO_LENGTH, threshold=threshold)
    if draft_length == "entropy":
        return EntropyBound(max_length=MAX_AUTO_LENGTH)
    if draft_length == "history":
        return History(max_length=MAX_AUTO_LENGTH)
    if draft_length == "cost" and cost is not None:
        return CostOptimal(cost=cost, max_length=MAX_AUTO_LENGTH, keep=keep)
    if isinstance(draft_length, int) and not isinstance(draft_length, bool) and draft_length >= 0:
        return Fixed(max_length=draft_length)
    raise UserError(
        "draft_length is out of range",
        got=draft_length,
        expected=f"{', '.join(NAMED)}, or a whole number from 0",
        fix="measure the pair's costs first (draftsmith cost)" if draft_length == "cost" else None,
    )


def describe(policy: LengthPolicy) -> str:
    """A policy in words, for reports."""
    match policy:
        case Confidence():
            return f"up to {policy.max_length}, while the draft gives its own chain more than {policy.threshold:.3f}"
        case EntropyBound():
            return f"up to {policy.max_length}, while 1 - sqrt({policy.gamma:g} H(q)) is at least {policy.threshold:g}"
        case History():
            return f"up to {policy.max_length}: two more after a full round, one fewer after any other"
        case CostOptimal():
            return f"up to {policy.max_length}, as acceptance so far and measured costs make it pay"
    return f"always {policy.max_length}"
