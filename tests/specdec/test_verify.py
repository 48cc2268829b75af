"""Verification is exact: enumeration, G-tests, and broken verifiers that must fail them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.sampling import Sampling, draw, warp
from specdec.verify import Proposal, greedy_rule, token_rule

_spec = importlib.util.spec_from_file_location("laws", Path(__file__).parent / "laws.py")
assert _spec is not None and _spec.loader is not None
laws = importlib.util.module_from_spec(_spec)
sys.modules["laws"] = laws
_spec.loader.exec_module(laws)

VOCAB, DRAFTS, ROWS = 8, 3, 60_000


def p_value(verifier: Any, *, shown: Any = None, q: Tensor | None = None) -> float:
    p, drawn_from = laws.tables(VOCAB, DRAFTS)
    drawn_from = drawn_from if q is None else q
    tokens, _ = laws.rounds(verifier, p, drawn_from, rows=ROWS, seed=1, shown=shown)
    return float(laws.g_test(laws.pair_counts(tokens, VOCAB), laws.pair_law(p)))


def test_shapes() -> None:
    p = torch.full((2, 4, 5), 0.2)
    proposal = Proposal(
        tokens=torch.zeros(2, 3, dtype=torch.long), num_drafts=torch.tensor([3, 0]), probs=p[:, :3]
    )
    accepted, following = token_rule(p, proposal, torch.full((2, 3), 0.5), torch.full((2, 4), 0.5))
    assert accepted.shape == following.shape == (2,) and accepted.tolist() == [3, 0]


def test_joint_law_of_sampling() -> None:
    assert p_value(token_rule) > 1e-3


def test_acceptance_is_the_overlap() -> None:
    p, q = laws.tables(VOCAB, 1)
    _, accepted = laws.rounds(token_rule, p, q, rows=ROWS, seed=2)
    overlap = float(torch.minimum(p[0, 0], q[0, 0]).sum())
    assert float(accepted.double().mean()) == pytest.approx(overlap, abs=4 * (0.25 / ROWS) ** 0.5)


def test_exact_enumeration() -> None:
    """Integrate the rule over a grid of both uniforms: the emitted token's law is p to the grid's width."""
    grid = 400
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    q = torch.tensor([0.2, 0.2, 0.1, 0.5])
    u = (torch.arange(grid).double() + 0.5) / grid
    law = torch.zeros(4, dtype=torch.float64)
    for token in range(4):
        rows = grid * grid
        proposal = Proposal(
            tokens=torch.full((rows, 1), token), num_drafts=torch.ones(rows, dtype=torch.long),
            probs=q.expand(rows, 1, 4),
        )  # fmt: skip
        accept = u.repeat_interleave(grid).unsqueeze(1)
        after = u.repeat(grid).unsqueeze(1).expand(rows, 2)
        accepted, following = token_rule(p.expand(rows, 2, 4), proposal, accept, after)
        emitted = torch.where(accepted == 1, torch.full_like(following, token), following)
        law += q[token].double() * torch.bincount(emitted, minlength=4) / rows
    torch.testing.assert_close(law, p.double(), atol=0.004, rtol=0)
    assert law[3] == 0


def test_one_hot_proposals_keep_the_law() -> None:
    """Look-up and greedy drafts have no q: p(x) is the chance of acceptance, and the rest of p follows."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = ROWS
    generator = torch.Generator().manual_seed(3)
    proposal = Proposal(
        tokens=torch.full((rows, 1), 1), num_drafts=torch.ones(rows, dtype=torch.long), probs=None
    )
    accepted, following = token_rule(
        p.expand(rows, 2, 4),
        proposal,
        torch.rand(rows, 1, generator=generator),
        torch.rand(rows, 2, generator=generator),
    )
    emitted = torch.where(accepted == 1, torch.ones_like(following), following)
    assert laws.g_test(torch.bincount(emitted, minlength=4), p) > 1e-3
    assert float(accepted.double().mean()) == pytest.approx(0.3, abs=0.005)


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


# Broken verifiers. Each is a fault found in real decoders; each must fail the test above.


def swapped(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """p and q exchanged in the acceptance ratio."""
    assert proposal.probs is not None
    mirrored = torch.cat([proposal.probs, p[:, -1:]], 1)
    wrong = Proposal(tokens=proposal.tokens, num_drafts=proposal.num_drafts, probs=p[:, :-1].contiguous())
    accepted, _ = token_rule(mirrored, wrong, u_accept, u_next)
    return accepted, _residual(p, proposal, accepted, u_next)


def rewarped(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """The residual put through top-p once more."""
    accepted, _ = token_rule(p, proposal, u_accept, u_next)
    return accepted, _residual(p, proposal, accepted, u_next, top_p=0.9)


def no_residual(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """The correction drawn from p itself."""
    accepted, _ = token_rule(p, proposal, u_accept, u_next)
    at = accepted.view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    return accepted, draw(p.gather(1, at).squeeze(1), u_next.gather(1, accepted[:, None]).squeeze(1))


def _residual(p: Tensor, proposal: Proposal, accepted: Tensor, u_next: Tensor, top_p: float = 1.0) -> Tensor:
    assert proposal.probs is not None
    padded = torch.cat([proposal.probs, torch.zeros_like(p[:, :1])], 1)
    at = accepted.view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    rest = (p - padded).clamp(min=0).gather(1, at).squeeze(1)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p.gather(1, at).squeeze(1))
    if top_p < 1:
        rest = warp(rest.log(), Sampling(temperature=1.0, top_p=top_p))
    return draw(rest, u_next.gather(1, accepted[:, None]).squeeze(1))


def test_the_helper_of_the_mutants_is_right() -> None:
    def rebuilt(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
        accepted, _ = token_rule(p, proposal, u_accept, u_next)
        return accepted, _residual(p, proposal, accepted, u_next)

    assert p_value(rebuilt) > 1e-3


@pytest.mark.parametrize("mutant", [swapped, rewarped, no_residual])
def test_broken_verifiers_fail(mutant: Any) -> None:
    assert p_value(mutant) < 1e-6


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(temperature=1.0, top_k=4)])
def test_a_warp_on_one_side_only_fails(sampling: Sampling) -> None:
    """The draft is drawn from a warped q, the verifier is told the raw one."""
    _, q = laws.tables(VOCAB, DRAFTS)
    assert p_value(token_rule, q=warp(q.log(), sampling), shown=q) < 1e-6
    assert p_value(token_rule, q=warp(q.log(), sampling)) > 1e-3  # told the truth, it is exact


def test_a_greedy_draft_judged_by_the_sampling_rule_fails() -> None:
    _, q = laws.tables(VOCAB, DRAFTS)
    assert p_value(token_rule, q=warp(q.log(), Sampling()), shown=q) < 1e-6
