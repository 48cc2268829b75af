"""`draftsmith train CONFIG key=value ...`: train the draft on the answers of a run folder."""

from pathlib import Path

import click

from specdec.cli import friendly


@click.command("train")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@friendly
def command(config: Path, overrides: tuple[str, ...]) -> None:
    """Train the draft of CONFIG on the answers in its run folder, going on from the newest checkpoint.

    Several processes: accelerate launch ... -m train CONFIG train.parallel=ddp
    """
    from specdec.settings import load
    from train.config import Config
    from train.pipeline import train_stage

    settings = load(Config, config, overrides)
    outcome = train_stage(settings)
    click.echo(f"step {outcome.step} of {outcome.total}: {outcome.folder}")
