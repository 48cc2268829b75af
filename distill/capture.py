"""What is kept of the target's distribution at each token of its answers.

Letters: B rows, V vocabulary, k symbols kept.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from specdec.settings import Section


class CaptureSection(Section):
    """How much of the target's distributions is stored."""

    top_k: int = Field(default=64, ge=1)
    """Most probable ids kept per token, 6 bytes each; the rest becomes one tail mass."""


def top_k_log_probs(
    logits: Tensor,  # [B, V]
    k: int,
) -> tuple[Tensor, Tensor]:  # [B, k] int32, [B, k] float32
    """The k most probable ids, best first, and their log-probabilities at temperature 1.

    The softmax runs over the whole vocabulary in float32. A vocabulary smaller than k is kept whole.
    """
    k = min(k, logits.shape[-1])
    ids = torch.empty(len(logits), k, dtype=torch.int32, device=logits.device)
    log_probs = torch.empty(len(logits), k, device=logits.device)
    rows = 8 if logits.device.type == "cpu" else max(len(logits), 1)  # a CPU's cache holds so many float32 copies
    for piece, here, there in zip(logits.split(rows), ids.split(rows), log_probs.split(rows), strict=True):
        wide = piece.float()
        values, best = wide.topk(k, dim=-1, sorted=True)
        here.copy_(best)
        torch.sub(values, wide.logsumexp(-1, keepdim=True), out=there)
    return ids, log_probs
