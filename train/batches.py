"""Which answers make up step n: a pure function of (seed, step), so resuming is knowing the step number.

1. Answers that do not fit `max_length` are left out, by count, with a message; never cut.
2. Every epoch is a permutation drawn from (seed, epoch).
3. Neighbours in the permutation are sorted by length in pools, and cut into batches of at most
   `batch_tokens` padded tokens.
4. The batches of an epoch are shuffled again, so that lengths do not arrive in order.
5. A batch is global: rank r of w processes takes its rows r::w. One process and two see the same global
   batch.

Letters: B rows, L padded length, N supervised tokens, k kept symbols.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distill.store import Example
from specdec.errors import UserError

POOL_BATCHES = 16
"""Batches' worth of answers sorted by length together: more wastes less padding, fewer mixes better."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Answers side by side, padded on the right: with causal attention padding is never looked at."""

    input_ids: Tensor
    """Prompt and answer without its last token, [B, L] int64, zeros where padded."""
    positions: Tensor
    """Indices into the flattened [B*L] rows whose next token is supervised, [N] int64."""
    token_ids: Tensor
    """Symbols kept from the target at each supervised position, [N, k] int64."""
    log_probs: Tensor
    """Their log-probabilities, [N, k] float32."""
    next_ids: Tensor
    """The answer's own token behind each supervised position, [N] int64."""

    @property
    def num_tokens(self) -> int:
        return int(self.positions.numel())


def input_length(example: Example) -> int:
    """Tokens fed for one answer: its last token is predicted, never fed."""
    return len(example.prompt_ids) + len(example.answer_ids) - 1


def usable(examples: Sequence[Example], max_length: int, what: str) -> list[Example]:
    """The answers that fit and have something to learn. Raises UserError when none is left."""
    kept = [e for e in examples if len(e.answer_ids) and len(e.prompt_ids) and input_length(e) <= max_length]
    if len(kept) < len(examples):
        print(
            f"{what}: {len(examples) - len(kept)} of {len(examples)} answers left out: empty, or longer than "
            f"train.max_length={max_length} tokens",
            file=sys.stderr,
        )
    if not kept:
        raise UserError(
            f"no supervised tokens in the {what} split",
            got=f"0 of {len(examples)} answers usable",
            expected=f"answers of at most train.max_length={max_length} tokens",
            fix="raise train.max_length, or generate answers first",
        )
    return kept


def cut(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cut a sequence of answers into batches of at most `batch_tokens` padded tokens (one answer may exceed
    it alone).
    """
    batches: list[list[int]] = []
    widest = 0
    for index in order:
        widest = max(widest, lengths[index])
        if not batches or widest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            widest = lengths[index]
        batches[-1].append(int(index))
    return batches


class Schedule:
    """The global batches of every step, as lists of answer numbers."""

    def __init__(self, lengths: Sequence[int], *, batch_tokens: int, seed: int) -> None:
        self.lengths, self.batch_tokens, self.seed = lengths, batch_tokens, seed
        self._starts = [0]  # first step of each epoch known so far
        self._epoch, self._batches = -1, list[list[int]]()

    def epoch(self, number: int) -> list[list[int]]:
        """The batches of one epoch, in order."""
        if number != self._epoch:
            random = np.random.default_rng((self.seed, number))
            order = random.permutation(len(self.lengths))
            pool = max(1, POOL_BATCHES * self.batch_tokens * len(order) // max(1, sum(self.lengths)))
            batches: list[list[int]] = []
            for start in range(0, len(order), pool):
                near = sorted(order[start : start + pool].tolist(), key=lambda i: self.lengths[i])
                batches += cut(near, self.lengths, self.batch_tokens)
            self._epoch, self._batches = number, [batches[i] for i in random.permutation(len(batches))]
        return self._batches

    def rows(self, step: int) -> list[int]:
        """The global batch of a step; steps count from 1."""
        index, epoch = step - 1, 0
        while True:
            if epoch + 1 == len(self._starts):
                self._starts.append(self._starts[-1] + len(self.epoch(epoch)))
            if index < self._starts[epoch + 1]:
                return self.epoch(epoch)[index - self._starts[epoch]]
            epoch += 1

    def num_steps(self, epochs: float) -> int:
        """Steps that walk the answers `epochs` times (a fraction of the last epoch is rounded up)."""
        whole = int(epochs)
        steps = sum(len(self.epoch(number)) for number in range(whole))
        return (
            max(1, steps + int(np.ceil((epochs - whole) * len(self.epoch(whole)))))
            if epochs > whole
            else max(1, steps)
        )


def split(rows: Sequence[int], *, rank: int, world: int, accumulate: int) -> list[list[int]]:
    """One rank's rows of a global batch, in at most `accumulate` micro-batches; a rank may get none."""
    mine = list(rows[rank::world])
    parts = [mine[i::accumulate] for i in range(accumulate)]
    return [part for part in parts if part]


def collate(examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
    """Pad answers into one batch and line up the positions that predict an answer token."""
    lengths = [input_length(e) for e in examples]
    width = max(lengths)
    input_ids = torch.zeros(len(examples), width, dtype=torch.int64)
    positions = []
    for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        ids = [*map(int, example.prompt_ids), *map(int, example.answer_ids)]
        input_ids[row, :length] = torch.tensor(ids[:-1])
        first = row * width + len(example.prompt_ids) - 1
        positions.append(torch.arange(first, first + len(example.answer_ids)))
    return Batch(
        input_ids=input_ids.to(device),
        positions=torch.cat(positions).to(device),
        token_ids=torch.cat([e.token_ids for e in examples]).to(device, torch.int64),
        log_probs=torch.cat([e.log_probs for e in examples]).to(device, torch.float32),
        next_ids=torch.cat([torch.as_tensor(e.answer_ids, dtype=torch.int64) for e in examples]).to(device),
    )
