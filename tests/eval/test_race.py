"""Races: who runs when, what is counted, and that transformers' answers are counted to their end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eval import race as races
from eval.race import Contestant, race


def test_every_contestant_meets_every_batch_and_the_first_one_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []
    monkeypatch.setattr(races.time, "perf_counter", lambda: now[0])

    def contestant(name: str, seconds: float) -> Contestant:
        def decode(prompts: races.Prompts) -> int:
            order.append(name)
            now[0] += seconds
            return 10 * len(prompts)

        return decode

    tallies = race(
        {"slow": contestant("slow", 2.0), "fast": contestant("fast", 0.5)},
        [("code", [[1], [2]]), ("prose", [[3]]), ("code", [[4]])],
    )
    assert order == ["slow", "fast", "slow", "fast", "fast", "slow", "slow", "fast"]
    assert dict(tallies["slow"].seconds) == {"code": 4.0, "prose": 2.0}
    assert dict(tallies["slow"].tokens) == {"code": 30, "prose": 10}
    assert tallies["slow"].speed() == pytest.approx(40 / 6)
    assert tallies["fast"].speed("code") == pytest.approx(30.0)


@pytest.mark.parametrize(("tokens", "length"), [([5, 6, 2, 2], 3), ([2], 1), ([5, 6], 2), ([], 0)])
def test_an_answer_ends_with_its_eos(tokens: list[int], length: int) -> None:
    count: Callable[[list[int], frozenset[int]], int] = races._length
    assert count(tokens, frozenset({2})) == length
