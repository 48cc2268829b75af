from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from distill.student import DraftSection, build_draft, choose_head_ids, save_draft
from specdec.errors import UserError

SMALL = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.bfloat16).requires_grad_(False)


def build(target: PreTrainedModel, tokenizer: Any, seed: int = 0, **fields: Any) -> PreTrainedModel:
    return build_draft(DraftSection(**fields), target, tokenizer, seed=seed)


def gemma(**extra: Any) -> PreTrainedModel:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SMALL, num_hidden_layers=3, layer_types=kinds, sliding_window=4, **extra)
    return Gemma3ForCausalLM(config)


def test_layers_are_the_targets(target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    draft = build(target, tiny_tokenizer, layers=(2, 0))
    ours, theirs = draft.state_dict(), target.state_dict()
    assert draft.config.num_hidden_layers == 2 and draft.dtype == torch.float32 and draft.training
    for name, value in ours.items():
        source = name.replace("layers.0.", "layers.X.").replace("layers.1.", "layers.0.").replace("X", "2")
        assert torch.equal(value, theirs[source].float()), name


def test_all_layers_give_the_target_back(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for model in (gemma().eval(), Qwen3ForCausalLM(Qwen3Config(**SMALL, num_hidden_layers=3)).eval()):
        draft = build(model, tiny_tokenizer, layers=(0, 1, 2)).eval()
        with torch.no_grad():
            torch.testing.assert_close(draft(IDS).logits, model(IDS).logits)


def test_kinds_of_layers_and_ties_follow(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    draft = build(gemma(), tiny_tokenizer, layers=(2, 1))
    assert draft.config.layer_types == ["full_attention", "sliding_attention"]
    assert draft.config.tie_word_embeddings
    assert draft.get_output_embeddings().weight is draft.get_input_embeddings().weight
    assert draft(IDS).logits.shape == (1, 12, 60)
    deep = build(gemma(), tiny_tokenizer, init="config", num_layers=5)
    assert deep.config.layer_types[-1] == "full_attention" and len(deep.config.layer_types) == 5


def test_freeze(target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    frozen = build(target, tiny_tokenizer, layers=(0,))
    names = {name for name, p in frozen.named_parameters() if not p.requires_grad}
    assert names == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(p.requires_grad for p in build(target, tiny_tokenizer, layers=(0,), freeze=()).parameters())
    assert not any(p.requires_grad for p in target.parameters())


def test_config_of_the_same_width_shares_embeddings(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    draft = build(target, tiny_tokenizer, init="config", num_layers=1, intermediate_size=96)
    assert torch.equal(draft.get_input_embeddings().weight, target.get_input_embeddings().weight.float())
    assert draft.config.intermediate_size == 96 and draft.config.num_attention_heads == 2
    again = build(target, tiny_tokenizer, init="config", num_layers=1, intermediate_size=96)
    other = build(target, tiny_tokenizer, seed=1, init="config", num_layers=1, intermediate_size=96)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(draft.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(draft.state_dict()[name], other.state_dict()[name])


def test_config_of_another_width(target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=r"draft\.freeze=\[\]"):
        build(target, tiny_tokenizer, init="config", num_layers=1, hidden_size=96)
    draft = build(target, tiny_tokenizer, init="config", num_layers=1, hidden_size=96, freeze=())
    config = draft.config
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (96, 3, 32)
    assert config.intermediate_size == 192 and config.num_key_value_heads == 1
    assert draft(IDS).logits.shape[-1] == target.config.vocab_size
    with pytest.raises(UserError, match="divisor of the 3"):
        build(
            target, tiny_tokenizer, init="config", num_layers=1, num_attention_heads=3, num_key_value_heads=2
        )


def test_the_random_state_is_left_alone(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    before = torch.get_rng_state()
    build(target, tiny_tokenizer, init="config", num_layers=1)
    assert torch.equal(before, torch.get_rng_state())


def test_sibling(
    target: PreTrainedModel, tiny_draft_dir: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    draft = build(target, tiny_tokenizer, init="sibling", path=str(tiny_draft_dir), freeze=())
    stored = AutoModelForCausalLM.from_pretrained(tiny_draft_dir).state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in draft.state_dict().items())
    assert all(p.requires_grad for p in draft.parameters())
    other = AutoTokenizer.from_pretrained(tiny_draft_dir)
    other.add_tokens(["<|more|>"])
    with pytest.raises(UserError, match="different tokenizers"):
        build(target, other, init="sibling", path=str(tiny_draft_dir))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": (0, 3)}, r"draft\.layers.*0 to 2"),
        ({"layers": ()}, r"draft\.layers.*0 to 2"),
        ({"layers": (0,), "hidden_size": 32}, r"draft\.hidden_size.*init=config"),
        ({"init": "config"}, r"draft\.num_layers"),
        ({"init": "sibling"}, r"draft\.path"),
    ],
)
def test_wrong_requests(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(target, tiny_tokenizer, **fields)


def test_other_architectures_are_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(UserError, match=r"GPT2LMHeadModel.*built like Llama.*init=sibling"):
        build(model, tiny_tokenizer, layers=(0,))


def test_saved_folder_loads_and_can_be_read(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    draft = build(target, tiny_tokenizer, layers=(1,))
    folder = tmp_path / "draft"
    save_draft(draft, tiny_tokenizer, folder, head_ids=torch.tensor([1, 5, 9]))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(v, draft.state_dict()[k]) for k, v in loaded.state_dict().items())
    assert loaded.generation_config.eos_token_id == tiny_tokenizer.eos_token_id
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tiny_tokenizer.get_vocab()
    assert load_file(folder / "head_ids.safetensors")["head_ids"].tolist() == [1, 5, 9]
    mask = os.umask(0o022)
    os.umask(mask)
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o666 & ~mask}
    save_draft(draft, tiny_tokenizer, folder)
    assert not (folder / "head_ids.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_choose_head_ids() -> None:
    counts = torch.tensor([0.0, 3, 1, 1, 0, 9, 1])
    assert choose_head_ids(counts, 3).tolist() == [1, 2, 5]  # ids 2, 3 and 6 tie: the lowest wins
    assert choose_head_ids(counts, 3, always_include={4}).tolist() == [1, 4, 5]
    assert choose_head_ids(torch.zeros(7), 3, always_include=[6]).tolist() == [0, 1, 6]  # filled up
    assert choose_head_ids(counts, 7).tolist() == list(range(7))
    assert counts.tolist()[4] == 0  # the caller's counts are left alone
    for size, always in ((8, ()), (0, ()), (1, (1, 2))):
        with pytest.raises(UserError, match=r"draft\.head_size"):
            choose_head_ids(counts, size, always)
