"""The target answers the prompts, and the distributions it samples from are captured while it does.

One shard = one decoded batch = the unit of work: whole on disk or absent, so a killed run redoes at most one.
Shards are dealt to ranks by number; nobody else's work is touched.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from distill.capture import top_k_log_probs
from distill.prompts import Prompt, Splits
from distill.store import shard_is_done, write_shard
from specdec.cli import progress
from specdec.decoder import Decoder, Limits, Request
from specdec.errors import UserError
from specdec.pair import LanguageModel
from specdec.render import Renderer
from specdec.sampling import Sampling
from specdec.settings import Section


class GenerateSection(Section):
    """How the target's own answers are made."""

    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)] = (0.7,)
    """Sampling temperatures; answer i of a prompt uses temperature i modulo their number."""
    answers_per_prompt: int = Field(1, ge=1)
    """Answers to each prompt."""
    max_new_tokens: int = Field(96, ge=1)
    """Tokens of an answer at most."""
    batch_size: int = Field(32, ge=1)
    """Answers decoded together; also the size of a shard."""
    max_prompts: int | None = Field(None, ge=1)
    """Use at most this many training prompts."""
    too_long: Literal["refuse", "skip"] = "refuse"
    """A prompt beyond the context: refuse the run, or skip it by name."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One answer to make."""

    answer_id: str
    prompt: Prompt
    split: str
    prompt_ids: tuple[int, ...]
    temperature: float

    @property
    def seed(self) -> int:
        """A stream of its own: the same answer in any shard, batch or order."""
        return zlib.crc32(self.answer_id.encode())


def plan_tasks(
    splits: Splits, section: GenerateSection, renderer: Renderer, *, context_length: int, seed: int
) -> list[list[Task]]:
    """All answers, cut into shards; sorted by temperature and prompt length inside a split: batches are even."""
    train = splits.train[: section.max_prompts]
    tasks = []
    for split, prompts in (("train", train), ("selection", splits.selection)):
        for prompt in prompts:
            ids = renderer.prompt_ids(prompt.messages, prompt.id)
            if not renderer.fits(prompt.id, ids, context_length, 1, section.too_long):
                continue
            for n in range(section.answers_per_prompt if split == "train" else 1):
                temperature = section.temperatures[n % len(section.temperatures)]
                tasks.append(
                    Task(
                        answer_id=f"{seed}/{prompt.id}/{n}",
                        prompt=prompt,
                        split=split,
                        prompt_ids=tuple(ids),
                        temperature=temperature,
                    )
                )
    if not any(t.split == "train" for t in tasks):
        raise UserError(
            "no prompts to answer",
            got="0 training prompts",
            expected="at least one",
            fix="check prompts.sources and prompts.held_out",
        )
    tasks.sort(key=lambda t: (t.split, t.temperature, len(t.prompt_ids), t.answer_id))
    shards = []
    for key in dict.fromkeys((t.split, t.temperature) for t in tasks):
        same = [t for t in tasks if (t.split, t.temperature) == key]
        shards += [same[i : i + section.batch_size] for i in range(0, len(same), section.batch_size)]
    return shards


def generate(
    target: LanguageModel,
    shards: Sequence[Sequence[Task]],
    run_dir: Path,
    *,
    section: GenerateSection,
    top_k: int,
    rank: int = 0,
    world: int = 1,
) -> int:
    """Make the shards that are missing; returns how many were made."""
    missing = [n for n in range(rank, len(shards), world) if not shard_is_done(run_dir, n)]
    with progress(sum(len(shards[n]) for n in missing), "generate", "answer") as bar:
        for number in missing:
            answers, ids, log_probs = answer_shard(target, shards[number], section=section, top_k=top_k)
            write_shard(run_dir, number, answers, ids, log_probs)
            bar.update(len(answers))
    return len(missing)


def answer_shard(
    target: LanguageModel, tasks: Sequence[Task], *, section: GenerateSection, top_k: int
) -> tuple[list[dict[str, Any]], Tensor, Tensor]:
    """Decode one shard: its answers, and the captured ids and log-probabilities [tokens, k]."""
    steps: list[tuple[list[int], Tensor, Tensor]] = []

    def observe(active: list[int], logits: Tensor) -> None:
        ids, values = top_k_log_probs(logits, top_k)
        steps.append((list(active), ids.cpu(), values.cpu()))

    requests = [Request(prompt_ids=t.prompt_ids, seed=t.seed) for t in tasks]
    limits = Limits(max_new_tokens=section.max_new_tokens, eos_ids=target.eos_ids)
    traces = Decoder(
        target, requests, limits=limits, sampling=Sampling(temperature=tasks[0].temperature), observer=observe
    ).run()
    lengths = [len(t.tokens) for t in traces]
    captured = list(_by_answer(steps, lengths))
    answers = [
        {
            "answer_id": task.answer_id,
            "prompt_id": task.prompt.id,
            "domain": task.prompt.domain,
            "split": task.split,
            "messages": list(task.prompt.messages),
            "prompt_ids": list(task.prompt_ids),
            "answer_ids": trace.tokens,
            "answer": target.tokenizer.decode(trace.tokens, skip_special_tokens=True),
            "temperature": task.temperature,
            "finish": trace.finish,
        }
        for task, trace in zip(tasks, traces, strict=True)
    ]
    return answers, torch.cat([ids for ids, _ in captured]), torch.cat([values for _, values in captured])


def _by_answer(
    steps: list[tuple[list[int], Tensor, Tensor]], lengths: list[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Step-major captures -> one [T, k] pair an answer. Step t holds what produced token t of each row still active."""
    for index, length in enumerate(lengths):
        ids, values = [], []
        for active, step_ids, step_values in steps[:length]:
            row = active.index(index)
            ids.append(step_ids[row])
            values.append(step_values[row])
        yield torch.stack(ids), torch.stack(values)
