"""The exact law of one round, under both rules, any warp and ragged drafts: the rules as black boxes, integrated.

Every draft is enumerated. A rule accepts by thresholds on its uniforms and draws by thresholds on the next one;
bisection finds them to the last bit, so the integral over all uniforms is a sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.prefix import Prefix, adjust
from specdec.sampling import Sampling, warp
from specdec.verify import RULES, Proposal

WARPS = {
    "plain": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.5),
    "top-k": Sampling(temperature=1.0, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "min-p": Sampling(temperature=1.2, min_p=0.3),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.7),
    "presence": Sampling(temperature=1.0, presence_penalty=0.8),
    "frequency": Sampling(temperature=1.0, frequency_penalty=0.6),
    "banned": Sampling(temperature=1.0, banned=(1,)),
    "all": Sampling(
        temperature=0.8, top_k=3, top_p=0.95, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3,
        min_new_tokens=3,
    ),
}  # fmt: skip
EOS = 2


def distributions(vocab: int, depth: int, sampling: Sampling, seed: int, dtype: torch.dtype) -> Tensor:
    """[V^depth, depth + 1, V]: the warped next-token distributions along every text of `depth` tokens."""
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(vocab**d, vocab, generator=generator, dtype=torch.float64) * 1.5 for d in range(depth + 1)]
    texts = torch.tensor(list(itertools.product(range(vocab), repeat=depth))).view(-1, depth)
    places = [torch.zeros(len(texts), dtype=torch.long)]
    for column in texts.unbind(dim=1):
        places.append(places[-1] * vocab + column)
    logits = torch.stack([table[place] for table, place in zip(tables, places, strict=True)], dim=1).to(dtype)
    prompts = [[0, vocab - 1]] * len(texts)
    prefix = Prefix.of(
        prompts, [2] * len(texts), vocab_size=vocab, eos_ids=(EOS,), device=texts.device
    )
    return warp(adjust(logits, sampling, prefix.along(texts) if sampling.adjusts else None), sampling)


def bisect(below: Callable[[Tensor], Tensor], size: int) -> Tensor:  # -> [size] fp64 in [0, 1]
    """The largest u for which `below(u)` holds, given that it holds up to a threshold."""
    low, high = torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    for _ in range(52):
        middle = (low + high) / 2
        holds = below(middle)
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return high


def acceptance_law(rule: str, p: Tensor, proposal: Proposal) -> Tensor:  # -> [N, K + 1] chance of each count
    size, num_columns = proposal.tokens.shape
    u_next = torch.full((size, num_columns + 1), 0.5, dtype=torch.float64)
    others = 0.0 if rule == "token" else 1.0  # so that only the one number decides
    chances = []
    for i in range(num_columns):

        def reaches(u: Tensor, i: int = i) -> Tensor:
            numbers = torch.full((size, num_columns), others, dtype=torch.float64)
            numbers[:, i] = u
            return RULES[rule](p, proposal, numbers, u_next)[0] > i

        chances.append(bisect(reaches, size) * (proposal.num_drafts > i))
    chance = torch.stack(chances, dim=1)
    one = torch.ones(size, 1, dtype=torch.float64)
    if rule == "token":  # the drafts before the first rejection
        return torch.cat([one, chance.cumprod(dim=1)], dim=1) * torch.cat([1 - chance, one], dim=1)
    after = torch.cat([(1 - chance).flip(1).cumprod(dim=1).flip(1), one], dim=1)  # the longest block kept
    return torch.cat([one, chance], dim=1) * after


def next_law(rule: str, p: Tensor, proposal: Proposal, count: int) -> Tensor:  # -> [N, V]
    """The law of the next token where exactly `count` drafts are accepted."""
    size, num_columns = proposal.tokens.shape
    numbers = torch.full((size, num_columns), 1.0, dtype=torch.float64)
    numbers[:, : count if rule == "token" else 0] = 0.0
    if count and rule == "block":
        numbers[:, count - 1] = 0.0

    def token(u: Tensor) -> Tensor:
        u_next = u.unsqueeze(1).expand(-1, num_columns + 1)
        return RULES[rule](p, proposal, numbers, u_next)[1]

    edges = [bisect(lambda u, v=v: token(u) <= v, size) for v in range(p.shape[-1] - 1)]  # type: ignore[misc]
    zero, one = torch.zeros(size, 1, dtype=torch.float64), torch.ones(size, 1, dtype=torch.float64)
    return torch.cat([*(e.unsqueeze(1) for e in edges), one], dim=1).diff(dim=1, prepend=zero)


def round_gap(rule: str, vocab: int, depth: int, sampling: Sampling, stop: str, dtype: torch.dtype) -> float:
    """Largest error of the joint law of depth + 1 tokens: one round, then the target's own tokens."""
    p = distributions(vocab, depth, sampling, 1, dtype)
    q = distributions(vocab, depth, sampling, 2, dtype)[:, :-1]
    texts = torch.tensor(list(itertools.product(range(vocab), repeat=depth))).view(-1, depth)
    chance = q.double().gather(-1, texts.unsqueeze(-1)).squeeze(-1)
    if stop == "all":
        counts = torch.full((len(texts),), depth)
    else:  # a policy: go on behind even tokens only; the rest of the block is never looked at
        counts = 1 + ((texts[:, :-1] % 2 == 0).long().cumprod(dim=1)).sum(dim=1)
    drafted = torch.arange(depth) < counts.unsqueeze(1)
    probs = torch.where(drafted.unsqueeze(-1), q, torch.full_like(q, 1 / vocab))
    proposal = Proposal(tokens=texts, num_drafts=counts, probs=probs)
    weight = torch.where(drafted, chance, torch.full_like(chance, 1 / vocab)).prod(dim=1)
    live = weight > 0
    p_live = p[live]
    proposal = Proposal(tokens=texts[live], num_drafts=counts[live], probs=probs[live])
    texts, weight = texts[live], weight[live]
    exact = distributions(vocab, depth, sampling, 1, dtype).double()
    whole = torch.tensor(list(itertools.product(range(vocab), repeat=depth))).view(-1, depth)
    law = torch.zeros((vocab,) * (depth + 1), dtype=torch.float64)
    accepted = acceptance_law(rule, p_live, proposal)
    for count in range(depth + 1):
        mass = torch.zeros((vocab,) * (count + 1), dtype=torch.float64)
        rows = weight.unsqueeze(1) * accepted[:, count : count + 1]
        rows = rows * torch.where(rows > 0, next_law(rule, p_live, proposal, count), 0.0)
        start = tuple(texts[:, i].unsqueeze(1).expand(-1, vocab) for i in range(count))
        mass.index_put_((*start, torch.arange(vocab).expand(len(texts), -1)), rows, accumulate=True)
        for later in range(count + 1, depth + 1):  # the target's own tokens fill up
            step = exact[:, later].view(*(vocab,) * depth, vocab)[(slice(None),) * later + (0,) * (depth - later)]
            mass = mass.unsqueeze(-1) * step
        law += mass
    want = torch.ones(len(whole), vocab, dtype=torch.float64) * exact[:, depth]
    for i in range(depth):
        want = want * exact[:, i].gather(1, whole[:, i : i + 1])
    return float((law - want.view_as(law)).abs().max())


@pytest.mark.parametrize("stop", ["all", "ragged"])
@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("rule", RULES)
def test_a_round_has_the_law_of_plain_sampling(rule: str, name: str, stop: str) -> None:
    for vocab, depth in ((3, 3), (5, 2), (8, 1)):
        assert round_gap(rule, vocab, depth, WARPS[name], stop, torch.float64) < 1e-9
    assert round_gap(rule, 4, 2, WARPS[name], stop, torch.float32) < 1e-6
