"""The report's plots, as inline SVG. One palette, readable in light and dark pages."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAFT, OTHER, GREY = "#2a7f62", "#c26a2d", "#7a8594"
LONGEST_NAME = 24  # characters of a domain's name beside its bar
Report = Mapping[str, Any]


def plots(report: Report) -> dict[str, str]:
    """Title -> SVG, for every plot that has something to show."""
    drawn = {
        "Speedup over plain decoding, with 95 % intervals": _speedup,
        "Acceptance by position in the draft": _acceptance,
        "Accepted drafts per round": _histogram,
        "Where a round's time goes": _cost,
        "Training": _training,
    }
    return {title: svg for title, draw in drawn.items() if (svg := draw(report, title)) is not None}


def _figure(draw: Callable[[Axes], None], title: str, *, width: float = 6.0, height: float = 3.4) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Salt and no date: the same report gives the same bytes. Text stays text: sharp, small, searchable. A
    # domain called "$x$" is a name, not a formula.
    style: dict[Any, Any] = {
        "font.size": 11,
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "text.parse_math": False,
    }
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing"
        )  # the reader's browser has its own fonts
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return _inline(target.getvalue(), title)


def _inline(text: str, title: str) -> str:
    """An SVG file as an element of a page: no ids that every plot has, and black follows the page's ink."""
    text = re.sub(r'<g id="[A-Za-z0-9.]+_\d+">', "<g>", text[text.index("<svg") :])
    text = text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    return re.sub(r"#000000|\bblack\b", "currentColor", text)


def _errors(values: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Distances to the interval's ends; 0 where there is none."""
    ends = [s["ci95"] or [s["value"], s["value"]] for s in values]
    low = [max(0.0, s["value"] - e[0]) for s, e in zip(values, ends, strict=True)]
    high = [max(0.0, e[1] - s["value"]) for s, e in zip(values, ends, strict=True)]
    return [low, high]


def _speedup(report: Report, title: str) -> str | None:
    """Horizontal bars, so that names of any number and length have room."""
    blocks = {"overall": report["overall"], **report["domains"]}
    named = {name: found for name, found in blocks.items() if found["speedup_decode"]["value"] is not None}
    if not named:
        return None
    raced = any(found["speedup_lookup_decode"]["value"] is not None for found in named.values())
    kinds = [("speedup_decode", "draft", DRAFT)]
    if raced:
        kinds.append(("speedup_lookup_decode", "prompt lookup (no draft model)", OTHER))
    thick = 0.8 / len(kinds)

    def draw(axes: Axes) -> None:
        for number, (key, label, colour) in enumerate(kinds):
            rows = [(row + number * thick, found[key]) for row, found in enumerate(named.values())]
            shown = [(place, s) for place, s in rows if s["value"] is not None]
            _bars(axes, [place for place, _ in shown], [s for _, s in shown], thick, colour, label)
        axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
        middle = (len(kinds) - 1) * thick / 2
        axes.set_yticks([row + middle for row in range(len(named))], [_short(name) for name in named])
        axes.invert_yaxis()
        axes.set_xlabel("tokens/s, in times of plain decoding")
        axes.margins(x=0.16)
        if raced:
            axes.figure.legend(loc="outside upper center", ncols=2, frameon=False)

    return _figure(draw, title, height=1.3 + (0.24 + 0.22 * len(kinds)) * len(named))


def _bars(
    axes: Axes, places: list[float], values: list[Mapping[str, Any]], thick: float, colour: str, label: str
) -> None:
    """Horizontal bars with intervals and the value behind each interval."""
    lengths = [s["value"] for s in values]
    axes.barh(
        places, lengths, thick * 0.92, xerr=_errors(values), color=colour, capsize=3, ecolor=GREY, label=label
    )
    for place, s in zip(places, values, strict=True):
        end = (s["ci95"] or [s["value"], s["value"]])[1]
        axes.annotate(
            f"{s['value']:.2f}x", (end, place), xytext=(5, 0), textcoords="offset points", va="center"
        )


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _acceptance(report: Report, title: str) -> str | None:
    numbered = list(enumerate(report["overall"]["acceptance_by_position"], start=1))
    found = [(k, s) for k, s in numbered if s["value"] is not None]
    if not found:
        return None

    def draw(axes: Axes) -> None:
        places, values = [k for k, _ in found], [s for _, s in found]
        heights = [s["value"] for s in values]
        axes.errorbar(places, heights, yerr=_errors(values), color=DRAFT, marker="o", capsize=4, ecolor=GREY)
        for k, s in found:
            top = (s["ci95"] or [s["value"], s["value"]])[1]
            axes.annotate(
                f"{s['value']:.2f}", (k, top), xytext=(0, 5), textcoords="offset points", ha="center"
            )
        axes.set_xticks(places)
        axes.set_xlim(places[0] - 0.4, places[-1] + 0.4)
        axes.set_ylim(0, 1.12)
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        axes.set_xlabel("position k of the draft")
        axes.set_ylabel("accepted, of those judged")

    return _figure(draw, title)


def _histogram(report: Report, title: str) -> str | None:
    counts = report["histogram"]
    if not sum(counts):
        return None

    def draw(axes: Axes) -> None:
        shares = [100 * count / sum(counts) for count in counts]
        axes.bar(range(len(counts)), shares, color=DRAFT)
        for place, share in enumerate(shares):
            axes.annotate(
                f"{share:.0f} %", (place, share), xytext=(0, 3), textcoords="offset points", ha="center"
            )
        axes.set_xticks(range(len(counts)))
        axes.set_xlabel("accepted drafts")
        axes.set_ylabel("rounds that drafted, %")

    return _figure(draw, title)


def _cost(report: Report, title: str) -> str | None:
    parts = report["cost"]["round_ms"]
    if any(value is None for value in parts.values()):
        return None

    def draw(axes: Axes) -> None:
        left = 0.0
        for name, colour in (("draft", DRAFT), ("verify", OTHER), ("host", GREY)):
            label = f"{name} {parts[name]:.3g} ms"
            axes.barh(0, parts[name], left=left, color=colour, label=label, height=0.5)
            left += parts[name]
        label = f"plain step {parts['plain_step']:.3g} ms"
        axes.barh(1, parts["plain_step"], color=OTHER, alpha=0.5, height=0.5, label=label)
        emitted = report["overall"]["tokens_per_target_forward"]["value"]
        axes.set_yticks([0, 1], [f"a round\n({emitted:.2f} tokens)", "plain step\n(1 token)"])
        axes.set_xlabel("milliseconds, measured")
        axes.figure.legend(loc="outside upper center", ncols=2, frameon=False)

    return _figure(draw, title, height=3.0)


def _training(report: Report, title: str) -> str | None:
    losses = _curve(report, "loss")
    measured = _curve(report, "eval/expected_acceptance")
    if not losses and not measured:
        return None

    def draw(axes: Axes) -> None:
        axes.set_xlabel("step")
        if losses:
            axes.plot(*zip(*losses, strict=True), color=OTHER, linewidth=1.2)
            axes.set_ylabel("training loss per token, nats", color=OTHER)
        if measured:
            twin = axes.twinx()
            twin.plot(*zip(*measured, strict=True), color=DRAFT, marker="o", markersize=4)
            twin.set_ylabel("expected acceptance, held out", color=DRAFT)
            twin.set_ylim(0, 1)
            twin.spines[["top"]].set_visible(False)

    return _figure(draw, title)


def _curve(report: Report, name: str) -> list[tuple[float, float]]:
    """(step, value) of the training records that hold the value."""
    return [(r["step"], r[name]) for r in report["training"] if r.get(name) is not None]
