"""What the target is asked: prompts from the built-in mixture, JSON lines or `datasets`, split by group.

1. Every source gives prompts (`SOURCES`: one function and one line each).
2. Sources are weighted and cut, texts that occur twice are kept once.
3. Whole groups (template and topic) go to one split: train, selection (chooses the best checkpoint) or
   report (the numbers that are published).
4. Each split is ordered domain by domain in turn, so that its first n prompts are a fair sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated

from pydantic import Field

from distill.builtin_prompts import builtin_prompts
from distill.prompt_records import Prompt, parse_records
from specdec.errors import UserError
from specdec.files import read_jsonl
from specdec.settings import Section

__all__ = ["Prompt", "PromptsSection", "SourceSection", "Splits", "load_prompts", "read_suite"]


class SourceSection(Section):
    """One source of prompts."""

    name: str
    """`builtin`, a JSON lines file (.jsonl), or a `datasets` name or folder."""
    domain: str | None = None
    """Domain of all its prompts; None: each record's own, else the source's name."""
    weight: float = Field(default=1.0, gt=0)
    """Share of its prompts that is kept, relative to the source with the largest weight."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Prompts taken at most."""
    split: str = "train"
    """Split of a `datasets` source."""


class PromptsSection(Section):
    """What the target is asked."""

    sources: Annotated[tuple[SourceSection, ...], Field(min_length=1)] = (SourceSection(name="builtin"),)
    """Where prompts come from."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the groups of a domain that is not trained on: half chooses the best checkpoint, half is for
    the report.
    """


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Prompts by what they are for; no two splits share a group."""

    train: tuple[Prompt, ...]
    selection: tuple[Prompt, ...]
    report: tuple[Prompt, ...]


def load_prompts(section: PromptsSection, *, seed: int) -> Splits:
    """All sources, split; the same seed gives the same splits, whatever order the sources come in.

    Raises:
        UserError: a source is missing, empty or broken, or a split would be empty.
    """
    largest = max(source.weight for source in section.sources)
    prompts: dict[str, Prompt] = {}
    for source in section.sources:
        found = _ordered(_read(source), seed)
        keep = round(len(found) * source.weight / largest)
        for prompt in found[: min(keep, source.max_prompts or keep)]:
            prompts.setdefault(_text(prompt), prompt)
    return _split(list(prompts.values()), section.held_out, seed)


def read_suite(path: Path | str) -> tuple[Prompt, ...]:
    """The prompts of a JSON lines file, in file order (see `prompt_records`).

    Raises:
        UserError: the file is missing or empty, or a line is not a prompt; names the line or the id.
    """
    path = Path(path)
    return parse_records(read_jsonl(path), str(path), default_domain=path.stem)


def _builtin(source: SourceSection) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(id=p.id, domain=p.domain, group=p.group, messages=({"role": "user", "content": p.text},))
        for p in builtin_prompts()
    )


def _dataset(source: SourceSection) -> tuple[Prompt, ...]:
    from datasets import load_dataset

    try:
        rows = load_dataset(source.name, split=source.split)
    except (OSError, ValueError) as error:  # covers datasets' own errors, a missing one included
        raise UserError(
            f"prompt source {source.name!r} cannot be loaded",
            got=(str(error).strip().splitlines() or [type(error).__name__])[0],
            expected="builtin, a .jsonl file, or a name or folder that datasets can load",
            fix="check prompts.sources",
        ) from error
    return parse_records(enumerate(rows, start=1), source.name, default_domain=Path(source.name).name)


SOURCES: dict[str, Callable[[SourceSection], tuple[Prompt, ...]]] = {
    "builtin": _builtin,
    "jsonl": lambda source: read_suite(source.name),
    "dataset": _dataset,
}
"""Kinds of sources: each is a function from its settings to prompts."""


def _kind(name: str) -> str:
    if name == "builtin":
        return name
    return "jsonl" if Path(name).suffix in (".jsonl", ".json") or Path(name).is_file() else "dataset"


def _read(source: SourceSection) -> tuple[Prompt, ...]:
    prompts = SOURCES[_kind(source.name)](source)
    if source.domain is None:
        return prompts
    return tuple(
        Prompt(
            id=p.id, domain=source.domain, group=p.group, messages=p.messages, later_turns=p.later_turns
        )
        for p in prompts
    )  # fmt: skip


def _split(prompts: Sequence[Prompt], held_out: float, seed: int) -> Splits:
    parts: dict[str, list[Prompt]] = {"train": [], "selection": [], "report": []}
    for domain in sorted({p.domain for p in prompts}):
        groups: dict[str, list[Prompt]] = {}
        for prompt in (p for p in prompts if p.domain == domain):
            groups.setdefault(prompt.group, []).append(prompt)
        names = sorted(groups, key=lambda name: _rank(seed, name))
        # Ranked, not thresholded: a small source still leaves something in each split.
        num_held = max(2, round(held_out * len(names))) if len(names) >= 3 else 0
        for place, name in enumerate(names):
            part = "train" if place >= num_held else ("report", "selection")[place % 2]
            parts[part] += groups[name]
    empty = [name for name, part in parts.items() if not part]
    if empty:
        raise UserError(
            f"the {' and '.join(empty)} split has no prompts",
            got=f"{len(prompts)} prompts",
            expected="at least three prompts of one domain that differ",
            fix="add prompts to prompts.sources",
        )
    return Splits(**{name: tuple(interleaved(part, seed)) for name, part in parts.items()})


def interleaved(prompts: Sequence[Prompt], seed: int) -> Iterable[Prompt]:
    """One prompt of each domain in turn, each domain in its own random order."""
    domains = sorted({p.domain for p in prompts})
    queues = [[p for p in _ordered(prompts, seed) if p.domain == domain] for domain in domains]
    return (p for p in chain.from_iterable(zip_longest(*queues)) if p is not None)


def _ordered(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    return sorted(prompts, key=lambda p: (_rank(seed, p.id), p.id))


def _rank(seed: int, name: str) -> str:
    """A random order that depends on seed and name alone: adding prompts does not reshuffle the others."""
    return hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogatepass")).hexdigest()


def _text(prompt: Prompt) -> str:
    return repr((prompt.messages, prompt.later_turns))
