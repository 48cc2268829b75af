"""train/config.py: the shipped configs, and the rules between sections."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.errors import UserError
from specdec.settings import dump, load
from train.config import Config

ROOT = Path(__file__).resolve().parents[2]
GIVEN = ["target.path=t", "draft.layers=[0,1]", "train.steps=10", "train.epochs=null"]
RECIPES = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in {"accelerate", "deepspeed"}
)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_shipped_configs_load_and_survive_a_round_trip(path: Path, tmp_path: Path) -> None:
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert header.startswith("# ")
    assert f"draftsmith {'eval' if path.parent.name == 'eval' else 'run'} configs/" in header
    config = load(Config, path, [] if path.name == "quickstart.yaml" else GIVEN)
    (tmp_path / "run.yaml").write_text(dump(config), encoding="utf-8")
    assert load(Config, tmp_path / "run.yaml", []) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.step=1", "train.steps?"),
        ("evl.seed=1", "eval?"),
        ("eval.draft_lenght=1", "eval.draft_length?"),
        ("train.epochs=1", "exactly one"),
        ("train.steps=null", "exactly one"),
        ("train.steps=0", "train.steps"),
        ("train.lr=-1", "train.lr"),
        ("train.batch_tokens=100", "train.batch_tokens"),
        ("train.max_length=96", "generate.max_new_tokens"),
        ("train.parallel=fsdp", "train.parallel"),
        ("eval.draft_length=-1", "eval.draft_length"),
        ("eval.temperatures=[-0.1]", "eval.temperatures"),
        ("eval.temperatures=[]", "eval.temperatures"),
        ("generate.temperatures=[-1]", "generate.temperatures"),
        ("generate.batch_size=0", "generate.batch_size"),
        ("prompts.held_out=0", "prompts.held_out"),
        ("prompts.held_out=1", "prompts.held_out"),
        ("draft.layers=[]", "draft.layers"),
        ("draft.layers=[-1]", "draft.layers"),
        ("draft.init=sibling", "draft."),
        ("capture.top_k=0", "capture.top_k"),
        ("objective.temperature=0", "objective.temperature"),
        ("publish.repo=name", "publish.repo"),
    ],
)
def test_wrong_settings_are_one_line_naming_the_key(override: str, words: str) -> None:
    load(Config, None, GIVEN)
    with pytest.raises(UserError) as caught:
        load(Config, None, [*GIVEN, override])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_schema_describes_every_field() -> None:
    schema = Config.model_json_schema()
    assert set(schema["properties"]) == {
        "run",
        "target",
        "draft",
        "prompts",
        "generate",
        "capture",
        "objective",
        "train",
        "eval",
        "publish",
    }
    for name, section in schema["$defs"].items():
        for field, entry in section["properties"].items():
            assert entry.get("description"), f"{name}.{field} has no docstring line"
