"""The built-in prompts: templates x topics of four domains, from the YAML files in `builtin/`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class BuiltinPrompt:
    """One prompt of the mixture."""

    id: str
    domain: str
    group: str
    """Template-and-topic cell."""
    text: str


def builtin_prompts() -> tuple[BuiltinPrompt, ...]:
    """All prompts, in file order."""
    found = (p for p in (files("distill") / "builtin").iterdir() if p.name.endswith(".yaml"))
    folders = sorted(found, key=lambda p: p.name)
    return tuple(
        prompt
        for file in folders
        for family in yaml.safe_load(file.read_text(encoding="utf-8"))
        for prompt in _family(file.name.removesuffix(".yaml"), family)
    )


def _family(domain: str, family: dict[str, Any]) -> Iterator[BuiltinPrompt]:
    for t, template in enumerate(family["templates"]):
        for x, topic in enumerate(family["topics"]):
            slots = topic if isinstance(topic, dict) else {"topic": topic}
            yield BuiltinPrompt(
                id=f"{domain}-{family['name']}-t{t:02}-x{x:03}",
                domain=domain,
                group=f"{domain}/{family['name']}/{t}/{x}",
                text=template.format(**slots),
            )
