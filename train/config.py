"""The settings of a training run: the sections of every room, and the rules that hold between them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from distill.capture import CaptureSection
from distill.generate import GenerateSection
from distill.losses import ObjectiveSection
from distill.prompts import PromptsSection
from distill.student import DraftSection
from eval.settings import EvalSection
from specdec.errors import UserError
from specdec.pair import TargetSection
from specdec.settings import RunSection, Section


class TrainSection(Section):
    """How the draft learns; exactly one of `steps` and `epochs` is set."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training answers."""
    batch_tokens: int = Field(default=2048, ge=1)
    """Tokens (prompt and answer) of one optimizer step, over all processes and accumulation."""
    max_length: int = Field(default=512, ge=2)
    """Tokens of prompt plus answer, at most."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    warmup: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps over which the learning rate rises to its peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay of the matrices."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; a longer gradient is scaled down to it."""
    parallel: Literal["none", "ddp"] = "none"
    """How several processes share the work."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of forward and backward; weights and optimizer stay float32."""
    accumulate: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step; does not change the result, only the memory."""
    eval_every: int = Field(default=100, ge=1)
    """Steps between measurements on the selection split."""
    save_every: int = Field(default=100, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept; the best one is kept besides."""
    trackers: tuple[Literal["jsonl", "wandb"], ...] = ("jsonl",)
    """Where metrics go; metrics.jsonl is always written."""
    max_bad_steps: int = Field(default=5, ge=1)
    """Steps with a non-finite loss or gradient that are skipped before the run stops."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise UserError(
                "train.steps and train.epochs",
                got="neither" if self.steps is None else f"both ({self.steps} and {self.epochs:g})",
                expected="exactly one of the two",
                fix="set one, and the other to null",
            )
        if self.max_length > self.batch_tokens:
            raise UserError(
                "train.max_length",
                got=self.max_length,
                expected=f"at most train.batch_tokens ({self.batch_tokens}), so that an answer fits a batch",
                fix="lower train.max_length or raise train.batch_tokens",
            )
        return self


class PublishSection(Section):
    """Where a finished draft goes."""

    repo: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    """Hub repository, as owner/name; None: the draft is not published."""
    private: bool = True
    """Whether a repository that is made here is private."""
    formats: Annotated[tuple[Literal["hf", "gguf"], ...], Field(min_length=1)] = ("hf",)
    """Formats that are exported."""


class Config(Section):
    """A whole run, from prompts to report; run.yaml is this, resolved."""

    run: RunSection = RunSection()
    """Where the run lives."""
    target: TargetSection
    """The model that is served."""
    draft: DraftSection = DraftSection()
    """The small model that is made."""
    prompts: PromptsSection = PromptsSection()
    """What the target is asked."""
    generate: GenerateSection = GenerateSection()
    """How the target answers."""
    capture: CaptureSection = CaptureSection()
    """How much of the target's distributions is stored."""
    objective: ObjectiveSection = ObjectiveSection()
    """The loss."""
    train: TrainSection
    """How the draft learns."""
    eval: EvalSection = EvalSection()
    """How the draft is scored."""
    publish: PublishSection = PublishSection()
    """Where the draft goes."""

    @model_validator(mode="after")
    def _rules(self) -> Self:
        _check_draft(self.draft)
        if self.objective.temperature <= 0:
            raise UserError("objective.temperature", got=self.objective.temperature, expected="above 0")
        if self.objective.kind == "jsd" and not 0 < self.objective.beta < 1:
            raise UserError("objective.beta", got=self.objective.beta, expected="above 0 and below 1")
        if self.generate.max_new_tokens >= self.train.max_length:
            raise UserError(
                "train.max_length",
                got=self.train.max_length,
                expected=f"more than generate.max_new_tokens ({self.generate.max_new_tokens}) and the prompt",
                fix="raise train.max_length or lower generate.max_new_tokens",
            )
        return self


def _check_draft(draft: DraftSection) -> None:
    if draft.init == "layers" and not draft.layers:
        raise UserError(
            "draft.layers",
            got="none",
            expected="the target's layers that the draft starts from, with draft.init=layers",
            fix="for example draft.layers=[0,29]",
        )
    if draft.init == "sibling" and draft.path is None:
        raise UserError(
            "draft.path", got="nothing", expected="a model's folder or name, with draft.init=sibling"
        )
    if draft.init != "layers" and draft.layers:
        raise UserError(
            "draft.layers", got=list(draft.layers), expected=f"nothing with draft.init={draft.init}",
            fix="set draft.init=layers, or leave draft.layers out",
        )  # fmt: skip
    if any(layer < 0 for layer in draft.layers):
        raise UserError("draft.layers", got=list(draft.layers), expected="layer numbers, from 0")
