"""What a decode leaves behind: one record a round and row, and the counters derived from it in one place."""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of a batch: seconds by part, and how large it was."""

    num_rows: int
    """Rows that were decoded, finished ones that rode along included."""
    num_columns: int
    """Tokens a row in the target forward: the most drafts of any row, and one."""
    draft_s: float
    """Proposing."""
    verify_s: float
    """The target forward."""
    host_s: float
    """Verification rule, trimming and bookkeeping."""

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.host_s


@dataclass(kw_only=True)
class Times:
    """Wall-clock seconds of one decode call (all rows together)."""

    prefill_s: float = 0.0
    """Reading the prompts and drawing the first token."""
    rounds: list[Round] = field(default_factory=list)
    """Every round after it."""

    @property
    def draft_s(self) -> float:
        return sum(r.draft_s for r in self.rounds)

    @property
    def verify_s(self) -> float:
        return sum(r.verify_s for r in self.rounds)

    @property
    def host_s(self) -> float:
        return sum(r.host_s for r in self.rounds)

    @property
    def decode_s(self) -> float:
        return self.draft_s + self.verify_s + self.host_s


@dataclass(kw_only=True)
class Trace:
    """One row's decode. tokens[0] comes from the prefill; every round is one target decode forward."""

    prompt_tokens: int
    """Length of the prompt."""
    tokens: list[int] = field(default_factory=list)
    """Emitted ids, the EOS included when it ended the answer."""
    finish: str = ""
    """eos, stop or length."""
    num_drafts: list[int] = field(default_factory=list)
    """K of each round."""
    num_accepted: list[int] = field(default_factory=list)
    """Accepted drafts of each round, before trimming."""
    num_emitted: list[int] = field(default_factory=list)
    """Tokens kept of each round, after trimming at EOS, stop or the limit."""

    @property
    def num_trimmed(self) -> int:
        """Tokens that the last round made beyond the end of the answer; `trimmed_by` says what ended it."""
        return sum(self.num_accepted) + len(self.num_accepted) - sum(self.num_emitted)

    @property
    def trimmed_by(self) -> str:
        """What cut the last round short: eos, stop or length; empty where nothing was cut."""
        return self.finish if self.num_trimmed else ""

    def check(self) -> None:
        """The counters' invariants; an AssertionError here is a fault of the decoder."""
        assert len(self.num_drafts) == len(self.num_accepted) == len(self.num_emitted)
        rounds = list(zip(self.num_drafts, self.num_accepted, self.num_emitted, strict=True))
        for drafts, accepted, emitted in rounds:
            assert 0 <= accepted <= drafts and 1 <= emitted <= accepted + 1, (drafts, accepted, emitted)
        for _, accepted, emitted in rounds[:-1]:
            assert emitted == accepted + 1, "only the last round is trimmed"
        assert sum(self.num_emitted) == len(self.tokens) - 1
        assert self.finish != "length" or not self.num_trimmed, "nothing is drafted beyond the limit"

    def record(self) -> dict[str, Any]:
        """As JSON for a report."""
        return {
            "tokens": self.tokens,
            "finish": self.finish,
            "trimmed_by": self.trimmed_by,
            "num_drafts": self.num_drafts,
            "num_accepted": self.num_accepted,
            "num_emitted": self.num_emitted,
        }


class Stopwatch:
    """Splits a round's wall clock at `mark`s. On a GPU, whose work is queued, by events in that queue."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.began = time.perf_counter()
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """What comes next is another part."""
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def split(self) -> list[float]:
        """Seconds between the marks, then the rest until now; on a GPU, call it once the host has waited for them."""
        pairs = itertools.pairwise(self.marks)
        parts = [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs]
        return [*parts, max(time.perf_counter() - self.began - sum(parts), 0.0)]


def acceptance(traces: Iterable[Trace]) -> float:
    """Draft acceptance rate, sum a / sum K (raw run); 0 where nothing was drafted."""
    drafted = accepted = 0
    for trace in traces:
        drafted += sum(trace.num_drafts)
        accepted += sum(trace.num_accepted)
    return accepted / drafted if drafted else 0.0
