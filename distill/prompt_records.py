"""Records of prompt files -> prompts. Three shapes are read:

    {"question_id": 1, "category": "code", "turns": ["first user turn", "second"]}      (Spec-Bench, MT-bench)
    {"id": "a", "domain": "code", "messages": [{"role": "user", "content": "..."}]}     (chat)
    {"id": "a", "prompt": "..."}                                                        (plain)

Strict: a record that is not one of these is named by file, line and field. A last assistant message of a chat
record is someone's answer, not part of the question; it is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAPES = "a record with turns, messages or prompt"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Something to ask."""

    id: str
    """Unique in its source."""
    domain: str
    """What kind of question it is; numbers are reported by domain."""
    group: str
    """Template-and-topic key: prompts of one group are never split apart."""
    messages: tuple[Mapping[str, Any], ...]
    """The conversation up to the answer; the last message is not an assistant's."""
    later_turns: tuple[str, ...] = ()
    """User turns asked after the target's own answer."""


def parse_records(
    records: Iterable[tuple[int, Mapping[str, Any]]], source: str, *, default_domain: str
) -> tuple[Prompt, ...]:
    """(line number, record) pairs -> prompts, in order. Raises UserError naming line, id and field."""
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, record in records:
        prompt = _parse(record, f"{source} line {number}", number, default_domain)
        if prompt.id in lines:
            raise UserError(
                f"{source} line {number}: id {prompt.id!r} occurs twice",
                got=f"lines {lines[prompt.id]} and {number}",
                expected="each id once",
                fix="number the records anew",
            )
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{source} has no prompts", got="0 records", expected=f"one or more, each {SHAPES}")
    return tuple(prompts)


def _parse(record: Mapping[str, Any], where: str, number: int, default_domain: str) -> Prompt:
    name = _first(record, ("question_id", "id"))
    identity = str(number if name is None else name)
    where = f"{where} (id {identity!r})"
    domain = _first(record, ("domain", "category"))
    messages, later = _conversation(record, where)
    key = hashlib.sha256(json.dumps([messages, later], sort_keys=True).encode()).hexdigest()[:16]
    return Prompt(
        id=identity,
        domain=str(domain) if domain is not None else default_domain,
        group=str(record.get("group") or key),
        messages=tuple(messages),
        later_turns=tuple(later),
    )


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _conversation(record: Mapping[str, Any], where: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    if record.get("turns") is not None:
        return _turns(record["turns"], where)
    if record.get("messages") is not None:
        return _messages(record["messages"], where), []
    if record.get("prompt") is not None:
        return [{"role": "user", "content": _asked(record["prompt"], f"{where}, field prompt")}], []
    raise UserError(
        f"{where}: no prompt", got=f"fields {', '.join(sorted(record)) or 'none'}",
        expected="field turns, messages or prompt",
    )  # fmt: skip


def _turns(turns: Any, where: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    if not isinstance(turns, list) or not turns:
        raise UserError(
            f"{where}, field turns", got=_kind(turns), expected="a list of user turns", fix='["..."]'
        )
    asked = [_asked(turn, f"{where}, field turns[{i}]") for i, turn in enumerate(turns)]
    return [{"role": "user", "content": asked[0]}], asked[1:]


def _messages(messages: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}, field messages", got=_kind(messages), expected="a list of messages")
    kept: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        field = f"{where}, field messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            got = message.get("role", "no role") if isinstance(message, dict) else _kind(message)
            raise UserError(field, got=got, expected=f"an object with role, one of {', '.join(ROLES)}")
        if message["role"] == "user":
            _asked(message.get("content"), f"{field}.content")
        kept.append({key: value for key, value in message.items() if value is not None})
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()
    if not any(message["role"] == "user" for message in kept):
        raise UserError(f"{where}, field messages", got="no user message", expected="a question to answer")
    return kept


def _asked(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise UserError(where, got=_kind(text), expected="text")
    if not text.strip():
        raise UserError(where, got="an empty turn", expected="text that asks something")
    return text


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "null"}.get(type(value), repr(value))
