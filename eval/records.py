"""What a decode record must satisfy before any number is drawn from it.

A record is one prompt turn at one temperature: a plain run and a speculative run (and, where asked for, a
prompt-lookup run) of the same engine. `tokens[0]` comes from the prefill; every later target forward is one round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import UserError

Record = Mapping[str, Any]
Run = Mapping[str, Any]
RUNS = ("plain", "speculative", "lookup")
TIMES = ("prefill_s", "decode_s", "draft_s", "verify_s", "host_s")
FINISHES = ("eos", "stop", "length")


def check_records(records: Sequence[Record]) -> None:
    """Hold every record to the decoder's invariants.

    Raises:
        UserError: there is no record, one is there twice, or one breaks a rule; names prompt, turn, run and rule.
    """
    if not records:
        raise UserError("the evaluation has no records", got=0, expected="at least one decoded prompt")
    seen = set()
    for record in records:
        key = (record["prompt_id"], record["turn"], record["temperature"])
        if key in seen:
            raise UserError(
                _where(record), got="two records", expected="one per prompt, turn and temperature"
            )
        seen.add(key)
        for name in RUNS:
            run = record.get(name)
            if run is None and name == "lookup":
                continue
            broken = "the run is missing" if run is None else _broken_rule(run, plain=name == "plain")
            if broken is not None:
                raise UserError(
                    f"{_where(record)}, {name} run",
                    got=broken,
                    expected="a consistent record",
                    fix="decode this prompt again; if it comes back, the decoder is at fault",
                )
        _check_expected(record)


def _where(record: Record) -> str:
    return f"record {record['prompt_id']!r}, turn {record['turn']}, temperature {record['temperature']:g}"


def _broken_rule(run: Run, *, plain: bool) -> str | None:
    """The first rule that a run breaks, in words; None where it breaks none."""
    drafts, accepted, emitted = run["num_drafts"], run["num_accepted"], run["num_emitted"]
    if not len(drafts) == len(accepted) == len(emitted):
        return f"{len(drafts)} num_drafts, {len(accepted)} num_accepted, {len(emitted)} num_emitted (lengths differ)"
    last = len(drafts) - 1
    for i, (k, a, e) in enumerate(zip(drafts, accepted, emitted, strict=True)):
        if not 0 <= a <= k:
            return f"round {i}: {a} accepted of {k} drafted (0 <= a <= K)"
        if not 1 <= e <= a + 1:
            return f"round {i}: {e} emitted with {a} accepted (1 <= emitted <= a + 1)"
        if e < a + 1 and i < last:
            return f"round {i}: {e} emitted with {a} accepted, though only the last round may be trimmed"
    if sum(emitted) != len(run["tokens"]) - 1:
        return f"{sum(emitted)} emitted in rounds, {len(run['tokens'])} tokens (sum(num_emitted) = len(tokens) - 1)"
    if plain and any(drafts):
        return "plain decoding with drafts (num_drafts must be 0 throughout)"
    if run["finish"] not in FINISHES:
        return f"finish {run['finish']!r} (one of {', '.join(FINISHES)})"
    for name in TIMES:
        if not (_is_finite(run[name]) and run[name] >= 0):
            return f"{name} = {run[name]} (a finite time, not negative)"
    if drafts and run["decode_s"] == 0:
        return f"{len(drafts)} rounds in decode_s = 0"
    pieces = run.get("pieces")
    if pieces is not None and len(pieces) != len(run["tokens"]):
        return f"{len(pieces)} pieces for {len(run['tokens'])} tokens"
    return None


def _is_finite(value: Any) -> bool:
    """False for NaN and infinity, and for the null that JSON lines hold in their place."""
    return isinstance(value, int | float) and math.isfinite(value)


def _check_expected(record: Record) -> None:
    expected = record.get("expected")
    if expected is None:
        return
    total, n = expected["sum"], expected["n"]
    slack = 1e-3 * (n + 1)  # fp32 sums over wide vocabularies round a little
    if n < 0 or not _is_finite(total) or not -slack <= total <= n + slack:
        raise UserError(
            _where(record), got=f"expected acceptance {total} over {n} positions", expected="0 <= sum <= n"
        )
