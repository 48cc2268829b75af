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
    logits = logits.float()
    values, ids = logits.topk(min(k, logits.shape[-1]), dim=-1, sorted=True)
    return ids.to(torch.int32), values - logits.logsumexp(-1, keepdim=True)
