"""Tiny models with peaked distributions, a short way to decode with them, and the G-test."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import power_divergence
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specdec.architecture import context_length
from specdec.decoder import Decoder, Limits, Request, slots_needed
from specdec.length import make_policy
from specdec.pair import LanguageModel
from specdec.propose import DraftModel, PromptLookup, Proposer
from specdec.sampling import Sampling, warp
from specdec.trace import Trace

VOCAB = 64
LOOKUP = "lookup"
COST = {"c": 0.1, "v": {str(n): 1 + 0.05 * (n - 1) for n in range(1, 10)}, "h": 0.02}


def as_language_model(model: Any, tokenizer: Any, **more: Any) -> LanguageModel:
    """A bare model with what the decoder needs to know about it."""
    config = model.config.get_text_config()
    facts = {
        "vocab_size": config.vocab_size,
        "context_length": context_length(config),
        "eos_ids": frozenset[int](),
        "fingerprint": "0" * 16,
    }
    model = model.float().eval().requires_grad_(False)
    return LanguageModel(model=model, tokenizer=tokenizer, **{**facts, **more})


def random_llama(
    seed: int, *, num_layers: int = 2, vocab_size: int = VOCAB, context: int = 512
) -> LlamaForCausalLM:
    """Weights ten times wider than usual: peaked distributions, answers that depend on the whole prompt."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=context,
        initializer_range=0.25, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def blurred(model: LlamaForCausalLM, noise: float, seed: int = 5) -> LlamaForCausalLM:
    """The model with noise on its weights: a draft that is right part of the time."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in twin.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    return twin


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as small to these vocabularies as the real ones are: draws cross them, and cost less."""
    monkeypatch.setattr("specdec.sampling.BLOCK", 4)


@pytest.fixture(scope="session")
def target(tiny_tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return as_language_model(random_llama(0), tiny_tokenizer)


@pytest.fixture(scope="session")
def drafts(target: LanguageModel) -> dict[str, LanguageModel | str]:
    """One that knows nothing, one that is the target, one right half the time, that with a short head; the lookup."""
    tokenizer, model = target.tokenizer, target.model
    near = blurred(model, 0.01)
    ids = torch.arange(0, VOCAB, 2)
    return {
        "random": as_language_model(random_llama(1, num_layers=1), tokenizer),
        "self": as_language_model(copy.deepcopy(model), tokenizer),
        "near": as_language_model(near, tokenizer),
        "short": as_language_model(copy.deepcopy(near), tokenizer, head_ids=ids),
        "lookup": LOOKUP,
    }


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """40 random prompts of 3 to 60 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 60, *torch.randint(3, 61, (38,), generator=generator).tolist()]
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


Decode = Callable[..., list[Trace]]


def decode_all(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    draft: LanguageModel | str | None = None,
    length: int | str = 4,
    threshold: float = 0.3,
    sampling: Sampling | None = None,
    max_new_tokens: int = 20,
    eos_ids: Sequence[int] = (),
    stop: tuple[str, ...] = (),
    batch_size: int = 8,
    seeds: Sequence[int] | None = None,
    vocab_size: int | None = None,
    **more: Any,
) -> list[Trace]:
    """Decode in batches of `batch_size`; `draft` is a model, "lookup", or None for plain decoding."""
    sampling = sampling or Sampling()
    limits = Limits(max_new_tokens=max_new_tokens, eos_ids=frozenset(eos_ids), stop=stop)
    requests = [
        Request(prompt_ids=ids, seed=seed)
        for ids, seed in zip(prompts, seeds or range(len(prompts)), strict=True)
    ]
    traces: list[Trace] = []
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        policy, proposer = make_policy(length, threshold=threshold, cost=COST), None
        if draft == LOOKUP:
            proposer = PromptLookup(policy=policy, device=target.device)
        elif isinstance(draft, LanguageModel):
            slots = slots_needed(batch, limits, policy.max_length)
            proposer = DraftModel(
                draft,
                vocab_size=vocab_size or target.vocab_size,
                num_slots=slots,
                policy=policy,
                sampling=sampling,
            )
        traces += run(target, batch, limits, sampling, proposer, vocab_size, **more)
    return traces


def run(
    target: LanguageModel,
    requests: Sequence[Request],
    limits: Limits,
    sampling: Sampling,
    proposer: Proposer | None,
    vocab_size: int | None = None,
    **more: Any,
) -> list[Trace]:
    return Decoder(
        target, requests, limits=limits, sampling=sampling, vocab_size=vocab_size, proposer=proposer, **more
    ).run()


@pytest.fixture(scope="session")
def decode() -> Decode:
    return decode_all


@pytest.fixture(scope="session")
def plain(target: LanguageModel, prompts: list[list[int]], decode: Decode) -> list[Trace]:
    return decode(target, prompts)


@pytest.fixture(scope="session")
def common_ids(plain: list[Trace]) -> list[int]:
    """Ids that turn up in most answers, but not at once: as EOS they land inside drafts."""
    counts = Counter(token for trace in plain for token in set(trace.tokens[4:]))
    return [token for token, _ in counts.most_common(3)]


@pytest.fixture(scope="session")
def language_model() -> Callable[..., LanguageModel]:
    return as_language_model


@pytest.fixture(scope="session")
def build() -> Callable[[PreTrainedConfig], PreTrainedModel]:
    """A model of random weights from its config, the same ones each time."""

    def build(config: PreTrainedConfig) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).float()
            for name, weight in model.named_parameters():  # biases start at zero: a lost one would not show
                if name.endswith("bias"):
                    torch.nn.init.normal_(weight, std=0.3)
        return model.eval()  # type: ignore[no-any-return]

    return build


@pytest.fixture(scope="session")
def llama() -> Callable[..., LlamaForCausalLM]:
    return random_llama


def g_test_p(outcomes: Tensor, probs: Tensor) -> float:
    """p-value of the G-test that `outcomes` [N] (flat ids) follow `probs` (any shape, sums to 1).

    Cells with less than five expected are pooled; an outcome the law forbids gives 0.
    """
    expected = probs.double().flatten().numpy() * len(outcomes)
    counts = torch.bincount(outcomes, minlength=len(expected)).double().numpy()
    if (counts[expected == 0] > 0).any():
        return 0.0
    rare = expected < 5
    if expected[rare].sum() >= 5:
        expected = np.append(expected[~rare], expected[rare].sum())
        counts = np.append(counts[~rare], counts[rare].sum())
    else:  # too little to stand alone: goes with the largest cell
        extra, more = expected[rare].sum(), counts[rare].sum()
        expected, counts = expected[~rare], counts[~rare]
        expected[expected.argmax()] += extra
        counts[expected.argmax()] += more
    expected *= counts.sum() / expected.sum()
    return float(power_divergence(counts, expected, lambda_="log-likelihood").pvalue)


@pytest.fixture(scope="session")
def g_test() -> Callable[[Tensor, Tensor], float]:
    return g_test_p


@pytest.fixture(scope="session")
def law(target: LanguageModel) -> tuple[list[int], Sampling, Tensor]:
    """A prompt, a warp that leaves six tokens, and the exact joint law of the first three tokens."""
    prompt, sampling = [9, 33, 14, 60, 5], Sampling(temperature=1.0, top_k=6)
    joint = torch.zeros(target.vocab_size, target.vocab_size, target.vocab_size, dtype=torch.float64)

    @torch.no_grad()
    def after(rows: list[list[int]]) -> Tensor:
        return warp(target.model(torch.tensor(rows), use_cache=False).logits[:, -1], sampling).double()

    first = after([prompt])[0]
    ones = first.nonzero().flatten().tolist()
    second = after([[*prompt, a] for a in ones])
    pairs = [(i, a, b) for i, a in enumerate(ones) for b in second[i].nonzero().flatten().tolist()]
    third = after([[*prompt, a, b] for _, a, b in pairs])
    for row, (i, a, b) in zip(third, pairs, strict=True):
        joint[a, b] = first[a] * second[i, b] * row
    assert abs(float(joint.sum()) - 1) < 1e-6 and int((joint > 0).sum()) == 6**3
    return prompt, sampling, joint / joint.sum()
