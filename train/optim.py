"""AdamW with decoupled weight decay (1711.05101), and a learning rate that is a pure function of the step."""

import math

import torch
from torch import nn

from train.config import TrainSection


def build_optimizer(model: nn.Module, section: TrainSection) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; matrices decay, norms and biases do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=section.lr, betas=(0.9, 0.95), eps=1e-8, fused=True
    )


def learning_rate(step: int, total: int, section: TrainSection) -> float:
    """Linear warm-up over `warmup * total` steps, then half a cosine down to a tenth of `lr`; steps count
    from 1.
    """
    warm = max(1, round(section.warmup * total))
    if step <= warm:
        return section.lr * step / warm
    done = (step - warm) / max(1, total - warm)
    return section.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Put one learning rate on every group."""
    for group in optimizer.param_groups:
        group["lr"] = value
