"""Draft length policies: what is refused, where they stop, and that a decode obeys them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec.errors import UserError
from specdec.length import MAX_AUTO_LENGTH, Confidence, Fixed, make_policy
from specdec.pair import LanguageModel
from specdec.propose import DraftModel
from specdec.sampling import Sampling
from specdec.trace import Trace


@pytest.mark.parametrize("bad", [-1, -100, True, 2.5, "4", "automatic", ""])
def test_what_is_no_length_is_refused(bad: object) -> None:
    with pytest.raises(
        UserError, match=r"^draft_length is out of range: got .*auto, or a whole number"
    ) as error:
        make_policy(bad)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_number_is_that_length(length: int) -> None:
    policy = make_policy(length)
    assert policy == Fixed(max_length=length)
    assert policy.go_on(torch.tensor([0.0, 1.0])).tolist() == [True, True]
    assert not policy.needs_confidence


def test_auto_stops_at_the_threshold() -> None:
    policy = make_policy("auto", threshold=0.4)
    assert policy == Confidence(max_length=MAX_AUTO_LENGTH, threshold=0.4)
    assert policy.go_on(torch.tensor([0.39, 0.41, 1.0])).tolist() == [False, True, True]
    assert policy.needs_confidence


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)])
def test_auto_drafts_while_the_chain_is_likely(
    target: LanguageModel, drafts: dict[str, LanguageModel], prompts: list[list[int]], sampling: Sampling
) -> None:
    """Each row by its own chain: products of q, recomputed from fresh forwards, cross the threshold once."""
    draft, threshold = drafts["near"], 0.02
    rows = [prompt[:12] for prompt in prompts if len(prompt) >= 12]
    proposer = DraftModel(
        draft, vocab_size=target.vocab_size, num_slots=32, policy=make_policy("auto", threshold=threshold),
        sampling=sampling,
    )  # fmt: skip
    limits = torch.full((len(rows),), 4)
    limits[0] = 1
    with torch.inference_mode():
        proposer.prefill(torch.tensor(rows), torch.full((len(rows),), 12))
        proposal = proposer.propose(rows, limits, torch.arange(len(rows)))
        counts = proposal.num_drafts.tolist()
        assert counts[0] == 1 and set(counts) >= {1, 2, 4}
        for b, row in enumerate(rows):
            tokens = proposal.tokens[b, : counts[b]].tolist()
            logits = draft.model(torch.tensor([row + tokens]), use_cache=False).logits[0, 11:-1]
            probs = (logits / (sampling.temperature or 1.0)).softmax(dim=-1)
            chain = probs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).cumprod(dim=0)
            assert bool((chain[:-1] > threshold).all())  # no draft behind an unlikely chain
            assert counts[b] == limits[b] or float(chain[-1]) <= threshold  # and no early end


def test_extreme_thresholds(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: list[list[int]],
    decode: Callable[..., list[Trace]],
) -> None:
    """Nothing clears 1, so rounds draft one token; everything clears 0, so they draft the most."""
    for threshold, length in ((1.0, 1), (0.0, MAX_AUTO_LENGTH)):
        traces = decode(
            target, prompts[:4], draft=drafts["random"], length="auto", threshold=threshold, max_new_tokens=30
        )
        for trace in traces:
            assert set(trace.num_drafts[: -MAX_AUTO_LENGTH - 1]) == {length}
