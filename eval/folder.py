"""The folder of one evaluation: what was asked for, what is measured already, and the records so far.

`settings.json` names what the numbers depend on, `measured.json` holds costs and baselines, `prompts.jsonl` one record
a line. A killed evaluation goes on behind its last whole record; another evaluation is refused the folder.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.files import append_jsonl, fingerprint, recover_jsonl, write_atomic

Key = tuple[str, int, float]
"""prompt id, turn, temperature."""


class EvalFolder:
    """Results of one evaluation on disk. Raises UserError when the folder belongs to another one."""

    def __init__(self, path: Path, inputs: Mapping[str, Any]) -> None:
        self.path, self.inputs = path, inputs
        before = self._read("settings.json")
        if before and before["fingerprint"] != fingerprint(inputs):
            changed = [name for name, value in inputs.items() if before["inputs"].get(name) != value]
            raise UserError(
                f"{path} holds another evaluation",
                got=f"different {', '.join(changed)}",
                expected="the settings it was started with",
                fix="choose another eval.out, or delete the folder",
            )
        self.measured = self._read("measured.json")
        self.records = recover_jsonl(path / "prompts.jsonl")

    def begin(self) -> None:
        """Write the settings; from here on the folder belongs to this evaluation."""
        record = {"fingerprint": fingerprint(self.inputs), "inputs": self.inputs}
        write_atomic(self.path / "settings.json", json.dumps(record, indent=1) + "\n")

    def measure(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, done once and kept."""
        if name not in self.measured:
            self.measured[name] = work()
            write_atomic(self.path / "measured.json", json.dumps(self.measured, indent=1) + "\n")
        return self.measured[name]

    def get(self, key: Key) -> dict[str, Any] | None:
        """The record of one prompt turn at one temperature, if it is there."""
        return next((record for record in self.records if _key(record) == key), None)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record."""
        append_jsonl(self.path / "prompts.jsonl", record)
        self.records.append(record)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise UserError(
                f"{path} is not valid JSON", fix=f"delete {self.path} and evaluate again"
            ) from None
        assert isinstance(found, dict)
        return found


def _key(record: Mapping[str, Any]) -> Key:
    return record["prompt_id"], record["turn"], record["temperature"]
