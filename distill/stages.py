"""The run folder and its stages: same fingerprint and done means skipped; another one means another run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.files import fingerprint, write_atomic

STAGES_FILE = "stages.json"


class Stages:
    """The record of finished and begun stages of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / STAGES_FILE
        self.records: dict[str, dict[str, Any]] = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.is_file():
            return {}
        try:
            records = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError:
            raise UserError(
                f"{self.path} is not valid JSON", fix="delete it, or choose another run.dir"
            ) from None
        if not isinstance(records, dict):
            raise UserError(f"{self.path} is not a JSON object", fix="delete it, or choose another run.dir")
        return records

    def begun(self, stage: str) -> bool:
        """Whether the stage has ever started here."""
        return stage in self.records

    def is_done(self, stage: str, inputs: Mapping[str, Any]) -> bool:
        """Whether the stage finished with exactly these inputs."""
        record = self.records.get(stage, {})
        return bool(record.get("done")) and record.get("fingerprint") == fingerprint(inputs)

    def check_same(self, stage: str, inputs: Mapping[str, Any]) -> None:
        """Refuse to mix two configs in one folder. Raises UserError naming what differs."""
        record = self.records.get(stage)
        if record is None or record["fingerprint"] == fingerprint(inputs):
            return
        before = record.get("inputs", {})
        changed = sorted(
            _changed(json.loads(json.dumps(before, default=str)), json.loads(json.dumps(inputs, default=str)))
        )
        raise UserError(
            f"run folder {self.path.parent} belongs to another config",
            got=f"different {', '.join(changed[:5]) or 'settings'} in stage {stage}",
            expected="the settings it was started with",
            fix="choose another run.dir",
        )

    def mark(self, stage: str, inputs: Mapping[str, Any], *, done: bool, **extra: Any) -> None:
        """Record that a stage has begun or is done; what others recorded meanwhile stays."""
        self.records = self._read()
        self.records[stage] = {
            "fingerprint": fingerprint(inputs),
            "done": done,
            **extra,
            "inputs": dict(inputs),
        }
        write_atomic(self.path, json.dumps(self.records, indent=1, default=str) + "\n")


def _changed(before: Any, now: Any, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            name
            for key in before.keys() | now.keys()
            for name in _changed(before.get(key), now.get(key), f"{prefix}.{key}".lstrip("."))
        ]
    return [] if before == now else [prefix]
