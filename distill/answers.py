"""The generate stage: what it is made from, what is done already, and the answers that are missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distill.capture import CaptureSection
from distill.generate import GenerateSection, generate, plan_tasks
from distill.prompts import PromptsSection, load_prompts
from distill.stages import Stages
from distill.store import shard_is_done
from specdec.architecture import context_length
from specdec.files import fingerprint, write_atomic
from specdec.pair import LanguageModel, TargetSection, identity, load_tokenizer, read_config, resolve_device
from specdec.render import Renderer
from specdec.settings import RunSection, Section, dump

STAGE = "generate"


class GenerateJob(Section):
    """The settings that answers depend on."""

    run: RunSection = RunSection()
    """Where the run lives."""
    target: TargetSection
    """The model that answers."""
    prompts: PromptsSection = PromptsSection()
    """What it is asked."""
    generate: GenerateSection = GenerateSection()
    """How it answers."""
    capture: CaptureSection = CaptureSection()
    """How much of its distributions is stored."""


class Answers:
    """The answers of one run folder: planned from prompts and tokenizer, before any model is loaded."""

    def __init__(self, job: GenerateJob) -> None:
        self.job, self.run_dir = job, Path(job.run.dir)
        resolve_device(job.target.device)  # a missing device shows before anything is written
        self.stages = Stages(self.run_dir)
        renderer = Renderer(load_tokenizer(job.target))
        self.splits = load_prompts(job.prompts, seed=job.run.seed)
        limit = context_length(read_config(job.target))
        self.shards = plan_tasks(
            self.splits, job.generate, renderer, context_length=limit, seed=job.run.seed
        )
        self.inputs = self._inputs(renderer)

    def _inputs(self, renderer: Renderer) -> dict[str, Any]:
        job = self.job
        tasks = [[t.answer_id, t.split, t.prompt_ids, t.temperature] for s in self.shards for t in s]
        return {
            "target": {"identity": identity(job.target), "dtype": job.target.dtype},
            "template": renderer.fingerprint,
            "prompts": {"tasks": fingerprint(tasks)},
            "generate": job.generate.model_dump(mode="json"),
            "capture": job.capture.model_dump(mode="json"),
            "run": {"seed": job.run.seed},
        }

    @property
    def done(self) -> bool:
        """Whether every answer of exactly these settings is on disk."""
        whole = all(shard_is_done(self.run_dir, n) for n in range(len(self.shards)))
        return whole and self.stages.is_done(STAGE, self.inputs)

    def check_same(self) -> None:
        """Refuse a folder that holds the answers of other settings. Raises UserError."""
        self.stages.check_same(STAGE, self.inputs)

    def make(self, target: Callable[[], LanguageModel], *, rank: int = 0, world: int = 1) -> str:
        """Make this rank's missing answers; returns how the stage stands."""
        self.check_same()
        if self.done:
            return "skipped, done"
        if not self.stages.begun(STAGE):
            self.stages.mark(STAGE, self.inputs, done=False)
        top_k = self.job.capture.top_k
        generate(
            target(), self.shards, self.run_dir,
            section=self.job.generate, top_k=top_k, rank=rank, world=world,
        )  # fmt: skip
        if not all(shard_is_done(self.run_dir, n) for n in range(len(self.shards))):
            return "waiting for other processes"
        self.stages.mark(STAGE, self.inputs, done=True)
        return "done"

    def write_settings(self) -> None:
        """Write run.yaml where there is none: a whole run's file says more than these sections."""
        if not (self.run_dir / "run.yaml").exists():
            write_atomic(self.run_dir / "run.yaml", dump(self.job))
