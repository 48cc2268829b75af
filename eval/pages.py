"""The report for readers: markdown, and one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eval.plots import plots

if TYPE_CHECKING:
    from jinja2 import Environment

Report = Mapping[str, Any]

COLUMNS = {
    "speedup_decode": "speedup",
    "speedup_end_to_end": "speedup, prefill included",
    "tokens_per_s_plain": "plain, tokens/s",
    "tokens_per_s_speculative": "speculative, tokens/s",
    "tokens_per_target_forward": "tokens per target forward",
    "mean_accepted_length": "mean accepted length",
    "expected_acceptance": "expected acceptance",
    "draft_acceptance_rate": "draft acceptance rate",
    "mean_draft_length": "mean draft length",
}
"""Statistics of the tables, and how they are called there."""


def number(value: float | None, digits: int = 3) -> str:
    """A number for a reader: `digits` significant ones, `-` where nothing was counted."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value == 0 or (isinstance(value, int) and abs(value) >= 10):
        return f"{value:,}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def statistic(found: Mapping[str, Any]) -> str:
    """`1.42 (1.35 to 1.49)`; the interval is left out where there is none."""
    text = number(found["value"])
    if found["ci95"] is None or found["value"] is None:
        return text
    return f"{text} ({number(found['ci95'][0])} to {number(found['ci95'][1])})"


def markdown_page(report: Report) -> str:
    """The report as markdown, without plots."""
    return _environment(escape=False).get_template("report.md.j2").render(_context(report))


def html_page(report: Report) -> str:
    """The report as one self-contained page; prompts and answers are shown as text."""
    page = _environment(escape=True).get_template("report.html.j2")
    return page.render(_context(report), plots=plots(report))


def _context(report: Report) -> dict[str, Any]:
    blocks = {"overall": report["overall"], **report["domains"]}
    return {
        "r": report,
        "blocks": blocks,
        "columns": COLUMNS,
        "plain": report["overall"]["tokens_per_s_plain"]["value"],
        "settings": _flat({name: report[name] for name in ("pair", "settings", "environment")}),
    }


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
        loader=PackageLoader("eval"), autoescape=escape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "statistic": statistic}
    return environment
