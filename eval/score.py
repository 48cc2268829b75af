"""Scoring a draft: decode the suite, check losslessness, write the report.

1. Prompts are rendered and held to the context, the folder to its settings: faults show before models load.
2. The cost model is measured; draft_length=auto takes its threshold from it.
3. Every prompt, turn by turn, through all contestants; one record a prompt turn and temperature.
4. The float32 losslessness check and transformers' own speed.
5. Records -> report.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.prompts import PromptsSection
from eval.acceptance import expected_acceptance
from eval.folder import EvalFolder, Key
from eval.lossless import lossless_check
from eval.metrics import expected_acceptance as expected_pair
from eval.metrics import total
from eval.race import hf_baseline
from eval.report import build_report, write_report
from eval.settings import EvalSection
from eval.speed import Bench
from eval.suites import Question, load_suite
from specdec import cost, provenance
from specdec.architecture import context_length
from specdec.cli import progress
from specdec.errors import UserError
from specdec.files import read_jsonl
from specdec.length import describe, make_policy
from specdec.measure import measure
from specdec.pair import (
    LanguageModel,
    TargetSection,
    check_pair,
    draft_folder,
    identity,
    load_draft,
    load_model,
    load_tokenizer,
    read_config,
    resolve_device,
)
from specdec.render import Renderer
from specdec.settings import RunSection, Section

HF_PROMPTS = 6  # each is decoded four times over; more would take longer than the race itself


class EvalJob(Section):
    """The settings that a report depends on."""

    run: RunSection = RunSection()
    """Where the run lives."""
    target: TargetSection
    """The model that is served."""
    prompts: PromptsSection = PromptsSection()
    """Where the builtin suite's prompts come from."""
    eval: EvalSection = EvalSection()
    """How the draft is scored."""


def evaluate(job: EvalJob, target: LanguageModel | None = None) -> tuple[dict[str, Any], Path]:
    """Score a draft -> (report, its folder). Goes on where a killed evaluation stopped.

    Raises:
        UserError: draft, suite or folder are not what they should be.
    """
    resolve_device(job.target.device)
    draft_path, out = _paths(job)
    renderer = Renderer(load_tokenizer(job.target))
    questions = load_suite(
        job.eval,
        job.prompts,
        renderer,
        context_length=context_length(read_config(job.target)),
        seed=job.run.seed,
    )
    folder = EvalFolder(out, _inputs(job, draft_path, questions))
    target = target or load_model(job.target)
    draft = load_draft(str(draft_path), target)
    training = _training(job, draft_path)
    vocab_size = check_pair(target, draft)
    folder.begin()
    measured = folder.measure("cost", lambda: measure(target, draft, vocab_size=vocab_size))
    alpha = _last(training, "eval/greedy_agreement", cost.ASSUMED_ACCEPTANCE)
    threshold = cost.confidence_threshold(measured, alpha)
    policy = make_policy(job.eval.draft_length, threshold=threshold, cost=measured)
    bench = Bench(
        target=target,
        draft=draft,
        vocab_size=vocab_size,
        policy=policy,
        max_new_tokens=job.eval.max_new_tokens,
        rule=job.eval.rule,
    )
    Scoring(bench=bench, folder=folder, renderer=renderer, section=job.eval).decode(questions)
    first = [(q.prompt.id, q.prompt_ids) for q in questions[: job.eval.lossless_prompts]]
    lossless = folder.measure("lossless", lambda: lossless_check(bench, first)) if first else None
    asked = [q.prompt_ids for q in questions[: min(job.eval.baseline_prompts, HF_PROMPTS)]]
    baseline = folder.measure("hf_baseline", lambda: hf_baseline(bench, asked)) if asked else None
    report = build_report(
        folder.records,
        pair=_pair(job, draft_path, bench),
        settings=job.eval.model_dump(mode="json"),
        environment=provenance.collect(),
        cost=_cost(measured, folder.records),
        lossless=lossless,
        training=training,
        hf_baseline=baseline,
    )
    write_report(report, out)
    return report, out


def _paths(job: EvalJob) -> tuple[Path, Path]:
    """(draft folder, report folder)."""
    folder = draft_folder(job.run, job.eval.draft)
    if job.eval.out is not None:
        return folder, Path(job.eval.out)
    if job.eval.draft is not None:
        raise UserError(
            "eval.out",
            got="nothing",
            expected="a folder for the report, beside eval.draft",
            fix="eval.out=DIR",
        )
    return folder, Path(job.run.dir) / "eval" / folder.name


def _inputs(job: EvalJob, draft_path: Path, questions: Sequence[Question]) -> dict[str, Any]:
    """What the records depend on."""
    section = job.eval.model_dump(mode="json", exclude={"out", "draft"})
    return {
        "target": [identity(job.target), job.target.dtype],
        "draft": identity(TargetSection(path=str(draft_path))),
        "prompts": zlib.crc32(repr([(q.prompt.id, q.prompt_ids) for q in questions]).encode()),
        "eval": section,
    }


def _training(job: EvalJob, draft_path: Path) -> list[dict[str, Any]]:
    """The metrics of the run that made the draft; none for a draft from elsewhere."""
    path = Path(job.run.dir) / "metrics.jsonl"
    if job.eval.draft is not None or not path.is_file():
        return []
    return [record for _, record in read_jsonl(path)]


def _last(training: Sequence[dict[str, Any]], name: str, default: float) -> float:
    return next((float(record[name]) for record in reversed(training) if name in record), default)


class Conversation:
    """A question and how far its conversation has come."""

    def __init__(self, question: Question) -> None:
        self.question, self.turn = question, 0
        self.messages: list[Any] = list(question.prompt.messages)
        self.prompt_ids: Sequence[int] = question.prompt_ids

    def key(self, temperature: float) -> Key:
        """Names the record of the present turn."""
        return self.question.prompt.id, self.turn, temperature

    def answer_and_ask(self, answer: str, renderer: Renderer) -> None:
        """Add the target's answer and the next user turn."""
        prompt = self.question.prompt
        self.messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": prompt.later_turns[self.turn]},
        ]
        self.turn += 1
        self.prompt_ids = renderer.prompt_ids(self.messages, prompt.id)


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Decodes questions into the records of a folder."""

    bench: Bench
    folder: EvalFolder
    renderer: Renderer
    section: EvalSection

    def decode(self, questions: Sequence[Question]) -> None:
        """Every batch at every temperature; records that are on disk are not made again."""
        size, temperatures = self.section.batch_size, self.section.temperatures
        with progress(len(questions) * len(temperatures), "decode", "prompt") as bar:
            for temperature in temperatures:
                for start in range(0, len(questions), size):
                    batch = [Conversation(question) for question in questions[start : start + size]]
                    while batch:
                        self._turn(batch, temperature, start)
                        batch = [c for c in batch if self._go_on(c, temperature)]
                    bar.update(len(questions[start : start + size]))

    def _turn(self, batch: Sequence[Conversation], temperature: float, start: int) -> None:
        """One turn of a batch through all contestants, unless all its records are there."""
        missing = [c for c in batch if self.folder.get(c.key(temperature)) is None]
        if not missing:
            return
        runs = self.bench.race(
            [c.prompt_ids for c in batch],
            [zlib.crc32(f"{self.section.seed}/{c.question.prompt.id}/{c.turn}".encode()) for c in batch],
            sampling=self.section.sampling(temperature),
            order=start // self.section.batch_size,
            lookup=start < self.section.baseline_prompts,
        )
        for conversation, found in zip(batch, runs, strict=True):
            if conversation in missing:
                self.folder.add(self._record(conversation, temperature, found))

    def _go_on(self, conversation: Conversation, temperature: float) -> bool:
        """Ask the next turn, behind the target's own (plain) answer; False when there is none, or no room."""
        prompt, section = conversation.question.prompt, self.section
        if conversation.turn >= len(prompt.later_turns):
            return False
        record = self.folder.get(conversation.key(temperature))
        assert record is not None
        conversation.answer_and_ask(record["plain"]["text"], self.renderer)
        limit, ids = self.bench.target.context_length, conversation.prompt_ids
        return self.renderer.fits(prompt.id, ids, limit, section.max_new_tokens, section.too_long)

    def _record(
        self, conversation: Conversation, temperature: float, runs: dict[str, Any]
    ) -> dict[str, Any]:
        bench, prompt = self.bench, conversation.question.prompt
        overlap, positions = expected_acceptance(
            bench.target,
            bench.draft,
            conversation.prompt_ids,
            runs["plain"]["tokens"],
            sampling=self.section.sampling(temperature),
            vocab_size=bench.vocab_size,
        )
        return {
            "prompt_id": prompt.id,
            "turn": conversation.turn,
            "domain": prompt.domain,
            "temperature": temperature,
            "prompt_tokens": len(conversation.prompt_ids),
            "prompt": str(conversation.messages[-1].get("content", "")),
            "draft_length": bench.policy.max_length,
            **runs,
            "expected": {"sum": overlap, "n": positions},
        }


def _pair(job: EvalJob, draft_path: Path, bench: Bench) -> dict[str, Any]:
    return {
        "target": job.target.path,
        "draft": str(draft_path),
        "target_parameters": bench.target.num_parameters,
        "draft_parameters": bench.draft.num_parameters,
        "draft_head_ids": None if bench.draft.head_ids is None else len(bench.draft.head_ids),
        "target_identity": bench.target.fingerprint,
        "draft_identity": bench.draft.fingerprint,
        "tokenizer_identity": Renderer(bench.target.tokenizer).fingerprint,
        "dtype": job.target.dtype,
        "draft_length_policy": describe(bench.policy),
    }


def _cost(measured: dict[str, Any], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The measured cost model, and what it predicts at the lowest temperature."""
    lowest = min(record["temperature"] for record in records)
    chosen = [record for record in records if record["temperature"] == lowest]
    alpha = total([expected_pair(record) for record in chosen]) or 0.0
    best = cost.best_draft_length(measured, alpha)
    return {
        **measured,
        "draft_length": best,
        "best_draft_length": best,
        "break_even_acceptance": cost.break_even_acceptance(measured),
        "predicted_speedup": cost.predicted_speedup(measured, alpha, best),
    }
