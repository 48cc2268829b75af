"""`draftsmith run CONFIG`: generate -> train -> eval in one run folder, skipping what is done.

A stage is known by the fingerprint of what it depends on: the target, its template, the prompts and the
settings for
`generate`; the answers' bytes and the settings for `train`; the chosen checkpoint and the settings for
`eval`.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli import friendly
from specdec.errors import UserError

if TYPE_CHECKING:
    from distill.generate import Task
    from specdec.pair import LanguageModel
    from train.config import Config
    from train.loop import Outcome
    from train.plan import Estimate


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
    click.echo(f"{'verdict':10}{result['verdict']}")
    click.echo(f"{'report':10}{result['report']}")


class Pipeline:
    """One run folder and the three stages that fill it."""

    def __init__(self, config: "Config") -> None:
        from distill.generate import plan_tasks
        from distill.prompts import load_prompts
        from distill.render import Renderer
        from specdec.pair import load_tokenizer
        from train.plan import target_shape
        from train.stages import Stages

        if config.train.parallel != "none":
            from train.runtime import launch_line

            raise UserError(
                "draftsmith run uses one process",
                got=f"train.parallel={config.train.parallel}",
                expected="none",
                fix=f"draftsmith generate CONFIG, then {launch_line()}, then draftsmith eval CONFIG",
            )
        self.config, self.run_dir = config, Path(config.run.dir)
        self.stages = Stages(self.run_dir)
        self._target: LanguageModel | None = None
        renderer = Renderer(load_tokenizer(config.target))
        splits = load_prompts(config.prompts, seed=config.run.seed)
        self.parameters, shape = target_shape(config.target)
        self.shards: list[list[Task]] = plan_tasks(
            splits,
            config.generate,
            renderer,
            seed=config.run.seed,
            context_length=int(shape.max_position_embeddings),
        )
        self.num_report_prompts = len(splits.report)
        self.generate_inputs = generate_inputs(config, self.shards, renderer.fingerprint)

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
        done = {"generate": self.stages.is_done("generate", self.generate_inputs)}
        done["train"] = done["generate"] and self.stages.is_done("train", train_inputs(self.config))
        done["eval"] = done["train"] and self.stages.is_done("eval", eval_inputs(self.config))
        lengths = [len(task.prompt_ids) for shard in self.shards for task in shard]
        limit = self.config.eval.max_prompts
        prompts = self.num_report_prompts if limit is None else min(limit, self.num_report_prompts)
        return estimate(
            self.config, prompt_lengths=lengths, eval_prompts=prompts, machine=measure(), done=done
        )

    def check_same(self) -> None:
        """Refuse a folder that another config has begun."""
        self.stages.check_same("generate", self.generate_inputs)
        if self.stages.is_done("generate", self.generate_inputs):
            self.stages.check_same("train", train_inputs(self.config))

    def run(self) -> dict[str, Any]:
        """Walk the stages; returns what to print."""
        from specdec.files import write_atomic
        from specdec.settings import dump
        from train import checkpoint, provenance

        self.check_same()
        write_atomic(self.run_dir / "run.yaml", dump(self.config))
        provenance.write(self.run_dir)
        states = {"generate": self.generate()}
        if (
            self.stages.is_done("train", train_inputs(self.config))
            and checkpoint.latest(self.run_dir) is not None
        ):
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

    def generate(self) -> str:
        """Make the answers that are missing."""
        from distill.generate import generate

        if self.stages.is_done("generate", self.generate_inputs):
            return "skipped, done"
        self.stages.mark("generate", self.generate_inputs, done=False)
        generate(
            self.target(),
            self.shards,
            self.run_dir,
            section=self.config.generate,
            top_k=self.config.capture.top_k,
        )
        self.stages.mark("generate", self.generate_inputs, done=True)
        return "done"

    def evaluate(self) -> tuple[str, dict[str, str]]:
        """Measure the best checkpoint on the report split."""
        from eval.main import evaluate

        inputs = eval_inputs(self.config)
        before = self.stages.records.get("eval", {})
        if self.stages.is_done("eval", inputs) and Path(before.get("report", "")).is_file():
            return "skipped, done", {"verdict": before["verdict"], "report": before["report"]}
        report, folder = evaluate(self.config, target=self._target)
        found = {"verdict": str(report["verdict"]), "report": str(Path(folder) / "report.md")}
        self.stages.mark("eval", inputs, done=True, **found)
        return "done", found


def train_stage(config: "Config", target: "LanguageModel | None" = None) -> "Outcome":
    """The train stage alone, in every process that was started; the main one keeps the record."""
    from train.build import train
    from train.runtime import is_main_process
    from train.stages import Stages

    stages, inputs = Stages(Path(config.run.dir)), train_inputs(config)
    stages.check_same("train", inputs)
    if is_main_process() and "train" not in stages.records and inputs["answers"]:
        stages.mark("train", inputs, done=False)
    outcome = train(config, target)
    if is_main_process():
        stages.mark("train", inputs, done=outcome.finished)
    return outcome


def generate_inputs(config: "Config", shards: "list[list[Task]]", template: str) -> dict[str, Any]:
    """What the answers depend on."""
    from specdec.files import fingerprint
    from specdec.pair import _identity, locate

    return {
        "target": {
            "identity": _identity(*locate(config.target.path), config.target),
            "dtype": config.target.dtype,
        },
        "template": template,
        "prompts": {
            "tasks": fingerprint(
                [[t.answer_id, t.split, t.prompt_ids, t.temperature] for shard in shards for t in shard]
            )
        },
        "generate": config.generate.model_dump(mode="json"),
        "capture": config.capture.model_dump(mode="json"),
        "run": {"seed": config.run.seed},
    }


def train_inputs(config: "Config") -> dict[str, Any]:
    """What the draft depends on; the answers by their bytes."""
    from specdec.files import fingerprint, sha256_file
    from train.stages import FREE_TRAIN_KEYS

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
        "eval": config.eval.model_dump(mode="json"),
    }
