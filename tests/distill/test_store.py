from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from distill import store as store_module
from distill.store import Store, captured_path, responses_path, shard_is_done, write_shard
from specdec.errors import UserError
from specdec.files import sha256_file

K = 3
REDO = r"shard-00001.*delete this file and run draftsmith generate again: only this shard"


def answer(name: str, length: int, split: str = "train") -> dict[str, object]:
    return {
        "answer_id": name, "prompt_id": f"p{name}", "domain": "chat", "split": split,
        "messages": [{"role": "user", "content": "grüß \u2028 dich"}], "prompt_ids": [5, 6],
        "answer_ids": list(range(length)), "answer": "x\ny", "temperature": 0.7, "finish": "length",
    }  # fmt: skip


def rows(count: int, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(count * K).view(count, K) + offset
    return ids, -(ids.float() + 1) / 64


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_shard(tmp_path, 0, [answer("a", 2), answer("b", 3, "selection")], *rows(5))
    write_shard(tmp_path, 1, [answer("c", 0), answer("d", 4)], *rows(4, 100))
    return tmp_path


def test_round_trip(run_dir: Path) -> None:
    train = Store(run_dir).examples("train")
    assert [len(e.answer_ids) for e in train] == [2, 0, 4]
    assert train[0].prompt_ids == (5, 6) and train[2].answer_ids == (0, 1, 2, 3)
    assert train[2].token_ids.shape == train[2].log_probs.shape == (4, K)
    assert torch.equal(train[2].token_ids.long(), rows(4, 100)[0])
    (selection,) = Store(run_dir).examples("selection")
    assert torch.equal(selection.token_ids.long(), rows(5)[0][2:]) and selection.domain == "chat"
    torch.testing.assert_close(selection.log_probs, rows(5)[1][2:].half())


def test_files_are_as_documented(run_dir: Path) -> None:
    with safe_open(captured_path(run_dir, 0), framework="pt") as file:
        metadata = file.metadata()
        assert sorted(file.keys()) == ["log_probs", "token_ids"]
        assert file.get_tensor("token_ids").dtype == torch.int32
        assert file.get_tensor("log_probs").dtype == torch.float16
    assert metadata["sha256_responses"] == sha256_file(responses_path(run_dir, 0))
    assert (metadata["num_tokens"], metadata["top_k"]) == ("5", "3")
    mask = os.umask(0o022)
    os.umask(mask)
    assert captured_path(run_dir, 0).stat().st_mode & 0o777 == 0o666 & ~mask


def test_responses_come_last(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store_module.write_atomic

    def stop_at_responses(path: Path, data: bytes) -> None:
        if path.suffix == ".jsonl":
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(store_module, "write_atomic", stop_at_responses)
    for index in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            write_shard(run_dir, index, [answer("e", 1)], *rows(1))
    assert [shard_is_done(run_dir, n) for n in range(3)] == [True, False, False]
    assert len(Store(run_dir).examples("train")) == 1


@pytest.mark.parametrize("cut", [4, 60, 200])
def test_truncated_capture_is_named(run_dir: Path, cut: int) -> None:
    path = captured_path(run_dir, 1)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=f"captured/{REDO}"):
        Store(run_dir)


def test_one_flipped_bit_in_either_file_is_found(run_dir: Path) -> None:
    for path in (captured_path(run_dir, 1), responses_path(run_dir, 1)):
        good = path.read_bytes()
        path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
        with pytest.raises(UserError, match=f"{path.parent.name}/{REDO}"):
            Store(run_dir)
        path.write_bytes(good)
    Store(run_dir)


def test_deleting_either_file_makes_that_shard_undone(run_dir: Path) -> None:
    captured_path(run_dir, 1).unlink()
    assert shard_is_done(run_dir, 0) and not shard_is_done(run_dir, 1)
    with pytest.raises(UserError, match=f"responses/{REDO}"):
        Store(run_dir)
    responses_path(run_dir, 1).unlink()
    assert len(Store(run_dir).examples("train")) == 1


def test_shards_of_another_pair_are_found(run_dir: Path) -> None:
    captured_path(run_dir, 1).write_bytes(captured_path(run_dir, 0).read_bytes())
    with pytest.raises(UserError, match="shard-00001"):
        Store(run_dir)


def test_mixed_widths_and_nothing_to_learn_are_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="0 answer tokens"):
        Store(run_dir).examples("report")
    write_shard(run_dir, 2, [answer("f", 1)], torch.zeros(1, 7), torch.zeros(1, 7))
    with pytest.raises(UserError, match="top_k 3 and 7"):
        Store(run_dir)
    empty = tmp_path / "empty"
    with pytest.raises(UserError, match="no answers to learn from.*draftsmith generate"):
        Store(empty)
    write_shard(empty, 0, [answer("a", 0)], torch.zeros(0, K), torch.zeros(0, K))
    with pytest.raises(UserError, match="no supervised tokens in the train split"):
        Store(empty).examples("train")
