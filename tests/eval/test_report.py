"""The report as a whole: verdict, temperatures, examples, strict JSON."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from eval.numbers import definitions
from eval.report import build_report, write_report
from specdec.errors import UserError

KEYS = {
    "schema_version", "verdict", "sentence", "pair", "settings", "environment", "overall", "domains",
    "temperature", "temperatures", "baselines", "cost", "lossless", "crosswalk", "definitions", "training",
    "histogram", "prompts",
}  # fmt: skip


def strict(path: Path) -> Any:
    """JSON that any parser reads: no NaN, no infinity."""
    return json.loads(
        path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{name} in JSON")
    )


def statistics(block: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All statistics of a block by name, those by position flattened."""
    found = {}
    for name, value in block.items():
        if isinstance(value, dict):
            found[name] = value
        elif isinstance(value, list):
            found |= {f"{name}[{k}]": item for k, item in enumerate(value)}
    return found


def test_the_schema(make: Any, tmp_path: Path) -> None:
    report = make.report(make.many(temperatures=(0.0, 0.7)), training=make.training(), lossless=make.lossless)
    write_report(report, tmp_path)
    assert strict(tmp_path / "report.json") == report
    assert set(report) == KEYS and report["schema_version"] == 1
    assert set(report["domains"]) == {"code", "factual", "prose", "structured"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    for block in (report["overall"], *report["domains"].values(), *report["temperatures"].values()):
        for name, found in statistics(block).items():
            assert set(found) == {"value", "ci95", "n"}, name
            assert (
                found["value"] is None
                or found["ci95"] is None
                or (found["ci95"][0] <= found["value"] + 1e-9 and found["value"] <= found["ci95"][1] + 1e-9)
            ), name


def test_a_statistic_has_one_definition(make: Any) -> None:
    """Every number of a block is defined, by the words of the function that it comes from."""
    from eval import metrics

    report = make.report(make.two_prompts())
    named = {name.partition("[")[0] for name in statistics(report["overall"])}
    assert named <= set(report["definitions"])
    assert all(len(text) > 20 and "\n" not in text for text in report["definitions"].values())
    doc = metrics.tokens_per_target_forward.__doc__
    assert doc is not None and report["definitions"]["tokens_per_target_forward"] == doc
    assert report["definitions"] == definitions()


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [((0.5, 0.6), "pays"), ((2.0, 1.8), "does not pay"), ((0.6, 1.6), "within noise")],
)
def test_the_verdict_comes_from_the_interval(make: Any, factors: tuple[float, float], verdict: str) -> None:
    records = [
        make.record(f"p{i}", make.run([2, 2], [1, 1], [2, 2], decode_s=3.0 * factors[i % 2]), plain_s=3.0)
        for i in range(8)
    ]
    report = make.report(records)
    low, high = report["overall"]["speedup_decode"]["ci95"]
    assert report["verdict"] == verdict
    assert (low > 1, high < 1) == (verdict == "pays", verdict == "does not pay")
    value = 2 / sum(factors)
    assert report["overall"]["speedup_decode"]["value"] == pytest.approx(value)
    assert f"{value:.2f}x" in report["sentence"] and f"{low:.2f} to {high:.2f}" in report["sentence"]


def test_the_sentence(make: Any) -> None:
    """Both prompts are twice as fast: the interval has no width."""
    assert make.report(make.two_prompts())["sentence"] == (
        "The draft pays: 2.00x the speed of plain decoding "
        "(95 % interval 2.00 to 2.00, n = 2 prompts, T = 0); code 2.00x, prose 2.00x."
    )
    one = make.report(make.two_prompts()[:1])
    assert (
        one["sentence"]
        == "Within noise: 2.00x the speed of plain decoding (n = 1 prompt, no interval, T = 0)."
    )
    assert one["verdict"] == "within noise" and one["overall"]["speedup_decode"]["ci95"] is None


def test_the_lowest_temperature_is_overall_and_each_has_its_block(make: Any) -> None:
    warm = [{**r, "temperature": 1.0} for r in make.two_prompts()]
    warm[0]["speculative"] = make.run([2, 2, 2], [2, 0, 2], [3, 1, 1], decode_s=8.5)
    report = make.report([*warm, *make.two_prompts()])
    assert report["temperature"] == 0.0 and list(report["temperatures"]) == ["0", "1"]
    assert report["temperatures"]["0"] == report["overall"]
    assert report["temperatures"]["1"]["speedup_decode"]["value"] == pytest.approx((8 / 10) / (8 / 8))
    assert report["temperatures"]["1"]["prompts"] == 2
    assert report["domains"]["code"]["speedup_decode"]["value"] == pytest.approx(2.0)  # of T = 0


def test_only_a_warm_temperature(make: Any) -> None:
    report = make.report([{**r, "temperature": 0.7} for r in make.two_prompts()])
    assert (
        report["temperature"] == 0.7
        and list(report["temperatures"]) == ["0.7"]
        and "T = 0.7" in report["sentence"]
    )


def test_plain_stands_beside_generate(make: Any) -> None:
    report = make.report(make.two_prompts(), hf_baseline=make.hf_baseline)
    assert report["baselines"]["hf_generate"] == make.hf_baseline
    assert report["baselines"]["plain_tokens_per_s_end_to_end"]["value"] == pytest.approx(10 / 10)


def test_the_round_is_taken_apart(make: Any) -> None:
    """4 s over 5 rounds, 20 % draft, 70 % verify, 10 % host; plain: 8 s over 8 steps."""
    report = make.report(make.two_prompts())
    parts = {"draft": 160.0, "verify": 560.0, "host": 80.0, "plain_step": 1000.0}
    assert report["cost"]["round_ms"] == pytest.approx(parts)
    assert report["cost"]["c"] == make.cost["c"]
    assert report["histogram"] == [1, 1, 2]


def test_examples_mark_what_was_drafted(make: Any) -> None:
    """Prefill's token; round 1: two drafts and the target's; round 2: its own; round 3: one draft, trimmed."""
    code, prose = make.report(make.two_prompts())["prompts"]
    assert [piece["drafted"] for piece in code["pieces"]] == [False, True, True, False, False, True]
    assert "".join(piece["text"] for piece in code["pieces"]) == code["answer"]
    assert (code["prompt_id"], code["domain"], code["prompt"]) == ("a", "code", "Prompt a")
    assert [piece["drafted"] for piece in prose["pieces"]] == [False, True, False, False]


def test_an_answer_without_pieces_stays_unmarked(make: Any) -> None:
    records = make.two_prompts()
    text = records[0]["speculative"]["text"]
    del records[0]["speculative"]["pieces"]
    assert make.report(records)["prompts"][0]["pieces"] == [{"text": text, "drafted": False}]


def test_examples_come_from_each_domain(make: Any) -> None:
    shown = make.report(make.many(prompts=12))["prompts"]
    assert [example["domain"] for example in shown] == [
        "code",
        "factual",
        "prose",
        "structured",
        "code",
        "factual",
    ]


def test_nothing_drafted_has_no_acceptance(make: Any, tmp_path: Path) -> None:
    records = [make.record(name, make.plain(5, decode_s=2.0), plain_s=2.0, expected=None) for name in "ab"]
    report = make.report(records)
    for name in ("mean_accepted_length", "draft_acceptance_rate", "expected_acceptance"):
        assert report["overall"][name] == {"value": None, "ci95": None, "n": 0}, name
    assert report["overall"]["acceptance_by_position"] == [] and report["histogram"] == [0]
    assert report["overall"]["tokens_per_target_forward"]["value"] == 1.0
    assert report["verdict"] == "within noise"
    write_report(report, tmp_path)
    strict(tmp_path / "report.json")


def test_nothing_decoded_behind_the_prefill(make: Any, tmp_path: Path) -> None:
    empty = make.run([], [], [], decode_s=0.0)
    report = make.report([make.record("a", empty, plain=empty)])
    assert report["sentence"] == "Within noise: nothing was decoded behind the first token."
    assert report["overall"]["speedup_end_to_end"]["value"] == 1.0
    write_report(report, tmp_path)
    strict(tmp_path / "report.json")


def test_numbers_that_are_not_finite_are_null(make: Any, tmp_path: Path) -> None:
    training = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 2.0, "eval/expected_acceptance": math.inf}]
    cost = {**make.cost, "break_even_acceptance": None, "predicted_speedup": math.nan}
    report = make.report(make.two_prompts(), training=training, cost=cost)
    write_report(report, tmp_path)
    read = strict(tmp_path / "report.json")
    assert read["training"] == [
        {"step": 1, "loss": None},
        {"step": 2, "loss": 2.0, "eval/expected_acceptance": None},
    ]
    assert read["cost"]["predicted_speedup"] is None


def test_a_broken_record_makes_no_report(make: Any) -> None:
    records = copy.deepcopy(make.two_prompts())
    records[0]["speculative"]["num_accepted"][0] = 3
    with pytest.raises(UserError, match="'a'.*3 accepted of 2"):
        make.report(records)


def test_the_seed_of_the_settings_draws_the_intervals(make: Any) -> None:
    records = make.many()
    given = {"pair": make.pair, "environment": {}, "cost": make.cost, "lossless": None, "training": []}
    reports = [build_report(records, settings={"seed": s}, hf_baseline=None, **given) for s in (0, 0, 1)]
    assert reports[0] == reports[1]
    assert reports[0]["overall"]["speedup_decode"]["ci95"] != reports[2]["overall"]["speedup_decode"]["ci95"]
    assert (
        reports[0]["overall"]["speedup_decode"]["value"] == reports[2]["overall"]["speedup_decode"]["value"]
    )


def test_a_folder_that_cannot_be_made_is_named(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="file"):
        write_report(make.report(make.two_prompts()), tmp_path / "file" / "report")


def test_half_a_character_does_not_stop_the_report(make: Any, tmp_path: Path) -> None:
    records = make.two_prompts()
    records[0]["prompt"] = "half \ud83d a pair"
    write_report(make.report(records), tmp_path)
    assert strict(tmp_path / "report.json")["prompts"][0]["prompt"] == "half ? a pair"
