"""Penalties, bans and minimum length against transformers' own processors and the formulas of OpenAI's interface."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specdec.prefix import Prefix, adjust
from specdec.sampling import Sampling

VOCAB = 12
EOS = 5
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]
PROMPT_TOKENS = [5, 5]


def prefix(rows: list[list[int]] = ROWS, prompt_tokens: list[int] = PROMPT_TOKENS) -> Prefix:
    return Prefix.of(rows, prompt_tokens, vocab_size=VOCAB, eos_ids=(EOS,), device=torch.device("cpu"))


@pytest.fixture
def logits() -> Tensor:
    """Of both signs: the repetition penalty multiplies the one and divides the other."""
    return 3 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))


PROCESSORS = {
    "repetition above 1": (Sampling(repetition_penalty=1.7), RepetitionPenaltyLogitsProcessor(1.7)),
    "repetition below 1": (Sampling(repetition_penalty=0.6), RepetitionPenaltyLogitsProcessor(0.6)),
    "banned": (Sampling(banned=(0, 9)), SuppressTokensLogitsProcessor([0, 9])),
    "too short": (Sampling(min_new_tokens=4), MinNewTokensLengthLogitsProcessor(5, 4, [EOS])),
    "long enough": (Sampling(min_new_tokens=3), MinNewTokensLengthLogitsProcessor(5, 3, [EOS])),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_as_transformers_does(logits: Tensor, name: str) -> None:
    sampling, processor = PROCESSORS[name]
    assert isinstance(processor, LogitsProcessor)
    want = processor(torch.tensor(ROWS), logits.clone())
    torch.testing.assert_close(adjust(logits, sampling, prefix()), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(want, logits) == (name == "long enough")


def test_presence_and_frequency_count_the_answer_only(logits: Tensor) -> None:
    """mu_j - c_j * frequency - (c_j > 0) * presence, c_j the answer's count of id j (OpenAI's API reference)."""
    got = adjust(logits, Sampling(presence_penalty=0.5, frequency_penalty=0.25), prefix())
    want = logits.clone()
    for row, answer in enumerate([[9, 2, 6], [8, 1, 8]]):
        for token in set(answer):
            want[row, token] -= 0.5 + 0.25 * answer.count(token)
    torch.testing.assert_close(got, want)


def test_each_draft_is_counted_for_those_behind_it(logits: Tensor) -> None:
    """Column k of a verified block sees the same prefix as a row that has committed the k drafts before it."""
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_new_tokens=5)
    drafts = torch.tensor([[0, 9, 9], [8, 8, 11]])
    block = adjust(logits.unsqueeze(1).expand(-1, 4, -1), sampling, prefix().along(drafts))
    for k in range(4):
        grown = [[*row, *new[:k]] for row, new in zip(ROWS, drafts.tolist(), strict=True)]
        torch.testing.assert_close(block[:, k], adjust(logits, sampling, prefix(grown)))


def test_a_short_listed_head_is_adjusted_like_the_full_one(logits: Tensor) -> None:
    sampling = Sampling(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, banned=(0, 9), min_new_tokens=5
    )
    ids = torch.tensor([1, 5, 8, 9, 11])
    torch.testing.assert_close(
        adjust(logits[:, ids], sampling, prefix(), ids), adjust(logits, sampling, prefix())[:, ids]
    )
