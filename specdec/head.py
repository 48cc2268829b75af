"""From hidden states to logits: vocabulary slicing, logit scale and soft-cap, and the short-listed draft head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.kernels import fast_linear
from specdec.pair import LanguageModel


def logit_scale(config: Mapping[str, Any]) -> float:
    """What a model multiplies its logits by: Granite divides them, Cohere multiplies them, others leave them."""
    return float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)


class Head:
    """The output head over the first `vocab_size` ids, or over a short list of them (FR-Spec, 2502.14856)."""

    def __init__(self, language_model: LanguageModel, vocab_size: int) -> None:
        embeddings = language_model.model.get_output_embeddings()
        ids = language_model.head_ids
        weight, bias = embeddings.weight[:vocab_size], embeddings.bias
        self.ids = ids
        self.weight = weight if ids is None else weight[ids].contiguous()
        self.bias = None if bias is None else bias[:vocab_size] if ids is None else bias[ids]
        self.vocab_size, self.eager = vocab_size, language_model.eager
        config = language_model.model.config.get_text_config().to_dict()
        self.scale = logit_scale(config)
        self.cap = config.get("final_logit_softcapping")

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., H] -> [..., M]
        logits = None if self.eager else fast_linear(hidden, self.weight, self.bias)
        if logits is None:
            logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits

    def token_ids(self, columns: Tensor) -> Tensor:
        """Columns of the head -> token ids."""
        return columns if self.ids is None else self.ids[columns]

    def widen(self, probs: Tensor) -> Tensor:  # [..., M] -> [..., V]
        """A distribution over the head's columns as one over the vocabulary: q is 0 off the list."""
        if self.ids is None:
            return probs
        full = probs.new_zeros(*probs.shape[:-1], self.vocab_size)
        return full.index_copy_(-1, self.ids, probs)
