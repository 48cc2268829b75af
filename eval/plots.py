"""The report's plots, as inline SVG. One palette, readable in light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAFT, OTHER, GREY = "#2a7f62", "#c26a2d", "#7a8594"
Report = Mapping[str, Any]


def plots(report: Report) -> dict[str, str]:
    """Title -> SVG, for every plot that has something to show."""
    drawn = {
        "Speedup by domain": _speedup,
        "Acceptance by position": _acceptance,
        "Accepted drafts per round": _histogram,
        "Where a round's time goes": _cost,
        "Training": _training,
    }
    return {title: svg for title, draw in drawn.items() if (svg := draw(report)) is not None}


def _figure(draw: Callable[[Axes], None], *, width: float = 6.0, height: float = 3.4) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # svg.hashsalt and no date: the same report gives the same bytes. Text stays text: sharp, small, searchable.
    style: dict[Any, Any] = {"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "report"}
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = target.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor")


def _errors(values: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Distances to the interval's ends; 0 where there is none."""
    ends = [s["ci95"] or [s["value"], s["value"]] for s in values]
    low = [max(0.0, s["value"] - e[0]) for s, e in zip(values, ends, strict=True)]
    high = [max(0.0, e[1] - s["value"]) for s, e in zip(values, ends, strict=True)]
    return [low, high]


def _speedup(report: Report) -> str | None:
    named = {"overall": report["overall"], **report["domains"]}
    bars = {n: b["speedup_decode"] for n, b in named.items() if b["speedup_decode"]["value"] is not None}
    lookup = report["overall"]["speedup_lookup_decode"]
    if not bars:
        return None
    if lookup["value"] is not None:
        bars["prompt lookup"] = lookup

    def draw(axes: Axes) -> None:
        values = list(bars.values())
        colours = [OTHER if name == "prompt lookup" else DRAFT for name in bars]
        places = range(len(bars))
        axes.bar(places, [s["value"] for s in values], yerr=_errors(values), color=colours, capsize=4, ecolor=GREY)
        for place, s in zip(places, values, strict=True):
            top = (s["ci95"] or [0, s["value"]])[1]
            axes.annotate(f"{s['value']:.2f}x", (place, top), xytext=(0, 4), textcoords="offset points", ha="center")
        axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
        axes.set_xticks(list(places), list(bars))
        axes.set_ylabel("tokens/s, over plain decoding")
        axes.margins(y=0.15)

    return _figure(draw)


def _acceptance(report: Report) -> str | None:
    found = [s for s in report["overall"]["acceptance_by_position"] if s["value"] is not None]
    if not found:
        return None

    def draw(axes: Axes) -> None:
        places = list(range(1, len(found) + 1))
        axes.errorbar(
            places, [s["value"] for s in found], yerr=_errors(found), color=DRAFT, marker="o", capsize=4, ecolor=GREY
        )
        axes.set_xticks(places)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("position k of the draft")
        axes.set_ylabel("accepted, of those judged")

    return _figure(draw)


def _histogram(report: Report) -> str | None:
    counts = report["accepted_length_histogram"]
    if not sum(counts):
        return None

    def draw(axes: Axes) -> None:
        shares = [100 * c / sum(counts) for c in counts]
        axes.bar(range(len(counts)), shares, color=DRAFT)
        axes.set_xticks(range(len(counts)))
        axes.set_xlabel("accepted drafts")
        axes.set_ylabel("rounds that drafted, %")

    return _figure(draw)


def _cost(report: Report) -> str | None:
    parts = report["cost"]["round_ms"]
    if any(value is None for value in parts.values()):
        return None

    def draw(axes: Axes) -> None:
        left = 0.0
        for name, colour in (("draft", DRAFT), ("verify", OTHER), ("host", GREY)):
            axes.barh(0, parts[name], left=left, color=colour, label=name, height=0.5)
            left += parts[name]
        axes.barh(1, parts["plain_step"], color=OTHER, alpha=0.5, height=0.5, label="plain step")
        emitted = report["overall"]["tokens_per_target_forward"]["value"]
        axes.set_yticks([0, 1], [f"a round\n({emitted:.2f} tokens)", "plain step\n(1 token)"])
        axes.set_xlabel("milliseconds")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, 1.22), ncols=4, frameon=False)

    return _figure(draw, height=2.6)


def _training(report: Report) -> str | None:
    losses = [(r["step"], r["loss"]) for r in report["training"] if r.get("loss") is not None]
    name = "eval/expected_acceptance"
    measured = [(r["step"], r[name]) for r in report["training"] if r.get(name) is not None]
    if not losses:
        return None

    def draw(axes: Axes) -> None:
        axes.plot(*zip(*losses, strict=True), color=GREY, linewidth=1)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss per token, nats", color=GREY)
        if measured:
            twin = axes.twinx()
            twin.plot(*zip(*measured, strict=True), color=DRAFT, marker="o")
            twin.set_ylabel("expected acceptance (selection)", color=DRAFT)
            twin.set_ylim(0, 1)
            twin.spines[["top"]].set_visible(False)

    return _figure(draw)
