"""Settings: sections of a YAML file plus dotted overrides, checked once, refused in one line."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from specdec.errors import UserError

SECTIONS = ("run", "target", "draft", "prompts", "generate", "capture", "objective", "train", "eval", "publish")


class Section(BaseModel):
    """A frozen group of settings; each field's docstring is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


JobT = TypeVar("JobT", bound=Section)


def load(job: type[JobT], path: Path | str | None, overrides: Sequence[str] = ()) -> JobT:
    """Read the sections of `job` from a YAML file and `a.b=value` overrides; other rooms' sections are left unread."""
    tree = _read_yaml(Path(path)) if path is not None else {}
    for item in overrides:
        _override(tree, item)
    mine = {key: value for key, value in tree.items() if key in job.model_fields or key not in SECTIONS}
    try:
        return job.model_validate(mine)
    except ValidationError as error:
        raise _explain(job, error) from None


def dump(job: Section) -> str:
    """YAML that loads to the same settings."""
    return yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError("config file not found", got=str(path), expected="a YAML file", fix="see configs/quickstart.yaml")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML", got=str(error)) from None
    if not isinstance(tree or {}, dict):
        raise UserError(f"{path} is not a mapping of sections", got=type(tree).__name__, expected=", ".join(SECTIONS))
    return tree or {}


def _override(tree: dict[str, Any], item: str) -> None:
    key, sign, text = item.partition("=")
    if not sign or not key:
        raise UserError("override not understood", got=item, expected="section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise UserError("override goes below a value", got=item, expected=f"{parent} to be a section")
    node[leaf] = value


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, f"{prefix}{name}.")


def _explain(job: type[Section], error: ValidationError) -> UserError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = [*_keys(job), *SECTIONS]
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        return UserError(f"unknown key {key}", expected=f"a known key, nearest is {near[0]}" if near else None, fix="rename or remove it")
    if first["type"] == "missing":
        return UserError(f"{key} is missing", expected="a value", fix=f"set it in the config or pass {key}=VALUE")
    message = first["msg"].removeprefix("Value error, ")
    return UserError(f"{key or 'config'} is wrong", got=repr(first["input"]) if key else None, expected=message)
