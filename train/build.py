"""From a config to a finished training run: answers from the store, a draft from the target, the loop."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.store import Store
from distill.student import build_draft
from specdec import provenance
from specdec.errors import UserError
from specdec.files import write_atomic
from specdec.pair import HEAD_IDS_FILE, LanguageModel, load_model, load_tokenizer
from specdec.settings import dump
from train import checkpoint
from train.config import Config
from train.head import head_ids as choose_head
from train.loop import Outcome, Trainer
from train.runtime import finish, start

SHORT_ROWS = 512
"""Tokens of a row up to which a CPU learns with the eager attention: torch's fused one takes a fifth longer a step
there (RESULTS.md), and the scores of longer rows would not fit into memory."""


def train(config: Config, target: LanguageModel | None = None) -> Outcome:
    """Train, or go on training, the draft of a run folder that holds answers. Raises UserError."""
    run_dir = Path(config.run.dir)
    accelerator = start(config.train, config.target.device)
    if not (run_dir / "responses").is_dir():
        raise UserError(
            "no answers to learn from",
            got=f"{run_dir} without responses/",
            fix="run draftsmith generate CONFIG first, or draftsmith run CONFIG",
        )
    store = Store(run_dir)
    examples, selection = list(store.examples("train")), list(store.examples("selection"))
    if accelerator.is_main_process:
        write_atomic(run_dir / "run.yaml", dump(config))
        provenance.write(run_dir)
        checkpoint.sweep(run_dir)
    accelerator.wait_for_everyone()
    folder = checkpoint.latest(run_dir)
    if folder is not None:
        tokenizer = load_tokenizer(config.target)
        draft, head_ids = reload(folder)
    else:
        target = target or load_model(config.target)
        tokenizer = target.tokenizer
        draft = build_draft(config.draft, target.model, tokenizer, seed=config.run.seed)
        with accelerator.main_process_first():  # who chooses the size by measuring it; the others read it
            head_ids = choose_head(
                config.draft.head_size, run_dir, draft, target, examples=examples, selection=selection
            )
    if accelerator.device.type == "cpu" and config.train.max_length <= SHORT_ROWS:
        draft.set_attn_implementation("eager")
    trainer = Trainer(
        config,
        draft=draft,
        tokenizer=tokenizer,
        examples=examples,
        selection=selection,
        accelerator=accelerator,
        head_ids=head_ids,
    )
    outcome = trainer.run()
    model, optimizer = trainer.model, trainer.optimizer
    del trainer
    finish(accelerator, model, optimizer)
    return outcome


def reload(folder: Path) -> tuple[PreTrainedModel, Tensor | None]:
    """The draft of a checkpoint, frozen where it was, and its short list."""
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    learning = checkpoint.read_state(folder)["trainable"]
    for name, parameter in draft.named_parameters():
        parameter.requires_grad_(name in learning)
    path = folder / HEAD_IDS_FILE
    return draft, load_file(path)["head_ids"] if path.is_file() else None

