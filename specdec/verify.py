"""Verification: which drafts survive, and which token follows them. Pure tensors, no host sync.

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


def token_rule(
    p: Tensor,  # [B, K+1, V]
    proposal: Proposal,  # K drafts a row
    u_accept: Tensor,  # [B, K] uniforms
    u_next: Tensor,  # [B, K+1] uniforms, one for each place the next token may land on
) -> tuple[Tensor, Tensor]:  # accepted count [B], next token [B]
    """Speculative sampling (Leviathan et al. 2211.17192, algorithm 1), exact at any temperature.

    Emitting the accepted drafts and then the next token has exactly the law of sampling from p.
    """
    drafts, q = proposal.tokens, proposal.probs
    num_columns = drafts.shape[1]
    # 1. Accept draft i while u_i < p_i(x_i) / q_i(x_i); a one-hot proposal has q_i(x_i) = 1.
    p_draft = p[:, :num_columns].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    q_draft = torch.ones_like(p_draft) if q is None else q.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    drafted = torch.arange(num_columns, device=p.device) < proposal.num_drafts.unsqueeze(-1)
    accepted = (u_accept * q_draft < p_draft) & drafted
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
    """The token rule at T=0, where p and q are one-hot: accept while the draft is the target's argmax."""
    num_columns = proposal.tokens.shape[1]
    drafted = torch.arange(num_columns, device=best.device) < proposal.num_drafts.unsqueeze(-1)
    accepted = (proposal.tokens == best[:, :num_columns]) & drafted
    num_accepted = accepted.long().cumprod(dim=-1).sum(dim=-1)
    return num_accepted, best.gather(1, num_accepted.unsqueeze(-1)).squeeze(-1)
