"""`draftsmith decode CONFIG --prompt TEXT`: watch one answer come, accepted drafts in colour."""

import sys
from pathlib import Path

import click

from specdec.cli import friendly

COLOUR, PLAIN = "\033[32m", "\033[0m"


@click.command("decode")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--prompt", "question", help="What to ask; without it, stdin is read.")
@click.option("--system", help="A system message before it.")
@click.option("--draft", help="Folder of the draft; default: the best checkpoint of run.dir.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="Sampling temperature.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True, help="Tokens, at most.")
@click.option("--draft-length", default="auto", show_default=True, help="A number, or a policy's name.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of sampling.")
@click.option("--compare/--no-compare", default=True, show_default=True, help="Time plain decoding too.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True)
@friendly
def command(config: Path, overrides: tuple[str, ...], **options: object) -> None:
    """Answer one prompt with the target of CONFIG and its draft, and show whose tokens they are.

    Green text was drafted and accepted; the rest is the target's own.
    """
    from specdec.settings import load
    from specdec.show import DecodeJob, Options, show

    color = options.pop("color")
    if options["question"] is None:
        options["question"] = sys.stdin.read()
    coloured = color == "always" or (color == "auto" and sys.stdout.isatty())

    def write(piece: str, drafted: bool) -> None:
        sys.stdout.write(f"{COLOUR}{piece}{PLAIN}" if coloured and drafted and piece else piece)
        sys.stdout.flush()

    summary = show(load(DecodeJob, config, overrides), Options(**options), write)  # type: ignore[arg-type]
    click.echo(f"\n{summary}")
