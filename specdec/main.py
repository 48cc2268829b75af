"""`draftsmith decode CONFIG --prompt TEXT`: watch one answer come, accepted drafts in colour.
`draftsmith cost CONFIG`: what a round of the pair costs, and when it pays."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specdec.cli import friendly
from specdec.errors import UserError

COLOUR, PLAIN = "\033[32m", "\033[0m"


@click.command("decode")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--prompt", "question", help="What to ask; without it, stdin is read.")
@click.option("--system", help="A system message before it.")
@click.option("--draft", help="Folder of the draft; default: the best checkpoint of run.dir.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="Sampling temperature.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Sample from the k most likely; 0: from all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Sample from the smallest set of this mass.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="Least share of the largest probability.")
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1: repeat less.")
@click.option("--rule", type=click.Choice(["token", "block"]), default="token", show_default=True, help="Verification.")
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
    from specdec.sampling import Sampling
    from specdec.settings import load
    from specdec.show import DecodeJob, Options, show

    law = {name: options.pop(name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    options["sampling"] = Sampling(**law)  # type: ignore[arg-type]
    color = options.pop("color")
    if options["question"] is None:
        options["question"] = sys.stdin.read()
    coloured = color == "always" or (color == "auto" and sys.stdout.isatty())

    def write(piece: str, drafted: bool) -> None:
        sys.stdout.write(f"{COLOUR}{piece}{PLAIN}" if coloured and drafted and piece else piece)
        sys.stdout.flush()

    summary = show(load(DecodeJob, config, overrides), Options(**options), write)  # type: ignore[arg-type]
    click.echo(f"\n{summary}")


@click.command("cost")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--draft", help="Folder of the draft; default: the best checkpoint of run.dir.")
@click.option("--batch-sizes", default="1", show_default=True, help="Rows decoded together, comma-separated.")
@click.option("--contexts", default="128", show_default=True, help="Tokens in each row's cache, comma-separated.")
@click.option("--max-draft-length", type=int, default=8, show_default=True, help="Largest K that is timed.")
@click.option(
    "--acceptance", default="0.3,0.5,0.7,0.9", show_default=True, help="Expected acceptances to predict for."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@friendly
def cost_command(
    config: Path, overrides: tuple[str, ...], batch_sizes: str, contexts: str, acceptance: str, as_json: bool,
    draft: str | None, max_draft_length: int,
) -> None:  # fmt: skip
    """Measure what a round costs on this machine: c, v(n) and h in units of a plain decoding step.

    From them follow the acceptance at which a draft breaks even and, for each --acceptance (a), the best draft
    length K and the speedup to expect, tau / (K c + v(K+1) + h).
    """
    from specdec.quote import Options, quote, table
    from specdec.settings import load
    from specdec.show import DecodeJob

    options = Options(
        draft=draft,
        batch_sizes=_numbers("--batch-sizes", batch_sizes, int),
        contexts=_numbers("--contexts", contexts, int),
        max_draft_length=max_draft_length,
        acceptances=_numbers("--acceptance", acceptance, float),
    )
    records = quote(load(DecodeJob, config, overrides), options)
    click.echo(json.dumps(records, indent=1) if as_json else table(records))


def _numbers(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(name, got=text, expected="numbers with commas between them", fix=f"{name} 1,4") from None
