from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from distill.stages import Stages
from specdec.errors import UserError
from train.pipeline import run_command


def invoke(folder: Path, target: Path, *extra: str) -> Result:
    suite = folder / "prompts.jsonl"
    suite.write_text(
        "".join(
            json.dumps({"question_id": i, "category": "chat", "turns": [f"hello world {i}"]}) + "\n"
            for i in range(20)
        )
    )
    config = folder / "config.yaml"
    config.write_text(
        json.dumps(
            {
                "run": {"dir": str(folder / "run")},
                "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
                "draft": {"layers": [0]},
                "prompts": {"sources": [{"name": str(suite)}], "held_out": 0.3},
                "generate": {"max_new_tokens": 8, "batch_size": 8},
                "train": {
                    "steps": 4,
                    "max_length": 256,
                    "batch_tokens": 512,
                    "save_every": 2,
                    "eval_every": 2,
                },
                "eval": {"max_new_tokens": 8, "max_prompts": 2, "lossless_prompts": 1},
            }
        )
    )
    return CliRunner().invoke(run_command, [str(config), *extra], catch_exceptions=False)


def test_plan_prints_every_stage_and_writes_nothing(tmp_path: Path, tiny_target_dir: Path) -> None:
    result = invoke(tmp_path, tiny_target_dir, "--plan")
    assert result.exit_code == 0, result.output
    assert all(
        word in result.output for word in ("generate", "train", "eval", "tokens", "disk", "memory", "time")
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "prompts.jsonl"]
    stages = json.loads(invoke(tmp_path, tiny_target_dir, "--plan", "--json").stdout)
    assert [s["stage"] for s in stages] == ["generate", "train", "eval"]
    assert all(s["tokens"] > 0 and s["disk_bytes"] > 0 and s["memory_bytes"] > 0 for s in stages)


def test_unknown_key_is_one_line(tmp_path: Path, tiny_target_dir: Path) -> None:
    result = invoke(tmp_path, tiny_target_dir, "train.stepz=3", "--plan")
    assert (
        result.exit_code == 2
        and "train.steps" in result.stderr
        and len(result.stderr.strip().splitlines()) == 1
    )


def test_run_walks_once_then_skips_and_refuses_another_config(tmp_path: Path, tiny_target_dir: Path) -> None:
    first = invoke(tmp_path, tiny_target_dir, "--json")
    assert first.exit_code == 0, first.output
    result = json.loads(first.stdout)
    assert result["stages"] == {"generate": "done", "train": "done", "eval": "done"}
    assert Path(result["report"]).is_file() and result["verdict"] in {"pays", "does not pay", "within noise"}
    again = json.loads(invoke(tmp_path, tiny_target_dir, "--json").stdout)
    assert set(again["stages"].values()) == {"skipped, done"} and again["report"] == result["report"]
    before = (tmp_path / "run" / "run.yaml").read_bytes()
    other = invoke(tmp_path, tiny_target_dir, "train.lr=0.5")
    assert other.exit_code == 2 and "train.lr" in other.stderr and "another run.dir" in other.stderr
    assert (tmp_path / "run" / "run.yaml").read_bytes() == before


def test_stage_inputs_that_differ_are_named(tmp_path: Path) -> None:
    Stages(tmp_path).mark("train", {"train": {"lr": 1, "steps": 3}, "seed": 0}, done=True)
    stages = Stages(tmp_path)
    assert stages.is_done("train", {"seed": 0, "train": {"steps": 3, "lr": 1}})
    assert not stages.is_done("train", {"train": {"lr": 2, "steps": 3}, "seed": 0})
    with pytest.raises(UserError, match=r"different train\.lr in stage train.*another run\.dir"):
        stages.check_same("train", {"train": {"lr": 2, "steps": 3}, "seed": 0})
