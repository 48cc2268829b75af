"""Records -> the report: one block of statistics per temperature and domain, the verdict, and three files.

`report.json` (schema version 1) holds every number as {"value", "ci95", "n"}; `report.md` and the self-contained
`report.html` show the same numbers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import metrics
from eval.crosswalk import crosswalk
from eval.metrics import Pair
from eval.records import Record, Run, check_records
from eval.stats import Statistic, mean_of_clusters, ratio_of_ratios, ratio_of_sums, verdict
from specdec.files import write_atomic

SCHEMA_VERSION = 1
NUM_EXAMPLES = 6
Block = dict[str, Any]

OF_RUN: dict[str, Callable[[Run], Pair]] = {
    "draft_acceptance_rate": metrics.draft_acceptance_rate,
    "draft_acceptance_rate_trimmed": metrics.draft_acceptance_rate_trimmed,
    "mean_accepted_length": metrics.mean_accepted_length,
    "tokens_per_target_forward": metrics.tokens_per_target_forward,
    "mean_draft_length": metrics.mean_draft_length,
}
"""Ratios of sums over the speculative runs."""

SPEEDS = {"decode": metrics.tokens_per_s_decode, "end_to_end": metrics.tokens_per_s_end_to_end}


def build_report(
    records: Sequence[Record],
    *,
    pair: Mapping[str, Any],
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    cost: Mapping[str, Any],
    lossless: Mapping[str, Any] | None,
    training: Sequence[Mapping[str, Any]],
    hf_baseline: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """All numbers of an evaluation. Raises UserError when a record breaks the decoder's invariants."""
    check_records(records)
    seed = int(settings.get("seed", 0))
    by_temperature = {
        f"{t:g}": [r for r in records if r["temperature"] == t] for t in sorted({r["temperature"] for r in records})
    }
    first, chosen = next(iter(by_temperature.items()))
    overall = block(chosen, seed)
    domains = {name: block([r for r in chosen if r["domain"] == name], seed) for name in _domains(chosen)}
    outcome = verdict(overall["speedup_decode"])
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": outcome,
        "sentence": _sentence(outcome, overall, domains, first),
        "pair": dict(pair),
        "settings": dict(settings),
        "environment": dict(environment),
        "temperature": float(first),
        "overall": overall,
        "domains": domains,
        "temperatures": {t: block(group, seed) for t, group in by_temperature.items()},
        "baselines": {"hf_generate": hf_baseline, "speedup_lookup_decode": overall["speedup_lookup_decode"]},
        "cost": {**cost, "round_ms": _round_parts(chosen)},
        "lossless": lossless,
        "crosswalk": crosswalk(
            chosen,
            tau=overall["tokens_per_target_forward"]["value"],
            alpha=overall["expected_acceptance"]["value"],
        ),
        "accepted_length_histogram": metrics.accepted_length_histogram([r["speculative"] for r in chosen]),
        "definitions": definitions(),
        "training": [dict(record) for record in training],
        "examples": [_example(record) for record in _spread(chosen)],
    }


def block(records: Sequence[Record], seed: int) -> Block:
    """Every statistic over these records, resampled by prompt."""
    clusters = [r["prompt_id"] for r in records]
    runs = [r["speculative"] for r in records]
    found: Block = {
        "prompts": len(set(clusters)),
        "expected_acceptance": ratio_of_sums(
            clusters, [metrics.expected_acceptance(r) for r in records], seed=seed
        ),
        "acceptance_by_position": [
            ratio_of_sums(clusters, [metrics.acceptance_at_position(run, k) for run in runs], seed=seed)
            for k in range(1, metrics.longest_draft(runs) + 1)
        ],
        **{
            name: ratio_of_sums(clusters, [measure(run) for run in runs], seed=seed)
            for name, measure in OF_RUN.items()
        },
        "mean_accepted_length_macro": mean_of_clusters(
            clusters, [metrics.mean_accepted_length(run) for run in runs], seed=seed
        ),
    }
    for kind, speed in SPEEDS.items():
        found[f"speedup_{kind}"] = ratio_of_ratios(
            clusters, [speed(run) for run in runs], [speed(r["plain"]) for r in records], seed=seed
        )
    for name in ("plain", "speculative"):
        pairs = [metrics.tokens_per_s_decode(r[name]) for r in records]
        found[f"tokens_per_s_{name}"] = ratio_of_sums(clusters, pairs, seed=seed)
    found["speedup_lookup_decode"] = _lookup_speedup(records, seed)
    return found


def _lookup_speedup(records: Sequence[Record], seed: int) -> Statistic:
    """Prompt lookup over plain decoding, on the prompts that were decoded with both."""
    raced = [r for r in records if r.get("lookup")]
    clusters = [r["prompt_id"] for r in raced]
    above, below = ([metrics.tokens_per_s_decode(r[name]) for r in raced] for name in ("lookup", "plain"))
    return ratio_of_ratios(clusters, above, below, seed=seed)


def definitions() -> dict[str, str]:
    """What each number means: the docstring of the one function that defines it."""
    functions = {
        "expected_acceptance": metrics.expected_acceptance,
        "acceptance_by_position": metrics.acceptance_at_position,
        **OF_RUN,
        "tokens_per_s": metrics.tokens_per_s_decode,
        "tokens_per_s_end_to_end": metrics.tokens_per_s_end_to_end,
    }
    found = {name: (inspect.getdoc(function) or "").split("\n\n")[0] for name, function in functions.items()}
    return {
        **found,
        "speedup_decode": "tokens/s after the first token, speculative / plain: same engine, prompts and settings, "
        "each prompt decoded both ways one after the other",
        "speedup_end_to_end": "the same with the prefill included",
        "ci95": " ".join((inspect.getmodule(ratio_of_sums).__doc__ or "").split()),
        "verdict": inspect.getdoc(verdict) or "",
    }


def _sentence(outcome: str, overall: Block, domains: Mapping[str, Block], temperature: str) -> str:
    speed = overall["speedup_decode"]
    lead = {"pays": "The draft pays", "does not pay": "The draft does not pay", "within noise": "Within noise"}[outcome]
    if speed["value"] is None:
        return f"{lead}: nothing was decoded behind the first token."
    text = f"{lead}: {speed['value']:.2f}x the speed of plain decoding"
    if speed["ci95"]:
        text += f" (95 % interval {speed['ci95'][0]:.2f} to {speed['ci95'][1]:.2f}, n = {speed['n']} prompts, "
    else:
        text += f" (n = {speed['n']} prompt, no interval, "
    text += f"T = {temperature})"
    parts = [
        f"{name} {found['speedup_decode']['value']:.2f}x"
        for name, found in domains.items()
        if found["speedup_decode"]["value"] is not None
    ]
    return text + (f"; {', '.join(parts)}." if len(parts) > 1 else ".")


def _round_parts(records: Sequence[Record]) -> dict[str, float | None]:
    """Milliseconds of a round by what they went to, and of a plain step."""
    parts = {}
    for name in ("draft_s", "verify_s", "host_s"):
        seconds = metrics.total([metrics.seconds_per_round(r["speculative"], name) for r in records])
        parts[name.removesuffix("_s")] = None if seconds is None else seconds * 1e3
    plain = metrics.total([metrics.seconds_per_round(r["plain"], "decode_s") for r in records])
    return {**parts, "plain_step": None if plain is None else plain * 1e3}


def _domains(records: Sequence[Record]) -> list[str]:
    return sorted({r["domain"] for r in records})


def _spread(records: Sequence[Record]) -> list[Record]:
    """A few records, each domain in turn."""
    queues = [[r for r in records if r["domain"] == name] for name in _domains(records)]
    ordered = [queue[i] for i in range(len(records)) for queue in queues if i < len(queue)]
    return ordered[:NUM_EXAMPLES]


def _example(record: Record) -> dict[str, Any]:
    """An answer as pieces of text, each marked as an accepted draft or the target's own token."""
    run = record["speculative"]
    drafted = [False]
    for _, accepted, emitted in metrics.rounds(run):
        drafted += [place < accepted for place in range(emitted)]
    pieces = run.get("pieces") or [run["text"]] + [""] * (len(run["tokens"]) - 1)
    return {
        "prompt_id": record["prompt_id"],
        "domain": record["domain"],
        "prompt": record["prompt"],
        "pieces": [{"text": text, "drafted": mine} for text, mine in zip(pieces, drafted, strict=True)],
        "tokens_per_target_forward": metrics.total([metrics.tokens_per_target_forward(run)]),
    }


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write report.json, report.md and report.html, each whole or not at all."""
    from eval.pages import html_page, markdown_page

    write_atomic(folder / "report.json", json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    write_atomic(folder / "report.md", markdown_page(report))
    write_atomic(folder / "report.html", html_page(report))
