"""The slot cache against fresh forwards: ragged accept and reject, windows, dropped rows, stale slots."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from specdec.cache import VIEW_STEP, Runner
from specdec.head import Head
from specdec.pair import LanguageModel
from specdec.trace import Trace

Build = Callable[[hf.PretrainedConfig], PreTrainedModel]
VOCAB = 64
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES = {
    "llama": hf.LlamaConfig(**SMALL),
    "qwen3": hf.Qwen3Config(**SMALL, head_dim=16),
    "mistral": hf.MistralConfig(**SMALL, sliding_window=8),
    "gemma3": hf.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=8, layer_types=MIXED),
}
HEADS = {
    "tied": hf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "bias": hf.PhiConfig(**{**SMALL, "num_key_value_heads": 2}),
    "soft cap": hf.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=8, final_logit_softcapping=0.5),
    "divided": hf.GraniteConfig(**SMALL, logits_scaling=8.0, embedding_multiplier=12.0),
    "multiplied": hf.CohereConfig(**SMALL, logit_scale=0.0625),
}


def fresh(model: PreTrainedModel, row: list[int]) -> Tensor:
    return model.base_model(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_ragged_rounds_equal_fresh_forwards(build: Build, name: str) -> None:
    """30 rounds of K+1 tokens, a random number kept, two drops of rows, past two views and many windows."""
    model, generator = build(ARCHITECTURES[name]), torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        return torch.randint(3, VOCAB, shape, generator=generator)

    lengths = [1, 45, 33, 38]
    prompt = some(4, max(lengths))
    runner = Runner(model, num_slots=45 + 30 * 5)
    rows = [prompt[b, :n].tolist() for b, n in enumerate(lengths)]
    hidden = runner.prefill(prompt, torch.tensor(lengths))
    for b, row in enumerate(rows):
        close(hidden[b], fresh(model, row)[-1])
    for number in range(30):
        if number in (10, 20):
            kept = [2, 0, 3] if number == 10 else [2]  # another order; then one row, which writes slices
            runner.keep(kept)
            rows = [rows[b] for b in kept]
        num_tokens = int(torch.randint(1, 6, (1,), generator=generator))
        tokens = some(len(rows), num_tokens)
        hidden = runner.forward(tokens, torch.tensor([len(r) for r in rows]))
        for b, row in enumerate(rows):
            drafted = row + tokens[b].tolist()
            close(hidden[b], fresh(model, drafted)[len(row) :])
            accepted = int(torch.randint(0, num_tokens + 1, (1,), generator=generator))
            rows[b] = drafted[: len(row) + accepted]
    assert max(len(r) for r in rows) > VIEW_STEP


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_rollback_then_rewrite(build: Build, name: str) -> None:
    """Far back across a window, other tokens written: nothing of the first text shows."""
    model, generator = build(ARCHITECTURES[name]), torch.Generator().manual_seed(2)
    first, second = torch.randint(3, VOCAB, (2, 2, 30), generator=generator)
    runner = Runner(model, num_slots=64)
    runner.prefill(first, torch.tensor([30, 30]))
    starts = torch.tensor([4, 11])
    hidden = runner.forward(second[:, :9], starts)
    for b, start in enumerate(starts.tolist()):
        close(hidden[b], fresh(model, first[b, :start].tolist() + second[b, :9].tolist())[start:])


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_one_row_token_by_token(build: Build, name: str) -> None:
    """From an empty cache to past two windows, with later slots full of another text."""
    model, generator = build(ARCHITECTURES[name]), torch.Generator().manual_seed(4)
    stale, row = torch.randint(3, VOCAB, (2, 20), generator=generator)
    runner = Runner(model, num_slots=30)
    runner.prefill(stale.unsqueeze(0), torch.tensor([20]))
    steps = [runner.forward(row[None, i : i + 1], torch.tensor([i]))[0, 0] for i in range(20)]
    close(torch.stack(steps), fresh(model, row.tolist()))


@torch.inference_mode()
def test_prefill_in_chunks(build: Build) -> None:
    """Prompts that end in different chunks, one at a chunk's edge."""
    model, generator = build(ARCHITECTURES["mistral"]), torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCAB, (4, 50), generator=generator)
    lengths = [50, 16, 17, 1]
    hidden = Runner(model, num_slots=51).prefill(tokens, torch.tensor(lengths), chunk=16)
    for b, n in enumerate(lengths):
        close(hidden[b], fresh(model, tokens[b, :n].tolist())[-1])


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_a_shared_beginning_is_read_once(build: Build, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike, one of them the beginning and a token more, in a new batch and into a running one."""
    model, generator = build(ARCHITECTURES[name]), torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCAB, (4, 40), generator=generator)
    tokens[:, :20] = tokens[0, :20]
    tokens[:, 20] = torch.tensor([3, 4, 5, 6])
    lengths = [40, 21, 33, 22]
    runner = Runner(model, num_slots=60)
    read: list[int] = []
    eager = runner._eager
    monkeypatch.setattr(runner, "_eager", lambda ids, positions: read.append(ids.numel()) or eager(ids, positions))

    def check(hidden: Tensor, tokens: Tensor) -> None:
        following = torch.randint(3, VOCAB, (4, 3), generator=generator)
        after = runner.forward(following, lengths)
        for b, n in enumerate(lengths):
            row = [*tokens[b, :n].tolist(), *following[b].tolist()]
            close(hidden[b], fresh(model, row[:n])[-1])
            close(after[b], fresh(model, row)[n:])

    check(runner.prefill(tokens, lengths), tokens)
    assert read == [20, 4 * 20, 4 * 3]
    again = torch.randint(3, VOCAB, (4, 40), generator=generator)
    again[:, :20], again[:, 20] = again[0, :20], tokens[:, 20]
    check(runner.refill([0, 1, 2, 3], again, lengths), again)
    assert read[3:] == [20, 4 * 20, 4 * 3]


@torch.inference_mode()
def test_equal_prompts_keep_a_token_of_their_own(build: Build) -> None:
    """The hidden state behind a prompt comes from a forward over its row, however much is shared."""
    model, generator = build(ARCHITECTURES["llama"]), torch.Generator().manual_seed(6)
    row = torch.randint(3, VOCAB, (1, 30), generator=generator)
    hidden = Runner(model, num_slots=31).prefill(row.expand(3, -1), [30, 30, 9])
    close(hidden[0], fresh(model, row[0].tolist())[-1])
    close(hidden[1], hidden[0])
    close(hidden[2], fresh(model, row[0, :9].tolist())[-1])


@torch.inference_mode()
def test_the_last_slot_is_usable_and_the_next_is_refused(build: Build) -> None:
    model = build(ARCHITECTURES["llama"])
    runner = Runner(model, num_slots=6)
    row = [5, 6, 7, 8, 9, 10]
    close(runner.forward(torch.tensor([row]), torch.tensor([0]))[0], fresh(model, row))
    with pytest.raises(AssertionError, match="last slot"):
        runner.forward(torch.tensor([[11]]), torch.tensor([6]))


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_head_gives_the_models_own_logits(
    build: Build, name: str, language_model: Callable[..., LanguageModel]
) -> None:
    model = build(HEADS[name])
    ids = torch.arange(3, 23).unsqueeze(0)
    want = model(ids, use_cache=False).logits[0]
    hidden = Runner(model, num_slots=20).forward(ids, torch.tensor([0]))[0]
    close(Head(language_model(model, None), VOCAB)(hidden), want)
    close(Head(language_model(model, None), 50)(hidden), want[:, :50])
    chosen = torch.tensor([3, 8, 41])
    short = Head(language_model(model, None, head_ids=chosen), 50)
    close(short(hidden), want[:, chosen])
    assert short.token_ids(torch.tensor([2, 0])).tolist() == [41, 3]
    wide = short.widen(torch.tensor([[0.2, 0.3, 0.5]]))
    assert wide.shape == (1, 50) and wide[0, chosen].tolist() == pytest.approx([0.2, 0.3, 0.5])
    assert int((wide > 0).sum()) == 3


@pytest.mark.parametrize(
    "config",
    [
        hf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=40),
        hf.OPTConfig(**{**SMALL, "max_position_embeddings": 40}, ffn_dim=64, word_embed_proj_dim=32),
    ],
    ids=["gpt2", "opt"],
)
def test_learned_positions_end_with_the_context(
    build: Build,
    config: hf.PretrainedConfig,
    language_model: Callable[..., LanguageModel],
    decode: Callable[..., list[Trace]],
) -> None:
    """Rows at the end of their context, and finished ones, share rounds with rows that draft far on."""
    model = build(config)
    target, twin = language_model(model, None), language_model(copy.deepcopy(model), None)
    rows = [list(range(3, 3 + n)) for n in (39, 30, 36, 5)]
    plain = decode(target, rows, max_new_tokens=30)
    assert [len(t.tokens) for t in plain] == [1, 10, 4, 30]
    for draft in (twin, "lookup"):
        assert [t.tokens for t in decode(target, rows, draft=draft, max_new_tokens=30)] == [
            t.tokens for t in plain
        ]
