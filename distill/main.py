"""`draftsmith generate CONFIG key=value ...`: the target answers the prompts."""

import os
from pathlib import Path

import click

from specdec.cli import friendly


@click.command("generate")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@friendly
def command(config: Path, overrides: tuple[str, ...]) -> None:
    """Let the target of CONFIG answer the prompts, and capture the distributions it samples from.

    Finished shards are never made again. Several processes share the shards: accelerate launch ... -m distill
    CONFIG
    """
    from distill.answers import Answers, GenerateJob
    from specdec import provenance
    from specdec.pair import load_model
    from specdec.settings import load

    job = load(GenerateJob, config, overrides)
    answers = Answers(job)
    answers.check_same()
    answers.write_settings()
    provenance.write(answers.run_dir)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    state = answers.make(lambda: load_model(job.target), rank=rank, world=world)
    num_answers = sum(len(shard) for shard in answers.shards)
    click.echo(f"generate  {state}: {num_answers} answers in {len(answers.shards)} shards")
    click.echo(f"folder    {answers.run_dir / 'responses'}")
