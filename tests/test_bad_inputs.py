"""Wrong requests through the front door: one line on stderr, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from draftsmith import main

LONG = b"".join(b'{"id": %d, "prompt": "%d %s"}\n' % (i, i, b"word " * 4000) for i in (5, 6, 7, 8))


class Desk:
    """A small config and a way to run commands on it."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.prompts = folder / "prompts.jsonl"
        self.write_prompts(*({"id": i, "prompt": f"hello world {i}"} for i in range(12)))
        self.config = folder / "config.yaml"
        config = {
            "run": {"dir": str(self.run_dir)},
            "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
            "draft": {"layers": [0]},
            "prompts": {"sources": [{"name": str(self.prompts)}], "held_out": 0.3},
            "generate": {"max_new_tokens": 8, "batch_size": 4},
            "train": {"steps": 4, "max_length": 128, "batch_tokens": 256, "save_every": 2, "eval_every": 2},
            "eval": {"max_new_tokens": 8, "max_prompts": 2, "lossless_prompts": 1, "baseline_prompts": 0},
        }
        self.config.write_text(json.dumps(config))

    def write_prompts(self, *records: object) -> None:
        self.prompts.write_text("".join(json.dumps(r) + "\n" for r in records))

    def __call__(self, command: str, *overrides: object) -> Result:
        return CliRunner().invoke(main, [command, str(self.config), *map(str, overrides)], catch_exceptions=False)

    def files(self) -> set[Path]:
        return set(self.folder.rglob("*"))


@pytest.fixture
def desk(tmp_path: Path, tiny_target_dir: Path) -> Desk:
    return Desk(tmp_path, tiny_target_dir)


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, (result.exit_code, result.output)
    lines = [line for line in result.stderr.strip().splitlines() if line.startswith("draftsmith:")]
    assert len(lines) == 1 and result.stderr.strip().endswith(lines[0]), result.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in result.output


def refused_untouched(desk: Desk, command: str, *overrides: object, words: tuple[str, ...]) -> None:
    before = desk.files()
    refused(desk(command, *overrides), *words)
    assert desk.files() == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=3", ("train.stepz", "train.steps")),
        ("trane.steps=3", ("trane", "train")),
        ("train.lr=fast", ("train.lr", "fast")),
        ("train.steps=2.5", ("train.steps", "2.5")),
        ("nonsense", ("nonsense", "key=value")),
        ("eval.draft_length=-1", ("eval.draft_length", "-1")),
        ("draft.head_size=some", ("draft.head_size", "valid integer, or 'auto'")),
        ("eval.draft_length=some", ("eval.draft_length", "'cost'", "valid integer")),
        ("eval.temperatures=[-0.5]", ("eval.temperatures", "-0.5")),
        ("generate.temperatures=[-1]", ("generate.temperatures", "-1")),
        ("target.device=cuda", ("CUDA", "cuda")),
        ("target.device=toaster", ("device", "toaster")),
        ("train.parallel=ddp", ("parallel", "accelerate launch")),
        ("target.path=./nowhere", ("not found", "./nowhere")),
        ("target.path=package:no_such_package/x.gguf", ("not installed", "no_such_package")),
        ("prompts.sources=[{name: nothing.jsonl}]", ("nothing.jsonl",)),
        ("eval.suite=nothing.jsonl", ("nothing.jsonl",)),
        ("draft.layers=[0,7]", ("draft.layers", "7")),
        ("draft.head_size=100000", ("draft.head_size", "100000")),
        ("train.max_length=9", ("supervised", "train.max_length")),
    ],
)
def test_wrong_settings_of_a_run(desk: Desk, override: str, words: tuple[str, ...]) -> None:
    if override == "target.device=cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    early = not override.startswith(("draft.", "train.max_length"))
    before = desk.files()
    refused(desk("run", override), *words)
    assert not early or desk.files() == before
    assert not list(desk.run_dir.glob("checkpoints/*"))


def test_missing_config(desk: Desk) -> None:
    refused(CliRunner().invoke(main, ["run", str(desk.folder / "no.yaml")]), "no.yaml")


@pytest.mark.parametrize("command", ["cost", "decode", "eval", "train"])
def test_nothing_trained_yet(desk: Desk, command: str) -> None:
    extra = ("--prompt", "hi") if command == "decode" else ()
    refused_untouched(desk, command, *extra, words=("draftsmith",))


def test_folder_without_tokenizer(desk: Desk, tiny_target_dir: Path) -> None:
    folder = desk.folder / "bare"
    shutil.copytree(tiny_target_dir, folder, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    refused_untouched(desk, "generate", f"target.path={folder}", words=("no tokenizer", str(folder)))


def test_a_gguf_that_is_not_one(desk: Desk) -> None:
    (desk.folder / "fake.gguf").write_bytes(b"not a model")
    target = f"target.path={desk.folder / 'fake.gguf'}"
    refused_untouched(desk, "run", target, words=("not a GGUF file", "fake.gguf"))


def test_pair_with_different_tokenizers(
    desk: Desk, tiny_draft_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = desk.folder / "other"
    shutil.copytree(tiny_draft_dir, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = [word for word in vocab if vocab[word] in (300, 301)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    overrides = (f"eval.draft={folder}", f"eval.out={desk.folder / 'out'}", "eval.suite=" + str(desk.prompts))
    refused_untouched(desk, "eval", *overrides, words=("different tokenizers", "2 ids differ", "300, 301"))


def test_padded_vocabulary_works(desk: Desk, tiny_draft_dir: Path) -> None:
    folder = desk.folder / "padded"
    shutil.copytree(tiny_draft_dir, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(384)
    model.save_pretrained(folder)
    out = desk.folder / "out"
    result = desk("eval", f"eval.draft={folder}", f"eval.out={out}", f"eval.suite={desk.prompts}")
    assert result.exit_code == 0, result.output
    report = json.loads((out / "report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["prompts"] == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("no prompts",)),
        (b'{"prompt": "a"}\n{"prompt": "b\n', ("line 2",)),
        (b'{"prompt": "a"}\n{"prompt": "hei\xdft"}\n', ("line 2", "UTF-8")),
        (LONG, ("prompt", "too long", "tokens")),
    ],
)
def test_prompt_files(desk: Desk, content: bytes, words: tuple[str, ...]) -> None:
    suite = desk.folder / "suite.jsonl"
    suite.write_bytes(content)
    refused_untouched(desk, "run", f"prompts.sources=[{{name: {suite}}}]", words=words)
    refused_untouched(
        desk, "eval", f"eval.suite={suite}", f"eval.draft={desk.folder}", f"eval.out={desk.folder / 'o'}", words=words
    )


def test_run_folder_that_cannot_be_written(desk: Desk) -> None:
    blocker = desk.folder / "blocker"
    blocker.write_text("a file")
    for where in (blocker / "run", blocker, Path("/proc/draftsmith")):
        refused_untouched(desk, "run", f"run.dir={where}", words=(str(where),))


def test_run_folder_of_another_config(desk: Desk) -> None:
    assert desk("generate").exit_code == 0
    refused_untouched(desk, "generate", "generate.max_new_tokens=9", words=("another config", "max_new_tokens"))
    refused_untouched(desk, "run", "generate.max_new_tokens=9", words=("another config", "max_new_tokens"))


def test_corrupted_shard(desk: Desk) -> None:
    assert desk("generate").exit_code == 0
    shard = desk.run_dir / "captured" / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 0xFF
    shard.write_bytes(data)
    refused(desk("train"), "damaged", "shard-00001.safetensors")
    shard.unlink()
    assert desk("run").exit_code == 0


def test_truncated_checkpoint(desk: Desk) -> None:
    assert desk("run").exit_code == 0
    newest = desk.run_dir / "checkpoints" / "step-000004"
    weights = newest / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused(desk("eval", f"eval.draft={newest}", f"eval.out={desk.folder / 'o'}"), "cannot be loaded", str(newest))
    assert not (desk.folder / "o").exists()
    again = desk("train")  # goes on from the whole one before, and says so
    assert again.exit_code == 0 and "step-000004 skipped" in again.stderr
    assert weights.read_bytes() == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a quarter of a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a tmpfs needs more rights")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_full_disk(desk: Desk, small_disk: Path) -> None:
    result = desk("run", f"run.dir={small_disk / 'run'}")
    refused(result, "disk is full")
    left = [p.name for p in small_disk.rglob("*") if p.name.startswith(".") or p.name.startswith("step-")]
    assert left == []
