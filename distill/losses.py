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

import torch
from pydantic import Field
from torch import Tensor

from specdec.settings import Section

FLOOR = -70.0  # log-probability; half-precision captures end at about -17


class ObjectiveSection(Section):
    """What the draft is trained to lower."""

    kind: Literal[
        "forward_kl", "reverse_kl", "skewed_kl", "jsd", "tv", "log_acceptance", "lk", "cross_entropy"
    ] = "forward_kl"
    """Divergence: KL(p||q), KL(q||p), KL(p||mixture), generalised Jensen-Shannon, total variation (1 - acceptance),
    -log acceptance, the blend of KL(p||q) and total variation that follows the acceptance, or the cross-entropy of
    the answers' own text."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of both distributions inside the loss; 1 leaves them as they are."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the target in the mixture of jsd: near 0 it acts like KL(p||q), near 1 like KL(q||p)."""
    skew: float = Field(default=0.1, gt=0, lt=1)
    """Weight of the target in the mixture of skewed_kl."""
    block_length: int = Field(default=1, ge=1)
    """Drafts a round in serving: above 1, a token weighs what its acceptance adds to the accepted length of such
    blocks; with kind=tv this lowers (block_length - expected accepted length) itself."""
    eta: float = Field(default=3.0, ge=0)
    """How fast lk turns from KL(p||q) to total variation as acceptance rises; 0 stays with KL(p||q)."""


def forward_kl(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
) -> Tensor:  # [N]
    """KL(p||q) = sum_v p(v) (log p(v) - log q(v)); infinite where q = 0 and p > 0."""
    p = log_p.exp()
    empty = p == 0
    return (p * (log_p.masked_fill(empty, 0.0) - log_q.masked_fill(empty, 0.0))).sum(-1)


def reverse_kl(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
) -> Tensor:  # [N]
    """KL(q||p) = sum_v q(v) (log q(v) - log p(v)).

    Probabilities of the target below e^FLOOR count as that: one rounded to 0 would make the loss infinite.
    """
    q = log_q.exp()
    empty = q == 0
    return (q * (log_q.masked_fill(empty, 0.0) - log_p.clamp(min=FLOOR).masked_fill(empty, 0.0))).sum(-1)


def skewed_kl(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
    skew: float,
) -> Tensor:  # [N]
    """KL(p||m), m = skew p + (1 - skew) q. Source: DistiLLM, arXiv 2402.03898, skew KLD. At most -log skew."""
    p, log_m = log_p.exp(), _mixture(log_p, log_q, skew)
    return (p * (log_p.masked_fill(p == 0, 0.0) - log_m)).sum(-1)


def jsd(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
    beta: float,
) -> Tensor:  # [N]
    """Generalised Jensen-Shannon: beta KL(p||m) + (1 - beta) KL(q||m), m = beta p + (1 - beta) q.

    Source: GKD, arXiv 2306.13649, the definition of D_JSD(beta). Bounded, finite for any p and q.
    """
    from_p = skewed_kl(log_p, log_q, beta)
    from_q = skewed_kl(log_q, log_p, 1 - beta)
    return beta * from_p + (1 - beta) * from_q


def _mixture(log_p: Tensor, log_q: Tensor, weight: float) -> Tensor:
    """log (weight p + (1 - weight) q)."""
    neither = (log_p == -math.inf) & (log_q == -math.inf)  # logaddexp of two -inf has a NaN gradient
    log_p, log_q = log_p.masked_fill(neither, 0.0), log_q.masked_fill(neither, 0.0)
    return (log_p + math.log(weight)).logaddexp(log_q + math.log1p(-weight))


def tv(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
) -> Tensor:  # [N]
    """Total variation, sum_v |p(v) - q(v)| / 2 = 1 - sum_v min(p(v), q(v)) = 1 - acceptance.

    Source: Leviathan et al., arXiv 2211.17192 (corollary 3.6). Over top-k ids and a tail bucket it is a lower
    bound of the full one: inside the bucket, p and q count as equal as they can be.
    """
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def log_acceptance(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
) -> Tensor:  # [N]
    """-log sum_v min(p(v), q(v)): total variation's gradient over the acceptance, so that it does not vanish early.

    Source: LK losses, arXiv 2602.23881. In logarithms throughout: finite however small the overlap, infinite without
    any, with a gradient of 0.
    """
    shared = torch.minimum(log_p, log_q)
    none = (shared == -math.inf).all(-1)
    return -shared.masked_fill(none.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(none, -math.inf)


def lk(
    log_p: Tensor,  # [N, M]
    log_q: Tensor,  # [N, M]
    eta: float,
) -> Tensor:  # [N]
    """w KL(p||q) + (1 - w) TV(p, q), w = exp(-eta acceptance), taken as a constant by the gradient.

    Source: LK losses, arXiv 2602.23881, the hybrid loss; eta = 3 is the authors' choice.
    """
    distance = tv(log_p, log_q)
    weight = (-eta * (1 - distance.detach())).exp()
    return weight * forward_kl(log_p, log_q) + (1 - weight) * distance


def block_weights(
    acceptance: Tensor,  # [N]
    rows: Tensor,  # [N]
    block_length: int,
) -> Tensor:  # [N]
    """The derivative of the expected accepted length of blocks in each token's acceptance.

    A block of K = `block_length` drafts starts at every token: its expected accepted length is a_1 + a_1 a_2 + ...
    (arXiv 2211.17192, eq. 1, with an acceptance for each token), and the result is summed over all blocks a token is
    in. Ours. `rows` [N] says which tokens follow one another: equal numbers side by side. A block ends with its row.
    With K = 1 every weight is 1.
    """
    n = len(acceptance)
    weights = torch.zeros_like(acceptance)
    places = torch.arange(n, device=acceptance.device)

    def shifted(by: int) -> tuple[Tensor, Tensor]:  # acceptance of the token so far ahead, and whether there is one
        ahead = (places + by).clamp(max=n - 1)
        inside = (places + by < n) & (rows[ahead] == rows)
        return acceptance[ahead].masked_fill(~inside, 0.0), inside

    blocks = [shifted(by) for by in range(block_length)]
    for at in range(block_length):  # the token in question is the block's number `at`
        gain = torch.zeros_like(acceptance)
        for last in range(block_length - 1, at, -1):  # 1 + a_{at+1} (1 + a_{at+2} (...))
            gain = blocks[last][0] * (1 + gain)
        before = torch.ones_like(acceptance)
        for first in range(at):
            before = before * blocks[first][0]
        inside = blocks[at][1]
        weights.index_add_(0, (places + at)[inside], (before * (1 + gain))[inside])
    return weights


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, ObjectiveSection], Tensor]] = {
    "forward_kl": lambda log_p, log_q, section: forward_kl(log_p, log_q),
    "jsd": lambda log_p, log_q, section: jsd(log_p, log_q, section.beta),
    "tv": lambda log_p, log_q, section: tv(log_p, log_q),
    "reverse_kl": lambda log_p, log_q, section: reverse_kl(log_p, log_q),
    "skewed_kl": lambda log_p, log_q, section: skewed_kl(log_p, log_q, section.skew),
    "log_acceptance": lambda log_p, log_q, section: log_acceptance(log_p, log_q),
    "lk": lambda log_p, log_q, section: lk(log_p, log_q, section.eta),
    "cross_entropy": lambda log_p, log_q, section: forward_kl(log_p, log_q),  # p is one-hot: the text
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
