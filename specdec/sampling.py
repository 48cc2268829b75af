"""One warp for both models, and random numbers that depend on nothing but (seed, row, position, purpose).

Letters: B rows, V vocabulary.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

import torch
from torch import Tensor

from specdec.errors import UserError

BLOCK = 256  # width of the blocks in the two-level inverse CDF
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a next token is drawn; the same warp is applied to target and draft."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose mass reaches p (nucleus)."""
    min_p: float = 0.0
    """Drop tokens below min_p times the largest probability."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by it where positive, multiplied where negative (1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the answer."""
    banned: tuple[int, ...] = ()
    """Ids that are never emitted."""
    min_new_tokens: int = 0
    """No id that ends an answer before this many tokens."""

    def __post_init__(self) -> None:
        rules = (
            ("temperature", self.temperature, self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", self.presence_penalty, isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", self.frequency_penalty, isfinite(self.frequency_penalty), "a finite number"),
            ("banned", self.banned, all(i >= 0 for i in self.banned), "token ids, 0 or more"),
            ("min_new_tokens", self.min_new_tokens, self.min_new_tokens >= 0, "0 or more"),
        )
        for name, value, holds, expected in rules:
            if not holds:
                raise UserError(f"{name} is out of range", got=value, expected=expected)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def adjusts(self) -> bool:
        """Whether logits change before the warp, by what stands before them (see `specdec.prefix`)."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.banned)
            or self.min_new_tokens > 0
        )


def at_least_fp32(logits: Tensor) -> torch.dtype:
    """The type that distributions of these logits are computed in."""
    return torch.promote_types(logits.dtype, torch.float32)


def warp(logits: Tensor, sampling: Sampling) -> Tensor:  # [..., V] -> [..., V]
    """Logits -> the distribution tokens are drawn from, fp32 (fp64 stays). T=0 gives the one-hot of the argmax.

    Penalties and bans come before it (`specdec.prefix.adjust`). Order here: temperature, top-k, top-p, min-p, as
    transformers applies them.
    """
    if sampling.greedy:
        ids = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros(logits.shape, dtype=at_least_fp32(logits), device=logits.device).scatter_(-1, ids, 1.0)
    scaled = logits.to(at_least_fp32(logits)) / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        floor = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    if sampling.top_p < 1:
        ordered, ids = scaled.sort(dim=-1, descending=True)
        mass = ordered.softmax(dim=-1)
        outside = (
            mass.cumsum(dim=-1) - mass >= sampling.top_p
        )  # mass *before* a token: the first is always kept
        scaled = scaled.masked_fill(torch.zeros_like(outside).scatter_(-1, ids, outside), float("-inf"))
    probs = scaled.softmax(dim=-1)
    if sampling.min_p > 0:
        probs = probs * (probs >= sampling.min_p * probs.amax(dim=-1, keepdim=True))
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


class Purpose(IntEnum):
    """What a random number is for: streams of different purpose never meet."""

    DRAFT = 1
    ACCEPT = 2
    NEXT = 3


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer finaliser (two multiply-xorshift rounds), held in int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Counter-based uniforms in [0, 1), fp64, 53 bits: broadcast of `seeds` and `positions` (int64).

    A row's number depends on its own seed and position alone, so its output cannot depend on its batch mates.
    """
    low, high = seeds & _MASK32, (seeds >> 32) & _MASK32
    state = _mix(_mix(_mix(low) ^ high) ^ (positions & _MASK32)) ^ (int(purpose) * 0x9E3779B1 & _MASK32)
    first, second = _mix(state), _mix(state ^ 0x5BD1E995)
    bits = ((first << 21) ^ second) & ((1 << 53) - 1)
    return bits.double() * 2.0**-53


def of_round(seeds: Tensor, starts: Tensor) -> Tensor:  # [B], [B] -> [B]
    """The stream of the round that starts at a row's position: what one round drew, no other draws again."""
    low, high = seeds & _MASK32, (seeds >> 32) & _MASK32
    mark = _mix(starts & _MASK32 ^ 0x2545F491)
    return ((_mix(high ^ mark) << 32) | _mix(_mix(low) ^ mark)) ^ (starts << 1)


def choose(logits: Tensor) -> Tensor:  # [..., V] -> [...]
    """The greedy choice: the highest logit's id, the first of equals. As argmax, but 4x faster on a CPU in bf16."""
    return logits.max(dim=-1).indices


def draw(probs: Tensor, u: Tensor) -> Tensor:  # [..., V] weights >= 0, [...] in [0, 1) -> [...] ids
    """Inverse-CDF draw from weights that need not sum to 1; an id of weight 0 is never drawn.

    Two levels (blocks, then inside one block), in fp64: a running sum over the whole vocabulary would cost more
    than the softmax before it.
    """
    width = probs.shape[-1]
    if width % BLOCK:
        probs = torch.nn.functional.pad(probs, (0, BLOCK - width % BLOCK))
    blocks = probs.unflatten(-1, (-1, BLOCK))
    block_cdf = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = block_cdf[..., -1:]
    x = torch.minimum(u.double().unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(block_cdf, x, right=True).clamp_(max=blocks.shape[-2] - 1)
    inside = blocks.gather(-2, block.unsqueeze(-1).expand(*block.shape, BLOCK)).squeeze(-2)
    before = torch.where(block > 0, block_cdf.gather(-1, (block - 1).clamp(min=0)), torch.zeros_like(x))
    cdf = inside.cumsum(dim=-1, dtype=torch.float64)
    # fp64 sums in two orders can disagree in the last bit: keep the remainder inside the block's own mass.
    rest = torch.minimum((x - before).clamp(min=0), torch.nextafter(cdf[..., -1:], torch.zeros_like(total)))
    offset = torch.searchsorted(cdf, rest, right=True)
    return (block * BLOCK + offset).squeeze(-1)
