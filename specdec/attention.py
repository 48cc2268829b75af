"""A plain grouped attention for short queries on a CPU, registered with transformers under `draftsmith_grouped`.

The CPU flash kernel spends most of a one-token step on set-up, and `repeat_kv` copies the cache once a layer; two
batched products with the query heads of a group side by side do neither. `sdpa` stays the eager twin.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

NAME = "draftsmith_grouped"
# Architectures whose attention is softmax(q k^T * scaling + mask) v and nothing else, checked by the parity test.
PLAIN = frozenset({"llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "granite", "smollm3"})


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,  # [B, Hq, N, D]
    key: Tensor,  # [B, Hk, S, D]
    value: Tensor,  # [B, Hk, S, D]
    attention_mask: Tensor | None,  # [B, 1, N, S], additive
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [B, N, Hq, D]
    """softmax(q k^T * scaling + mask) v, with the Hq/Hk query heads of a key head as rows of one product."""
    batch, heads, length, width = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    rows = query.reshape(batch, key_heads, group * length, width)
    scores = torch.matmul(rows, key.transpose(-1, -2)).float().view(batch, key_heads, group, length, -1) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask.unsqueeze(1)
    weights = scores.softmax(dim=-1).to(value.dtype).view(batch, key_heads, group * length, -1)
    mixed = torch.matmul(weights, value).view(batch, heads, length, width)
    return mixed.transpose(1, 2), None


def use_grouped(model: PreTrainedModel) -> bool:
    """Switch a model on a CPU to the grouped attention where its architecture allows it; True when it did."""
    if model.device.type != "cpu" or model.config.get_text_config().model_type not in PLAIN:
        return False
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True
