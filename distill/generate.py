"""The target answers the prompts, and the distributions it samples from are captured while it does.

1. All answers are planned and cut into shards; shards are dealt to ranks by number, nobody else's work is touched.
2. The answers of a rank's missing shards go through one decoder, temperature by temperature: as answers end, others
   take their places in the batch.
3. A shard is written when its last answer has ended: whole on disk or absent, so a killed run redoes the few that
   were under way.
"""

import itertools
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
from specdec.decoder import Decoder, Limits, Request, slots_needed
from specdec.errors import UserError
from specdec.length import make_policy
from specdec.pair import LanguageModel, check_pair, load_draft
from specdec.propose import DraftModel
from specdec.render import Renderer
from specdec.sampling import Sampling
from specdec.settings import Section
from specdec.trace import Trace


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
    draft: str | None = None
    """Folder of a draft to make the answers faster with; their distribution stays the target's."""
    draft_length: int | Literal["confidence", "entropy", "history"] = 3
    """Tokens drafted a round, or the policy that decides."""
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
    draft = load_draft(section.draft, target) if section.draft and missing else None
    with progress(sum(len(shards[n]) for n in missing), "generate", "answer") as bar:

        def write(number: int, made: Sequence[Answer]) -> None:
            write_shard(
                run_dir, number,
                [answer.record for answer in made],
                torch.cat([answer.token_ids for answer in made]),
                torch.cat([answer.log_probs for answer in made]),
            )  # fmt: skip

        for _, group in itertools.groupby(missing, key=lambda n: shards[n][0].temperature):
            numbers = list(group)
            tasks = [(n, task) for n in numbers for task in shards[n]]
            held: dict[int, dict[int, Answer]] = {n: {} for n in numbers}
            for place, answer in answers(target, [t for _, t in tasks], section=section, top_k=top_k, draft=draft):
                number = tasks[place][0]
                held[number][place] = answer
                bar.update()
                if len(held[number]) == len(shards[number]):
                    made = held.pop(number)
                    write(number, [made[place] for place in sorted(made)])
    return len(missing)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and the distributions it was sampled from."""

    record: dict[str, Any]
    """The line of the responses file."""
    token_ids: Tensor
    """[T, k] most probable ids at each token."""
    log_probs: Tensor
    """[T, k] their log-probabilities."""


def answers(
    target: LanguageModel,
    tasks: Sequence[Task],
    *,
    section: GenerateSection,
    top_k: int,
    draft: LanguageModel | None = None,
) -> Iterator[tuple[int, Answer]]:
    """Answer tasks of one temperature; yields (place of the task, its answer) as answers end."""
    limits = Limits(max_new_tokens=section.max_new_tokens, eos_ids=target.eos_ids)
    sampling = Sampling(temperature=tasks[0].temperature)
    requests = [Request(prompt_ids=t.prompt_ids, seed=t.seed) for t in tasks]
    proposer = None
    if draft is not None:
        policy = make_policy(section.draft_length)
        proposer = DraftModel(
            draft, vocab_size=check_pair(target, draft), policy=policy, sampling=sampling,
            num_slots=slots_needed(requests, limits, policy.max_length),
        )  # fmt: skip
    captured = Captured(top_k)
    decoder = Decoder(
        target, requests, limits=limits, sampling=sampling, proposer=proposer,
        vocab_size=check_pair(target, draft) if draft else None,
        max_rows=section.batch_size, observer=captured.observe,
    )  # fmt: skip
    for place, trace in decoder.finished():
        ids, log_probs = captured.pop(place, len(trace.tokens))
        yield place, Answer(record=_record(target, tasks[place], trace), token_ids=ids, log_probs=log_probs)


class Captured:
    """The top-k distributions of answers under way."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def observe(self, indices: list[int], logits: Tensor, counts: list[int]) -> None:
        """The decoder's observer: keep the columns that gave a token."""
        given = torch.cat([logits[b, :n] for b, n in enumerate(counts)])  # [sum of counts, V]
        ids, values = top_k_log_probs(given, self.top_k)
        pieces = zip(ids.cpu().split(counts), values.cpu().split(counts), strict=True)
        for index, piece in zip(indices, pieces, strict=True):
            self._steps.setdefault(index, []).append(piece)

    def pop(self, index: int, num_tokens: int) -> tuple[Tensor, Tensor]:  # [T, k], [T, k]
        """An ended answer's distributions, its tokens' first `num_tokens`; a round's trimmed rest is dropped."""
        ids, values = zip(*self._steps.pop(index), strict=True)
        return torch.cat(ids)[:num_tokens], torch.cat(values)[:num_tokens]


def _record(target: LanguageModel, task: Task, trace: Trace) -> dict[str, Any]:
    return {
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
