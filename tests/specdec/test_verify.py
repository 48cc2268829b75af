"""Verification: shapes, the chance of acceptance, and T=0. Its law and its mutants are in test_mutants.py."""

from __future__ import annotations

import pytest
import torch

from specdec.sampling import Sampling, draw, warp
from specdec.verify import Proposal, greedy_rule, token_rule


def test_shapes() -> None:
    p = torch.full((2, 4, 5), 0.2)
    proposal = Proposal(
        tokens=torch.zeros(2, 3, dtype=torch.long), num_drafts=torch.tensor([3, 0]), probs=p[:, :3]
    )
    accepted, following = token_rule(p, proposal, torch.full((2, 3), 0.5), torch.full((2, 4), 0.5))
    assert accepted.shape == following.shape == (2,) and accepted.tolist() == [3, 0]


def test_the_chance_of_acceptance_is_the_overlap() -> None:
    rows = 60_000
    generator = torch.Generator().manual_seed(2)
    p, q = torch.randn(2, 8, generator=generator).softmax(-1)
    proposal = Proposal(
        tokens=draw(q.expand(rows, 8), torch.rand(rows, generator=generator)).unsqueeze(1),
        num_drafts=torch.ones(rows, dtype=torch.long),
        probs=q.expand(rows, 1, 8),
    )
    u = torch.rand(2, rows, 2, generator=generator)
    accepted, _ = token_rule(p.expand(rows, 2, 8), proposal, u[0, :, :1], u[1])
    overlap = float(torch.minimum(p, q).sum())
    assert float(accepted.double().mean()) == pytest.approx(overlap, abs=4 * (0.25 / rows) ** 0.5)


def test_greedy_rule_is_the_token_rule_at_zero() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(500, 4, 6, generator=generator)
    drafts = torch.randint(0, 6, (500, 3), generator=generator)
    best = logits.argmax(-1)
    drafts = torch.where(torch.rand(500, 3, generator=generator) < 0.7, best[:, :3], drafts)
    counts = torch.randint(0, 4, (500,), generator=generator)
    proposal = Proposal(tokens=drafts, num_drafts=counts, probs=None)
    u = torch.rand(500, 4, generator=generator)
    soft = token_rule(warp(logits, Sampling()), proposal, u[:, :3], u)
    hard = greedy_rule(best, proposal)
    assert torch.equal(soft[0], hard[0]) and torch.equal(soft[1], hard[1])
    assert (hard[0] <= counts).all() and set(hard[0].tolist()) == {0, 1, 2, 3}
