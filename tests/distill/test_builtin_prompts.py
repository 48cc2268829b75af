"""The built-in prompts: enough of each domain, none twice, every text a finished sentence."""

from __future__ import annotations

from collections import Counter

import pytest

from distill.builtin_prompts import BuiltinPrompt, builtin_prompts


@pytest.fixture(scope="module")
def prompts() -> tuple[BuiltinPrompt, ...]:
    return builtin_prompts()


def test_every_domain_has_enough_prompts(prompts: tuple[BuiltinPrompt, ...]) -> None:
    counts = Counter(p.domain for p in prompts)
    assert set(counts) == {"code", "structured", "factual", "prose"}
    assert len(prompts) >= 2000
    assert min(counts.values()) >= 500


@pytest.mark.parametrize("field", ["id", "group", "text"])
def test_nothing_occurs_twice(prompts: tuple[BuiltinPrompt, ...], field: str) -> None:
    counts = Counter(getattr(p, field) for p in prompts)
    assert [value for value, n in counts.items() if n > 1] == []


def test_group_is_the_cell_of_the_same_domain(prompts: tuple[BuiltinPrompt, ...]) -> None:
    assert all(p.group.startswith(f"{p.domain}/") and p.group.count("/") == 3 for p in prompts)


def test_texts_are_finished(prompts: tuple[BuiltinPrompt, ...]) -> None:
    def finished(text: str) -> bool:
        # The shortest sound question is "What is DNA?".
        return (
            text[-1] in ".?:" and not {"{", "}"} & set(text) and "  " not in text and 12 <= len(text) <= 300
        )

    assert [p.text for p in prompts if not finished(p.text)] == []


def test_two_calls_agree(prompts: tuple[BuiltinPrompt, ...]) -> None:
    assert builtin_prompts() == prompts
