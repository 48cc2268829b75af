"""From records to numbers: right values by hand, and a report that survives whatever a prompt holds."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval.report import build_report, write_report
from specdec.errors import UserError

COST = {
    "c": 0.1, "v": {"1": 1.0, "2": 1.05, "3": 1.1}, "h": 0.02, "draft_length": 2, "best_draft_length": 2,
    "break_even_acceptance": 0.2, "predicted_speedup": 1.3, "plain_step_ms": 50.0, "draft_step_ms": 5.0,
}  # fmt: skip
PAIR = {
    "target": "t", "draft": "d", "target_parameters": 135_000_000, "draft_parameters": 35_000_000,
    "draft_length_policy": "Fixed(max_length=2)",
}  # fmt: skip
SETTINGS = {"batch_size": 1, "seed": 0}


def run(drafts: list[int], accepted: list[int], emitted: list[int], decode_s: float) -> dict[str, Any]:
    tokens = list(range(1 + sum(emitted)))
    return {
        "tokens": tokens, "text": "x" * len(tokens), "pieces": ["x"] * len(tokens), "finish": "length",
        "prefill_s": 1.0, "decode_s": decode_s, "draft_s": 0.2 * decode_s, "verify_s": 0.7 * decode_s,
        "host_s": 0.1 * decode_s, "num_drafts": drafts, "num_accepted": accepted, "num_emitted": emitted,
    }  # fmt: skip


def plain(tokens: int, decode_s: float) -> dict[str, Any]:
    zeros = [0] * (tokens - 1)
    return run(zeros, zeros, [1] * (tokens - 1), decode_s)


def record(name: str, spec: dict[str, Any], seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "prompt_id": name, "turn": 0, "domain": "code", "temperature": 0.0, "prompt_tokens": 5, "prompt": "p",
        "draft_length": 2, "plain": plain(len(spec["tokens"]), seconds), "speculative": spec, "lookup": None,
        "expected": {"sum": 3.0, "n": 6}, **more,
    }  # fmt: skip


def two_prompts() -> list[dict[str, Any]]:
    """a: three rounds, of which the last is trimmed; b: two rounds, one of them without drafts."""
    a = run([2, 2, 2], [2, 0, 2], [3, 1, 2], 3.0)  # 6 tokens behind the prefill's
    b = run([2, 0], [1, 0], [2, 1], 2.0)
    return [record("a", a, 6.0), record("b", b, 3.0, domain="prose", expected={"sum": 1.0, "n": 4})]


def build(records: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "pair": PAIR, "settings": SETTINGS, "environment": {}, "cost": COST, "lossless": None, "training": [],
        "hf_baseline": None, **more,
    }  # fmt: skip
    return build_report(records, **given)


def test_numbers_by_hand() -> None:
    overall = build(two_prompts())["overall"]
    value = {k: v["value"] for k, v in overall.items() if isinstance(v, dict)}
    assert value["expected_acceptance"] == pytest.approx(4 / 10)
    assert value["draft_acceptance_rate"] == pytest.approx(5 / 8)
    # In a's last round the second draft lies behind the end: 1 of 1 judged.
    assert value["draft_acceptance_rate_trimmed"] == pytest.approx((2 + 0 + 2 + 1) / (2 + 2 + 2 + 2))
    assert value["mean_accepted_length"] == pytest.approx(1 + 5 / 4)
    assert value["mean_accepted_length_macro"] == pytest.approx(((1 + 4 / 3) + 2) / 2)
    assert value["tokens_per_target_forward"] == pytest.approx(9 / 5)
    assert value["mean_draft_length"] == pytest.approx(8 / 5)
    assert value["tokens_per_s_speculative"] == pytest.approx(9 / 5)
    assert value["tokens_per_s_plain"] == pytest.approx(9 / 9)
    assert value["speedup_decode"] == pytest.approx(9 / 5)
    assert value["speedup_end_to_end"] == pytest.approx((11 / 7) / (11 / 11))
    assert [s["value"] for s in overall["acceptance_by_position"]] == pytest.approx([3 / 4, 2 / 3])
    assert overall["speedup_decode"]["n"] == overall["prompts"] == 2


def test_crosswalk_by_hand() -> None:
    rows = {(r["tool"], r["number"]): r["value"] for r in build(two_prompts())["crosswalk"]}
    assert rows["vLLM", "Mean acceptance length"] == pytest.approx(1 + 5 / 4)
    assert rows["vLLM", "Per-position acceptance rate"] == pytest.approx([3 / 4, 2 / 4])  # joint, not conditional
    assert rows["gpt-fast", "Mean Accepted"] == pytest.approx(5 / 4)  # the bonus token is left out
    assert rows["SGLang", "accept length"] == pytest.approx(11 / 5)  # the prefill's token is counted
    assert rows["Spec-Bench", "Speedup ratio"] == pytest.approx(
        ((7 / 4 + 4 / 3) / 2) / ((7 / 7 + 4 / 4) / 2)
    )


@pytest.mark.parametrize(
    ("speed", "verdict"), [(0.5, "pays"), (2.0, "does not pay"), (None, "within noise")]
)
def test_the_verdict_comes_from_the_interval(speed: float | None, verdict: str) -> None:
    records = []
    for i in range(8):
        seconds = 3.0 * (speed or (0.6 if i % 2 else 1.6))
        records.append(record(str(i), run([2, 2], [1, 1], [2, 2], seconds), 3.0))
    report = build(records)
    low, high = report["overall"]["speedup_decode"]["ci95"]
    assert report["verdict"] == verdict
    assert (low > 1, high < 1) == (verdict == "pays", verdict == "does not pay")
    assert f"{report['overall']['speedup_decode']['value']:.2f}x" in report["sentence"]


def test_one_prompt_has_no_interval_and_no_verdict() -> None:
    report = build(two_prompts()[:1])
    assert report["overall"]["speedup_decode"]["ci95"] is None
    assert report["verdict"] == "within noise"


def test_lowest_temperature_is_overall_and_each_has_its_block() -> None:
    warm = [{**r, "temperature": 1.0} for r in two_prompts()]
    warm[0]["speculative"] = run([2, 2, 2], [2, 0, 2], [3, 1, 2], 6.0)
    report = build([*warm, *two_prompts()])
    assert report["temperature"] == 0.0 and list(report["temperatures"]) == ["0", "1"]
    assert report["temperatures"]["0"] == report["overall"]
    assert report["temperatures"]["1"]["speedup_decode"]["value"] == pytest.approx(9 / 8)


def test_a_record_that_breaks_an_invariant_is_refused() -> None:
    records = two_prompts()
    records[0]["speculative"]["num_accepted"][0] = 3
    with pytest.raises(UserError, match="'a'"):
        build(records)
    with pytest.raises(UserError, match="no records"):
        build([])


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_pages_show_prompts_as_text_and_load_nothing(tmp_path: Path) -> None:
    nasty = "<script>alert('x')</script> & <img src=x onerror=alert(1)>"
    records = two_prompts()
    records[0]["prompt"] = nasty
    records[0]["speculative"]["pieces"][2] = nasty
    metrics = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "eval/expected_acceptance": 0.4}]
    lossless = {
        "dtype": "float32", "prompts": 2, "identical": 1,
        "divergences": [
            {"prompt_id": nasty, "position": 3, "plain": 1, "speculative": 2, "logit_gap": 1e-5, "class": "numeric tie"}
        ],
    }  # fmt: skip
    baseline = {
        "tokens_per_s": 10.0, "assisted_tokens_per_s": 11.0, "plain_tokens_per_s": 12.0,
        "speculative_tokens_per_s": 18.0, "prompts": 2, "num_tokens": 20,
    }  # fmt: skip
    report = build(records, training=metrics, lossless=lossless, hf_baseline=baseline)
    write_report(report, tmp_path)
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda x: pytest.fail(f"not JSON: {x}"))
    assert read["schema_version"] == 1 and read["overall"] == report["overall"]
    page = (tmp_path / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in tags.seen}
    assert not any(name.startswith("on") or name == "src" for _, attrs in tags.seen for name in attrs)
    assert nasty in tags.text
    assert not re.search(r"(?:href|src|url\()\W{0,2}https?:", page)
    assert sum(tag == "svg" for tag, _ in tags.seen) == 5
    text = (tmp_path / "report.md").read_text()
    assert text.startswith(f"# {report['sentence']}") and "| overall | 2 | 1.80" in text
    assert all(f"**{name}**" in text for name in report["definitions"])


def test_a_report_without_drafts_or_training(tmp_path: Path) -> None:
    records = [record("a", plain(5, 2.0), 2.0, expected=None)]
    report = build(records)
    assert report["overall"]["mean_accepted_length"]["value"] is None
    assert report["overall"]["acceptance_by_position"] == []
    write_report(report, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "No training curve" in page and "Not checked" in page


def test_every_statistic_has_value_interval_and_n() -> None:
    report = build(two_prompts())
    for block in (report["overall"], *report["domains"].values()):
        for name, found in block.items():
            for statistic in found if isinstance(found, list) else [found] if isinstance(found, dict) else []:
                assert set(statistic) == {"value", "ci95", "n"}, name
    needed = {"expected_acceptance", "draft_acceptance_rate", "mean_accepted_length", "tokens_per_target_forward"}
    assert needed <= set(report["definitions"]) and all(report["definitions"].values())
