"""Two real gloo processes against one: the same global batches have to give the same curve."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = (
    "target.dtype=float32 target.device=cpu draft.layers=[0] generate.max_new_tokens=32 train.steps=30 "
    "train.batch_tokens=256 train.max_length=128 train.lr=3e-3 train.eval_every=10 train.save_every=30 "
    "train.precision=fp32"
)
LAUNCH = (
    "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0 -m train"
)


def run(root: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, timeout=180, cwd=root
    )


def curve(run_dir: Path, key: str) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


@pytest.mark.slow
def test_two_processes_follow_one(root: Path, tmp_path: Path, run_dir: Path, tiny_target_dir: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"target": {"path": str(tiny_target_dir)}}))
    other = Path(shutil.copytree(run_dir, tmp_path / "other"))
    two = run(
        root, [*LAUNCH.split(), str(config), *SETTINGS.split(), f"run.dir={other}", "train.parallel=ddp"]
    )
    assert two.returncode == 0, two.stderr[-3000:]
    one = run(root, ["-m", "train", str(config), *SETTINGS.split(), f"run.dir={run_dir}"])
    assert one.returncode == 0, one.stderr[-3000:]
    for key, length in (("loss", 30), ("grad_norm", 30), ("eval/expected_acceptance", 3)):
        ours, theirs = curve(run_dir, key), curve(other, key)
        assert len(ours) == len(theirs) == length
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4, key


@pytest.mark.slow
def test_wrong_launch_is_one_line_with_the_right_command(
    root: Path, run_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"target": {"path": str(tiny_target_dir)}}))
    done = run(
        root, ["-m", "train", str(config), *SETTINGS.split(), f"run.dir={run_dir}", "train.parallel=ddp"]
    )
    assert done.returncode == 2
    assert "accelerate launch --multi_gpu --num_processes" in done.stderr and "Traceback" not in done.stderr
