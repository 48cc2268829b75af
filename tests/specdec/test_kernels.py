"""The fast path against its eager twin, and the property it is built for: a row's numbers are its own, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from specdec import kernels
from specdec.cache import Runner
from specdec.kernels import MOST_TOKENS, fast_forward, fast_linear
from specdec.pair import LanguageModel
from specdec.trace import Trace

Build = Callable[[hf.PretrainedConfig], PreTrainedModel]
VOCAB = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 160,
    "initializer_range": 0.1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES = {
    "llama": hf.LlamaConfig(**SHAPE),
    "llama with biases": hf.LlamaConfig(**SHAPE, attention_bias=True, rope_parameters=LLAMA3),
    "mistral": hf.MistralConfig(**SHAPE, sliding_window=20),
    "qwen2, mixed windows": hf.Qwen2Config(
        **{k: v for k, v in SHAPE.items() if k != "head_dim"}
        | {"hidden_size": 192, "use_sliding_window": True, "sliding_window": 20, "layer_types": MIXED}
    ),
    "qwen3": hf.Qwen3Config(**SHAPE),
}

needs_kernels = pytest.mark.skipif(kernels._library() is None, reason="no C++ compiler on this machine")


def some(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=generator)


def worst(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).abs().max())


@needs_kernels
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_parity_with_the_eager_twin(build: Build, name: str) -> None:
    """Ragged rounds past windows and views: as near to a float32 forward as bf16 eager is, and near to that."""
    model = build(ARCHITECTURES[name]).bfloat16()
    exact = copy.deepcopy(model).float()
    generator = torch.Generator().manual_seed(1)
    prompt, lengths = some(generator, 3, 40), [40, 7, 25]
    runners = [Runner(model, 140), Runner(model, 140, eager=True), Runner(exact, 140)]
    assert runners[0].fast is not None and runners[1].fast is None and runners[2].fast is None
    for runner in runners:
        runner.prefill(prompt, lengths)
    errors = []
    for _ in range(20):
        tokens = some(generator, 3, int(torch.randint(1, 6, (1,), generator=generator)))
        fast, eager, truth = (runner.forward(tokens, lengths) for runner in runners)
        errors.append((worst(fast, truth), worst(eager, truth), worst(fast, eager)))
        lengths = [n + int(torch.randint(0, tokens.shape[1] + 1, (1,), generator=generator)) for n in lengths]
    ours, theirs, apart = (max(column) for column in zip(*errors, strict=True))
    assert ours < 1.5 * theirs + 1e-3 and apart < 3 * theirs + 1e-3
    assert ours > 0  # they are two computations


@needs_kernels
@torch.inference_mode()
def test_a_whole_text_in_one_forward_of_a_fresh_cache(build: Build) -> None:
    """As scoring reads a text: no forward has made the slots yet, whoever is asked has to."""
    model = build(ARCHITECTURES["llama"]).bfloat16()
    tokens = some(torch.Generator().manual_seed(6), 2, 30)
    runners = [Runner(model, 70), Runner(model, 70, eager=True)]
    fast, eager = (runner.forward(tokens, [0, 0]) for runner in runners)
    assert not torch.equal(fast, eager) and worst(fast, eager) < 0.05


@needs_kernels
@torch.inference_mode()
def test_a_prompt_is_read_the_same_in_any_batch(build: Build) -> None:
    """Alone, in a batch whose prompts need pieces of another size, or moved into a row of a running one."""
    model = build(ARCHITECTURES["llama"]).bfloat16()
    generator = torch.Generator().manual_seed(8)
    prompts, lengths = some(generator, 40, 50), [50] * 20 + [13] * 20
    batch, alone = Runner(model, 60), Runner(model, 60)
    ends = batch.prefill(prompts, lengths)  # pieces of 12 tokens
    for row in (0, 39):
        assert torch.equal(alone.prefill(prompts[row : row + 1, : lengths[row]], lengths[row : row + 1])[0], ends[row])
    assert torch.equal(batch.refill([3, 5], prompts[[39, 0]], [13, 50]), ends[[39, 0]])
    following = some(generator, 40, 2)
    after = batch.forward(following, batch.filled)
    assert torch.equal(alone.forward(following[39:], [13])[0], after[39])
    alone.prefill(prompts[:1], [50])
    assert torch.equal(alone.forward(following[5:6], [50])[0], after[5])


@needs_kernels
@torch.inference_mode()
def test_a_full_serving_batch_has_each_row_as_alone(build: Build) -> None:
    """The largest forward that the kernels take: every row has the bits that it has alone."""
    model = build(ARCHITECTURES["llama"]).bfloat16()
    rows = MOST_TOKENS // 4
    generator = torch.Generator().manual_seed(7)
    prompt, tokens = some(generator, rows, 9), some(generator, rows, 4)
    batch, alone = Runner(model, 20), Runner(model, 20)
    batch.prefill(prompt, [9] * rows)
    hidden = batch.forward(tokens, [9] * rows)
    batch.keep([rows - 1])
    alone.prefill(prompt[:1], [9])
    alone.cache.adopt(torch.tensor([0]), batch.cache)
    assert torch.equal(alone.forward(tokens[-1:], [9])[0], hidden[-1])


@needs_kernels
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_a_token_is_the_same_alone_in_a_batch_and_in_a_round(build: Build, name: str) -> None:
    """Equal bits: one row token by token, one row at once, three rows of which the others hold other texts."""
    model, generator = build(ARCHITECTURES[name]).bfloat16(), torch.Generator().manual_seed(2)
    prompt, tokens = some(generator, 1, 30), some(generator, 1, 8)

    def after_prompt(rows: int) -> Runner:
        runner = Runner(model, 64)
        runner.prefill(prompt.expand(rows, -1), [30] * rows)
        return runner

    one, batch = after_prompt(1), after_prompt(3)
    steps = torch.stack([one.forward(tokens[:, i : i + 1], [30 + i])[0, 0] for i in range(8)])
    at_once = after_prompt(1).forward(tokens, [30])[0]
    others = some(generator, 3, 8)
    others[1] = tokens[0]
    together = batch.forward(others, [12, 30, 21])[1]
    assert torch.equal(steps, at_once) and torch.equal(steps, together)


@needs_kernels
@torch.inference_mode()
def test_rows_that_move_keep_their_cache(build: Build) -> None:
    """Dropped rows make new tensors of keys and values: the addresses held from before are of no use then."""
    model, generator = build(ARCHITECTURES["llama"]).bfloat16(), torch.Generator().manual_seed(3)
    prompt, tokens = some(generator, 4, 20), some(generator, 4, 2)
    kept, whole = Runner(model, 64), Runner(model, 64)
    for runner in (kept, whole):
        runner.prefill(prompt, [20] * 4)
        runner.forward(tokens, [20] * 4)
    kept.keep([3, 1])
    new = some(generator, 4, 3)
    assert torch.equal(kept.forward(new[[3, 1]], [22, 22]), whole.forward(new, [22] * 4)[[3, 1]])
    kept.refill([0], prompt[2:3], [20])
    alone = Runner(model, 64)
    alone.prefill(prompt[2:3], [20])
    refilled, fresh = kept.forward(new[:2], [20, 25])[0], alone.forward(new[:1], [20])[0]
    torch.testing.assert_close(refilled, fresh, atol=0.06, rtol=0)  # the eager prefill rounds by its shapes


@needs_kernels
@pytest.mark.parametrize("flags", [(), ("-mno-avx512bf16",), ("-mno-avx512f",)], ids=["native", "fma", "narrow"])
@pytest.mark.parametrize(("size", "outputs"), [(32, 1), (64, 4), (96, 7), (576, 50)])
@torch.inference_mode()
def test_linear(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], size: int, outputs: int) -> None:
    """Within the rounding of bf16, with outputs that leave a block half full; rows don't depend on their number."""
    library = kernels._library(flags)
    if library is None:
        pytest.skip("the compiler does not know this machine's flags")
    monkeypatch.setattr(kernels, "_library", lambda: library)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(11, size, generator=generator).bfloat16()
    weight, bias = (torch.randn(s, generator=generator).bfloat16() for s in ((outputs, size), (outputs,)))
    got = fast_linear(x, weight, bias)
    want = x.double() @ weight.double().T + bias.double()
    assert got is not None
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-2)
    for rows in (1, 2, 3, 5):
        part = fast_linear(x[3 : 3 + rows], weight, bias)
        assert part is not None and torch.equal(part, got[3 : 3 + rows])
    plain = fast_linear(x[:4].view(2, 2, size), weight, None)
    assert plain is not None and plain.shape == (2, 2, outputs)
    torch.testing.assert_close(plain.view(4, -1).double(), want[:4] - bias.double(), rtol=2**-8, atol=1e-2)


@torch.inference_mode()
def test_what_does_not_fit_is_left_to_the_eager_twin(build: Build) -> None:
    narrow = hf.LlamaConfig(**{**SHAPE, "head_dim": 16})
    gelu = hf.LlamaConfig(**SHAPE, hidden_act="gelu")
    mlp_bias = hf.LlamaConfig(**SHAPE, mlp_bias=True)
    for config in (narrow, gelu, mlp_bias, hf.Gemma2Config(**SHAPE)):
        assert fast_forward(build(config).bfloat16(), 32, 31) is None
    assert fast_forward(build(ARCHITECTURES["llama"]), 32, 31) is None  # float32: the reference
    x, weight = torch.zeros(2, 64).bfloat16(), torch.zeros(8, 64).bfloat16()
    assert fast_linear(x.float(), weight.float(), None) is None
    assert fast_linear(x[:, :48].contiguous(), weight[:, :48].contiguous(), None) is None
    assert fast_linear(torch.zeros(MOST_TOKENS + 1, 64).bfloat16(), weight, None) is None
    assert fast_linear(x, torch.zeros(64, 8).bfloat16().T, None) is None


def test_no_compiler_is_told_once_and_decodes_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any, build: Build
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels._library.cache_clear()
    try:
        model = build(ARCHITECTURES["llama"]).bfloat16()
        with torch.inference_mode():
            for _ in range(2):
                runner = Runner(model, 16)
                runner.prefill(torch.full((1, 4), 5), [4])
                assert runner.fast is None and runner.forward(torch.full((1, 2), 6), [4]).shape == (1, 2, 96)
    finally:
        kernels._library.cache_clear()
    error = capsys.readouterr().err
    assert error.count("no fast CPU kernels") == 1 and error.count("\n") == 1
    assert not list((tmp_path / "draftsmith").iterdir())


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_identity_in_bf16(
    build: Build, language_model: Callable[..., LanguageModel], decode: Callable[..., list[Trace]], name: str
) -> None:
    """Where the eager twin rounds a round of K+1 tokens otherwise than single ones, here not one token differs."""
    model = build(ARCHITECTURES[name]).bfloat16()
    near = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in near.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=generator).bfloat16()
    target, draft = language_model(model, None), language_model(near, None)
    rows = [some(generator, n).tolist() for n in (3, 17, 40, 9)]
    plain = decode(target, rows, max_new_tokens=40)
    accepted = 0
    for draft_length in range(1, 8):
        traces = decode(target, rows, draft=draft, length=draft_length, max_new_tokens=40)
        assert [t.tokens for t in traces] == [t.tokens for t in plain]
        accepted += sum(sum(t.num_accepted) for t in traces)
    assert accepted > 0
