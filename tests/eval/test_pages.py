"""Pages that stay text whatever a prompt holds, and that load nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from eval.pages import cell, fenced, html_page, markdown_page, number, statistic

NASTY = "<script>alert('x')</script> & \"<img src=x onerror=alert(1)>\" {{ 7*7 }} | `a`\n# not a title"
VOID = {"meta", "br", "path", "rect", "use"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; a tag that closes another one's element is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.marked = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "mark" in self.open:
            self.marked += data


def nasty_report(make: Any) -> dict[str, Any]:
    """Prompts, answers, domains, ids and paths that try to be HTML."""
    records = make.many(prompts=8, domains=("code", NASTY), temperatures=(0.0, 1.0))
    for record in records:
        record["prompt"] = NASTY
        record["speculative"]["pieces"][2] = NASTY
    divergence = {**make.lossless["divergences"][0], "prompt_id": NASTY, "plain": None}
    report = make.report(
        records,
        pair={**make.pair, "draft": NASTY},
        environment={"command": [NASTY], "devices": []},
        lossless={**make.lossless, "divergences": [divergence]},
        training=make.training(),
        hf_baseline=make.hf_baseline,
    )
    assert isinstance(report, dict)
    return report


def test_what_users_wrote_is_shown_as_text(make: Any) -> None:
    page = Page(html_page(nasty_report(make)))
    assert not {"script", "img", "iframe", "object", "link", "form"} & {tag for tag, _ in page.seen}
    assert not any(name.startswith("on") or name == "src" for _, attrs in page.seen for name in attrs)
    assert page.text.count(NASTY) >= 12  # six prompts, six answers
    assert "49" not in page.text.split(NASTY[:10])[1][:80]  # no template within a template


def test_the_page_loads_nothing(make: Any) -> None:
    text = html_page(make.report(make.many(), training=make.training()))
    page = Page(text)
    assert not any(name in ("src", "srcset", "data") for _, attrs in page.seen for name in attrs)
    links = [value or "" for _, attrs in page.seen for name, value in attrs.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"url\((?!#)|@import", text)
    policy = [attrs["content"] for tag, attrs in page.seen if tag == "meta" and "http-equiv" in attrs]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_ids_are_unique_and_references_hold(make: Any) -> None:
    text = html_page(make.report(make.many(), training=make.training()))
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)


def test_the_same_report_gives_the_same_bytes(make: Any) -> None:
    report = make.report(make.many(), training=make.training())
    assert html_page(report) == html_page(report)


def test_accepted_drafts_are_marked(make: Any) -> None:
    records = make.two_prompts()[:1]
    spec = records[0]["speculative"]
    spec["pieces"] = ["one ", "two ", "three ", "four ", "five ", "six"]
    spec["text"] = "".join(spec["pieces"])
    report = make.report(records)
    page = Page(html_page(report))
    assert page.marked.replace("Marked", "") == "two three six"
    assert "one ⟦two three ⟧four five ⟦six⟧" in markdown_page(report)


@pytest.mark.parametrize("show", [html_page, markdown_page])
def test_numbers_stand_on_the_page(make: Any, show: Any) -> None:
    report = make.report(make.two_prompts(), hf_baseline=make.hf_baseline, lossless=make.lossless)
    text = show(report)
    text = Page(text).text if show is html_page else text
    assert report["sentence"] in text
    for words in ("134,515,008", "7 of 8 answers", "numeric tie", "0.0000250", "SGLang", "Fixed(max"):
        assert words in text, words
    for name in report["definitions"]:
        assert name in text
    assert "No training curve" in text
    assert "Prompt lookup was not raced" in text and "speedup of prompt lookup" not in text


@pytest.mark.parametrize("show", [html_page, markdown_page])
def test_what_was_not_measured_is_said(make: Any, show: Any) -> None:
    text = show(make.report([make.record("a", make.plain(3), expected=None)]))
    for words in ("Not checked", "was not timed", "No training curve"):
        assert words in text
    shown = text.partition("Definitions")[0]
    assert not re.search(r"\b(?:None|nan|inf)\b", shown)


def test_generate_without_an_assisted_run(make: Any) -> None:
    """Plain decodes 10 tokens in 10 s; `generate` was twice as fast."""
    baseline = {**make.hf_baseline, "tokens_per_s": 2.0, "assisted_tokens_per_s": None}
    text = markdown_page(make.report(make.two_prompts(), hf_baseline=baseline))
    assert "| transformers generate | 2.00 | 2.00 |" in text and "assisted" not in text


def test_plain_of_the_same_race_is_preferred(make: Any) -> None:
    baseline = {**make.hf_baseline, "plain_tokens_per_s": 40.0, "speculative_tokens_per_s": 60.0}
    text = markdown_page(make.report(make.two_prompts(), hf_baseline=baseline))
    assert "| transformers generate | 20.0 | 0.500 |" in text
    assert "| draftsmith, speculative | 60.0 | 1.50 |" in text


def test_markdown_tables_are_whole(make: Any) -> None:
    """Each row of a table has as many cells as its head, whatever the names hold."""
    width, tables, inside = 0, 0, False
    for line in markdown_page(nasty_report(make)).splitlines():
        inside ^= line.startswith("```")
        cells = len(re.findall(r"(?<!\\)\|", line))
        if inside or not line.startswith("|"):
            width = 0
        elif width == 0:
            width, tables = cells, tables + 1
        else:
            assert cells == width, line
    assert tables == 11


def test_training_table_is_thinned_and_keeps_the_last(make: Any) -> None:
    report = make.report(make.two_prompts(), training=make.training(steps=2500))
    section = markdown_page(report).partition("## Training")[2].partition("##")[0]
    steps = [line.split("|")[1].strip() for line in section.splitlines() if re.match(r"\| \d", line)]
    assert steps[-1] == "2,500" and 5 <= len(steps) <= 10


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (float("nan"), "-"), (0.0, "0"), (0, "0"), (7, "7"), (134515008, "134,515,008"),
        (1.4249, "1.42"), (0.0000251, "0.0000251"), (123.4, "123"), (12345.6, "12,346"), (-0.5, "-0.500"),
        ("auto", "auto"), (True, "True"),
    ],
)  # fmt: skip
def test_numbers_for_readers(value: Any, text: str) -> None:
    assert number(value) == text


def test_statistics_for_readers() -> None:
    assert statistic({"value": 1.418, "ci95": [1.35, 1.49], "n": 48}) == "1.42 (1.35 to 1.49)"
    assert statistic({"value": 1.418, "ci95": None, "n": 1}) == "1.42"
    assert statistic({"value": None, "ci95": None, "n": 0}) == "-"


def test_text_in_markdown() -> None:
    assert cell("a|b\n<b>*c*</b>") == r"a\|b &lt;b>\*c\*&lt;/b>"
    assert fenced("a ```` b").splitlines() == ["`````text", "a ```` b", "`````"]
