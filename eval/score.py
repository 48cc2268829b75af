"""Scoring a draft: decode the suite, check losslessness, write the report.

1. Prompts are rendered and held to the context, the folder to its settings: faults show before models load.
2. The cost model is measured; draft_length=auto takes its threshold from it.
3. Every prompt, turn by turn, through all contestants; one record a prompt turn and temperature.
4. The float32 losslessness check and transformers' own speed.
5. Records -> report.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.prompts import PromptsSection
from eval.acceptance import expected_acceptance
from eval.folder import EvalFolder
from eval.lossless import lossless_check
from eval.metrics import Pair, seconds_per_round, total
from eval.metrics import expected_acceptance as expected_pair
from eval.report import build_report, write_report
from eval.settings import EvalSection
from eval.speed import Bench, hf_baseline
from eval.suites import Question, load_suite
from specdec import cost, provenance
from specdec.cli import progress
from specdec.errors import UserError
from specdec.files import read_jsonl
from specdec.length import make_policy
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
from specdec.sampling import Sampling
from specdec.settings import RunSection, Section
from specdec.show import ASSUMED_ACCEPTANCE


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
        context_length=int(read_config(job.target).max_position_embeddings),
        seed=job.run.seed,
    )
    folder = EvalFolder(out, _inputs(job, draft_path, questions))
    target = target or load_model(job.target)
    draft = load_draft(str(draft_path), target)
    training = _training(job, draft_path)
    vocab_size = check_pair(target, draft)
    folder.begin()
    measured = folder.measure("cost", lambda: cost.measure(target, draft, vocab_size=vocab_size))
    alpha = _last(training, "eval/greedy_agreement", ASSUMED_ACCEPTANCE)
    policy = make_policy(job.eval.draft_length, threshold=cost.confidence_threshold(measured, alpha))
    bench = Bench(
        target=target,
        draft=draft,
        vocab_size=vocab_size,
        policy=policy,
        max_new_tokens=job.eval.max_new_tokens,
    )
    _decode(bench, questions, folder, renderer, job.eval)
    first = [(q.prompt.id, q.prompt_ids) for q in questions[: job.eval.lossless_prompts]]
    lossless = folder.measure("lossless", lambda: lossless_check(bench, first)) if first else None
    asked = [q.prompt_ids for q in questions[: min(job.eval.baseline_prompts, 4)]]
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


def _decode(
    bench: Bench, questions: Sequence[Question], folder: EvalFolder, renderer: Renderer, section: EvalSection
) -> None:
    """Every batch at every temperature; a batch with all its records on disk is not decoded again."""
    size = section.batch_size
    batches = [questions[i : i + size] for i in range(0, len(questions), size)]
    with progress(len(questions) * len(section.temperatures), "decode", "prompt") as bar:
        for temperature in section.temperatures:
            for number, batch in enumerate(batches):
                lookup = number * size < section.baseline_prompts
                _decode_batch(bench, batch, folder, renderer, section, temperature, number, lookup)
                bar.update(len(batch))


def _decode_batch(
    bench: Bench,
    batch: Sequence[Question],
    folder: EvalFolder,
    renderer: Renderer,
    section: EvalSection,
    temperature: float,
    order: int,
    lookup: bool,
) -> None:
    """All turns of a batch. A later turn sees the target's own (plain) answers to the earlier ones."""
    messages = {q.prompt.id: list(q.prompt.messages) for q in batch}
    asked = {q.prompt.id: q.prompt_ids for q in batch}
    turn, left = 0, list(batch)
    while left:
        if any(folder.get((q.prompt.id, turn, temperature)) is None for q in left):
            seeds = [zlib.crc32(f"{section.seed}/{q.prompt.id}/{turn}".encode()) for q in left]
            ids = [asked[q.prompt.id] for q in left]
            runs = bench.race(ids, seeds, temperature=temperature, order=order, lookup=lookup)
            for question, found in zip(left, runs, strict=True):
                key = (question.prompt.id, turn, temperature)
                if folder.get(key) is None:
                    folder.add(_record(bench, question, key, asked[key[0]], messages[key[0]], found))
        turn += 1
        going = []
        for question in left:
            prompt = question.prompt
            if turn > len(prompt.later_turns):
                continue
            record = folder.get((prompt.id, turn - 1, temperature))
            assert record is not None
            messages[prompt.id] += [
                {"role": "assistant", "content": record["plain"]["text"]},
                {"role": "user", "content": prompt.later_turns[turn - 1]},
            ]
            found_ids = renderer.prompt_ids(messages[prompt.id], prompt.id)
            limit = bench.target.context_length
            if renderer.fits(prompt.id, found_ids, limit, section.max_new_tokens, section.too_long):
                asked[prompt.id] = tuple(found_ids)
                going.append(question)
        left = going


def _record(
    bench: Bench,
    question: Question,
    key: tuple[str, int, float],
    prompt_ids: Sequence[int],
    messages: Sequence[Any],
    runs: dict[str, Any],
) -> dict[str, Any]:
    name, turn, temperature = key
    overlap, positions = expected_acceptance(
        bench.target,
        bench.draft,
        prompt_ids,
        runs["plain"]["tokens"],
        sampling=Sampling(temperature=temperature),
        vocab_size=bench.vocab_size,
    )
    return {
        "prompt_id": name,
        "turn": turn,
        "domain": question.prompt.domain,
        "temperature": temperature,
        "prompt_tokens": len(prompt_ids),
        "prompt": str(messages[-1].get("content", "")),
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
        "draft_length_policy": str(bench.policy),
    }


def _cost(measured: dict[str, Any], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The measured cost model with h from the real rounds, and what it predicts at the lowest temperature."""
    lowest = min(record["temperature"] for record in records)
    chosen = [record for record in records if record["temperature"] == lowest]
    hosts: list[Pair] = [seconds_per_round(record["speculative"], "host_s") for record in chosen]
    host = total(hosts) or 0.0
    full = {**measured, "h": host * 1e3 / measured["plain_step_ms"]}
    alpha = total([expected_pair(record) for record in chosen]) or 0.0
    best = cost.best_draft_length(full, alpha)
    return {
        **full,
        "draft_length": best,
        "best_draft_length": best,
        "break_even_acceptance": cost.break_even_acceptance(full),
        "predicted_speedup": cost.predicted_speedup(full, alpha, best),
    }
