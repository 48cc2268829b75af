"""Lossless check: in fp32, greedy speculative decoding must give plain decoding's tokens, one for one."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from eval.speed import Bench
from specdec.pair import LanguageModel
from specdec.sampling import Sampling

TIE_GAP = 1e-3  # logits; fp32 forwards of 1 and K+1 rows differ by about 1e-4 on this scale


def in_fp32(model: LanguageModel) -> LanguageModel:
    """A copy of the model in single precision."""
    return dataclasses.replace(model, model=copy.deepcopy(model.model).float())


def lossless_check(bench: Bench, prompts: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
    """Decode (id, prompt ids) pairs plainly and speculatively in fp32, greedily; list every divergence."""
    exact = dataclasses.replace(bench, target=in_fp32(bench.target), draft=in_fp32(bench.draft))
    greedy = Sampling()
    divergences = []
    for name, ids in prompts:
        plain = exact.run([ids], [0], greedy, None)[0][0].tokens
        speculative = exact.run([ids], [0], greedy, exact.draft_model(len(ids), greedy))[0][0].tokens
        if plain != speculative:
            divergences.append({"prompt_id": name, **divergence(exact.target, ids, plain, speculative)})
    return {
        "dtype": "float32",
        "prompts": len(prompts),
        "identical": len(prompts) - len(divergences),
        "divergences": divergences,
    }


@torch.inference_mode()
def divergence(
    target: LanguageModel, prompt_ids: Sequence[int], plain: list[int], speculative: list[int]
) -> dict[str, Any]:
    """Where two answers part, with the target's gap between its two best logits there."""
    at = next(
        (i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b),
        min(len(plain), len(speculative)),
    )
    inputs = torch.tensor([[*prompt_ids, *plain[:at]]], device=target.device)
    best = target.model(input_ids=inputs).logits[0, -1].topk(2).values
    gap = float(best[0] - best[1])
    return {
        "position": at,
        "plain": plain[at] if at < len(plain) else None,
        "speculative": speculative[at] if at < len(speculative) else None,
        "logit_gap": gap,
        "class": "numeric tie" if gap < TIE_GAP else "defect",
    }
