"""Plots: one for each thing there is to show, with what the report says written on it."""

from __future__ import annotations

import warnings
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from eval.plots import plots


def words(svg: str) -> list[str]:
    """The texts of a picture; the picture has to be well-formed."""
    return [
        "".join(node.itertext()) for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("text")
    ]


def by_start(report: dict[str, Any]) -> dict[str, list[str]]:
    return {title.split()[0]: words(svg) for title, svg in plots(report).items()}


def test_every_plot_says_what_it_shows(make: Any) -> None:
    drawn = by_start(make.report(make.two_prompts(), training=make.training()))
    assert list(drawn) == ["Speedup", "Acceptance", "Accepted", "Where", "Training"]
    assert {"overall", "code", "prose", "2.00x"} <= set(drawn["Speedup"])
    assert "tokens/s, in times of plain decoding" in drawn["Speedup"]
    assert {"0.75", "0.67", "position k of the draft"} <= set(drawn["Acceptance"])
    assert {"25 %", "50 %", "accepted drafts"} <= set(drawn["Accepted"])
    assert {"draft 160 ms", "verify 560 ms", "host 80 ms", "plain step 1e+03 ms"} <= set(drawn["Where"])
    assert {"step", "training loss per token, nats", "expected acceptance, held out"} <= set(
        drawn["Training"]
    )


def test_lookup_stands_beside_the_draft(make: Any) -> None:
    with_lookup = by_start(make.report(make.many(prompts=8)))["Speedup"]
    assert "prompt lookup (no draft model)" in with_lookup
    assert "prompt lookup (no draft model)" not in by_start(make.report(make.two_prompts()))["Speedup"]


def test_what_was_not_measured_has_no_plot(make: Any) -> None:
    assert list(by_start(make.report([make.record("a", make.plain(4))]))) == ["Speedup", "Where"]
    nothing = make.run([], [], [], decode_s=0.0)
    assert plots(make.report([make.record("a", nothing, plain=nothing)])) == {}


@pytest.mark.parametrize(
    "training", [[{"step": 5, "loss": 2.0}], [{"step": 5, "eval/expected_acceptance": 0.4}]]
)
def test_half_a_training_record_is_enough(make: Any, training: list[dict[str, Any]]) -> None:
    assert "Training" in by_start(make.report(make.two_prompts(), training=training))


def test_names_are_names(make: Any) -> None:
    """Neither a formula nor HTML nor a missing glyph stops a plot; a long name is cut; many names fit."""
    names = (
        "$\\frac{x$",
        "<b>&",
        "数学",
        "a domain with a name that goes on and on",
        *(f"d{i}" for i in range(10)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = by_start(make.report(make.many(prompts=28, domains=names)))["Speedup"]
    assert {"$\\frac{x$", "<b>&", "数学", "a domain with a name th…", "d9"} <= set(drawn)
