"""Records -> the report: one block of statistics per temperature and domain, the verdict, and three files.

`report.json` (schema version 1) holds every number as {"value", "ci95", "n"}; `report.md` and the
self-contained `report.html` show the same numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import metrics
from eval.crosswalk import crosswalk
from eval.numbers import Block, block, definitions, over_runs, round_parts
from eval.records import Record, check_records
from eval.stats import verdict
from specdec.files import write_atomic

SCHEMA_VERSION = 1
NUM_EXAMPLES = 6
LEADS = {
    "pays": "The draft pays",
    "does not pay": "The draft does not pay",
    "within noise": "Within noise",
}


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
    """All numbers of an evaluation, as JSON values: a number that is not finite becomes None.

    `overall`, `domains` and everything else without a temperature of its own is of the lowest temperature.

    Args:
        records: one per prompt turn and temperature, in any order.
        settings: `seed` (0 where absent) also seeds the bootstrap.
        training: the lines of metrics.jsonl; empty for a draft from elsewhere.

    Raises:
        UserError: there are no records, or one breaks the decoder's invariants.
    """
    check_records(records)
    seed = int(settings.get("seed", 0))
    groups = _by_temperature(records)
    temperature, chosen = next(iter(groups.items()))
    blocks = {name: block(group, seed) for name, group in groups.items()}
    overall = blocks[temperature]
    domains = {name: block([r for r in chosen if r["domain"] == name], seed) for name in _domains(chosen)}
    outcome = verdict(overall["speedup_decode"])
    report = {
        "schema_version": SCHEMA_VERSION,
        "verdict": outcome,
        "sentence": _sentence(outcome, overall, domains, temperature),
        "pair": pair,
        "settings": settings,
        "environment": environment,
        "temperature": float(temperature),
        "overall": overall,
        "domains": domains,
        "temperatures": blocks,
        "baselines": {
            "hf_generate": hf_baseline,
            "plain_tokens_per_s_end_to_end": over_runs(
                chosen, "plain", metrics.tokens_per_s_end_to_end, seed
            ),
            "speedup_lookup_decode": overall["speedup_lookup_decode"],
        },
        "cost": {**cost, "round_ms": round_parts(chosen)},
        "lossless": lossless,
        "crosswalk": crosswalk(
            chosen,
            tau=overall["tokens_per_target_forward"]["value"],
            alpha=overall["expected_acceptance"]["value"],
        ),
        "histogram": metrics.accepted_length_histogram([r["speculative"] for r in chosen]),
        "definitions": definitions(),
        "training": training,
        "prompts": [_example(record) for record in _spread(chosen)],
    }
    found = _plain_json(report)
    assert isinstance(found, dict)
    return found


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write report.json, report.md and report.html, each whole or not at all.

    Raises:
        UserError: the folder cannot be written.
    """
    from eval.pages import html_page, markdown_page

    pages = markdown_page(report), html_page(report)
    text = json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False)
    for name, content in zip(("report.json", "report.md", "report.html"), (text + "\n", *pages), strict=True):
        # A byte-level tokenizer can give half a surrogate pair, which UTF-8 cannot hold.
        write_atomic(folder / name, content.encode("utf-8", errors="replace"))


def _by_temperature(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by temperature, the lowest first, under names such as "0" and "0.7"."""
    temperatures = sorted({float(r["temperature"]) for r in records})
    return {str(t).removesuffix(".0"): [r for r in records if r["temperature"] == t] for t in temperatures}


def _sentence(outcome: str, overall: Block, domains: Mapping[str, Block], temperature: str) -> str:
    """The verdict for a reader who stops here."""
    speed = overall["speedup_decode"]
    if speed["value"] is None:
        return f"{LEADS[outcome]}: nothing was decoded behind the first token."
    text = f"{LEADS[outcome]}: {speed['value']:.2f}x the speed of plain decoding"
    if speed["ci95"] is not None:
        low, high = speed["ci95"]
        text += f" (95 % interval {low:.2f} to {high:.2f}, n = {speed['n']} prompts, T = {temperature})"
    else:
        text += f" (n = {speed['n']} prompt, no interval, T = {temperature})"
    speeds = {name: found["speedup_decode"]["value"] for name, found in domains.items()}
    parts = [f"{name} {value:.2f}x" for name, value in speeds.items() if value is not None]
    return text + (f"; {', '.join(parts)}." if len(parts) > 1 else ".")


def _domains(records: Sequence[Record]) -> list[str]:
    return sorted({r["domain"] for r in records})


def _spread(records: Sequence[Record]) -> list[Record]:
    """A few records, each domain in turn."""
    queues = [[r for r in records if r["domain"] == name] for name in _domains(records)]
    ordered = [queue[i] for i in range(len(records)) for queue in queues if i < len(queue)]
    return ordered[:NUM_EXAMPLES]


def _example(record: Record) -> dict[str, Any]:
    """A prompt and its answer as pieces of text, each an accepted draft's (`drafted`) or the target's own."""
    run = record["speculative"]
    drafted = [False]  # the prefill's token
    for _, accepted, emitted in metrics.rounds(run):
        drafted += [place < accepted for place in range(emitted)]
    texts = run.get("pieces")
    if texts is None:  # no piece is known for each token: the answer stays unmarked
        texts, drafted = [run["text"]], [False]
    return {
        "prompt_id": record["prompt_id"],
        "turn": record["turn"],
        "domain": record["domain"],
        "prompt": record["prompt"],
        "answer": run["text"],
        "pieces": [{"text": text, "drafted": mine} for text, mine in zip(texts, drafted, strict=True)],
        "tokens_per_target_forward": metrics.total([metrics.tokens_per_target_forward(run)]),
    }


def _plain_json(value: Any) -> Any:
    """Dicts and lists that JSON can hold; it has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {str(key): _plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
