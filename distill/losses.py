"""What "close to the target" means: one formula per objective, over any set of symbols.

The symbols are the whole vocabulary, or the target's top-k ids and one tail bucket that holds the rest: the
formulas are the same. Every function takes log-probabilities (of p, the target, and q, the draft) and gives
one number a token, in nats. A symbol with p = 0 or q = 0 (log-probability -inf) gives its exact limit and a
gradient free of NaN: 0 log 0 = 0.

Letters: N tokens, M symbols.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from pydantic import Field
from torch import Tensor

from specdec.settings import Section


class ObjectiveSection(Section):
    """What the draft is trained to lower."""

    kind: Literal["forward_kl", "jsd", "tv"] = "forward_kl"
    """Divergence: KL(p||q), generalised Jensen-Shannon, or total variation (1 - acceptance)."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of both distributions inside the loss; 1 leaves them as they are."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the target in the mixture of jsd: near 0 it acts like KL(p||q), near 1 like KL(q||p)."""


def forward_kl(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
) -> Tensor:  # [N]
    """KL(p||q) = sum_v p(v) (log p(v) - log q(v)); infinite where q = 0 and p > 0."""
    p = log_p.exp()
    empty = p == 0
    return (p * (log_p.masked_fill(empty, 0.0) - log_q.masked_fill(empty, 0.0))).sum(-1)


def jsd(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
    beta: float,
) -> Tensor:  # [N]
    """Generalised Jensen-Shannon: beta KL(p||m) + (1 - beta) KL(q||m), m = beta p + (1 - beta) q.

    Source: GKD, arXiv 2306.13649, the definition of D_JSD(beta). Bounded, finite for any p and q.
    """
    neither = (log_p == -math.inf) & (log_q == -math.inf)  # logaddexp of two -inf has a NaN gradient
    log_p, log_q = log_p.masked_fill(neither, 0.0), log_q.masked_fill(neither, 0.0)
    log_m = (log_p + math.log(beta)).logaddexp(log_q + math.log1p(-beta))
    p, q = log_p.exp(), log_q.exp()
    from_p = p * (log_p.masked_fill(p == 0, 0.0) - log_m)
    from_q = q * (log_q.masked_fill(q == 0, 0.0) - log_m)
    return (beta * from_p + (1 - beta) * from_q).masked_fill(neither, 0.0).sum(-1)


def tv(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
) -> Tensor:  # [N]
    """Total variation, sum_v |p(v) - q(v)| / 2 = 1 - sum_v min(p(v), q(v)) = 1 - acceptance.

    Source: Leviathan et al., arXiv 2211.17192 (corollary 3.6). Over top-k ids and a tail bucket it is a lower
    bound of the full one: inside the bucket, p and q count as equal as they can be.
    """
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, ObjectiveSection], Tensor]] = {
    "forward_kl": lambda log_p, log_q, section: forward_kl(log_p, log_q),
    "jsd": lambda log_p, log_q, section: jsd(log_p, log_q, section.beta),
    "tv": lambda log_p, log_q, section: tv(log_p, log_q),
}
"""Formulas by the name in `objective.kind`: (log p [N, M], log q [N, M], section) -> [N]."""


def temper(
    log_probs: Tensor,  # [N, M]
    temperature: float,
) -> Tensor:  # [N, M]
    """p^(1/T), renormalised over the symbols given.

    A tail bucket is tempered as if it were one symbol, since the ids in it are unknown: at T other than 1
    this is not the tempered full distribution. p and q are treated alike, so q = p stays the minimum.
    """
    return log_probs if temperature == 1.0 else (log_probs / temperature).log_softmax(-1)


def token_losses(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
    section: ObjectiveSection,
) -> Tensor:  # [N]
    """The objective of `section` for each token, in nats, without the T^2 factor some papers put in front."""
    log_p, log_q = temper(log_p, section.temperature), temper(log_q, section.temperature)
    return OBJECTIVES[section.kind](log_p, log_q, section)
