"""The loss from hidden states and head weights, without ever holding a [tokens, vocabulary] matrix.

The whole of it, for a chunk of n tokens:

1. z = hidden @ head.T, in the dtype of the hidden states; everything after it in float32.
2. Take the k target ids out of z; what is left is the tail. One log-sum-exp over it gives u_tail.
3. u = [z_1 .. z_k, u_tail] are the logits of k+1 symbols; log q = log_softmax(u) is exact, and so is q_tail,
   however small: nothing is computed as 1 - sum.
4. The objective on [n, k+1], with ordinary autograd, gives du.
5. dz is du_i at target id i, and du_tail * softmax(tail) elsewhere: one scaled copy of step 2's exponentials.
6. d hidden = dz @ head, and d head += dz.T @ hidden when the head learns.

A short-listed head (arXiv 2502.14856) is a head with fewer rows: a target id off the list has q = 0, and its
mass p joins the tail's. Divergences then are over (kept on-list ids, everything else). Where the kept ids are
the whole head there is no everything else: p is renormalised over them, or KL would be infinite by rounding.

Letters: N tokens, n tokens of a chunk, H hidden size, M head rows, k target ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from distill.losses import ObjectiveSection, token_losses


@dataclass(frozen=True, kw_only=True)
class SparseTarget:
    """The target's most probable ids at each token; what they leave of 1 is the tail mass."""

    token_ids: Tensor
    """Ids, distinct within a token, [N, k] int64."""
    log_probs: Tensor
    """Their log-probabilities at temperature 1, [N, k]."""


def text_target(token_ids: Tensor) -> SparseTarget:  # [N]
    """All mass on the tokens of a text: forward KL to it is the text's cross-entropy."""
    ids = token_ids.unsqueeze(-1)
    return SparseTarget(token_ids=ids, log_probs=torch.zeros(ids.shape, device=ids.device))


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Sums over tokens, each token times its weight; divide once, by the global number of tokens."""

    loss: Tensor
    """Sum of the objective in nats, scalar, with gradient."""
    expected_acceptance_sum: Tensor
    """Sum of min(p, q) over kept on-list ids at temperature 1, scalar: a lower bound of the acceptance."""
    greedy_agreement_sum: Tensor
    """Tokens at which the draft's most probable id is the target's, scalar."""
    num_tokens: Tensor
    """Sum of the weights, scalar; the number of tokens where no weights are given."""


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """A target laid out for one head: k columns and a tail."""

    columns: Tensor
    """Head rows of the target ids, [N, k] int64; 0 where the id is off the head."""
    on_head: Tensor
    """Whether the head has the id, [N, k] bool."""
    p: Tensor
    """Raw probability of each id, 0 where it is off the head, [N, k]."""
    log_p: Tensor
    """Log-probabilities of the k ids and the tail, normalised, [N, k+1]."""
    best: Tensor
    """Head row of the target's most probable id, [N] int64; -1 where the head lacks it."""
    weights: Tensor
    """Weight of each token, [N]."""

    def __getitem__(self, rows: slice) -> Symbols:
        return Symbols(
            columns=self.columns[rows], on_head=self.on_head[rows], p=self.p[rows], log_p=self.log_p[rows],
            best=self.best[rows], weights=self.weights[rows],
        )  # fmt: skip


def lay_out(
    target: SparseTarget,
    num_rows: int,
    head_ids: Tensor | None,  # [M], sorted
    weights: Tensor | None,  # [N]
    dtype: torch.dtype,
) -> Symbols:
    """Map target ids to head rows, and move the mass of ids that the head lacks into the tail."""
    ids = target.token_ids.long()
    if head_ids is None:
        on_head = ids < num_rows  # a padded target vocabulary may be the wider one
        columns = ids
    else:
        columns = torch.searchsorted(head_ids, ids).clamp_(max=num_rows - 1)
        on_head = head_ids[columns] == ids
    columns = columns.masked_fill(~on_head, 0)
    log_probs = target.log_probs.to(dtype)
    best = log_probs.argmax(-1, keepdim=True)
    log_p = log_probs.masked_fill(~on_head, -math.inf)
    p = log_p.exp()
    tail = (1 - p.sum(-1, keepdim=True)).clamp_(min=0)
    tail = tail.masked_fill(on_head.sum(-1, keepdim=True) == num_rows, 0.0)
    log_p = torch.cat([log_p, tail.log()], -1)
    return Symbols(
        columns=columns,
        on_head=on_head,
        p=p,
        log_p=log_p - log_p.logsumexp(-1, keepdim=True),
        best=columns.gather(1, best).masked_fill(~on_head.gather(1, best), -1).squeeze(1),
        weights=log_p.new_ones(len(ids)) if weights is None else weights.detach().to(log_p),
    )


def chunked_loss(
    hidden: Tensor,  # [N, H]
    head_weight: Tensor,  # [M, H]
    target: SparseTarget,
    section: ObjectiveSection,
    *,
    head_ids: Tensor | None = None,  # [M], sorted
    chunk_tokens: int = 512,
    weights: Tensor | None = None,  # [N]
) -> LossSums:
    """The objective of `section`, summed over tokens, with its gradient, `chunk_tokens` tokens at a time.

    Args:
        hidden: last hidden states of the draft after its final norm; their dtype is that of the matmuls.
        head_weight: the draft's output rows; with `head_ids`, the rows of those ids alone.
        target: the target's distributions at the same tokens.
        section: the objective.
        head_ids: ids of a short-listed head, ascending; None for the first M ids.
        chunk_tokens: tokens per chunk; peak memory is about 6 bytes x chunk_tokens x M in bfloat16.
        weights: weight of each token; without them 1.

    Returns:
        Sums over tokens. `loss` carries gradient to `hidden`, and to `head_weight` if that requires it.
    """
    _check(hidden, head_weight, target, head_ids)
    symbols = lay_out(target, len(head_weight), head_ids, weights, _exact(hidden.dtype))
    learning = torch.is_grad_enabled()
    loss, acceptance, agreement = _ChunkedLoss.apply(
        hidden, head_weight, symbols, section, chunk_tokens,
        learning and hidden.requires_grad, learning and head_weight.requires_grad,
    )  # fmt: skip
    return LossSums(
        loss=loss,
        expected_acceptance_sum=acceptance,
        greedy_agreement_sum=agreement,
        num_tokens=symbols.weights.sum(),
    )


@torch.no_grad()
def judge(
    hidden: Tensor,  # [N, H]
    head_weight: Tensor,  # [M, H]
    target: SparseTarget,
    *,
    head_ids: Tensor | None = None,  # [M], sorted
    chunk_tokens: int = 512,
) -> tuple[Tensor, Tensor]:  # [N], [N]
    """The acceptance of each token, and whether the draft's most probable id is the target's: what `LossSums` sums."""
    _check(hidden, head_weight, target, head_ids)
    exact = _exact(hidden.dtype)
    symbols = lay_out(target, len(head_weight), head_ids, None, exact)
    rows, acceptance, agrees = head_weight.to(hidden.dtype), [], []
    for start in range(0, len(hidden), chunk_tokens):
        part = symbols[slice(start, start + chunk_tokens)]
        z = (hidden[start : start + chunk_tokens] @ rows.T).to(exact)
        q = (z.gather(1, part.columns) - z.logsumexp(-1, keepdim=True)).exp()
        acceptance.append(torch.minimum(part.p, q).sum(-1))
        agrees.append((z.argmax(-1) == part.best).to(exact))
    return torch.cat(acceptance), torch.cat(agrees)


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made beside the value, chunk by chunk: each chunk's logits are computed once."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        head_weight: Tensor,
        symbols: Symbols,
        section: ObjectiveSection,
        chunk_tokens: int,
        hidden_learns: bool,
        head_learns: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = _exact(hidden.dtype)
        rows = head_weight.to(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden) if hidden_learns else None
        # Many chunks are added up here: in bfloat16 the late ones would be rounded away.
        grad_head = torch.zeros_like(head_weight, dtype=exact) if head_learns else None
        sums = torch.zeros(3, dtype=exact, device=hidden.device)
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            grad_logits, numbers = _chunk(
                hidden[part] @ rows.T, symbols[part], section, hidden_learns or head_learns
            )
            sums += numbers
            if grad_logits is None:
                continue
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ rows
            if grad_head is not None:
                grad_head += grad_logits.T @ hidden[part]
        ctx.grads = (grad_hidden, None if grad_head is None else grad_head.to(head_weight.dtype))  # type: ignore[attr-defined]
        loss, acceptance, agreement = sums.unbind()
        loss, acceptance, agreement = loss.clone(), acceptance.clone(), agreement.clone()
        ctx.mark_non_differentiable(acceptance, agreement)
        return loss, acceptance, agreement

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.grads]
        return (*scaled, None, None, None, None, None)


def _chunk(
    logits: Tensor,  # [n, M]
    symbols: Symbols,
    section: ObjectiveSection,
    learning: bool,
) -> tuple[Tensor | None, Tensor]:  # [n, M], [3]
    """Gradient of the loss in the logits, and the sums [loss, acceptance, agreement] (steps 2 to 5)."""
    z = logits.to(_exact(logits.dtype))
    agrees = z.argmax(-1) == symbols.best
    picked = z.gather(1, symbols.columns).masked_fill_(~symbols.on_head, -math.inf)  # [n, k]
    # Adding -inf takes an id out of the tail; off-head ids add 0 to row 0, which changes nothing.
    z.scatter_add_(1, symbols.columns, torch.zeros_like(picked).masked_fill_(symbols.on_head, -math.inf))
    peak = z.amax(-1, keepdim=True).clamp_(min=torch.finfo(z.dtype).min)  # finite where the tail is empty
    z.sub_(peak).exp_()
    total = z.sum(-1, keepdim=True)
    with torch.set_grad_enabled(learning):
        u = torch.cat([picked, peak + total.log()], -1).requires_grad_(learning)  # [n, k+1]
        log_q = u.log_softmax(-1)
        loss = token_losses(symbols.log_p, log_q, section) @ symbols.weights
        grad_u = torch.autograd.grad(loss, u)[0] if learning else None
    acceptance = torch.minimum(symbols.p, log_q.detach()[:, :-1].exp()).sum(-1)
    numbers = torch.stack([loss.detach(), acceptance @ symbols.weights, agrees.to(z.dtype) @ symbols.weights])
    if grad_u is None:
        return None, numbers
    z.mul_(grad_u[:, -1:] / total.clamp_(min=torch.finfo(z.dtype).tiny))
    z.scatter_add_(1, symbols.columns, grad_u[:, :-1].masked_fill(~symbols.on_head, 0.0))
    return z, numbers


def eager_loss(
    hidden: Tensor,  # [N, H]
    head_weight: Tensor,  # [M, H]
    target: SparseTarget,
    section: ObjectiveSection,
    *,
    head_ids: Tensor | None = None,  # [M], sorted
    chunk_tokens: int = 512,
    weights: Tensor | None = None,  # [N]
) -> LossSums:
    """The plain twin of `chunked_loss`: same arguments and result, on the whole [N, M] matrix by autograd."""
    _check(hidden, head_weight, target, head_ids)
    exact = _exact(hidden.dtype)
    symbols = lay_out(target, len(head_weight), head_ids, weights, exact)
    logits = (hidden @ head_weight.to(hidden.dtype).T).to(exact)
    log_q_all = logits.log_softmax(-1)  # [N, M]
    taken = torch.zeros(logits.shape, device=logits.device).scatter_add_(
        1, symbols.columns, symbols.on_head.float()
    )
    tail = log_q_all.masked_fill(taken > 0, -math.inf).logsumexp(-1, keepdim=True)
    log_q = torch.cat(
        [log_q_all.gather(1, symbols.columns).masked_fill(~symbols.on_head, -math.inf), tail], -1
    )
    acceptance = torch.minimum(symbols.p, log_q.detach()[:, :-1].exp()).sum(-1)
    agrees = (logits.argmax(-1) == symbols.best).to(exact)
    return LossSums(
        loss=token_losses(symbols.log_p, log_q, section) @ symbols.weights,
        expected_acceptance_sum=acceptance @ symbols.weights,
        greedy_agreement_sum=agrees @ symbols.weights,
        num_tokens=symbols.weights.sum(),
    )


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(hidden: Tensor, head_weight: Tensor, target: SparseTarget, head_ids: Tensor | None) -> None:
    assert hidden.ndim == 2 and head_weight.ndim == 2 and hidden.shape[1] == head_weight.shape[1]
    assert target.token_ids.shape == target.log_probs.shape and len(target.token_ids) == len(hidden)
    assert head_ids is None or head_ids.shape == head_weight.shape[:1]
