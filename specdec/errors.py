"""The two endings that are not crashes: a request that is wrong, and an answer that is no."""

from __future__ import annotations


class UserError(ValueError):
    """The request is wrong: one line that says what, got, expected and fix (exit code 2).

    `str(error)` is "what: got ...; expected ...; fix: ...", where parts that were not given are left out
    and line breaks are folded, so that the message stays one line whatever the user's text held.
    """

    def __init__(self, what: str, *, got: object = None, expected: object = None, fix: object = None) -> None:
        parts = [
            f"{label} {_fold(value)}"
            for label, value in (("got", got), ("expected", expected), ("fix:", fix))
            if value is not None
        ]
        message = _fold(what)
        super().__init__(f"{message}: {'; '.join(parts)}" if parts else message)


class AnswerIsNo(Exception):
    """The command ran and the answer is no: a gate failed, a check found a mismatch (exit code 1)."""


def _fold(value: object) -> str:
    return " ".join(str(value).split())
