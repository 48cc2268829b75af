"""The report for readers: markdown, and one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eval.plots import plots

if TYPE_CHECKING:
    from jinja2 import Environment

Report = Mapping[str, Any]

COLUMNS = {
    "speedup_decode": "speedup",
    "speedup_end_to_end": "speedup, prefill included",
    "speedup_lookup_decode": "speedup of prompt lookup",
    "tokens_per_s_plain": "plain, tokens/s",
    "tokens_per_s_speculative": "speculative, tokens/s",
    "tokens_per_target_forward": "tokens per target forward",
    "mean_accepted_length": "mean accepted length",
    "expected_acceptance": "expected acceptance",
    "draft_acceptance_rate": "draft acceptance rate",
    "draft_acceptance_rate_trimmed": "acceptance rate, trimmed",
    "mean_draft_length": "mean draft length",
}
"""Statistics of the tables, and how they are called there."""
TRAINING_COLUMNS = ("step", "eval/expected_acceptance", "eval/greedy_agreement", "eval/loss")
TRAINING_ROWS = 10


def number(value: Any, digits: int = 3) -> str:
    """A number for a reader: `digits` significant ones, `-` where nothing was counted; text as it is."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value == 0 or isinstance(value, int):
        return f"{value:,g}" if value == 0 else f"{value:,}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def statistic(found: Mapping[str, Any]) -> str:
    """`1.42 (1.35 to 1.49)`; the interval is left out where there is none."""
    text = number(found["value"])
    if found["ci95"] is None or found["value"] is None:
        return text
    return f"{text} ({number(found['ci95'][0])} to {number(found['ci95'][1])})"


def cell(value: Any) -> str:
    """Any text inside a markdown table or line: one line, no HTML, no markup."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text)


def fenced(text: str) -> str:
    """A markdown code block; its fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def markdown_page(report: Report) -> str:
    """The report as markdown, without plots."""
    return _environment(escape=False).get_template("report.md.j2").render(_context(report))


def html_page(report: Report) -> str:
    """The report as one self-contained page; prompts and answers are shown as text."""
    page = _environment(escape=True).get_template("report.html.j2")
    return page.render(_context(report), plots=plots(report))


def _context(report: Report) -> dict[str, Any]:
    overall = report["overall"]
    return {
        "r": report,
        "blocks": {"overall": overall, **report["domains"]},
        "columns": {
            key: title
            for key, title in COLUMNS.items()
            if key != "speedup_lookup_decode" or overall[key]["n"]
        },
        "policy": report["pair"].get("draft_length_policy") or number(report["settings"].get("draft_length")),
        "examples": [{**example, "spans": _spans(example["pieces"])} for example in report["prompts"]],
        "speeds": _speeds(report["baselines"]),
        "training_columns": TRAINING_COLUMNS,
        "training_rows": _training_rows(report["training"]),
        "settings": _flat({name: report[name] for name in ("pair", "settings", "environment")}),
    }


def _speeds(baselines: Mapping[str, Any]) -> list[tuple[str, float, float | None]]:
    """(who, tokens/s with the prefill, in times of our plain decoding) of the race against `generate`."""
    hf = baselines["hf_generate"]
    if hf is None:
        return []
    plain = hf.get("plain_tokens_per_s") or baselines["plain_tokens_per_s_end_to_end"]["value"]
    named = {
        "transformers generate": hf["tokens_per_s"],
        "transformers generate, assisted by the draft": hf.get("assisted_tokens_per_s"),
        "draftsmith, plain": plain,
        "draftsmith, speculative": hf.get("speculative_tokens_per_s"),
    }
    return [
        (name, speed, speed / plain if plain else None) for name, speed in named.items() if speed is not None
    ]


def _spans(pieces: Sequence[Mapping[str, Any]]) -> list[tuple[bool, str]]:
    """(drafted, text) with neighbours of the same origin joined."""
    groups = itertools.groupby((p for p in pieces if p["text"]), key=lambda piece: bool(piece["drafted"]))
    return [(drafted, "".join(piece["text"] for piece in group)) for drafted, group in groups]


def _training_rows(training: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The evaluations during training, thinned to about ten, the last one always among them."""
    rows = [record for record in training if "eval/expected_acceptance" in record]
    stride = max(1, math.ceil(len(rows) / TRAINING_ROWS))
    return rows[::-1][::stride][::-1]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            found[f"{prefix}{key}"] = " ".join(map(str, value))
        else:
            found[f"{prefix}{key}"] = "-" if value is None else str(value)
    return found


def _environment(*, escape: bool) -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("eval"),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "statistic": statistic, "cell": cell, "fenced": fenced}
    return environment
