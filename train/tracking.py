"""Where the numbers of a run go: metrics.jsonl always, wandb beside it when asked."""

import json
import uuid
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.files import append_jsonl, recover_jsonl, write_atomic

METRICS = "metrics.jsonl"


class Tracker:
    """Appends records; on resume first cuts back what the lost steps wrote. Only the main process has one
    that writes.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        trackers: tuple[str, ...],
        after_step: int,
        settings: dict[str, Any],
        active: bool,
    ) -> None:
        self.path, self.active = run_dir / METRICS, active
        self._wandb = None
        if not active:
            return
        cut_back(self.path, after_step)
        if "wandb" in trackers:
            self._wandb = _start_wandb(run_dir, settings)

    def log(self, record: dict[str, Any]) -> None:
        """Write one record; it has to carry its `step`."""
        if not self.active:
            return
        append_jsonl(self.path, record)
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


def cut_back(path: Path, step: int) -> None:
    """Drop the records after `step`: they describe steps that will be taken again."""
    records = recover_jsonl(path)
    kept = [r for r in records if r.get("step", 0) <= step]
    if len(kept) < len(records):
        write_atomic(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records, touching nothing: another process may be writing the last line."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines if line.strip()]


def _start_wandb(run_dir: Path, settings: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(
            "train.trackers has wandb",
            got="package wandb is not installed",
            fix="pip install wandb, or train.trackers=[jsonl]",
        ) from None
    # The id lives in the run folder: a resumed run goes on in the same chart instead of opening a new one.
    id_file = run_dir / "wandb-id"
    if not id_file.exists():
        write_atomic(id_file, uuid.uuid4().hex[:8])
    return wandb.init(
        project="draftsmith",
        id=id_file.read_text().strip(),
        resume="allow",
        dir=str(run_dir),
        config=settings,
    )
