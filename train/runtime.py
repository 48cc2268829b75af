"""Processes: starting them as asked, stopping them on a signal, and leaving without an abort."""

import gc
import os
import signal
import sys
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from specdec.errors import UserError
from train.config import TrainSection

ON_CPU = (
    "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no --main_process_port 0 -m train CONFIG train.parallel=ddp"
)
ON_GPU = "accelerate launch --multi_gpu --num_processes N -m train CONFIG train.parallel=ddp"


def launch_line() -> str:
    """The command that really starts several synchronised processes on this machine."""
    return ON_GPU if torch.cuda.is_available() else ON_CPU


def check_processes(parallel: str, started: int) -> None:
    """Hold `train.parallel` to the number of processes that were started. Raises UserError."""
    if parallel == "none" and started > 1:
        raise UserError(
            "train.parallel is none",
            got=f"{started} processes",
            expected="1 process",
            fix="pass train.parallel=ddp, or start it without a launcher: draftsmith train CONFIG",
        )
    if parallel == "ddp" and started < 2:
        raise UserError(
            "train.parallel is ddp", got=f"{started} process", expected="2 or more", fix=launch_line()
        )


def start(section: TrainSection, device: str = "auto") -> Accelerator:
    """The process group that `train.parallel` asks for, checked: launchers may start fewer, or ones that
    never meet.
    """
    if not sys.stderr.isatty():
        disable_progress_bar()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_processes(section.parallel, world)
    accelerator = Accelerator(cpu=device == "cpu" or not torch.cuda.is_available(), mixed_precision="no")
    if accelerator.num_processes != world:
        raise UserError(
            "the processes do not know each other",
            got=f"{accelerator.num_processes} in the group",
            expected=f"{world} (WORLD_SIZE)",
            fix=launch_line(),
        )
    return accelerator


def finish(accelerator: Accelerator, *objects: Any) -> None:
    """Leave after success. gloo aborts at exit in one run of ten unless everything is freed before the
    group ends.

    Never call it in a `finally`: after one rank failed the others would wait for it.
    """
    accelerator.wait_for_everyone()
    accelerator.free_memory(*objects)
    del objects
    gc.collect()
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class StopSignal:
    """Remembers SIGTERM or SIGUSR1 while the loop runs; the ranks agree on it once a step."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def is_main_process() -> bool:
    """Whether this is rank 0, as the launcher says."""
    return os.environ.get("RANK", "0") == "0"
