"""Settings: YAML plus dotted overrides, checked by the sections of the room that reads them."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from specdec.errors import UserError

SECTIONS = (
    "run", "target", "draft", "prompts", "generate", "capture", "objective", "train", "eval", "publish",
)  # fmt: skip


class Section(pydantic.BaseModel):
    """A frozen group of settings; each field carries one docstring line, which is its help text."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


class RunSection(Section):
    """Where the run lives."""

    dir: Path = Path("runs/quickstart")
    """Run folder; every output of the run lies below it."""
    seed: int = pydantic.Field(default=0, ge=0)
    """Seed of prompts, answers, initial weights and data order."""


JobT = TypeVar("JobT", bound=Section)


def load(job: type[JobT], path: Path | str | None, overrides: Sequence[str] = ()) -> JobT:
    """Read the settings of `job`, a Section whose fields are sections.

    Args:
        job: the model to fill; those of `SECTIONS` that it lacks belong to other rooms and stay unread.
        path: a YAML file, or None for defaults and overrides alone.
        overrides: `section.key=value`, where value is YAML; later ones win.

    Raises:
        UserError: the file, an override, a key or a value is wrong; the first fault only, on one line.
    """
    tree = {} if path is None else _read_yaml(Path(path))
    for override in overrides:
        _apply_override(tree, override)
    for name in set(SECTIONS) - set(job.model_fields):
        tree.pop(name, None)
    for name, field in job.model_fields.items():
        is_section = any(_sections_in(field.annotation))
        if is_section and name in tree and tree[name] is None:
            tree[name] = {}  # "train:" with nothing under it means the defaults
        elif is_section and field.is_required():
            tree.setdefault(name, {})  # so that the fault names the key inside that is required
    try:
        return job.model_validate(tree)
    except pydantic.ValidationError as error:
        raise _first_error(job, error) from error


def dump(job: Section) -> str:
    """YAML text of `job` that `load` reads back to an equal job."""
    text: str = yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
    return text


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(
            f"cannot read {path}", got=error.strerror, expected="a YAML file", fix="check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            str(path), got="bytes that are not UTF-8", expected="UTF-8 text", fix="save the file as UTF-8"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(
            str(path), got=f"broken YAML ({error})", expected="valid YAML", fix="repair that line"
        ) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(str(path), got=_show(tree), expected="sections such as 'target:' and 'train:'")
    return {str(name): value for name, value in tree.items()}


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(
            "override", got=repr(override), expected="section.key=value", fix="for example train.steps=100"
        )
    try:
        value = yaml.safe_load(text) if text else ""
    except (yaml.YAMLError, ValueError):
        value = text  # not YAML, such as a "[" in a path: the text itself is meant
    node: Any = tree
    for depth, part in enumerate(parts[:-1], start=1):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise UserError(
                f"override {override!r}",
                got=f"{'.'.join(parts[:depth])} is {_show(node)}, which has no keys",
                expected="section.key=value",
                fix=f"set {'.'.join(parts[:depth])} as a whole",
            )
    node[parts[-1]] = value


def _first_error(job: type[Section], error: pydantic.ValidationError) -> UserError:
    faults = error.errors(include_url=False)
    # An unknown key is often a misspelt required one: name it before the key that then seems to be missing.
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    key = _key(fault)
    if fault["type"] == "extra_forbidden":
        fix = f"did you mean {_nearest(key, list(known_keys(job)))}?"
        return UserError(f"unknown key {key}", got=_show(fault["input"]), expected="a known key", fix=fix)
    if fault["type"] == "missing":
        fix = f"set it in the config, or give {key}=..."
        return UserError(f"{key} is required", got="nothing", expected="a value", fix=fix)
    if fault["type"] == "value_error":
        cause = fault.get("ctx", {}).get("error")
        text = str(cause) if cause is not None else fault["msg"]
        own = isinstance(cause, UserError)  # already says what, got, expected and fix
        return UserError(text) if own or not key else UserError(key, got=_show(fault["input"]), expected=text)
    # A value that may be of several kinds has one fault for each.
    kinds = [f["msg"].removeprefix("Input should be ").partition(", unable to")[0] for f in faults if _key(f) == key]
    return UserError(key or "config", got=_show(fault["input"]), expected=", or ".join(dict.fromkeys(kinds)))


def _key(fault: Any) -> str:
    return ".".join(str(part) for part in fault["loc"] if not _is_branch(str(part)))


def known_keys(job: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key of `job`, depth first: "train", "train.steps", ..."""
    for name, field in job.model_fields.items():
        yield prefix + name
        for inner in _sections_in(field.annotation):
            yield from known_keys(inner, f"{prefix}{name}.")


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _sections_in(part)


def _nearest(key: str, known: list[str]) -> str:
    """The known key most like `key`: by the whole name, or by its last part when the section is wrong."""
    plain = ".".join(part for part in key.split(".") if not part.isdigit())
    last = plain.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, plain, candidate).ratio()
        part = difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio()
        return whole + part

    return max(known, key=likeness)


def _is_branch(part: str) -> bool:
    """Pydantic adds the name of a union's branch to the location, which is no key of the user's."""
    return "[" in part or part.removeprefix("constrained-") in {"int", "float", "str", "bool"}


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
