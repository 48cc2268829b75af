"""Proposers: drafts are drawn from the q they hand on, the cache has no hole, look-up copies right."""

from __future__ import annotations

import pytest
import torch

from specdec.length import Fixed, make_policy
from specdec.pair import LanguageModel
from specdec.propose import Committed, DraftModel, PromptLookup
from specdec.sampling import Purpose, Sampling, draw, uniform, warp

WARPED = Sampling(temperature=0.9, top_k=12, top_p=0.95)


def proposer_for(draft: LanguageModel, sampling: Sampling, length: int = 4) -> DraftModel:
    return DraftModel(draft, vocab_size=64, num_slots=200, policy=make_policy(length), sampling=sampling)


@pytest.mark.parametrize("sampling", [Sampling(), WARPED], ids=["greedy", "warped"])
@pytest.mark.parametrize("name", ["near", "short"])
@torch.inference_mode()
def test_drafts_come_from_the_q_handed_on(
    drafts: dict[str, LanguageModel], prompts: list[list[int]], name: str, sampling: Sampling
) -> None:
    """Ten rounds, from none to all accepted: q is the warp of a fresh forward, the draft a draw from it.

    A hole in the cache, a stale slot or a q from elsewhere would show here.
    """
    draft, generator = drafts[name], torch.Generator().manual_seed(0)
    proposer = proposer_for(draft, sampling)
    rows = [list(p) for p in prompts[:3]]
    lengths = [len(r) for r in rows]
    padded = torch.zeros(3, max(lengths), dtype=torch.long)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = torch.tensor(row)
    proposer.prefill(padded, lengths)
    seeds = torch.tensor([5, 6, 7])
    for row in rows:
        row.append(9)
    for _ in range(10):
        proposal = proposer.propose(Committed(rows=rows, limits=[4, 4, 4], seeds=seeds))
        assert proposal.num_drafts.tolist() == [4, 4, 4] and proposal.tokens.shape == (3, 4)
        for b, row in enumerate(rows):
            tokens = proposal.tokens[b].tolist()
            logits = draft.model(torch.tensor([row + tokens]), use_cache=False).logits[0, len(row) - 1 : -1]
            if draft.head_ids is not None:
                off = torch.ones(64, dtype=torch.bool)
                off[draft.head_ids] = False
                logits = logits.masked_fill(off, float("-inf"))
            q = warp(logits, sampling)
            if sampling.greedy:
                assert proposal.probs is None
                assert tokens == q.argmax(dim=-1).tolist()
            else:
                assert proposal.probs is not None
                torch.testing.assert_close(proposal.probs[b], q, atol=2e-5, rtol=0)
                positions = len(row) + torch.arange(4)
                drawn = draw(proposal.probs[b], uniform(seeds[b], positions, Purpose.DRAFT))
                assert tokens == drawn.tolist()  # from the very tensor handed on
            accepted = int(torch.randint(0, 5, (1,), generator=generator))
            row += [*tokens[:accepted], int(torch.randint(3, 64, (1,), generator=generator))]


@torch.inference_mode()
def test_limits_hold_row_by_row(drafts: dict[str, LanguageModel]) -> None:
    rows = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    proposer = proposer_for(drafts["near"], WARPED)
    proposer.prefill(torch.tensor(rows), [3, 3, 3])
    whole = proposer.propose(Committed(rows=rows, limits=[4, 4, 4], seeds=torch.arange(3)))
    some = proposer.propose(Committed(rows=rows, limits=[0, 2, 3], seeds=torch.arange(3)))
    assert some.num_drafts.tolist() == [0, 2, 3] and some.tokens.shape == (3, 3)
    assert torch.equal(some.tokens[1, :2], whole.tokens[1, :2])
    assert torch.equal(some.tokens[2, :3], whole.tokens[2, :3])


@torch.inference_mode()
def test_kept_rows_draft_as_before(drafts: dict[str, LanguageModel]) -> None:
    rows = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    proposer = proposer_for(drafts["near"], WARPED)
    proposer.prefill(torch.tensor(rows), [3, 3, 3])
    whole = proposer.propose(Committed(rows=rows, limits=[4, 4, 4], seeds=torch.arange(3)))
    proposer.keep([2, 0])
    rest = proposer.propose(Committed(rows=[rows[2], rows[0]], limits=[4, 4], seeds=torch.tensor([2, 0])))
    assert torch.equal(rest.tokens, whole.tokens[[2, 0]])


@torch.inference_mode()
def test_a_draft_that_sat_out_rounds_catches_up(drafts: dict[str, LanguageModel]) -> None:
    """Rows move on by different amounts without the draft; then it drafts as if it had read along."""
    rows = [[5, 6, 7], [8, 9, 10]]
    proposer = proposer_for(drafts["near"], WARPED)
    proposer.prefill(torch.tensor(rows), [3, 3])
    rows = [[5, 6, 7, *range(20, 40)], [8, 9, 10, 33]]
    late = proposer.propose(Committed(rows=rows, limits=[4, 4], seeds=torch.arange(2)))
    for b, row in enumerate(rows):
        fresh = proposer_for(drafts["near"], WARPED)
        fresh.prefill(torch.tensor([row]), [len(row)])
        want = fresh.propose(Committed(rows=[row], limits=[4], seeds=torch.tensor([b])))
        assert late.tokens[b].tolist() == want.tokens[0].tolist()


@torch.inference_mode()
def test_the_alarm_of_a_lagging_cache(drafts: dict[str, LanguageModel]) -> None:
    """A cache that claims more than it holds, or a step that starts behind what is written."""
    proposer = proposer_for(drafts["near"], WARPED)
    proposer.prefill(torch.tensor([[5, 6, 7]]), [3])
    with pytest.raises(AssertionError, match="a hole in the cache: row 0 holds 3 tokens, a forward starts at 4"):
        proposer.runner.forward(torch.tensor([[9]]), [4])


# Prompt look-up


def look_up(*rows: list[int], limits: list[int] | None = None, **more: int) -> list[list[int]]:
    proposer = PromptLookup(policy=Fixed(max_length=4), device=torch.device("cpu"), **more)
    seeds = torch.zeros(len(rows), dtype=torch.long)
    proposal = proposer.propose(Committed(rows=rows, limits=limits or [4] * len(rows), seeds=seeds))
    assert proposal.probs is None and proposal.tokens.dtype == torch.long
    assert proposal.tokens.shape == (len(rows), int(proposal.num_drafts.max()))
    return [t[:n].tolist() for t, n in zip(proposal.tokens, proposal.num_drafts.tolist(), strict=True)]


def test_look_up_by_hand() -> None:
    assert look_up([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [[4, 5, 6, 1]]
    assert look_up([7, 1, 2, 8, 9, 1, 2, 5, 6, 1, 2]) == [[5, 6, 1, 2]]  # the latest place
    assert look_up([5, 1, 2, 9, 4, 2, 8, 1, 2]) == [[9, 4, 2, 8]]  # a longer match before a later one
    assert look_up([1, 2, 3, 4, 5]) == [[]]
    assert look_up([6, 6]) == [[6]]
    assert look_up([6, 6, 6]) == [[6]]
    assert look_up([5]) == [[]]
    assert look_up([1, 2, 3, 9, 8, 3], max_ngram=1) == [[9, 8, 3]]


def test_look_up_holds_its_limits_row_by_row() -> None:
    row = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert look_up(row, [1, 2, 3], row, limits=[2, 4, 0]) == [[4, 5], [], []]
    assert look_up(row, limits=[1]) == [[4]]
    assert look_up(row, limits=[0]) == [[]]
