"""Exact laws and goodness of fit, for the tests of verification."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy.stats import power_divergence
from torch import Tensor

from specdec.sampling import Purpose, draw, uniform
from specdec.verify import Proposal

Verifier = Callable[[Tensor, Proposal, Tensor, Tensor], tuple[Tensor, Tensor]]


def g_test(counts: Tensor, expected: Tensor) -> float:
    """p-value of the G-test that `counts` were drawn from `expected` (a distribution); rare cells are pooled."""
    counts, expected = counts.flatten().double(), expected.flatten().double() * counts.sum()
    assert float(counts[expected == 0].sum()) == 0, "something impossible was drawn"
    rare = expected < 5
    seen = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    wanted = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    keep = wanted > 0
    wanted = wanted[keep] * seen[keep].sum() / wanted[keep].sum()
    return float(power_divergence(seen[keep].numpy(), wanted.numpy(), lambda_="log-likelihood").pvalue)


def tables(vocab: int, num_drafts: int, sharpness: float = 1.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """p and q that depend on the token before: [K+1, V, V] and [K, V, V], rows indexed by the previous token."""
    generator = torch.Generator().manual_seed(seed)
    p = (torch.randn(num_drafts + 1, vocab, vocab, generator=generator) * sharpness).softmax(-1)
    q = (torch.randn(num_drafts, vocab, vocab, generator=generator) * sharpness).softmax(-1)
    return p, (0.5 * q + 0.5 * p[:-1])  # a draft that is somewhat right


def rounds(
    verifier: Verifier, p: Tensor, q: Tensor, *, rows: int, seed: int, shown: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run `rows` rounds from previous token 0 -> the first two emitted tokens [rows, 2], accepted counts [rows].

    Drafts are drawn from q; `shown` is the q that the verifier is told (a fault when it is another one). A round that
    emits one token only is completed by a draw from p, as the next round would.
    """
    num_drafts, vocab = q.shape[:2]
    seeds = torch.arange(rows) + seed * 1_000_003
    previous = torch.zeros(rows, dtype=torch.long)
    drafts, q_rows, p_rows = [], [], []
    for k in range(num_drafts):
        p_rows.append(p[k, previous])
        q_rows.append((q if shown is None else shown)[k, previous])
        token = draw(q[k, previous], uniform(seeds, torch.full((rows,), k), Purpose.DRAFT))
        drafts.append(token)
        previous = token
    p_rows.append(p[num_drafts, previous])
    proposal = Proposal(
        tokens=torch.stack(drafts, 1),
        num_drafts=torch.full((rows,), num_drafts),
        probs=torch.stack(q_rows, 1).float(),
    )
    positions = torch.arange(num_drafts + 1)
    u_accept = uniform(seeds[:, None], positions[:num_drafts], Purpose.ACCEPT)
    u_next = uniform(seeds[:, None], positions, Purpose.NEXT)
    accepted, following = verifier(torch.stack(p_rows, 1).float(), proposal, u_accept, u_next)
    emitted = torch.cat([proposal.tokens, proposal.tokens[:, :1]], 1)
    emitted.scatter_(1, accepted[:, None], following[:, None])
    again = draw(p[1, emitted[:, 0]], uniform(seeds, torch.full((rows,), 77), Purpose.NEXT))
    second = torch.where(accepted >= 1, emitted[:, 1], again)
    return torch.stack([emitted[:, 0], second], 1), accepted


def pair_law(p: Tensor) -> Tensor:  # [K+1, V, V] -> [V, V]
    """The target's joint law of the first two tokens behind token 0."""
    return p[0, 0].unsqueeze(-1) * p[1]


def pair_counts(tokens: Tensor, vocab: int) -> Tensor:
    """[rows, 2] -> counts [V, V]."""
    return torch.bincount(tokens[:, 0] * vocab + tokens[:, 1], minlength=vocab * vocab).view(vocab, vocab)
