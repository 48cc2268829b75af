"""One optimizer step: hidden states, loss sums, one division, gradient, update.

Letters: B rows, L length, N supervised tokens, H hidden size, M head rows (the vocabulary or the short
list), k symbols.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import reduce
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.chunked import SparseTarget, chunked_loss, judge, text_target
from distill.losses import ObjectiveSection, block_weights
from specdec.errors import UserError
from specdec.head import logit_scale
from train.batches import Batch


class DraftLoss(nn.Module):
    """The draft with its loss inside: one forward that a data-parallel wrapper can see whole."""

    def __init__(
        self,
        draft: PreTrainedModel,
        objective: ObjectiveSection,
        *,
        precision: str,
        head_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.draft, self.objective = draft, objective
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.head_ids = head_ids
        self._frozen_head: Tensor | None = None
        config = draft.config.get_text_config().to_dict()
        self.scale = logit_scale(config)
        if config.get("final_logit_softcapping") or draft.get_output_embeddings().bias is not None:
            raise UserError(
                "this draft's head has a soft-cap or a bias",
                expected="a plain linear head",
                fix="choose a draft with an architecture like Llama or Qwen",
            )

    def head(self) -> Tensor:
        """Head rows in use, [M, H]; gathered once when they do not learn."""
        weight: Tensor = self.draft.get_output_embeddings().weight
        if weight.requires_grad:
            return weight if self.head_ids is None else weight[self.head_ids]
        if self._frozen_head is None:
            rows = weight if self.head_ids is None else weight[self.head_ids.to(weight.device)]
            self._frozen_head = rows.detach().to(self.dtype).contiguous()
        return self._frozen_head

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:  # -> scalar, [4]
        """Sum of the loss (with gradient), and the sums [loss, expected acceptance, greedy agreement,
        tokens].
        """
        with torch.autocast(
            batch.input_ids.device.type, dtype=self.dtype, enabled=self.dtype == torch.bfloat16
        ):
            hidden = self.draft.base_model(
                input_ids=batch.input_ids, use_cache=False
            ).last_hidden_state  # [B, L, H]
        supervised = (
            hidden.flatten(0, 1).index_select(0, batch.positions).to(self.dtype) * self.scale
        )  # [N, H]
        target = SparseTarget(token_ids=batch.token_ids, log_probs=batch.log_probs)
        weights, learnt, length = None, target, self.objective.block_length
        apart = length > 1 or self.objective.kind == "cross_entropy"  # then the loss says nothing of the acceptance
        if apart:
            acceptance, agrees = judge(supervised, self.head(), target, head_ids=self.head_ids)
        if length > 1:
            weights = block_weights(acceptance, batch.positions // batch.input_ids.shape[1], length)
        if self.objective.kind == "cross_entropy":
            learnt = text_target(batch.next_ids)
        sums = chunked_loss(supervised, self.head(), learnt, self.objective, head_ids=self.head_ids, weights=weights)
        numbers = [sums.loss, sums.expected_acceptance_sum, sums.greedy_agreement_sum]
        if apart:
            numbers[1:] = [acceptance.sum(), agrees.sum()]
        values = [torch.as_tensor(x, dtype=torch.float64).detach().to(hidden.device) for x in numbers]
        return sums.loss, torch.stack(
            [*values, torch.tensor(float(batch.num_tokens), dtype=torch.float64, device=hidden.device)]
        )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step measured, over all processes."""

    loss: float
    """Mean loss per supervised token, nats."""
    expected_acceptance: float
    """Mean of sum_v min(p, q) over the batch, a lower bound where only top-k symbols were kept."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    num_tokens: int
    """Supervised tokens of the global batch."""
    applied: bool
    """False when loss or gradient was not finite and the update was skipped."""
    stop: bool
    """A process was asked to stop."""


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Batch],
    *,
    accelerator: Accelerator,
    num_tokens: int,
    grad_clip: float,
    stop: bool = False,
    idle: bool = False,
) -> StepResult:
    """One update from this process's micro-batches of a global batch with `num_tokens` supervised tokens.

    Losses are sums, divided once by the global count; data parallelism averages gradients, hence times the
    world size.
    `idle` marks a process whose share is empty: it runs the same forward with weight zero so that nobody
    waits for it.
    """
    device = accelerator.device
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    scale = 0.0 if idle else accelerator.num_processes / num_tokens
    for index, batch in enumerate(parts):
        last = index == len(parts) - 1
        with nullcontext() if last else accelerator.no_sync(model):
            loss, numbers = model(batch)
            (loss * scale).backward()
        if not idle:
            sums[:4] += numbers
    sums[4] = float(stop)
    if accelerator.num_processes > 1:
        sums = reduce(sums, "sum")
    trainable = [p for p in model.parameters() if p.grad is not None]
    norm = float(nn.utils.clip_grad_norm_(trainable, grad_clip if grad_clip > 0 else math.inf))
    loss_value = float(sums[0]) / num_tokens
    applied = math.isfinite(norm) and math.isfinite(loss_value)
    if applied:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(
        loss=loss_value,
        expected_acceptance=float(sums[1]) / num_tokens,
        grad_norm=norm,
        num_tokens=num_tokens,
        applied=applied,
        stop=bool(sums[4] > 0),
    )
