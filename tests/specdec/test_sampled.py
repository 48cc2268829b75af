"""The law of sampling, through the whole decoder, for both rules and with penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.pair import LanguageModel
from specdec.sampling import Sampling
from specdec.trace import Trace, acceptance

Decode = Callable[..., list[Trace]]
Prompts = list[list[int]]
Drafts = dict[str, LanguageModel | str]
EVERY_DRAFT = ["random", "self", "near", "short", "lookup"]
WARM = Sampling(temperature=0.8)


def tokens(traces: list[Trace]) -> list[list[int]]:
    return [trace.tokens for trace in traces]


# The law of sampling, through everything


@pytest.mark.parametrize(
    ("name", "length"),
    [(None, 0), ("near", 1), ("near", 3), ("near", "auto"), ("random", 3), ("random", "auto"), ("short", 3),
     ("short", "auto"), ("lookup", 3)],
)  # fmt: skip
def test_law_of_the_first_three_tokens(
    target: LanguageModel,
    drafts: Drafts,
    decode: Decode,
    g_test: Callable[[Tensor, Tensor], float],
    law: tuple[list[int], Sampling, Tensor],
    name: str | None,
    length: int | str,
) -> None:
    prompt, sampling, joint = law
    num_rows, vocab = 4000, target.vocab_size
    traces = decode(
        target, [prompt] * num_rows, draft=name and drafts[name], length=length, sampling=sampling,
        max_new_tokens=5, batch_size=num_rows,
    )  # fmt: skip
    first, second, third = torch.tensor([t.tokens[:3] for t in traces]).T
    assert g_test((first * vocab + second) * vocab + third, joint) > 1e-3
    if name in ("near", "short"):
        assert 0.05 < acceptance(traces) < 0.95
    if name in ("near", "random") and length == "auto":
        assert len({t.num_drafts[0] for t in traces}) > 1  # ragged


# The other rule, and settings that look at what stands before


@pytest.mark.parametrize("name", ["near", "short", "random", "lookup"])
def test_block_verification_keeps_the_law_and_accepts_no_less(
    target: LanguageModel,
    drafts: Drafts,
    decode: Decode,
    g_test: Callable[[Tensor, Tensor], float],
    law: tuple[list[int], Sampling, Tensor],
    name: str,
) -> None:
    prompt, sampling, joint = law
    rate = {}
    for rule in ("token", "block"):
        traces = decode(
            target, [prompt] * 4000, draft=drafts[name], length=3, sampling=sampling, max_new_tokens=5,
            batch_size=4000, rule=rule,
        )  # fmt: skip
        first, second, third = torch.tensor([t.tokens[:3] for t in traces]).T
        vocab = target.vocab_size
        assert g_test((first * vocab + second) * vocab + third, joint) > 1e-3
        rate[rule] = acceptance(traces)
    assert rate["block"] > rate["token"] - 0.01


PENALISED = Sampling(
    repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, banned=(7, 12), min_new_tokens=6
)


@pytest.mark.parametrize("name", ["near", "self", "short", "lookup"])
@pytest.mark.parametrize("warm", [False, True], ids=["greedy", "sampled"])
def test_penalties_look_at_each_positions_own_prefix(
    target: LanguageModel,
    drafts: Drafts,
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
    common_ids: list[int],
    name: str,
    warm: bool,
) -> None:
    """Greedy: the text of plain decoding, which itself differs from the unpenalised one. Self-acceptance stays 1."""
    sampling = replace(PENALISED, temperature=0.8) if warm else PENALISED
    more = {"sampling": sampling, "eos_ids": common_ids}
    want = decode(target, prompts, **more)
    got = decode(target, prompts, draft=drafts[name], **more)
    if not warm:
        assert tokens(got) == tokens(want)
        assert sum(a.tokens != b.tokens[: len(a.tokens)] for a, b in zip(want, plain, strict=True)) > 20
    for trace in [*want, *got]:
        assert not {7, 12} & set(trace.tokens) and len(trace.tokens) >= 6
    if name == "self":
        assert acceptance(got) == 1.0
