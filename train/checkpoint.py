"""Checkpoints: whole or absent, checked before they are trusted, resumed bit for bit.

`checkpoints/step-000100/` is a plain `from_pretrained` folder; its `trainer/` holds the optimizer's moments
and a
`state.json` with the step and the SHA-256 of every file. Random numbers need no saving: batches and the
generator's seed are functions of (seed, step).
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from distill.student import save_draft
from specdec.errors import UserError
from specdec.files import atomic_dir, sha256_file, write_atomic
from train.tracking import METRICS, read_metrics

STATE = "trainer/state.json"
OPTIMIZER = "trainer/optimizer.safetensors"
SCORE = "eval/expected_acceptance"


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def all_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    found = [p for p in (run_dir / "checkpoints").glob("step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=step_of)


def save(
    run_dir: Path,
    *,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    head_ids: Tensor | None,
    bad_steps: int,
) -> Path:
    """Write one checkpoint; a kill at any moment leaves either the whole folder or none."""
    folder = folder_of(run_dir, step)
    with atomic_dir(folder) as temporary:
        save_draft(model, tokenizer, temporary, head_ids=head_ids)
        (temporary / "trainer").mkdir()
        save_file(dict(_moments(model, optimizer)), temporary / OPTIMIZER)
        files = {
            str(p.relative_to(temporary)): sha256_file(p) for p in sorted(temporary.rglob("*")) if p.is_file()
        }
        state = {
            "step": step,
            "bad_steps": bad_steps,
            "trainable": [name for name, p in model.named_parameters() if p.requires_grad],
            "files": files,
        }
        write_atomic(temporary / STATE, json.dumps(state, indent=1) + "\n")
    return folder


def _moments(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{key}/{name}", value.detach().cpu().contiguous()


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None when every file is there and unchanged."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        files: dict[str, str] = state["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{STATE} is missing or unreadable"
    for name, digest in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256_file(folder / name) != digest:
            return f"{name} is damaged"
    return None


def latest(run_dir: Path) -> Path | None:
    """The newest whole checkpoint; damaged ones are passed over, by name on stderr."""
    for folder in reversed(all_checkpoints(run_dir)):
        fault = problem(folder)
        if fault is None:
            return folder
        print(f"checkpoint {folder} skipped: {fault}", file=sys.stderr)
    return None


def restore(folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put weights and moments back bit for bit; returns the saved state (`step`, `bad_steps`)."""
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    try:
        model.load_state_dict(saved)
    except RuntimeError:
        raise UserError(
            f"checkpoint {folder} does not fit the draft of this config", fix="choose another run.dir"
        ) from None
    moments = load_file(folder / OPTIMIZER)
    for name, parameter in model.named_parameters():
        state = {
            key.partition("/")[0]: value for key, value in moments.items() if key.partition("/")[2] == name
        }
        if state:
            optimizer.state[parameter] = {
                k: v.clone() if k == "step" else v.to(parameter.device, copy=True) for k, v in state.items()
            }
    return read_state(folder)


def read_state(folder: Path) -> dict[str, Any]:
    """`step`, `bad_steps`, names of the `trainable` parameters, and `files` with their SHA-256."""
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return state


def best(run_dir: Path) -> Path | None:
    """The checkpoint with the highest expected acceptance on the selection split.

    All checkpoints of a run have one shape and so one cost: the higher acceptance is the higher predicted
    speedup.
    """
    kept = {step_of(p): p for p in all_checkpoints(run_dir)}
    scores = {
        r["step"]: r[SCORE] for r in read_metrics(run_dir / METRICS) if SCORE in r and r["step"] in kept
    }
    return kept[max(scores, key=lambda step: (scores[step], step))] if scores else None


def point_at_best(run_dir: Path) -> Path | None:
    """Refresh the link `best` of a run folder; the link is swapped in one move."""
    folder = best(run_dir)
    if folder is not None:
        temporary = run_dir / ".best.new"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder.relative_to(run_dir))
        os.replace(temporary, run_dir / "best")
    return folder


def sweep(run_dir: Path) -> None:
    """Remove what a kill left half written."""
    for folder in (run_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(folder, ignore_errors=True)


def prune(run_dir: Path, keep: int, protected: Sequence[Path | None] = ()) -> None:
    """Delete all but the newest `keep` checkpoints and the protected ones."""
    for folder in all_checkpoints(run_dir)[:-keep] if keep > 0 else []:
        if folder not in protected:
            shutil.rmtree(folder)
