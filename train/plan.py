"""What a run would cost, before anything is spent: tokens, disk, memory and time of each stage.

Times come from this machine's matrix multiplication and memory speed, measured for a moment, and from the
models' parameter counts: right within a factor of three or so. Nothing is written.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec.pair import TargetSection, read_config
from train.config import Config

RECORD_BYTES = 40
"""Bytes of JSON around one token of a recorded answer: its id, its text, its share of the prompt."""

LIKELY_HEAD = 8192
"""Ids of a short list whose size is not measured yet."""

DECODE_SHARE, TRAIN_SHARE, EVAL_SHARE = 0.15, 0.6, 0.25
"""What batched sampling with capture, training and batch-1 decoding reach of the machine's bare speed (two
CPU cores).
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds of this machine."""

    flops: float
    """Floating point operations per second of a matrix multiplication."""
    bytes_per_s: float
    """Bytes read per second."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One stage of a plan."""

    stage: str
    status: str
    """`run` or `skip (done)`."""
    tokens: int
    disk_bytes: int
    memory_bytes: int
    time_s: float


def measure(device: str = "cpu") -> Machine:
    """Time a few multiplications and copies: about a fifth of a second."""
    a, b = torch.randn(256, 1024), torch.randn(1024, 1024)
    a, b = a.to(device, torch.bfloat16), b.to(device, torch.bfloat16)
    big = torch.ones(1 << 24, device=device)
    multiply = _best(lambda: float((a @ b)[0, 0]))
    read = _best(lambda: float(big.sum()))
    return Machine(flops=2 * 256 * 1024 * 1024 / multiply, bytes_per_s=4 * (1 << 24) / read)


def _best(work: Callable[[], float]) -> float:
    """Seconds of the fastest of a few tries: what else runs on the machine can only slow one down."""
    seconds = []
    for _ in range(12):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def target_shape(section: TargetSection) -> tuple[int, Any]:
    """Parameter count and text config of the target, from its config file alone."""
    config = read_config(section)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters()), config


def draft_size(config: Config, target: Any) -> tuple[int, int]:
    """Parameters of the draft: (all, learning), for a Llama-like stack of the configured shape."""
    draft = config.draft
    hidden = draft.hidden_size or target.hidden_size
    layers = draft.num_layers or len(draft.layers) or 2
    inner = draft.intermediate_size or target.intermediate_size
    heads = draft.num_attention_heads or target.num_attention_heads
    kv = draft.num_key_value_heads or target.num_key_value_heads or heads
    body = layers * (2 * hidden * hidden + 2 * hidden * hidden * kv // heads + 3 * hidden * inner)
    embeddings = target.vocab_size * hidden
    return body + embeddings, body + (0 if "embeddings" in draft.freeze else embeddings)


def estimate(
    config: Config,
    *,
    prompt_lengths: list[int],
    eval_prompts: int,
    machine: Machine,
    done: dict[str, bool],
) -> list[Estimate]:
    """The three stages of a run. `prompt_lengths` has one entry per answer to make."""
    parameters, shape = target_shape(config.target)
    width = 4 if config.target.dtype == "float32" else 2
    new = config.generate.max_new_tokens
    answers, prompt_tokens = len(prompt_lengths), sum(prompt_lengths)
    answer_tokens = answers * new
    steps = -(-answers // config.generate.batch_size) * new
    step_s = max(
        parameters * width / machine.bytes_per_s, 2 * parameters * config.generate.batch_size / machine.flops
    )
    head_dim = shape.hidden_size // shape.num_attention_heads
    cache = (
        2
        * shape.num_hidden_layers
        * (shape.num_key_value_heads or shape.num_attention_heads)
        * head_dim
        * width
    )
    longest = max(prompt_lengths, default=0) + new
    id_bytes = 2 if shape.vocab_size < 65536 else 4
    generate = Estimate(
        stage="generate",
        status=_status(done, "generate"),
        tokens=answer_tokens,
        disk_bytes=answer_tokens * config.capture.top_k * (id_bytes + 2)
        + RECORD_BYTES * (answer_tokens + prompt_tokens),
        memory_bytes=parameters * width
        + cache * longest * config.generate.batch_size
        + 4 * shape.vocab_size * config.generate.batch_size,
        time_s=steps * step_s / DECODE_SHARE + 2 * parameters * prompt_tokens / machine.flops,
    )
    total, learning = draft_size(config, shape)
    padded = answer_tokens + prompt_tokens
    per_epoch = max(1, -(-padded // config.train.batch_tokens))
    num_steps = config.train.steps or max(1, round((config.train.epochs or 1.0) * per_epoch))
    seen = num_steps * min(config.train.batch_tokens, padded)
    size = config.draft.head_size or shape.vocab_size
    rows = min(LIKELY_HEAD, shape.vocab_size) if size == "auto" else size
    head = rows * (config.draft.hidden_size or shape.hidden_size)
    train = Estimate(
        stage="train",
        status=_status(done, "train"),
        tokens=seen,
        disk_bytes=(config.train.keep + 1) * 4 * (total + 2 * learning),
        memory_bytes=4 * total + 12 * learning + config.train.batch_tokens * 4 * 40 * shape.hidden_size,
        time_s=6 * (learning + head) * seen / machine.flops / TRAIN_SHARE,
    )
    eval_tokens = eval_prompts * config.eval.max_new_tokens * len(config.eval.temperatures)
    decode = Estimate(
        stage="eval",
        status=_status(done, "eval"),
        tokens=eval_tokens,
        disk_bytes=RECORD_BYTES * 3 * eval_tokens,
        memory_bytes=(parameters + total) * width,
        time_s=3 * eval_tokens * parameters * width / machine.bytes_per_s / EVAL_SHARE,
    )
    return [generate, train, decode]


def _status(done: dict[str, bool], stage: str) -> str:
    return "skip (done)" if done.get(stage) else "run"


def table(estimates: list[Estimate]) -> str:
    """The plan for a reader."""
    lines = [f"{'stage':10}{'status':14}{'tokens':>12}{'disk MB':>10}{'memory MB':>11}{'time':>10}"]
    for e in estimates:
        lines.append(
            f"{e.stage:10}{e.status:14}{e.tokens:>12,}{e.disk_bytes / 1e6:>10.1f}"
            f"{e.memory_bytes / 1e6:>11.0f}{_clock(e.time_s):>10}"
        )
    return "\n".join([*lines, "Estimates, times within a factor of three. Nothing was written."])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02}m" if minutes >= 60 else f"{minutes}m{rest:02}s"
