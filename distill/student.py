"""The draft before training: built from the target's layers, from a config, or from a small sibling.

Letters: V vocabulary, M ids of a short-listed head.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdec.architecture import context_length
from specdec.errors import UserError
from specdec.files import atomic_dir
from specdec.pair import HEAD_IDS_FILE, LanguageModel, TargetSection, check_pair, load_model
from specdec.settings import Section

_SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_INDEX_LISTS = ("mlp_only_layers", "full_attn_idxs", "cross_attention_layers")
"""Config fields that hold layer numbers: which layer is which would change with the depth."""
_NOT_PER_LAYER = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id")
"""Lists that may be as long as the model is deep by chance."""


class DraftSection(Section):
    """The small model that is made."""

    init: Literal["config", "layers", "sibling"] = "layers"
    """Where it starts: random layers of a given shape, layers of the target, or a trained small model."""
    path: str | None = None
    """With init=sibling: folder or Hub id of the model to start from."""
    layers: tuple[int, ...] = ()
    """With init=layers: the target's layers to take, from 0, in the order they are stacked."""
    num_layers: int | None = Field(default=None, ge=1)
    """With init=config: number of layers."""
    hidden_size: int | None = Field(default=None, ge=1)
    """With init=config: width; None takes the target's, and its embeddings with it."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """With init=config: width of the MLP; None keeps the target's ratio to the hidden size."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """With init=config: attention heads; None keeps the target's width of a head."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """With init=config: key-value heads; None takes the target's number where it divides the heads."""
    freeze: tuple[Literal["embeddings"], ...] = ("embeddings",)
    """Parts that do not learn: `embeddings` are the input rows and the output head."""
    head_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Ids of a short-listed output head; `auto`: as many as this machine's measured costs make pay; None: all."""


def build_draft(
    section: DraftSection,
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
) -> PreTrainedModel:
    """An untrained draft, float32, on the CPU, frozen where the section says.

    The random state of the process is left as it was; equal seeds give equal weights.

    Raises:
        UserError: the target is not built like Llama, a layer number is out of range, the shape is
            impossible, or the sibling has another tokenizer.
    """
    if section.init == "sibling":
        draft = _sibling(section, target_model, tokenizer)
    elif section.init == "layers":
        draft = _from_layers(section, target_model, seed)
    else:
        draft = _from_config(section, target_model, seed)
    if section.init != "sibling":
        # The target's penalties and temperatures stay with the target; where text ends goes along.
        ends = target_model.generation_config or GenerationConfig()
        draft.generation_config = GenerationConfig(
            bos_token_id=ends.bos_token_id, eos_token_id=ends.eos_token_id, pad_token_id=ends.pad_token_id
        )
    draft.requires_grad_(True)
    if "embeddings" in section.freeze:
        draft.get_input_embeddings().requires_grad_(False)
        draft.get_output_embeddings().requires_grad_(False)
    draft.train()
    return draft


def save_draft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    head_ids: Tensor | None = None,  # [M], sorted
) -> None:
    """Save a folder that `from_pretrained` loads, tokenizer included, whole or not at all.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    with atomic_dir(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if head_ids is not None:
            ids = head_ids.detach().to("cpu", torch.int64).contiguous()
            save_file({"head_ids": ids}, temporary / HEAD_IDS_FILE)


def choose_head_ids(
    counts: Tensor,  # [V]
    size: int,
    always_include: Collection[int] = (),
) -> Tensor:  # [size] int64, sorted
    """The ids of a short-listed head (FR-Spec, arXiv 2502.14856): the most frequent, and some in any case.

    Equal counts go by id, lowest first, so that the list is the same everywhere and unseen ids fill it up.

    Raises:
        UserError: the list would be larger than the vocabulary, or smaller than the ids it must hold.
    """
    forced = sorted(set(always_include))
    if not max(1, len(forced)) <= size <= len(counts):
        raise UserError(
            "draft.head_size",
            got=size,
            expected=f"{max(1, len(forced))} (ids that are always kept) to {len(counts)} (the vocabulary)",
        )
    ranked = counts.detach().cpu().double()
    ranked[forced] = torch.inf
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def _sibling(
    section: DraftSection, target_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    if section.path is None:
        raise UserError("draft.path", got="nothing", expected="a model's folder or Hub id, with init=sibling")
    sibling = load_model(TargetSection(path=section.path, dtype="float32", device="cpu"))
    config = target_model.config.get_text_config()
    target = LanguageModel(
        model=target_model, tokenizer=tokenizer, vocab_size=int(config.vocab_size),
        context_length=context_length(config), eos_ids=frozenset(), fingerprint="",
    )  # fmt: skip
    check_pair(target, sibling)
    return sibling.model


def _from_layers(section: DraftSection, target: PreTrainedModel, seed: int) -> PreTrainedModel:
    num_layers = len(_layers(target))
    for name, value in section.model_dump(include={*_SHAPE, "num_layers"}, exclude_none=True).items():
        raise UserError(
            f"draft.{name}", got=value, expected="nothing with draft.init=layers",
            fix="set draft.init=config to choose a shape",
        )  # fmt: skip
    if not section.layers or not all(0 <= layer < num_layers for layer in section.layers):
        raise UserError(
            "draft.layers", got=list(section.layers),
            expected=f"one or more layers of the target, each from 0 to {num_layers - 1}",
        )  # fmt: skip
    draft = _new(_picked(target.config, section.layers), seed)
    _copy_rest(target, draft)
    for ours, number in zip(_layers(draft), section.layers, strict=True):
        ours.load_state_dict(_layers(target)[number].state_dict())
    return draft


def _from_config(section: DraftSection, target: PreTrainedModel, seed: int) -> PreTrainedModel:
    num_layers = len(_layers(target))
    if section.num_layers is None:
        raise UserError("draft.num_layers", got="nothing", expected="a number, with draft.init=config")
    if section.layers:
        raise UserError("draft.layers", got=list(section.layers), expected="nothing with draft.init=config")
    same_width = section.hidden_size in (None, target.config.hidden_size)
    if not same_width and "embeddings" in section.freeze:
        raise UserError(
            "draft.freeze", got=list(section.freeze),
            expected=f"nothing where draft.hidden_size ({section.hidden_size}) is not the target's "
            f"({target.config.hidden_size}): the draft's own embeddings start random and have to learn",
            fix="draft.freeze=[]",
        )  # fmt: skip
    spread = torch.linspace(0, num_layers - 1, section.num_layers).round().long().tolist()
    config = _picked(target.config, spread, **_shape(section, target.config.to_dict()))
    draft = _new(config, seed)
    if same_width:
        _copy_rest(target, draft)
    return draft


def _shape(section: DraftSection, target: dict[str, Any]) -> dict[str, int]:
    """The sizes of a draft: those given, the rest in the target's proportions."""
    hidden = section.hidden_size or int(target["hidden_size"])
    head_dim = int(target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"])
    same = hidden == target["hidden_size"]
    heads = section.num_attention_heads or (
        int(target["num_attention_heads"]) if same else max(1, hidden // head_dim)
    )
    kv_heads = section.num_key_value_heads
    if kv_heads is None:
        wanted = int(target.get("num_key_value_heads") or heads)
        kv_heads = max(n for n in range(1, min(wanted, heads) + 1) if heads % n == 0)
    if heads % kv_heads:
        raise UserError(
            "draft.num_key_value_heads", got=kv_heads, expected=f"a divisor of the {heads} attention heads"
        )
    mlp = -(-int(target["intermediate_size"]) * hidden // (32 * int(target["hidden_size"]))) * 32
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": section.intermediate_size or (int(target["intermediate_size"]) if same else mlp),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return sizes


def _picked(config: PreTrainedConfig, layers: Collection[int], **sizes: int) -> PreTrainedConfig:
    """The target's config with the given layers alone, per-layer lists included."""
    fields = config.to_dict()
    depth = int(fields["num_hidden_layers"])
    for name in _INDEX_LISTS:
        if fields.get(name):
            raise UserError(
                f"cannot take layers out of a {type(config).__name__} with {name}", got=fields[name],
                expected="a dense model built like Llama", fix="draft.init=sibling with a small model",
            )  # fmt: skip
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == depth and name not in _NOT_PER_LAYER:
            fields[name] = [value[layer] for layer in layers]
    fields.update(sizes, num_hidden_layers=len(layers), dtype="float32")
    if "max_window_layers" in fields and fields.get("layer_types") is not None:
        fields["max_window_layers"] = len(layers)
    return type(config).from_dict(fields)


def _new(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, TypeError) as error:
            raise UserError("the draft's shape is not possible", got=error, fix="check draft.*") from error
    return model  # type: ignore[no-any-return]


def _copy_rest(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Everything but the layers: embeddings, final norm, head; tied as the target's are."""
    rest = {k: value for k, value in target.state_dict().items() if not k.startswith("model.layers.")}
    missing, unexpected = draft.load_state_dict(rest, strict=False)
    lost = [name for name in missing if not name.startswith("model.layers.")]
    assert not unexpected and not lost, f"{unexpected} {lost}"


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a model built like Llama."""
    inner = dict(model.named_children()).get("model")
    layers = None if inner is None else dict(inner.named_children()).get("layers")
    if not isinstance(layers, nn.ModuleList) or model.get_output_embeddings() is None:
        raise UserError(
            f"cannot build a draft from a {type(model).__name__}",
            got="no model.layers with an output head",
            expected="a decoder built like Llama (Llama, Qwen, Mistral, Gemma, ...)",
            fix="draft.init=sibling with draft.path set to a small model of the family",
        )
    return layers
