"""Draft length policies: how many tokens a round drafts. A policy is one small class and a line in `make_policy`."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.errors import UserError

MAX_AUTO_LENGTH = 6


class LengthPolicy(Protocol):
    """Decides, row by row, whether to draft one more token. It must not drop a token already drafted: whether a
    drawn token is proposed may not depend on which token it is, or the output's law would change."""

    @property
    def max_length(self) -> int:
        """Most tokens a round may draft."""
        ...

    @property
    def needs_confidence(self) -> bool:
        """Whether `go_on` reads the chain at T=0, where it costs a softmax."""
        ...

    def go_on(self, chain: Tensor) -> Tensor:  # [B] product of the drafted tokens' q -> [B] bool
        """True where one more token is worth drafting."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Always K tokens."""

    max_length: int
    needs_confidence: bool = False

    def go_on(self, chain: Tensor) -> Tensor:
        return torch.ones_like(chain, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """Draft on while the chance that the whole chain so far is accepted, as the draft sees it, is above a threshold."""

    max_length: int
    threshold: float
    needs_confidence: bool = True

    def go_on(self, chain: Tensor) -> Tensor:
        return chain > self.threshold


def make_policy(draft_length: int | str, *, threshold: float = 0.3) -> LengthPolicy:
    """`auto` -> confidence stop; a number -> that fixed length. Raises UserError for anything else."""
    if draft_length == "auto":
        return Confidence(max_length=MAX_AUTO_LENGTH, threshold=threshold)
    if isinstance(draft_length, int) and not isinstance(draft_length, bool) and draft_length >= 0:
        return Fixed(max_length=draft_length)
    raise UserError(
        "draft_length is out of range", got=draft_length, expected="auto, or a whole number from 0"
    )


def describe(policy: LengthPolicy) -> str:
    """A policy in words, for reports."""
    if isinstance(policy, Confidence):
        return f"up to {policy.max_length}, while the draft gives its own chain more than {policy.threshold:.3f}"
    return f"always {policy.max_length}"
