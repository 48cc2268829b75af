"""kill -9 at every stage: the same command finishes, and the result is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

KILLS = 3
TIMES = ("_s", "_ms", "tokens_per_s", "speedup", "cost", "verdict", "environment", "sentence", "hf_", "baselines")


def write_config(folder: Path, target: Path) -> Path:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": i, "prompt": f"hello world {i}"}) + "\n" for i in range(60)))
    config = {
        "run": {"dir": str(folder / "run")},
        "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
        "draft": {"layers": [0], "head_size": 200},
        "prompts": {"sources": [{"name": str(prompts)}], "held_out": 0.4},
        "generate": {"max_new_tokens": 24, "batch_size": 3},
        "train": {"steps": 60, "max_length": 128, "batch_tokens": 512, "save_every": 5, "eval_every": 10},
        "eval": {
            "draft_length": 3, "max_new_tokens": 24, "lossless_prompts": 2, "baseline_prompts": 0,
            "temperatures": [0.0, 1.0],
        },
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def start(python: str, root: Path, config: Path) -> subprocess.Popen[str]:
    command = [python, "-c", "from draftsmith import main; main()", "run", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=config.parent, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-2000:]
    return out


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def progress_of(run: Path) -> dict[str, Callable[[], int]]:
    """A counter of finished units for each stage."""
    return {
        "generate": lambda: len(list((run / "responses").glob("shard-*.jsonl"))),
        "train": lambda: lines(run / "metrics.jsonl"),
        "eval": lambda: sum(lines(p) for p in run.glob("eval/*/prompts.jsonl")),
    }


def kill_after_progress(process: subprocess.Popen[str], count: Callable[[], int]) -> None:
    """Kill -9 as soon as the stage has finished one more unit than it had."""
    before, deadline = count(), time.monotonic() + 120
    while count() <= before:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not any(word in k for word in TIMES)}
        return {k: without_times(v) for k, v in kept.items()}
    if isinstance(value, list):
        timed = "Speedup ratio"  # a crosswalk row that is a ratio of times
        return [without_times(v) for v in value if not (isinstance(v, dict) and v.get("number") == timed)]
    return value


def test_three_kills_in_each_stage_change_nothing(
    tmp_path: Path, tiny_target_dir: Path, root: Path, python: str
) -> None:
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    configs = [write_config(folder, tiny_target_dir) for folder in folders]
    finish(start(python, root, configs[0]))
    run = folders[1] / "run"
    for count in progress_of(run).values():
        for _ in range(KILLS):
            before = {p: p.stat().st_mtime_ns for p in (run / "responses").glob("*.jsonl")}
            kill_after_progress(start(python, root, configs[1]), count)
            assert before.items() <= {p: p.stat().st_mtime_ns for p in (run / "responses").glob("*.jsonl")}.items()
    finish(start(python, root, configs[1]))

    whole, killed = (folder / "run" for folder in folders)
    ours, theirs = (load_file(r / "best" / "model.safetensors") for r in (whole, killed))
    assert ours.keys() == theirs.keys() and all(bool((ours[k] == theirs[k]).all()) for k in ours)
    assert (whole / "best").resolve().name == (killed / "best").resolve().name
    steps = [json.loads(line).get("step") for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and set(range(1, 61)) <= set(steps)
    reports = [json.loads(next(r.glob("eval/*/report.json")).read_text()) for r in (whole, killed)]
    for report in reports:
        report["pair"].pop("draft")  # its path
    assert without_times(reports[0]) == without_times(reports[1])
    assert reports[0]["overall"]["mean_accepted_length"]["n"] > 0
