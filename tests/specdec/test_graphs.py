"""Captured forwards against fresh ones: with a recorder that runs on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from specdec import graphs
from specdec.cache import Runner
from specdec.pair import LanguageModel
from specdec.trace import Trace

Build = Callable[[hf.PretrainedConfig], PreTrainedModel]
VOCAB = 64
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
ARCHITECTURES = {
    "llama": hf.LlamaConfig(**SMALL),
    "mistral": hf.MistralConfig(**SMALL, sliding_window=8),
    "gemma3": hf.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}  # fmt: skip


class OnCpu:
    """Records like CUDA: a replay reads its inputs and writes its result where the recording did, and runs no Python
    of the caller's."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.recorded += 1
        output = run().clone()

        def replay() -> None:
            self.replayed += 1
            output.copy_(run())

        output.zero_()
        return replay, output


def walk(runner: Runner, model: PreTrainedModel, rounds: int, rows: list[list[int]]) -> list[list[int]]:
    """Ragged rounds of one to four tokens, some of them kept; every hidden state against a fresh forward's."""
    generator = torch.Generator().manual_seed(len(rows))
    for _ in range(rounds):
        width = int(torch.randint(1, 5, (1,), generator=generator))
        tokens = torch.randint(3, VOCAB, (len(rows), width), generator=generator)
        hidden = runner.forward(tokens, [len(row) for row in rows])
        for b, row in enumerate(rows):
            drafted = row + tokens[b].tolist()
            want = model.base_model(input_ids=torch.tensor([drafted]), use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(hidden[b], want[len(row) :], atol=2e-5, rtol=0)
            rows[b] = drafted[: len(row) + int(torch.randint(0, width + 1, (1,), generator=generator))]
    return rows


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_replays_equal_fresh_forwards(build: Build, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Across a step of the view, a refilled row, and rows that are dropped down to one."""
    monkeypatch.setattr(graphs, "USES_BEFORE_CAPTURE", 1)
    model, recorder = build(ARCHITECTURES[name]), OnCpu()
    runner = Runner(model, num_slots=400, eager=True, recorder=recorder)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, VOCAB, (3, 250), generator=generator)
    lengths = [249, 200, 7]
    runner.prefill(prompt, lengths)
    rows = walk(runner, model, 20, [prompt[b, :n].tolist() for b, n in enumerate(lengths)])
    assert len(rows[0]) > graphs.VIEW_STEP
    runner.refill([1], prompt[2:, :20], [20])
    rows = walk(runner, model, 10, [rows[0], prompt[2, :20].tolist(), rows[2]])
    before = recorder.recorded
    runner.keep([2])
    walk(runner, model, 20, [rows[2]])
    assert recorder.recorded > before  # the cache has moved, so what was captured is not used
    assert recorder.replayed > 25


@torch.inference_mode()
def test_prompts_and_rare_shapes_are_not_captured(build: Build) -> None:
    recorder = OnCpu()
    runner = Runner(build(ARCHITECTURES["llama"]), num_slots=300, eager=True, recorder=recorder)
    for _ in range(20):
        runner.prefill(torch.ones(1, 40, dtype=torch.long), [40])
    assert recorder.recorded == 0
    for number in range(graphs.USES_BEFORE_CAPTURE + 2):
        runner.forward(torch.ones(1, 1, dtype=torch.long), [40 + number])
    assert (recorder.recorded, recorder.replayed) == (1, 2)


@torch.inference_mode()
def test_a_model_that_waits_for_the_host_goes_on_eagerly(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "USES_BEFORE_CAPTURE", 1)
    attempts = []

    def refuse(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        attempts.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    model = build(ARCHITECTURES["llama"])
    runner = Runner(model, num_slots=100, eager=True, recorder=refuse)
    runner.prefill(torch.full((2, 5), 3), [5, 4])
    walk(runner, model, 12, [[3] * 5, [3] * 4])
    assert len(attempts) == 1 and "not permitted" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("draft", [None, "near"])
def test_a_gpu_decodes_the_eager_twins_tokens(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: list[list[int]],
    decode: Callable[..., list[Trace]],
    draft: str | None,
) -> None:
    def answers(eager: bool) -> list[list[int]]:
        def moved(model: LanguageModel) -> LanguageModel:
            return replace(model, model=deepcopy(model.model).to("cuda"), eager=eager)  # type: ignore[arg-type]

        more = {"draft": draft and moved(drafts[draft]), "max_new_tokens": 60}
        return [trace.tokens for trace in decode(moved(target), prompts, **more)]

    assert answers(eager=False) == answers(eager=True)
