"""What the decoder must know of an architecture, read off its config: what rolls back, windows, context length."""

from typing import Any

from specdec.errors import UserError

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


def refuse_unsupported(config: Any, *, takes_positions: bool) -> None:
    """UserError with the reason where a model's state can't be rolled back by position alone."""
    kinds = _layer_kinds(config)
    reason = None
    if config.is_encoder_decoder:
        reason = "an encoder-decoder; draftsmith decodes decoder-only models"
    elif not hasattr(config, "num_attention_heads"):
        reason = "recurrent state, which a rejected draft has already changed"
    elif kinds - SUPPORTED_LAYERS:
        reason = f"layers that are not rolled back by position: {', '.join(sorted(kinds - SUPPORTED_LAYERS))}"
    elif not takes_positions or (hasattr(config, "alibi") and config.alibi):
        reason = "positions counted by the model itself (such as ALiBi), not given by position ids"
    if reason is not None:
        raise UserError(
            "this architecture cannot roll back a rejected draft",
            got=f"{config.model_type}: {reason}",
            expected="full or sliding-window attention in every layer, positions given as ids",
            fix="choose another target or draft",
        )


def windows(config: Any) -> dict[str, int | None]:
    """Attention windows by layer kind; None is full attention."""
    window = config.sliding_window if hasattr(config, "sliding_window") else None
    kinds = _layer_kinds(config) or {"sliding_attention" if window else "full_attention"}
    return {kind: (window if kind == "sliding_attention" else None) for kind in sorted(kinds)}


def layer_windows(config: Any) -> list[int | None]:
    """The attention window of each layer."""
    known = windows(config)
    kinds = list(config.layer_types or ()) if hasattr(config, "layer_types") else []
    return [known[kind] for kind in kinds or [*known] * config.num_hidden_layers]


def context_length(config: Any) -> int:
    """Positions a row may reach.

    LongRoPE changes the rotation of *all* positions once any row of the batch passes the original length: keys
    already cached would be of the other kind, and a row's text would depend on its batch mates. There the
    original length is the limit.
    """
    limit = int(config.max_position_embeddings)
    parameters = config.rope_parameters if hasattr(config, "rope_parameters") else None
    if not parameters:
        return limit
    each = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    return min([limit, *(int(p["original_max_position_embeddings"]) for p in each if p["rope_type"] == "longrope")])


def _layer_kinds(config: Any) -> set[str]:
    return set(config.layer_types or ()) if hasattr(config, "layer_types") else set()
