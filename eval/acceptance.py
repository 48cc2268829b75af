"""Expected acceptance: alpha = mean over positions of sum_v min(p(v), q(v)), teacher-forced on the target's text.

Leviathan et al. 2211.17192, the definition of beta and its mean alpha: 1 - TV distance, after the sampling warp, fp32.
At T=0 both are one-hot and alpha is the share of positions where the argmaxes agree.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.cache import Runner
from specdec.head import Head
from specdec.pair import LanguageModel
from specdec.prefix import Prefix, adjust
from specdec.sampling import Sampling, warp

CHUNK = 64  # positions whose full distributions are held at once


def overlap(p: Tensor, q: Tensor) -> Tensor:  # [..., V], [..., V] -> [...]
    """sum_v min(p(v), q(v)): the chance that a token drawn from q survives verification against p."""
    return torch.minimum(p, q).sum(dim=-1)


@torch.inference_mode()
def expected_acceptance(
    target: LanguageModel,
    draft: LanguageModel,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    *,
    sampling: Sampling,
    vocab_size: int,
) -> tuple[float, int]:
    """(sum of overlaps, number of positions) over one answer of the target's."""
    target_head, draft_head = Head(target, vocab_size), Head(draft, vocab_size)
    p_hidden, q_hidden = _hidden(target, prompt_ids, answer_ids), _hidden(draft, prompt_ids, answer_ids)
    total = 0.0
    for start in range(0, len(answer_ids), CHUNK):
        rows = slice(start, start + CHUNK)
        before = [*prompt_ids, *answer_ids[:start]]
        prefix = _prefixes(before, answer_ids[rows], len(prompt_ids), target, vocab_size) if sampling.adjusts else None
        p = warp(adjust(target_head(p_hidden[rows]), sampling, prefix), sampling)
        q = warp(adjust(draft_head(q_hidden[rows]), sampling, prefix, draft_head.ids), sampling)
        total += float(overlap(p, draft_head.widen(q)).sum())
    return total, len(answer_ids)


def _prefixes(
    before: Sequence[int], answer: Sequence[int], prompt_tokens: int, target: LanguageModel, vocab_size: int
) -> Prefix:
    """What stands before each token of a piece of an answer, [T, V]."""
    first = Prefix.of(
        [before], [prompt_tokens], vocab_size=vocab_size, eos_ids=target.eos_ids, device=target.device
    )  # fmt: skip
    along = first.along(torch.tensor([answer[:-1]], dtype=torch.long, device=target.device))
    return replace(along, prompt=along.prompt[0], answer=along.answer[0], num_new=along.num_new[0])


def _hidden(model: LanguageModel, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Tensor:  # [T, H]
    """Hidden states of the positions that predict the answer."""
    tokens = torch.tensor([[*prompt_ids, *answer_ids[:-1]]], device=model.device)
    runner = Runner(model.model, tokens.shape[1] + 1, eager=model.eager)
    hidden = runner.forward(tokens, torch.zeros(1, dtype=torch.long, device=model.device))
    return hidden[0, len(prompt_ids) - 1 :]
