"""Every architecture we claim, with random weights: long random walks of the slot cache against fresh forwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from specdec.architecture import context_length
from specdec.cache import Runner
from specdec.errors import UserError
from specdec.head import Head
from specdec.pair import LanguageModel

Build = Callable[[hf.PretrainedConfig], PreTrainedModel]
VOCAB, CONTEXT, STEPS = 64, 48, 1000
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.15,
}  # fmt: skip
GROUPED = {**SHAPE, "num_key_value_heads": 2}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32, "factor": 1.5,
}  # fmt: skip
ARCHITECTURES = {
    "llama": hf.LlamaConfig(**GROUPED),
    "llama, llama3 rope": hf.LlamaConfig(**GROUPED, rope_parameters=LLAMA3),
    "qwen2": hf.Qwen2Config(**GROUPED),
    "qwen3, yarn": hf.Qwen3Config(**GROUPED, head_dim=16, rope_parameters=YARN),
    "mistral": hf.MistralConfig(**GROUPED, sliding_window=8),
    "gemma2": hf.Gemma2Config(**GROUPED, head_dim=16, query_pre_attn_scalar=16, **WINDOW),
    "gemma3": hf.Gemma3TextConfig(**GROUPED, head_dim=16, query_pre_attn_scalar=16, **WINDOW),
    "phi3": hf.Phi3Config(**GROUPED),
    "phi3, longrope": hf.Phi3Config(**GROUPED, original_max_position_embeddings=32, rope_parameters=LONG),
    "gpt_neox": hf.GPTNeoXConfig(**SHAPE),
    "olmo2": hf.Olmo2Config(**GROUPED),
    "granite": hf.GraniteConfig(**GROUPED, attention_multiplier=0.4, residual_multiplier=0.7, logits_scaling=2.0),
    "mixtral": hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": hf.Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


class Walk:
    """Rows of random text in one Runner: drafts accepted or rejected, rows rolled far back, rows refilled."""

    def __init__(self, model: PreTrainedModel, head: Head, limit: int, num_rows: int = 3) -> None:
        self.model, self.head, self.limit = model, head, limit
        self.generator = torch.Generator().manual_seed(1)
        self.runner = Runner(model, num_slots=limit + 6)  # rows at the limit ride along with longer drafts
        lengths = [self.number(1, limit - 1) for _ in range(num_rows)]
        self.rows = [self.text(n) for n in lengths]
        self.runner.prefill(self.padded(self.rows), lengths)
        self.at_limit = self.far_back = self.refilled = self.worst = 0

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def text(self, length: int) -> list[int]:
        return torch.randint(3, VOCAB, (length,), generator=self.generator).tolist()

    def padded(self, rows: list[list[int]]) -> Tensor:
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows])

    def fresh(self, rows: list[list[int]]) -> Tensor:
        """Logits [B, N, V] of a full forward without a cache: what follows a token can't reach it."""
        return self.model(self.padded(rows), use_cache=False).logits.float()

    def check(self, got: Tensor, want: Tensor) -> None:
        self.worst = max(self.worst, float((got - want).abs().max()))

    def step(self) -> None:
        num_tokens = self.number(1, 5)
        drafts = [self.text(num_tokens) for _ in self.rows]
        hidden = self.runner.forward(torch.tensor(drafts), [len(row) for row in self.rows])
        logits = self.head(hidden)
        drafted = [(row + more)[: self.limit] for row, more in zip(self.rows, drafts, strict=True)]
        want = self.fresh(drafted)
        for b, row in enumerate(self.rows):
            inside = len(drafted[b]) - len(row)
            self.check(logits[b, :inside], want[b, len(row) : len(row) + inside])
            self.at_limit += len(drafted[b]) == self.limit and inside > 0
            self.rows[b] = drafted[b][: len(row) + self.number(0, inside)]
            if self.number(1, 20) == 1 and len(self.rows[b]) > 12:  # across a window
                self.rows[b] = self.rows[b][: self.number(1, len(self.rows[b]) - 10)]
                self.far_back += 1
        done = [b for b, row in enumerate(self.rows) if len(row) >= self.limit]
        if done:
            self.refill(done)

    def refill(self, done: list[int]) -> None:
        new = [self.text(self.number(1, 30)) for _ in done]
        hidden = self.runner.refill(done, self.padded(new), [len(row) for row in new])
        want = self.fresh(new)
        for place, (b, row) in enumerate(zip(done, new, strict=True)):
            self.check(self.head(hidden[place]), want[place, len(row) - 1])
            self.rows[b] = row
        self.refilled += len(done)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_a_long_random_walk_equals_fresh_forwards(
    build: Build, language_model: Callable[..., LanguageModel], name: str
) -> None:
    """1,000 steps: logits within 1e-4, past windows, to the context's end, rows rolled back and refilled."""
    config = ARCHITECTURES[name]
    model, limit = build(config), context_length(config)
    walk = Walk(model, Head(language_model(model, None), VOCAB), limit)
    for _ in range(STEPS):
        walk.step()
    assert walk.worst < 1e-4
    assert min(walk.at_limit, walk.far_back, walk.refilled) > 20  # the hard cases really came


def test_the_context_of_longrope_is_the_original_one() -> None:
    """Past it every rotation changes, of cached keys and batch mates too."""
    assert context_length(ARCHITECTURES["phi3, longrope"]) == 32
    assert context_length(ARCHITECTURES["qwen3, yarn"]) == CONTEXT
    assert context_length(ARCHITECTURES["gemma3"]) == CONTEXT


@torch.inference_mode()
def test_a_lagging_cache_is_told(build: Build) -> None:
    """A planted lag of one token in one row: a forward that starts behind a hole is refused."""
    runner = Runner(build(ARCHITECTURES["llama"]), num_slots=32)
    runner.prefill(torch.full((2, 8), 5), [8, 6])
    runner.forward(torch.full((2, 2), 5), [8, 6])
    with pytest.raises(AssertionError, match="row 1 holds 8 tokens, a forward starts at 9"):
        runner.forward(torch.full((2, 2), 5), [10, 9])


HEADS = {"vocab_size": VOCAB, "num_attention_heads": 2}
REFUSED = {
    "mamba": (hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "recurrent state"),
    "rwkv": (hf.RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "recurrent state"),
    "falcon_h1": (hf.FalconH1Config(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "hybrid"),
    "qwen3_next": (hf.Qwen3NextConfig(**GROUPED), "linear_attention"),
    "recurrent_gemma": (hf.RecurrentGemmaConfig(**HEADS, hidden_size=32, num_hidden_layers=2), "linear_attention"),
    "lfm2": (hf.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]), "conv"),
    "llama4_text": (hf.Llama4TextConfig(**GROUPED, attention_chunk_size=8), "chunked_attention"),
    "bloom": (hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2), "ALiBi"),
    "mpt": (hf.MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=2), "ALiBi"),
    "falcon": (hf.FalconConfig(**HEADS, hidden_size=32, num_hidden_layers=2, alibi=True), "ALiBi"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_roll_back_is_refused_by_name(name: str) -> None:
    config, reason = REFUSED[name]
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=rf"got {name}: .*{reason}") as error:
        Runner(model, num_slots=8)
    assert "\n" not in str(error.value)


def test_an_encoder_decoder_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = hf.BartModel(hf.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=VOCAB))
    with pytest.raises(UserError, match="got bart: an encoder-decoder"):
        Runner(model, num_slots=8)
