"""specdec/settings.py: YAML, overrides, and one line that names the fault."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from specdec.errors import UserError
from specdec.settings import Section, dump, load


class Item(Section):
    name: str
    weight: float = 1.0


class Train(Section):
    steps: int | None = None
    lr: float = 1e-3
    length: Literal["auto"] | int = "auto"


class Target(Section):
    path: str


class Prompts(Section):
    sources: tuple[Item, ...] = (Item(name="builtin"),)


class Job(Section):
    target: Target
    train: Train = Train()
    prompts: Prompts = Prompts()
    out: Path | None = None


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "target: {path: a}\ntrain: {steps: 3}\ngenerate: {anything: 1}\n")
    job = load(Job, path, ["train.lr=1e-4", "train.length=5", "target.path=b=c", "publish.repo=x"])
    assert job.target.path == "b=c"
    assert job.train == Train(steps=3, lr=1e-4, length=5)
    assert load(Job, path, ["train.steps=null", "train.steps=7"]).train.steps == 7
    assert load(Job, None, ["target.path=a", "prompts.sources=[{name: f}]"]).prompts.sources[0].name == "f"


def test_empty_section_means_the_defaults(tmp_path: Path) -> None:
    assert load(Job, write(tmp_path, "target: {path: a}\ntrain:\n"), []).train == Train()


def test_dump_reloads_identically(tmp_path: Path) -> None:
    job = load(Job, None, ["target.path='é: #1'", "train.lr=1.5e-7", "prompts.sources=[{name: 'no'}]"])
    assert load(Job, write(tmp_path, dump(job)), []) == job
    job = load(Job, None, ["target.path=null-ish", "out=a/b"])
    assert job.out == Path("a/b")
    assert load(Job, write(tmp_path, dump(job)), []) == job


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.stepps=3"], ["unknown key train.stepps", "train.steps?"]),
        (["trian.steps=3"], ["unknown key trian", "train?"]),
        (["prompts.sources=[{name: a, wieght: 2}]"], ["unknown key prompts.sources.0.wieght", "weight?"]),
        (["train.steps=many"], ["train.steps", "'many'", "integer"]),
        (["train.length=long"], ["train.length: got 'long'"]),
        (["train.lr=.nan"], ["train.lr", "finite"]),
        (["train.steps"], ["override", "section.key=value"]),
        (["target.path.x=1"], ["target.path is 'a'"]),
    ],
)
def test_faults_are_one_line_that_names_the_key(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load(Job, None, ["target.path=a", *overrides])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_required_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^target\.path is required"):
        load(Job, None, [])


@pytest.mark.parametrize("text", ["a: [1", "- 1\n", "3\n", "a: \x07\n"])
def test_broken_files_name_themselves(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=r"job\.yaml") as caught:
        load(Job, path, [])
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot read"):
        load(Job, tmp_path / "none.yaml", [])


def test_sections_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Train().lr = 2.0  # type: ignore[misc]
