"""The draft's short-listed head (FR-Spec, 2502.14856): which ids it keeps, and how many pay.

Letters: V vocabulary, M ids on the list.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.store import Example
from distill.student import choose_head_ids
from specdec.cost import ASSUMED_ACCEPTANCE, best_draft_length, predicted_speedup
from specdec.files import write_atomic
from specdec.measure import draft_steps, measure
from specdec.pair import LanguageModel

SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
"""Sizes that `auto` weighs up, beside the whole vocabulary."""
CHOICE_FILE = "head_size.json"


def short_list(weights: Tensor, size: int, target: LanguageModel) -> Tensor:  # [V] -> [M], sorted
    """The ids that carry most of the weights, and every stop id."""
    return choose_head_ids(weights, size, always_include=sorted(target.eos_ids))


def token_weights(examples: Sequence[Example], vocab_size: int) -> Tensor:  # -> [V]
    """How much each id matters to the target on its own answers: counts, plus the probability of the
    captured ids.
    """
    weights = torch.zeros(vocab_size, dtype=torch.float64)
    for example in examples:
        ids = torch.as_tensor(example.answer_ids, dtype=torch.int64)
        weights.index_add_(0, ids, torch.ones(len(ids), dtype=torch.float64))
        weights.index_add_(0, example.token_ids.flatten().long(), example.log_probs.flatten().double().exp())
    return weights


def auto_size(
    run_dir: Path, draft: PreTrainedModel, target: LanguageModel, *, learnt: Tensor, unseen: Tensor
) -> int:
    """The list's size with the best predicted speedup on this machine; chosen once for a run, kept in its folder.

    A shorter list makes a draft step cheaper, but the ids off it are never drafted. `learnt` [V] are the weights of the
    answers that the list is made from, `unseen` [V] those of held-out answers that it is judged by.
    """
    path = run_dir / CHOICE_FILE
    if path.is_file():
        return int(json.loads(path.read_text())["size"])
    everything = whole(draft, target)
    sizes = sorted({size for size in SIZES if len(target.eos_ids) <= size < everything} | {everything})
    lists = {size: short_list(learnt[:everything], size, target) for size in sizes}
    unseen = (unseen if unseen.any() else learnt)[:everything]
    coverage = {size: float(unseen[ids].sum() / unseen.sum()) for size, ids in lists.items()}
    model = deepcopy(draft).to(device=target.device, dtype=target.model.dtype).eval()  # type: ignore[call-arg]
    drafts = [replace(target, model=model, head_ids=ids.to(target.device)) for ids in lists.values()]
    measured = measure(target, drafts[-1], vocab_size=everything)
    seconds = draft_steps(drafts, vocab_size=everything)
    steps = {size: 1e3 * s / measured["plain_step_ms"] for size, s in zip(sizes, seconds, strict=True)}
    weighed = weigh(measured, steps, coverage)
    best = max(weighed, key=lambda row: float(row["speedup"]))["size"]
    write_atomic(path, json.dumps({"size": best, "weighed": weighed}, indent=1) + "\n")
    return int(best)


def whole(draft: PreTrainedModel, target: LanguageModel) -> int:
    """The vocabulary that both share; one of them may be padded beyond it."""
    return min(target.vocab_size, len(draft.get_output_embeddings().weight))


def weigh(
    measured: Mapping[str, Any], steps: Mapping[int, float], coverage: Mapping[int, float]
) -> list[dict[str, float | int]]:
    """For each size: its c in plain steps, the share of unseen text on the list, and the speedup that both predict
    for a draft that would be accepted half the time with the whole vocabulary.
    """
    found: list[dict[str, float | int]] = []
    for size, c in steps.items():
        costs, acceptance = {**measured, "c": c}, ASSUMED_ACCEPTANCE * coverage[size]
        speedup = predicted_speedup(costs, acceptance, best_draft_length(costs, acceptance))
        found.append({"size": size, "c": c, "coverage": coverage[size], "speedup": speedup})
    return found


def head_ids(
    size: int | Literal["auto"] | None,
    run_dir: Path,
    draft: PreTrainedModel,
    target: LanguageModel,
    *,
    examples: Sequence[Example],
    selection: Sequence[Example],
) -> Tensor | None:  # [M], sorted
    """The list that draft.head_size asks for; None is the whole vocabulary."""
    if size is None:
        return None
    weights = token_weights(examples, target.vocab_size)
    if size == "auto":
        size = auto_size(run_dir, draft, target, learnt=weights, unseen=token_weights(selection, target.vocab_size))
        if size == whole(draft, target):
            return None
    return short_list(weights, size, target)
