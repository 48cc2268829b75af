"""What the benchmarks start from: a config's pair, ready to race, and the questions of its suite."""

from __future__ import annotations

import sys
from pathlib import Path

from eval.score import EvalJob
from eval.speed import Bench
from eval.suites import Question, load_suite
from specdec.length import make_policy
from specdec.pair import LanguageModel, check_pair, draft_folder, load_draft, load_model
from specdec.render import Renderer
from specdec.settings import load


def from_command_line() -> tuple[Path, list[str], EvalJob]:
    """[CONFIG] [key=value ...] -> config, overrides, and the job they make."""
    config, *overrides = sys.argv[1:] or ["configs/quickstart.yaml"]
    return Path(config), overrides, load(EvalJob, Path(config), overrides)


def load_bench(job: EvalJob) -> tuple[Bench, list[Question]]:
    """The target and the best draft of the job's run folder (K = 1 until told otherwise), and the suite."""
    target = load_model(job.target)
    draft = load_draft(str(draft_folder(job.run, job.eval.draft)), target)
    bench = Bench(
        target=target, draft=draft, vocab_size=check_pair(target, draft), max_new_tokens=job.eval.max_new_tokens,
        policy=make_policy(1),
    )  # fmt: skip
    return bench, load_questions(job, target)


def load_questions(job: EvalJob, target: LanguageModel) -> list[Question]:
    """The job's suite, as the target reads it."""
    renderer = Renderer(target.tokenizer)
    return load_suite(job.eval, job.prompts, renderer, context_length=target.context_length, seed=job.run.seed)
