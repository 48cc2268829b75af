"""The two ways a command can end badly: the request is wrong (exit 2), or it ran and the answer is no (exit 1)."""

from typing import Any


class UserError(ValueError):
    """A request that cannot be served, as one line: what, got, expected, fix."""

    def __init__(self, what: str, *, got: Any = None, expected: Any = None, fix: str | None = None) -> None:
        parts = [f"got {got}" if got is not None else "", f"expected {expected}" if expected is not None else "", f"fix: {fix}" if fix else ""]
        tail = "; ".join(p for p in parts if p)
        super().__init__(" ".join(f"{what}: {tail}".split()) if tail else " ".join(what.split()))


class AnswerIsNo(Exception):
    """The command ran and its answer is no: a gate failed, a check found a mismatch."""
