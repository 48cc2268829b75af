from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill.store import Example, Store
from specdec.errors import UserError
from train.batches import Schedule, collate, cut, input_length, split, usable


@pytest.fixture
def examples(run_dir: Path) -> list[Example]:
    return list(Store(run_dir).examples("train"))


def test_cut_counts_padding() -> None:
    assert cut([0, 1, 2, 3], [4, 4, 5, 2], 10) == [[0, 1], [2, 3]]
    assert cut([0, 1], [30, 2], 10) == [[0], [1]]


def test_an_epoch_has_every_answer_once_and_fits() -> None:
    lengths = [3 + (7 * i) % 17 for i in range(200)]
    schedule = Schedule(lengths, batch_tokens=64, seed=1)
    for number in (0, 1):
        batches = schedule.epoch(number)
        assert sorted(i for b in batches for i in b) == list(range(200))
        assert all(max(lengths[i] for i in b) * len(b) <= 64 for b in batches)
    assert schedule.epoch(0) != schedule.epoch(1)


def test_step_number_alone_says_the_batch() -> None:
    lengths = [3 + (7 * i) % 17 for i in range(50)]
    walked = Schedule(lengths, batch_tokens=64, seed=1)
    unbroken = [walked.rows(step) for step in range(1, 40)]
    assert Schedule(lengths, batch_tokens=64, seed=1).rows(35) == unbroken[34]
    assert Schedule(lengths, batch_tokens=64, seed=2).rows(35) != unbroken[34]


def test_steps_of_fractional_epochs() -> None:
    schedule = Schedule([8] * 16, batch_tokens=16, seed=0)
    assert [schedule.num_steps(x) for x in (1.0, 0.5, 1.25, 2)] == [8, 4, 10, 16]


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (2, 3), (5, 2)])
def test_ranks_and_micro_batches_share_a_global_batch(world: int, accumulate: int) -> None:
    rows = [5, 9, 2, 7]
    parts = [
        part for rank in range(world) for part in split(rows, rank=rank, world=world, accumulate=accumulate)
    ]
    assert sorted(i for part in parts for i in part) == sorted(rows)
    assert all(parts)


def test_collate_lines_up_positions_with_answers(examples: list[Example]) -> None:
    three = examples[:3]
    batch = collate(three)
    width = max(input_length(e) for e in three)
    assert batch.input_ids.shape == (3, width)
    assert batch.num_tokens == sum(len(e.answer_ids) for e in three)
    assert batch.token_ids.shape == batch.log_probs.shape == (batch.num_tokens, 4)
    # The token after each supervised position is the answer's token: the position predicts it.
    start = 0
    for row, example in enumerate(three):
        full = [*map(int, example.prompt_ids), *map(int, example.answer_ids)]
        positions = batch.positions[start : start + len(example.answer_ids)] - row * width
        assert [full[int(p) + 1] for p in positions] == list(map(int, example.answer_ids))
        assert batch.input_ids[row, : len(full) - 1].tolist() == full[:-1]
        start += len(example.answer_ids)
    assert torch.equal(batch.token_ids[: len(three[0].answer_ids)], three[0].token_ids.long())


def test_long_answers_are_left_out_aloud(examples: list[Example], capsys: pytest.CaptureFixture[str]) -> None:
    limit = sorted(map(input_length, examples))[len(examples) // 2]
    kept = usable(examples, limit, "train")
    assert 0 < len(kept) < len(examples)
    assert all(input_length(e) <= limit for e in kept)
    assert f"{len(examples) - len(kept)} of {len(examples)} answers left out" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"no supervised tokens.*raise train\.max_length"):
        usable(examples, 2, "train")
