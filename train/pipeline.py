"""`draftsmith run CONFIG`: generate -> train -> eval in one run folder, skipping what is done.

A stage is known by the fingerprint of what it depends on: the target, its template, the prompts and the
settings for `generate`; the answers' bytes and the settings for `train`; the chosen checkpoint and the
settings for `eval`.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli import friendly
from specdec.errors import UserError

if TYPE_CHECKING:
    from specdec.pair import LanguageModel
    from train.config import Config
    from train.loop import Outcome
    from train.plan import Estimate


FREE_TRAIN_KEYS = frozenset(
    {"parallel", "accumulate", "eval_every", "save_every", "keep", "trackers", "max_bad_steps"}
)
"""Settings of `train` that may change between two starts of one run: they do not change what is learnt."""


@click.command("run")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--plan", is_flag=True, help="Print the stages with tokens, disk, memory and time; write nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@friendly
def run_command(config: Path, overrides: tuple[str, ...], plan: bool, as_json: bool) -> None:
    """Generate answers, train the draft, and measure what it is worth: everything CONFIG says, going on
    where it stopped.
    """
    from specdec.settings import load
    from train.config import Config

    pipeline = Pipeline(load(Config, config, overrides))
    if plan:
        from train.plan import table

        estimates = pipeline.plan()
        click.echo(json.dumps([asdict(e) for e in estimates], indent=1) if as_json else table(estimates))
        return
    result = pipeline.run()
    if as_json:
        click.echo(json.dumps(result, indent=1))
        return
    for stage, state in result["stages"].items():
        click.echo(f"{stage:10}{state}")
    click.echo(f"{'best':10}{result['best']}")
    click.echo(f"{'verdict':10}{result['sentence']}")
    click.echo(f"{'report':10}{result['report']}")


class Pipeline:
    """One run folder and the three stages that fill it."""

    def __init__(self, config: "Config") -> None:
        from distill.answers import Answers, GenerateJob

        if config.train.parallel != "none":
            from train.runtime import launch_line

            raise UserError(
                "draftsmith run uses one process",
                got=f"train.parallel={config.train.parallel}",
                expected="none",
                fix=f"draftsmith generate CONFIG, then {launch_line()}, then draftsmith eval CONFIG",
            )
        self.config, self.run_dir = config, Path(config.run.dir)
        self.answers = Answers(
            GenerateJob(
                run=config.run,
                target=config.target,
                prompts=config.prompts,
                generate=config.generate,
                capture=config.capture,
            )
        )
        self.stages = self.answers.stages
        self._target: LanguageModel | None = None

    def target(self) -> "LanguageModel":
        """The target, loaded once and only if a stage needs it."""
        from specdec.pair import load_model

        if self._target is None:
            self._target = load_model(self.config.target)
        return self._target

    def plan(self) -> list["Estimate"]:
        """What `run` would do and cost. Writes nothing."""
        from train.plan import estimate, measure

        self.check_same()
        done = {"generate": self.answers.done}
        done["train"] = done["generate"] and self.stages.is_done("train", train_inputs(self.config))
        done["eval"] = done["train"] and self.stages.is_done("eval", eval_inputs(self.config))
        return estimate(
            self.config,
            prompt_lengths=[len(task.prompt_ids) for shard in self.answers.shards for task in shard],
            eval_prompts=self.num_eval_prompts(),
            machine=measure(),
            done=done,
        )

    def num_eval_prompts(self) -> int:
        """Prompts that the eval stage decodes."""
        from distill.prompts import read_suite

        section = self.config.eval
        report = self.answers.splits.report if section.suite == "builtin" else read_suite(section.suite)
        return len(report) if section.max_prompts is None else min(section.max_prompts, len(report))

    def check_same(self) -> None:
        """Refuse a folder that another config has begun."""
        self.answers.check_same()
        if self.answers.done:
            self.stages.check_same("train", train_inputs(self.config))

    def run(self) -> dict[str, Any]:
        """Walk the stages; returns what to print."""
        from specdec import provenance
        from specdec.files import write_atomic
        from specdec.settings import dump
        from train import checkpoint

        self.check_same()
        self.num_eval_prompts()  # a suite that is not there shows before hours of work
        write_atomic(self.run_dir / "run.yaml", dump(self.config))
        provenance.write(self.run_dir)
        states = {"generate": self.answers.make(self.target)}
        trained = self.stages.is_done("train", train_inputs(self.config))
        if trained and checkpoint.latest(self.run_dir) is not None:
            states["train"] = "skipped, done"
        else:
            outcome = train_stage(self.config, self._target)
            if not outcome.finished:
                raise UserError(
                    f"stopped by a signal after step {outcome.step} of {outcome.total}",
                    fix="run the same command again to go on",
                )
            states["train"] = "done"
        states["eval"], report = self.evaluate()
        best = checkpoint.best(self.run_dir)
        return {"run_dir": str(self.run_dir), "stages": states, "best": str(best), **report}

    def evaluate(self) -> tuple[str, dict[str, str]]:
        """Measure the best checkpoint on the report split."""
        from eval.score import EvalJob, evaluate

        config, inputs = self.config, eval_inputs(self.config)
        before = self.stages.records.get("eval", {})
        if self.stages.is_done("eval", inputs) and Path(before.get("report", "")).is_file():
            state = "skipped, done"
            return state, {name: before[name] for name in ("verdict", "sentence", "report")}
        job = EvalJob(run=config.run, target=config.target, prompts=config.prompts, eval=config.eval)
        report, folder = evaluate(job, self._target)
        found = {
            "verdict": str(report["verdict"]),
            "sentence": str(report["sentence"]),
            "report": str(folder / "report.html"),
        }
        self.stages.mark("eval", inputs, done=True, **found)
        return "done", found


def train_stage(config: "Config", target: "LanguageModel | None" = None) -> "Outcome":
    """The train stage alone, in every process that was started; the main one keeps the record."""
    from distill.stages import Stages
    from train.build import train
    from train.runtime import is_main_process

    stages, inputs = Stages(Path(config.run.dir)), train_inputs(config)
    stages.check_same("train", inputs)
    if is_main_process() and "train" not in stages.records and inputs["answers"]:
        stages.mark("train", inputs, done=False)
    outcome = train(config, target)
    if is_main_process():
        stages.mark("train", inputs, done=outcome.finished)
    return outcome


def train_inputs(config: "Config") -> dict[str, Any]:
    """What the draft depends on; the answers by their bytes."""
    from specdec.files import fingerprint, sha256_file

    files = sorted((Path(config.run.dir) / "responses").glob("shard-*.jsonl"))
    return {
        "answers": fingerprint([[p.name, sha256_file(p)] for p in files]) if files else None,
        "draft": config.draft.model_dump(mode="json"),
        "objective": config.objective.model_dump(mode="json"),
        "train": {k: v for k, v in config.train.model_dump(mode="json").items() if k not in FREE_TRAIN_KEYS},
        "run": {"seed": config.run.seed},
    }


def eval_inputs(config: "Config") -> dict[str, Any]:
    """What the report depends on."""
    from train import checkpoint

    return {
        "train": train_inputs(config),
        "best": str(checkpoint.best(Path(config.run.dir))),
        "eval": config.eval.model_dump(mode="json", exclude={"out", "draft"}),
    }
