"""The training loop. Step n sees batch n, uses learning rate n and seed n: whoever knows n can go on from
there.

1. Schedule the answers; restore the newest whole checkpoint, if any.
2. Every step: this process's rows of the global batch, one update, one line in metrics.jsonl.
3. Every `eval_every` steps, at the end and before each save: expected acceptance on the selection split.
4. Every `save_every` steps, at the end, and on SIGTERM or SIGUSR1: a checkpoint, then `best`, then pruning.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.store import Example
from specdec.cli import progress
from specdec.errors import UserError
from train import checkpoint
from train.batches import Schedule, collate, split, usable
from train.config import Config
from train.evaluate import Selection
from train.optim import build_optimizer, learning_rate, set_learning_rate
from train.runtime import StopSignal
from train.step import DraftLoss, StepResult, train_step
from train.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call of the loop ended."""

    step: int
    """Last step taken."""
    total: int
    """Steps asked for."""
    folder: Path
    """Newest checkpoint."""

    @property
    def finished(self) -> bool:
        return self.step >= self.total


class Trainer:
    """What the loop holds between steps."""

    def __init__(
        self,
        config: Config,
        *,
        draft: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        selection: Sequence[Example],
        accelerator: Accelerator,
        head_ids: Tensor | None = None,
    ) -> None:
        section = config.train
        self.config, self.tokenizer, self.accelerator = config, tokenizer, accelerator
        self.run_dir = Path(config.run.dir)
        self.examples = usable(examples, section.max_length, "train")
        self.selection = Selection(usable(selection, section.max_length, "selection"), section.batch_tokens)
        lengths = [len(e.prompt_ids) + len(e.answer_ids) - 1 for e in self.examples]
        self.schedule = Schedule(lengths, batch_tokens=section.batch_tokens, seed=config.run.seed)
        self.total = (
            section.steps if section.steps is not None else self.schedule.num_steps(section.epochs or 1.0)
        )
        self.draft = draft.to(device=accelerator.device, dtype=torch.float32).train()  # type: ignore[call-arg]
        self.head_ids = None if head_ids is None else head_ids.to(accelerator.device)
        self.loss = DraftLoss(
            self.draft, config.objective, precision=section.precision, head_ids=self.head_ids
        )
        self.optimizer = build_optimizer(self.draft, section)
        self.step, self.bad_steps, self.evaluated = 0, 0, -1
        self._resume()
        self.model = accelerator.prepare_model(self.loss)
        self.tracker = Tracker(
            self.run_dir,
            trackers=section.trackers,
            after_step=self.step,
            settings=config.model_dump(mode="json"),
            active=accelerator.is_main_process,
        )

    def _resume(self) -> None:
        folder = checkpoint.latest(self.run_dir)
        if folder is not None:
            state = checkpoint.restore(folder, self.draft, self.optimizer)
            self.step, self.bad_steps = state["step"], state["bad_steps"]
            if self.accelerator.is_main_process:
                print(f"resumed from {folder}", file=sys.stderr)

    def run(self) -> Outcome:
        """Train to the last step, or until a signal."""
        section = self.config.train
        with StopSignal() as signal, progress(self.total, "train", "step") as bar:
            bar.update(self.step)
            while self.step < self.total:
                self.step += 1
                result = self.one_step(stop=signal.received)
                done = self.step == self.total or result.stop
                saving = done or self.step % section.save_every == 0
                if saving or self.step % section.eval_every == 0:
                    self.evaluate()
                if saving:
                    self.save()
                bar.update(1)
                if result.stop and self.step < self.total:
                    if self.accelerator.is_main_process:
                        print(
                            f"stopped by a signal after step {self.step}; the same command goes on",
                            file=sys.stderr,
                        )
                    break
        self.tracker.close()
        return Outcome(step=self.step, total=self.total, folder=checkpoint.folder_of(self.run_dir, self.step))

    def one_step(self, *, stop: bool = False) -> StepResult:
        """One update and its record."""
        section, started = self.config.train, time.perf_counter()
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        torch.manual_seed((self.config.run.seed * 1_000_003 + self.step) * world + rank)
        rows = self.schedule.rows(self.step)
        mine = split(rows, rank=rank, world=world, accumulate=section.accumulate)
        parts = [
            collate([self.examples[i] for i in part], self.accelerator.device) for part in mine or [rows[:1]]
        ]
        rate = learning_rate(self.step, self.total, section)
        set_learning_rate(self.optimizer, rate)
        result = train_step(
            self.model,
            self.optimizer,
            parts,
            accelerator=self.accelerator,
            grad_clip=section.grad_clip,
            stop=stop,
            idle=not mine,
            num_tokens=sum(len(self.examples[i].answer_ids) for i in rows),
        )
        self._count_bad(result, rows)
        record: dict[str, Any] = {
            "step": self.step,
            "loss": result.loss,
            "lr": rate,
            "grad_norm": result.grad_norm,
            "supervised_tokens": result.num_tokens,
            "tokens_per_s": result.num_tokens / (time.perf_counter() - started),
            "expected_acceptance": result.expected_acceptance,
        }
        if not result.applied:  # NaN is not JSON
            record |= {"loss": None, "grad_norm": None, "expected_acceptance": None, "skipped": True}
        self.tracker.log(record)
        return result

    def _count_bad(self, result: StepResult, rows: Sequence[int]) -> None:
        self.bad_steps = 0 if result.applied else self.bad_steps + 1
        if result.applied:
            return
        ids = [self.examples[i].answer_id for i in rows]
        if self.accelerator.is_main_process:
            print(
                f"step {self.step} skipped: loss or gradient is not finite; answers {', '.join(ids)}",
                file=sys.stderr,
            )
        if self.bad_steps >= self.config.train.max_bad_steps:
            raise UserError(
                f"loss or gradient not finite {self.bad_steps} steps in a row, last at step {self.step}",
                got=f"answers {', '.join(ids)}",
                fix="lower train.lr, or look at those answers",
            )

    def evaluate(self) -> None:
        """Expected acceptance on the selection split, once per step at most."""
        if self.evaluated != self.step:
            self.evaluated = self.step
            self.tracker.log({"step": self.step, **self.selection.evaluate(self.loss, self.accelerator)})

    def save(self) -> None:
        """Checkpoint, `best`, pruning: by the main process, the others wait."""
        if self.accelerator.is_main_process:
            newest = checkpoint.save(
                self.run_dir,
                step=self.step,
                model=self.draft,
                tokenizer=self.tokenizer,
                optimizer=self.optimizer,
                head_ids=self.head_ids,
                bad_steps=self.bad_steps,
            )
            checkpoint.prune(
                self.run_dir, self.config.train.keep, [checkpoint.point_at_best(self.run_dir), newest]
            )
        self.accelerator.wait_for_everyone()
