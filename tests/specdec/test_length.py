"""Draft length policies: what is refused, where they stop, and that a decode obeys them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec.cost import plain_steps, predicted_speedup
from specdec.errors import UserError
from specdec.length import MAX_AUTO_LENGTH, Confidence, CostOptimal, EntropyBound, Fixed, History, make_policy
from specdec.pair import LanguageModel
from specdec.propose import Committed, DraftModel
from specdec.sampling import Sampling
from specdec.trace import Trace


@pytest.mark.parametrize("bad", [-1, -100, True, 2.5, "4", "automatic", ""])
def test_what_is_no_length_is_refused(bad: object) -> None:
    with pytest.raises(
        UserError, match=r"^draft_length is out of range: got .*auto, .*, or a whole number"
    ) as error:
        make_policy(bad)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_number_is_that_length(length: int) -> None:
    policy = make_policy(length)
    assert policy == Fixed(max_length=length)
    assert policy.go_on(torch.tensor([0.0, 1.0])).tolist() == [True, True]
    assert policy.reads == "nothing"


def test_auto_stops_at_the_threshold() -> None:
    policy = make_policy("auto", threshold=0.4)
    assert policy == Confidence(max_length=MAX_AUTO_LENGTH, threshold=0.4)
    assert policy.go_on(torch.tensor([0.39, 0.41, 1.0])).tolist() == [False, True, True]
    assert policy.reads == "chain"


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
    limits = [4] * len(rows)
    limits[0] = 1
    with torch.inference_mode():
        proposer.prefill(torch.tensor(rows), [12] * len(rows))
        proposal = proposer.propose(Committed(rows=rows, limits=limits, seeds=torch.arange(len(rows))))
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


COST = {"c": 0.1, "v": {str(n): 1 + 0.05 * (n - 1) for n in range(1, 10)}, "h": 0.02}


def test_entropy_bound_is_its_formula() -> None:
    policy = make_policy("entropy")
    assert isinstance(policy, EntropyBound) and policy.reads == "entropy"
    edge = (1 - policy.threshold) ** 2 / policy.gamma
    assert policy.go_on(torch.tensor([0.0, edge - 1e-3, edge + 1e-3, 9.0])).tolist() == [True, True, False, False]


def test_history_is_two_up_one_down_and_forgets() -> None:
    policy = History(max_length=6, first=3)
    seen = []
    for drafts, accepted in ((3, 3), (5, 4), (4, 0), (3, 3), (5, 5), (6, 6)):
        seen.append(policy.lengths([0])[0])
        policy.observe(0, drafts, accepted)
    assert [*seen, policy.lengths([0])[0]] == [3, 5, 4, 3, 5, 6, 6]
    assert policy.lengths([1]) == [3]  # another row, another history
    for _ in range(9):
        policy.observe(0, 4, 0)
    assert policy.lengths([0]) == [1]
    policy.start()
    assert policy.lengths([0]) == [3]


def simulate(policy: CostOptimal, alpha: float, rounds: int, seed: int = 0) -> tuple[float, list[int]]:
    """Plain steps' time a token that a row of this acceptance costs, and the K of its rounds."""
    generator = torch.Generator().manual_seed(seed)
    spent, tokens, lengths = 0.0, 0, []
    policy.start()
    for _ in range(rounds):
        (k,) = policy.lengths([0])
        hits = (torch.rand(k, generator=generator) < alpha).long()
        accepted = int(hits.cumprod(dim=0).sum())
        policy.observe(0, k, accepted)
        spent += plain_steps(COST, k)
        tokens += accepted + 1
        lengths.append(k)
    return spent / tokens, lengths


def cost_optimal() -> CostOptimal:
    policy = make_policy("cost", cost=COST)
    assert isinstance(policy, CostOptimal)
    return policy


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.95])
def test_cost_optimal_comes_near_the_best_length_of_hindsight(alpha: float) -> None:
    best = max(predicted_speedup(COST, alpha, k) for k in range(MAX_AUTO_LENGTH + 1))
    got = sum(1 / simulate(cost_optimal(), alpha, 600, seed)[0] for seed in range(5)) / 5
    assert got > 0.95 * best


def test_a_draft_that_is_never_right_costs_little() -> None:
    spent, lengths = simulate(cost_optimal(), 0.0, 640)
    assert spent < 1.05
    probes = [i for i, k in enumerate(lengths) if k and i > 40]
    gaps = [b - a for a, b in zip(probes, probes[1:], strict=False)]
    assert gaps and gaps == sorted(gaps) and gaps[-1] > 60  # ever more rarely
    assert all(lengths[i] == 1 for i in probes)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_rows_that_probe_out_of_step_cost_a_batch_no_more_than_one_row(rows: int) -> None:
    cost = {**COST, "batch_size": rows}
    policy = CostOptimal(cost=cost, max_length=6)
    policy.start()
    widened = 0
    for now in range(1200):
        active = [row for row in range(rows) if now >= 3 * row]  # each starts three rounds after the one before
        lengths = policy.lengths(active)
        widened += max(lengths) > 0
        for row, k in zip(active, lengths, strict=True):
            policy.observe(row, k, 0)
    assert 0 < widened < 60


def test_cost_optimal_does_not_flip_flop_and_forgets() -> None:
    policy = cost_optimal()
    _, lengths = simulate(policy, 0.6, 500)
    assert sum(a != b for a, b in zip(lengths, lengths[1:], strict=False)) < 60
    fresh = cost_optimal().lengths([0])
    simulate(policy, 0.0, 100)
    assert policy.lengths([0]) == [0]
    policy.start()
    assert policy.lengths([0]) == fresh
    kept = CostOptimal(cost=COST, max_length=6, keep=True)
    simulate(kept, 0.0, 100)
    kept.start()
    assert kept.lengths([0]) == [0]


def test_kept_estimates_are_those_of_many_calls() -> None:
    """One call of another kind does not turn them, and a call's own drafts soon outweigh them."""
    policy = CostOptimal(cost=COST, max_length=6, keep=True)
    for _ in range(10):
        simulate(policy, 0.9, 40)
        policy.start()
    usual = policy.lengths([0])
    simulate(policy, 0.0, 40)
    policy.start()
    assert policy.lengths([0])[0] >= usual[0] - 1 > 0
    for _ in range(30):
        policy.observe(0, max(policy.lengths([0])[0], 1), 0)
    assert policy.lengths([0]) == [0]


def test_cost_optimal_needs_costs() -> None:
    with pytest.raises(UserError, match="draftsmith cost|measure"):
        make_policy("cost")


@pytest.mark.parametrize("name", ["near", "random", "self", "short", "lookup"])
@pytest.mark.parametrize("length", ["entropy", "history", "cost"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
def test_every_policy_in_any_batch(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: list[list[int]],
    decode: Callable[..., list[Trace]],
    length: str,
    name: str,
    sampling: Sampling,
) -> None:
    """Greedy text is the plain one; sampled text does not know its batch mates; the own twin is always accepted."""
    more = {"draft": drafts[name], "length": length, "sampling": sampling, "max_new_tokens": 30}
    rows, seeds = prompts[:6], list(range(6))
    alone = decode(target, rows, batch_size=1, seeds=seeds, **more)
    together = decode(target, rows, batch_size=6, seeds=seeds, **more)
    assert [(t.tokens, t.num_drafts) for t in alone] == [(t.tokens, t.num_drafts) for t in together]
    if sampling.greedy:
        assert [t.tokens for t in alone] == [t.tokens for t in decode(target, rows, max_new_tokens=30)]
    if name == "self":
        assert all(t.num_accepted == t.num_drafts for t in alone)
    if name == "random" and length == "cost":
        assert any(0 in t.num_drafts[:-1] for t in alone)  # plain rounds, and drafts after them
