"""`draftsmith eval CONFIG key=value ...`: score a draft."""

import json
from pathlib import Path

import click

from specdec.cli import friendly


@click.command("eval")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
@friendly
def command(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Score the best draft of CONFIG's run folder, or any draft: eval.draft=FOLDER eval.out=DIR.

    Decodes held-out prompts plainly and with the draft, side by side, and writes report.json, report.md and
    report.html.
    """
    from eval.score import EvalJob, evaluate
    from specdec.settings import load

    report, folder = evaluate(load(EvalJob, config, overrides))
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    click.echo(report["sentence"])
    click.echo(f"report    {folder / 'report.html'}")
