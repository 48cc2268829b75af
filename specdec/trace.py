"""What a decode leaves behind: one record a round and row, and the counters derived from it in one place."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Times:
    """Wall-clock seconds of one decode call (all rows together)."""

    prefill_s: float = 0.0
    """Reading the prompts and drawing the first token."""
    draft_s: float = 0.0
    """Proposing."""
    verify_s: float = 0.0
    """Target forwards after the prefill."""
    host_s: float = 0.0
    """Verification rule, trimming and bookkeeping."""

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

    def check(self) -> None:
        """The counters' invariants; an AssertionError here is a fault of the decoder."""
        assert len(self.num_drafts) == len(self.num_accepted) == len(self.num_emitted)
        for drafts, accepted, emitted in zip(
            self.num_drafts, self.num_accepted, self.num_emitted, strict=True
        ):
            assert 0 <= accepted <= drafts and 1 <= emitted <= accepted + 1, (drafts, accepted, emitted)
        assert sum(self.num_emitted) == len(self.tokens) - 1

    def record(self) -> dict[str, Any]:
        """As JSON for a report."""
        return {
            "tokens": self.tokens,
            "finish": self.finish,
            "num_drafts": self.num_drafts,
            "num_accepted": self.num_accepted,
            "num_emitted": self.num_emitted,
        }


def acceptance(traces: Iterable[Trace]) -> float:
    """Draft acceptance rate, sum a / sum K (raw run); 0 where nothing was drafted."""
    drafted = accepted = 0
    for trace in traces:
        drafted += sum(trace.num_drafts)
        accepted += sum(trace.num_accepted)
    return accepted / drafted if drafted else 0.0
