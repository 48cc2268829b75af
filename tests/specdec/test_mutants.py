"""The law of sampling, by exact enumeration and by G-test; and broken verifiers, which both must notice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.pair import LanguageModel
from specdec.propose import DraftModel
from specdec.sampling import Purpose, Sampling, draw, uniform, warp
from specdec.trace import Trace
from specdec.verify import RULES, Proposal, block_rule, token_rule

Rule = Callable[[Tensor, Proposal, Tensor, Tensor], tuple[Tensor, Tensor]]
GTest = Callable[[Tensor, Tensor], float]
RIGHT, WRONG = 1e-3, 1e-6  # p-values: the right verifier stays above the one, a broken one below the other


# Broken verifiers: each a fault that real decoders had


def next_token(p: Tensor, proposal: Proposal, accepted: Tensor, u_next: Tensor, top_p: float = 1.0) -> Tensor:
    """The token behind the accepted drafts; right at top_p = 1, and written apart from the product."""
    last = p[torch.arange(len(p)), accepted]
    if proposal.probs is None:
        q = torch.zeros_like(p[:, :-1]).scatter(-1, proposal.tokens.unsqueeze(-1), 1.0)
    else:
        q = proposal.probs
    rest = (last - q[torch.arange(len(p)), accepted.clamp(max=q.shape[1] - 1)]).clamp(min=0)
    if top_p < 1:
        rest = warp(rest.log(), Sampling(temperature=1.0, top_p=top_p))
    weights = torch.where((accepted < proposal.num_drafts).unsqueeze(-1), rest, last)
    return draw(weights, u_next[torch.arange(len(p)), accepted])


def swapped(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts by q / p. Where that leaves no residual, the target's own distribution."""
    assert proposal.probs is not None
    mirrored = torch.cat([proposal.probs, p[:, -1:]], dim=1)
    accepted, _ = token_rule(mirrored, replace(proposal, probs=p[:, :-1]), u_accept, u_next)
    rest = next_token(p, proposal, accepted, u_next)
    allowed = (
        p[torch.arange(len(p)), accepted].gather(1, rest.clamp(max=p.shape[-1] - 1).unsqueeze(1)).squeeze(1)
        > 0
    )
    return accepted, torch.where(allowed, rest, p[torch.arange(len(p)), accepted].argmax(dim=-1))


def rewarped(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """Puts the residual through top-p once more."""
    accepted, _ = token_rule(p, proposal, u_accept, u_next)
    return accepted, next_token(p, proposal, accepted, u_next, top_p=0.7)


def no_residual(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """Follows a rejection with a draw from p."""
    accepted, _ = token_rule(p, proposal, u_accept, u_next)
    return accepted, draw(p[torch.arange(len(p)), accepted], u_next[torch.arange(len(p)), accepted])


def bonus_less_q(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """Subtracts the last q from the bonus token too, as if the last draft had been rejected."""
    accepted, _ = token_rule(p, proposal, u_accept, u_next)
    forever = replace(proposal, num_drafts=torch.full_like(proposal.num_drafts, p.shape[1]))
    return accepted, next_token(p, forever, accepted, u_next)


def one_number(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """Spends the number that rejected a draft on the token that follows, too."""
    return token_rule(p, proposal, u_accept, torch.cat([u_accept, u_next[:, -1:]], dim=1))


BROKEN: list[Rule] = [swapped, rewarped, no_residual, one_number]


def rebuilt(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """No mutant: shows that what the mutants are made from is right."""
    accepted, _ = token_rule(p, proposal, u_accept, u_next)
    return accepted, next_token(p, proposal, accepted, u_next)


# Exact enumeration: all numbers are multiples of 1/16, so that a coarse grid of uniforms integrates exactly


def sixteenths(seed: int, one_hot: bool, vocab: int = 5) -> tuple[Tensor, Tensor]:
    """p and q [V] in sixteenths: q and the residual's mass are powers of two, so the thresholds are too."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        q = torch.tensor([8, 4, 2, 1, 1])[torch.randperm(vocab, generator=generator)]
        p = torch.bincount(torch.randint(0, vocab, (16,), generator=generator), minlength=vocab)
        proposed = 16 * (q == 8) if one_hot else q
        if int((p - proposed).clamp(min=0).sum()) in (1, 2, 4, 8):
            return p / 16, q / 16


def exact_gap(rule: Rule, *, q_shown: str = "q", ragged: bool = False) -> float:
    """Largest error of the joint law of three tokens, over all drafts and all numbers, at V = 5, K = 2.

    Every distribution depends on the token before. `q_shown`: "q"; "soft" for a greedy draft judged by its q;
    "one-hot" for a greedy draft judged rightly. `ragged`: an unlikely first draft is the only one.
    """
    one_hot = q_shown == "one-hot"
    vocab, steps = 5, 16 if one_hot else 8
    tables = [sixteenths(seed, one_hot) for seed in range(11)]
    p0, q0 = tables[0]
    p1, q1 = (torch.stack(t) for t in zip(*tables[1:6], strict=True))
    p2 = torch.stack([p for p, _ in tables[6:]])
    grid = (torch.arange(steps).double() + 0.5) / steps
    fine = (torch.arange(16).double() + 0.5) / 16
    cells = list(itertools.product(range(vocab), range(vocab), range(steps), range(steps), range(16)))
    x1, x2, a1, a2, n = torch.tensor(cells).T
    weight = torch.full((len(cells),), 1 / (steps * steps * 16), dtype=torch.float64)
    if q_shown == "q":
        weight = weight * q0[x1] * q1[x1, x2]
    else:
        weight = weight * (x1 == q0.argmax()) * (x2 == q1.argmax(dim=-1)[x1])
    counts = torch.where(q0[x1] < 0.2, 1, 2) if ragged else torch.full_like(x1, 2)
    probs = None if one_hot else torch.stack([q0.expand(len(cells), -1), q1[x1]], dim=1)
    proposal = Proposal(tokens=torch.stack([x1, x2], dim=1), num_drafts=counts, probs=probs)
    p = torch.stack([p0.expand(len(cells), -1), p1[x1], p2[x2]], dim=1)
    u_next = fine[n].unsqueeze(1).expand(-1, 3)
    accepted, token = rule(p, proposal, torch.stack([grid[a1], grid[a2]], dim=1), u_next)
    assert bool((accepted <= counts).all())
    law = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for number, start in ((0, (token,)), (1, (x1, token)), (2, (x1, x2, token))):
        rows = accepted == number
        mass = torch.zeros((vocab,) * len(start), dtype=torch.float64)
        mass.index_put_(tuple(s[rows] for s in start), weight[rows], accumulate=True)
        if number == 0:
            mass = mass.unsqueeze(-1) * p1
        if number < 2:
            mass = mass.unsqueeze(-1) * p2
        law += mass
    want = p0.double().view(-1, 1, 1) * p1.double().unsqueeze(-1) * p2.double()
    return float((law - want).abs().max())


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("q_shown", ["q", "one-hot"])
@pytest.mark.parametrize("rule", [token_rule, rebuilt])
def test_the_rule_is_exact(rule: Rule, q_shown: str, ragged: bool) -> None:
    assert exact_gap(rule, q_shown=q_shown, ragged=ragged) < 1e-9


@pytest.mark.parametrize("rule", [*BROKEN, bonus_less_q])
def test_enumeration_notices(rule: Rule) -> None:
    assert exact_gap(rule) > 2e-3


def test_enumeration_notices_a_greedy_draft_with_a_soft_q() -> None:
    assert exact_gap(token_rule, q_shown="soft") > 2e-3


# G-test of the rule on 200,000 rows


def two_tokens(
    rule: Rule, p: Tensor, q: Tensor, *, shown: Tensor | None = None, rows: int = 200_000
) -> Tensor:
    """The first two tokens [rows], as one id, of a Markov chain p [V, V] behind token 0; K = 3 drafts from q.

    The verifier is told `shown` (the very q where None). Rounds follow each other until two tokens are out.
    """
    shown = q if shown is None else shown
    vocab, outcomes = len(p), []

    def one_round(previous: Tensor, seeds: Tensor, at: int) -> tuple[Tensor, Tensor, Tensor]:
        drafts, p_rows, q_rows = [], [], []
        for k in range(3):
            p_rows.append(p[previous])
            q_rows.append(shown[previous])
            previous = draw(q[previous], uniform(seeds, torch.tensor(at + k), Purpose.DRAFT))
            drafts.append(previous)
        p_rows.append(p[previous])
        tokens = torch.stack(drafts, dim=1)
        proposal = Proposal(
            tokens=tokens, num_drafts=torch.full_like(seeds, 3), probs=torch.stack(q_rows, dim=1)
        )
        positions = at + torch.arange(4)
        u_accept = uniform(seeds.unsqueeze(1), positions[:3], Purpose.ACCEPT)
        u_next = uniform(seeds.unsqueeze(1), positions, Purpose.NEXT)
        accepted, token = rule(torch.stack(p_rows, dim=1), proposal, u_accept, u_next)
        emitted = torch.cat([tokens, token.unsqueeze(1)], dim=1).scatter(
            1, accepted.unsqueeze(1), token.unsqueeze(1)
        )
        return emitted[:, 0], emitted[:, 1], accepted

    for seeds in torch.arange(rows).split(4000):
        first, second, accepted = one_round(torch.zeros_like(seeds), seeds, 0)
        another, _, _ = one_round(first, seeds + 10**7, 1)  # a round's numbers are its own
        outcomes.append(first * vocab + torch.where(accepted > 0, second, another))
    return torch.cat(outcomes)


def chain(vocab: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """p and q [V, V], the next token's distribution behind each token, and p's joint law of two tokens."""
    generator = torch.Generator().manual_seed(11)
    p = (1.2 * torch.randn(vocab, vocab, generator=generator)).softmax(dim=-1)
    q = (0.5 * p + 0.5 * (1.2 * torch.randn(vocab, vocab, generator=generator)).softmax(dim=-1)).float()
    return p, q, p[0].double().unsqueeze(1) * p.double()


@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_the_joint_law_of_two_tokens(g_test: GTest, rule: Rule) -> None:
    p, q, law = chain()
    assert g_test(two_tokens(rule, p, q), law) > RIGHT


def without_q(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification that takes sampled drafts for one-hot ones."""
    return block_rule(p, replace(proposal, probs=None), u_accept, u_next)


def token_chance(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification's residual behind the token rule's acceptance."""
    accepted, _ = token_rule(p, proposal, u_accept, u_next)
    never = torch.full_like(u_accept, 2.0)
    columns = torch.arange(u_accept.shape[1]) + 1 == accepted.unsqueeze(1)
    return accepted, block_rule(p, proposal, torch.where(columns, -1.0, never), u_next)[1]


def longest_ratio(p: Tensor, proposal: Proposal, u_accept: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification with the ratio of the whole block, not cut at 1 on the way, and the token rule's residual."""
    assert proposal.probs is not None
    ids = proposal.tokens.unsqueeze(-1)
    ratio = (p[:, :-1].gather(-1, ids) / proposal.probs.gather(-1, ids)).squeeze(-1).cumprod(dim=1)
    accepted = (torch.arange(1, ids.shape[1] + 1) * (u_accept < ratio)).amax(dim=1)
    return accepted, next_token(p, proposal, accepted, u_next)


def test_a_block_judged_as_one_hot_keeps_the_law(g_test: GTest) -> None:
    """No mutant either: it only accepts less, as with the token rule."""
    p, q, law = chain()
    assert g_test(two_tokens(without_q, p, q, rows=60_000), law) > RIGHT


@pytest.mark.parametrize("rule", [token_chance, longest_ratio])
def test_g_test_notices_a_broken_block_rule(g_test: GTest, rule: Rule) -> None:
    p, q, law = chain()
    assert g_test(two_tokens(rule, p, q, rows=60_000), law) < WRONG


@pytest.mark.parametrize("rule", BROKEN)
def test_g_test_notices(g_test: GTest, rule: Rule) -> None:
    p, q, law = chain()
    assert g_test(two_tokens(rule, p, q, rows=60_000), law) < WRONG


@pytest.mark.parametrize(
    "drawn",
    [
        Sampling(temperature=0.8),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, top_k=5),
        Sampling(),
    ],
    ids=["temperature", "top-p", "top-k", "greedy"],
)
def test_g_test_notices_a_q_that_was_not_drawn_from(g_test: GTest, drawn: Sampling) -> None:
    """A warp on one side, q off by a temperature, a greedy draft, a soft q; told the truth, all are exact."""
    p, q, law = chain()
    warped = warp(q.log(), drawn)
    assert g_test(two_tokens(token_rule, p, warped, shown=q, rows=60_000), law) < WRONG
    assert g_test(two_tokens(token_rule, p, warped, rows=60_000), law) > RIGHT


# The same faults inside the decoder


def reported(change: Callable[[Tensor, DraftModel], Tensor]) -> Callable[..., Any]:
    """A draft model that hands on another q than the one its token came from."""
    honest = DraftModel._pick

    def pick(self: DraftModel, logits: Tensor, seeds: Tensor, positions: Tensor) -> Any:
        token, _ = honest(self, logits, seeds, positions)
        return token, self.head.widen(change(logits, self))

    return pick


def greedy_pick(self: DraftModel, logits: Tensor, seeds: Tensor, positions: Tensor) -> Any:
    q = self.head.widen(warp(logits, self.sampling))
    return q.argmax(dim=-1), q


def one_hot_pick(self: DraftModel, logits: Tensor, seeds: Tensor, positions: Tensor) -> Any:
    return greedy_pick(self, logits, seeds, positions)[0], None


def where_drafted(rule: Rule) -> Rule:
    """The rule in rounds with drafts; the last round of a row may have none."""
    return lambda p, proposal, *u: (rule if proposal.tokens.shape[1] else token_rule)(p, proposal, *u)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "q off by a temperature": (
        DraftModel, "_pick",
        reported(lambda logits, self: warp(logits, replace(self.sampling, temperature=1.3))),
    ),
    "q not warped": (DraftModel, "_pick", reported(lambda logits, self: logits.softmax(dim=-1))),
    "greedy draft, soft q": (DraftModel, "_pick", greedy_pick),
    "swapped": (RULES, "token", where_drafted(swapped)),
    "residual re-warped": (RULES, "token", where_drafted(rewarped)),
    "no residual": (RULES, "token", where_drafted(no_residual)),
    "target not warped": ("specdec.decoder.warp", "", lambda logits, sampling: logits.softmax(dim=-1)),
}  # fmt: skip


def decoded_p_value(
    target: LanguageModel,
    draft: LanguageModel,
    decode: Callable[..., list[Trace]],
    g_test: GTest,
    law: tuple[list[int], Sampling, Tensor],
) -> float:
    prompt, sampling, joint = law
    vocab, rows = target.vocab_size, 6000
    traces = decode(
        target, [prompt] * rows, draft=draft, length=3, sampling=sampling, max_new_tokens=5, batch_size=rows
    )
    first, second, third = torch.tensor([t.tokens[:3] for t in traces]).T
    return g_test((first * vocab + second) * vocab + third, joint)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_decoders_law_notices(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    decode: Callable[..., list[Trace]],
    g_test: GTest,
    law: tuple[list[int], Sampling, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    owner, name, value = FAULTS[fault]
    if owner is RULES:
        monkeypatch.setitem(RULES, name, value)
    elif name:
        monkeypatch.setattr(owner, name, value)
    else:
        monkeypatch.setattr(owner, value)
    draft = drafts[
        "random" if owner is RULES else "near"
    ]  # many rejections, or many drafts
    assert decoded_p_value(target, draft, decode, g_test, law) < WRONG


def test_a_greedy_draft_judged_as_one_hot_keeps_the_law(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    decode: Callable[..., list[Trace]],
    g_test: GTest,
    law: tuple[list[int], Sampling, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault above is the soft q, not the greedy draft; and the patching itself breaks nothing."""
    monkeypatch.setattr(DraftModel, "_pick", one_hot_pick)
    assert decoded_p_value(target, drafts["near"], decode, g_test, law) > RIGHT


@pytest.mark.parametrize("shown", [torch.tensor([[[0.0, 1.0, 0.0]]]), None], ids=["q", "one-hot"])
def test_a_rejection_by_rounding_alone_still_draws_a_token(shown: Tensor | None) -> None:
    """p misses 1 by rounding, the number falls in between: an empty residual, and yet a real token."""
    p = torch.tensor([[[0.0, 1 - 2.0**-24, 0.0], [0.2, 0.3, 0.5]]])
    proposal = Proposal(tokens=torch.tensor([[1]]), num_drafts=torch.tensor([1]), probs=shown)
    u_accept = torch.tensor([[1 - 2.0**-40]], dtype=torch.float64)
    accepted, token = token_rule(p, proposal, u_accept, torch.full((1, 2), 0.5, dtype=torch.float64))
    assert (accepted.tolist(), token.tolist()) == ([0], [1])
