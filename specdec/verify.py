"""Verification: which drafts survive, and which token follows them. Pure tensors, no host sync.

A rule takes p, a proposal and uniforms, and returns how many drafts it accepts and the token behind them.
Letters: B rows, K drafts, V vocabulary. p is the target's and q the draft's distribution *after the same warp*.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sampling import draw


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens and where they came from."""

    tokens: Tensor
    """[B, K] drafted ids."""
    num_drafts: Tensor
    """[B] how many of a row's K columns are really drafted."""
    probs: Tensor | None
    """[B, K, V] the very distribution each token was drawn from; None for one-hot proposals (greedy, look-up)."""

    def drafted(self) -> Tensor:  # [B, K] bool
        """Which columns are really drafted."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return columns < self.num_drafts.unsqueeze(-1)


def token_rule(
    p: Tensor,  # [B, K+1, V]
    proposal: Proposal,  # K drafts a row
    u_accept: Tensor,  # [B, K] uniforms
    u_next: Tensor,  # [B, K+1] uniforms, one for each place the next token may land on
) -> tuple[Tensor, Tensor]:  # accepted count [B], next token [B]
    """Speculative sampling (Leviathan et al. 2211.17192, algorithm 1), exact at any temperature.

    Emitting the accepted drafts and then the next token has exactly the law of sampling from p.
    """
    num_columns = proposal.tokens.shape[1]
    # 1. Accept draft i while u_i < p_i(x_i) / q_i(x_i); a one-hot proposal has q_i(x_i) = 1.
    p_draft, q_draft = _at_drafts(p, proposal)
    accepted = (u_accept * q_draft < p_draft) & proposal.drafted()
    # 2. a = the drafts before the first rejection.
    num_accepted = accepted.long().cumprod(dim=-1).sum(dim=-1)
    # 3. The target's distribution behind the accepted drafts ...
    at = num_accepted.view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    p_next = p.gather(1, at).squeeze(1)
    # 4. ... less what the draft already had its chance at: norm(max(p - q, 0)), unless no draft was rejected (bonus).
    if num_columns:
        rejected = (num_accepted < proposal.num_drafts).unsqueeze(-1)
        p_next = torch.where(rejected, _residual(p_next, proposal, num_accepted), p_next)
    # 5. Draw the next token from it (`draw` normalises).
    return num_accepted, draw(p_next, u_next.gather(1, num_accepted.unsqueeze(-1)).squeeze(-1))


def block_rule(
    p: Tensor,  # [B, K+1, V]
    proposal: Proposal,  # K drafts a row
    u_accept: Tensor,  # [B, K] uniforms
    u_next: Tensor,  # [B, K+1] uniforms, one for each place the next token may land on
) -> tuple[Tensor, Tensor]:  # accepted count [B], next token [B]
    """Block verification (Sun et al. 2403.10444, algorithm 2): drafts are judged together, as exact as the token rule.

    It never accepts fewer tokens in expectation. A row's drafts may end where its policy stops: whether one more is
    drafted depends on the drafts before it alone, and the proof goes by induction over those.
    """
    num_columns, drafted = proposal.tokens.shape[1], proposal.drafted()
    if not num_columns:
        return proposal.num_drafts, draw(p[:, 0], u_next[:, 0])
    # 1. w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1), w_0 = 1: how much of the block up to i may be kept.
    p_draft, q_draft = _at_drafts(p, proposal)
    weights = [torch.ones_like(p_draft[:, 0])]
    for i in range(num_columns):
        weights.append((weights[-1] * p_draft[:, i] / q_draft[:, i]).clamp(max=1))
    w = torch.stack(weights, dim=1)  # [B, K+1]
    # 2. The mass of max(w_i p - q, 0) behind each prefix of i drafts.
    q = _as_probs(proposal, p)
    left = (w[:, :-1, None] * p[:, :-1] - q).clamp(min=0)  # [B, K, V]
    mass = left.sum(dim=-1)
    # 3. Keep i drafts with chance h_i = mass_i / (mass_i + 1 - w_i); all of them with chance w_K.
    rest = mass[:, 1:] / (mass[:, 1:] + 1 - w[:, 1:-1]).clamp(min=torch.finfo(p.dtype).tiny)
    last = torch.arange(1, num_columns + 1, device=p.device) == proposal.num_drafts.unsqueeze(-1)
    chance = torch.where(last, w[:, 1:], torch.cat([rest, w[:, -1:]], dim=1))
    # 4. a = the longest block that is kept.
    lengths = torch.arange(1, num_columns + 1, device=p.device)
    num_accepted = (lengths * ((u_accept < chance) & drafted)).amax(dim=-1)
    # 5. The token behind it: from p when the whole block was kept, else from what w_a p leaves of q.
    at = num_accepted.view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    p_next = p.gather(1, at).squeeze(1)
    residual = left.gather(1, at.clamp(max=num_columns - 1)).squeeze(1)
    cut_short = (num_accepted < proposal.num_drafts).unsqueeze(-1) & (residual.sum(dim=-1, keepdim=True) > 0)
    p_next = torch.where(cut_short, residual, p_next)
    return num_accepted, draw(p_next, u_next.gather(1, num_accepted.unsqueeze(-1)).squeeze(-1))


def _at_drafts(p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:  # [B, K+1, V] -> [B, K], [B, K]
    """p and q at the drafted tokens."""
    ids = proposal.tokens.unsqueeze(-1)
    p_draft = p[:, : ids.shape[1]].gather(-1, ids).squeeze(-1)
    if proposal.probs is None:
        return p_draft, torch.ones_like(p_draft)
    return p_draft, proposal.probs.gather(-1, ids).squeeze(-1)


def _as_probs(proposal: Proposal, p: Tensor) -> Tensor:  # [B, K, V]
    if proposal.probs is not None:
        return proposal.probs
    return torch.zeros_like(p[:, :-1]).scatter_(-1, proposal.tokens.unsqueeze(-1), 1.0)


def _residual(
    p_next: Tensor, proposal: Proposal, num_accepted: Tensor
) -> Tensor:  # [B, V], ..., [B] -> [B, V]
    index = num_accepted.clamp(max=proposal.tokens.shape[1] - 1)
    if proposal.probs is None:
        residual = p_next.scatter(-1, proposal.tokens.gather(1, index.unsqueeze(-1)), 0.0)
    else:
        q_next = proposal.probs.gather(1, index.view(-1, 1, 1).expand(-1, 1, p_next.shape[-1])).squeeze(1)
        residual = (p_next - q_next).clamp(min=0)
    # Where p <= q everywhere, nothing is left. Rounding alone rejects such a draft: p stands in for the residual.
    return torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p_next)


def greedy_rule(
    best: Tensor, proposal: Proposal
) -> tuple[Tensor, Tensor]:  # [B, K+1] argmax of p -> [B], [B]
    """Either rule at T=0, where p and q are one-hot: accept while the draft is the target's argmax."""
    assert proposal.probs is None, "at T=0 drafts are one-hot: a soft q would let other tokens through"
    accepted = (proposal.tokens == best[:, : proposal.tokens.shape[1]]) & proposal.drafted()
    num_accepted = accepted.long().cumprod(dim=-1).sum(dim=-1)
    return num_accepted, best.gather(1, num_accepted.unsqueeze(-1)).squeeze(-1)


RULES = {"token": token_rule, "block": block_rule}
"""Rules of sampling by name; at T=0 both are `greedy_rule`."""
