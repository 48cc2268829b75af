"""A record that no correct decoder can leave behind is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from eval.records import check_records
from specdec.errors import UserError

Damage = Callable[[dict[str, Any]], None]


def put(path: str, value: Any) -> Damage:
    """Set `run.field` or `run.field.index` of a record."""

    def damage(record: dict[str, Any]) -> None:
        *folders, last = path.split(".")
        place: Any = record
        for name in folders:
            place = place[name]
        place[int(last) if last.isdigit() else last] = value

    return damage


BROKEN: dict[str, tuple[Damage, str]] = {
    "more accepted than drafted": (put("speculative.num_accepted.0", 3), "round 0: 3 accepted of 2"),
    "negative acceptance": (put("speculative.num_accepted.1", -1), "round 1: -1 accepted"),
    "more emitted than accepted and one": (put("speculative.num_emitted.1", 2), "round 1: 2 emitted"),
    "a round without a token": (put("speculative.num_emitted.1", 0), "round 1: 0 emitted"),
    "trimmed in the middle": (put("speculative.num_emitted.0", 2), "only the last round"),
    "a round too few": (put("speculative.num_drafts", [2, 2]), "lengths differ"),
    "a token too many": (put("speculative.tokens", [1] * 7), "5 emitted in rounds, 7 tokens"),
    "no tokens": (put("speculative.tokens", []), "0 tokens"),
    "an unknown finish": (put("speculative.finish", ""), "finish ''"),
    "time runs backwards": (put("speculative.verify_s", -0.1), "verify_s"),
    "no time": (put("speculative.decode_s", float("nan")), "decode_s"),
    "null time": (put("speculative.host_s", None), "host_s"),
    "rounds in no time": (put("plain.decode_s", 0.0), "decode_s = 0"),
    "pieces of another answer": (put("speculative.pieces", ["x"]), "1 pieces for 6 tokens"),
    "plain decoding that drafts": (put("plain.num_drafts.0", 1), "plain decoding with drafts"),
    "a missing run": (put("speculative", None), "missing"),
    "overlap above 1": (put("expected", {"sum": 6.1, "n": 6}), "expected acceptance 6.1"),
    "overlap that is no number": (put("expected", {"sum": float("nan"), "n": 6}), "expected acceptance"),
    "null overlap": (put("expected", {"sum": None, "n": 6}), "expected acceptance"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_is_refused(make: Any, name: str) -> None:
    damage, words = BROKEN[name]
    records = copy.deepcopy(make.two_prompts())
    damage(records[0])
    with pytest.raises(UserError) as refused:
        check_records(records)
    assert "record 'a', turn 0, temperature 0" in str(refused.value)
    assert words in str(refused.value)


def test_a_broken_lookup_run_is_refused_too(make: Any) -> None:
    records = copy.deepcopy(make.many(prompts=4))
    records[2]["lookup"]["num_accepted"][0] = 99
    with pytest.raises(UserError, match="prose-2.*lookup run"):
        check_records(records)


def test_no_records_are_refused() -> None:
    with pytest.raises(UserError, match="no records"):
        check_records([])


def test_the_same_prompt_twice_is_refused_and_its_turns_and_temperatures_are_not(make: Any) -> None:
    first = make.two_prompts()[0]
    check_records([first, {**first, "turn": 1}, {**first, "temperature": 1.0}])
    with pytest.raises(UserError, match="two records"):
        check_records([first, {**first, "domain": "prose"}])


def test_records_that_a_decoder_can_leave_behind_are_accepted(make: Any) -> None:
    for seed in range(5):
        check_records(make.many(temperatures=(0.0, 1.0), seed=seed))
    first = make.two_prompts()[0]
    only_prefill = make.run([], [], [], decode_s=0.0)
    check_records([{**first, "plain": only_prefill, "speculative": only_prefill, "expected": None}])
    check_records([{**first, "expected": {"sum": 6.0005, "n": 6}}])  # fp32 rounds
    bare = {key: value for key, value in first["speculative"].items() if key != "pieces"}
    check_records([{**first, "speculative": bare}])
