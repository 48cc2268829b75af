"""Answers and captured distributions on disk: shards that are whole or absent.

1. `responses/shard-00000.jsonl`: one answer a line.
2. `captured/shard-00000.safetensors`: `token_ids` [N, k] int32 and `log_probs` [N, k] float16, one row for
   each answer token of the shard, in file order; row t of an answer is the distribution of its token t.
3. The captured file is written first and names the SHA-256 of the responses: a responses file that exists has
   its partner, and a pair that does not belong together is found out.

Letters: N answer tokens of a shard, T of one answer, k symbols kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specdec.errors import UserError
from specdec.files import read_jsonl, sha256_file, write_atomic


@dataclass(frozen=True, kw_only=True)
class Example:
    """One answer of the target, and the distributions it was sampled from."""

    answer_id: str
    """Names the answer in messages."""
    prompt_ids: tuple[int, ...]
    """Tokens of the rendered prompt."""
    answer_ids: tuple[int, ...]
    """Tokens of the answer, the end token included when it was reached, T of them."""
    token_ids: Tensor
    """Most probable ids at each answer token, [T, k] int32, mapped from disk."""
    log_probs: Tensor
    """Their log-probabilities at temperature 1, [T, k] float16, mapped from disk."""
    domain: str
    """Domain of the prompt."""
    split: str
    """`train` or `selection`."""


def responses_path(run_dir: Path | str, index: int) -> Path:
    """Where the answers of a shard lie."""
    return Path(run_dir) / "responses" / f"shard-{index:05d}.jsonl"


def captured_path(run_dir: Path | str, index: int) -> Path:
    """Where the distributions of a shard lie."""
    return Path(run_dir) / "captured" / f"shard-{index:05d}.safetensors"


def shard_is_done(run_dir: Path | str, index: int) -> bool:
    """Whether both files of a shard are there; each is whole when it is there."""
    return responses_path(run_dir, index).is_file() and captured_path(run_dir, index).is_file()


def write_shard(
    run_dir: Path | str,
    index: int,
    answers: Sequence[Mapping[str, Any]],
    token_ids: Tensor,  # [N, k]
    log_probs: Tensor,  # [N, k]
) -> None:
    """Write a shard, or replace it.

    Raises:
        UserError: the disk is full, or the run folder cannot be written.
    """
    num_tokens = sum(len(answer["answer_ids"]) for answer in answers)
    assert token_ids.shape == log_probs.shape and len(token_ids) == num_tokens, "one row an answer token"
    text = "".join(json.dumps(dict(answer), ensure_ascii=False) + "\n" for answer in answers)
    data = text.encode("utf-8", "surrogatepass")
    tensors = {
        "token_ids": token_ids.detach().to("cpu", torch.int32).contiguous(),
        "log_probs": log_probs.detach().to("cpu", torch.float16).contiguous(),
    }
    metadata = {
        "sha256_responses": hashlib.sha256(data).hexdigest(),
        "sha256_captured": _sha256(tensors),
        "num_tokens": str(num_tokens),
        "top_k": str(token_ids.shape[1]),
    }
    # A stale partner must not stand beside new distributions, should the work stop between the two writes.
    responses_path(run_dir, index).unlink(missing_ok=True)
    write_atomic(captured_path(run_dir, index), save(tensors, metadata))
    write_atomic(responses_path(run_dir, index), data)


class Store:
    """The shards of a run folder, checked when it is opened.

    Raises:
        UserError: there is no shard, or one is damaged; names the file.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        files = sorted((self.run_dir / "responses").glob("shard-*.jsonl"))
        if not files:
            raise UserError(
                "no answers to learn from",
                got=f"no shard in {self.run_dir / 'responses'}",
                expected="answers of the target",
                fix="run draftsmith generate CONFIG first",
            )
        self._examples: list[Example] = []
        for responses in files:
            captured = self.run_dir / "captured" / f"{responses.stem}.safetensors"
            token_ids, log_probs = _read_captured(responses, captured)
            self._examples += _cut(responses, captured, token_ids, log_probs)
        widths = sorted({example.token_ids.shape[1] for example in self._examples})
        if len(widths) > 1:
            raise UserError(
                f"shards of {self.run_dir} were captured with different settings",
                got=f"capture.top_k {' and '.join(map(str, widths))}",
                expected="one value",
                fix="delete the shards of one kind and run draftsmith generate again",
            )

    def examples(self, split: str) -> list[Example]:
        """The answers of a split, in shard and file order.

        Raises:
            UserError: not one token of the split could be learnt from.
        """
        chosen = [example for example in self._examples if example.split == split]
        if not any(example.answer_ids for example in chosen):
            raise UserError(
                f"no supervised tokens in the {split} split of {self.run_dir}",
                got=f"{len(chosen)} answers, 0 answer tokens",
                expected="at least one answer with tokens",
                fix="give more prompts (prompts.sources, prompts.held_out) and run draftsmith generate",
            )
        return chosen


def _read_captured(responses: Path, captured: Path) -> tuple[Tensor, Tensor]:  # [N, k], [N, k]
    if not captured.is_file():
        raise _damaged(responses, f"no {captured}", "its captured distributions beside it")
    try:
        with safe_open(captured, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("token_ids", "log_probs")}
    except (SafetensorError, OSError) as error:
        raise _damaged(captured, f"not a whole safetensors file ({error})", "a captured shard") from error
    token_ids, log_probs = tensors["token_ids"], tensors["log_probs"]
    shape = (int(metadata.get("num_tokens", -1)), int(metadata.get("top_k", -1)))
    if token_ids.shape != shape or log_probs.shape != shape:
        raise _damaged(captured, f"shapes {[*token_ids.shape]} and {[*log_probs.shape]}", f"{[*shape]}")
    if _sha256(tensors) != metadata.get("sha256_captured"):
        raise _damaged(captured, "bytes that differ from its checksum", "the bytes that were written")
    if sha256_file(responses) != metadata.get("sha256_responses"):
        raise _damaged(responses, "bytes that differ from the checksum in its captured partner", "a pair")
    return token_ids, log_probs


def _cut(responses: Path, captured: Path, token_ids: Tensor, log_probs: Tensor) -> list[Example]:
    """One example a line; its rows are views into the mapped file."""
    answers = [answer for _, answer in read_jsonl(responses)]
    lengths = [len(answer["answer_ids"]) for answer in answers]
    if sum(lengths) != len(token_ids):
        raise _damaged(captured, f"{len(token_ids)} rows", f"{sum(lengths)}, one an answer token")
    return [
        Example(
            answer_id=answer["answer_id"],
            prompt_ids=tuple(answer["prompt_ids"]),
            answer_ids=tuple(answer["answer_ids"]),
            token_ids=ids,
            log_probs=values,
            domain=answer["domain"],
            split=answer["split"],
        )
        for answer, ids, values in zip(
            answers, token_ids.split(lengths), log_probs.split(lengths), strict=True
        )
    ]


def _damaged(path: Path, got: str, expected: str) -> UserError:
    fix = "delete this file and run draftsmith generate again: only this shard is made anew"
    return UserError(f"damaged shard {path}", got=got, expected=expected, fix=fix)


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
