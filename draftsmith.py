"""draftsmith: distil a small draft model from a flagship, and measure what it is worth."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import click

from specdec.cli import run_and_exit

# name -> (module, attribute, help). A module is imported when its command runs: torch takes seconds to load.
COMMANDS = {
    "run": ("train.pipeline", "run_command", "Walk the whole recipe: answers, capture, training, report."),
    "generate": ("distill.main", "command", "Let the target answer the prompts; capture its distributions."),
    "train": ("train.main", "command", "Train the draft on the captured answers."),
    "eval": ("eval.main", "command", "Score a draft: acceptance, speedup, losslessness, verdict."),
    "cost": ("specdec.main", "cost_command", "Measure what a round of the pair costs, and when it pays."),
    "decode": ("specdec.main", "command", "Answer one prompt with target and draft, and show the rounds."),
}


class LazyGroup(click.Group):
    """A click group that imports a command's module only when that command is called."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Run the command line; a wrong request is one line on stderr, without click's usage block."""
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        run_and_exit(lambda: super(LazyGroup, self).main(args, standalone_mode=False, **extra))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        found = vars(importlib.import_module(module))[attribute]
        assert isinstance(found, click.Command), f"{module}.{attribute} is not a click command"
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        _, command, rest = super().resolve_command(ctx, args)
        return args[0], command, rest  # the name of the table, whatever the function is called

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="draftsmith")
def main() -> None:
    """Distil a small draft model from a flagship, and measure what it is worth.

    Commands take CONFIG.yaml and dotted KEY=VALUE overrides: draftsmith run configs/quickstart.yaml
    train.steps=200
    """


if __name__ == "__main__":
    main()
