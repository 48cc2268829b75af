from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.losses import (
    OBJECTIVES,
    ObjectiveSection,
    block_weights,
    forward_kl,
    jsd,
    lk,
    log_acceptance,
    reverse_kl,
    skewed_kl,
    temper,
    token_losses,
    tv,
)

KINDS = sorted(OBJECTIVES)
LOG_P = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).double().log()
LOG_Q = torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.5, 0.0]]).double().log()


def test_forward_kl_by_hand() -> None:
    # 0.5 ln 2 - 0.25 ln 2, and ln 2
    expected = torch.tensor([0.25 * math.log(2), math.log(2)]).double()
    assert forward_kl(LOG_P, LOG_Q).shape == (2,)
    torch.testing.assert_close(forward_kl(LOG_P, LOG_Q), expected, check_dtype=False)


def test_forward_kl_is_infinite_off_the_draft() -> None:
    assert forward_kl(LOG_Q, LOG_P).tolist()[1] == math.inf


def test_tv_is_one_minus_acceptance() -> None:
    acceptance = torch.minimum(LOG_P.exp(), LOG_Q.exp()).sum(-1)
    torch.testing.assert_close(tv(LOG_P, LOG_Q), 1 - acceptance)
    assert tv(LOG_P, LOG_Q).tolist() == pytest.approx([0.25, 0.5])


def test_jsd_by_hand_and_its_symmetry() -> None:
    # Second row, beta 1/4: m = (0.25 + 0.375, 0.375, 0); p = (1, 0, 0), q = (0.5, 0.5, 0).
    row = 0.25 * math.log(1 / 0.625) + 0.75 * (0.5 * math.log(0.5 / 0.625) + 0.5 * math.log(0.5 / 0.375))
    assert float(jsd(LOG_P, LOG_Q, 0.25)[1]) == pytest.approx(row, rel=1e-6)
    torch.testing.assert_close(jsd(LOG_P, LOG_Q, 0.3), jsd(LOG_Q, LOG_P, 0.7))


def test_jsd_tends_to_both_kls() -> None:
    torch.testing.assert_close(
        jsd(LOG_P, LOG_Q, 1e-6)[0] / 1e-6, forward_kl(LOG_P, LOG_Q)[0], rtol=1e-4, atol=0
    )
    reverse = jsd(LOG_P, LOG_Q, 1 - 1e-6)[0] / 1e-6
    torch.testing.assert_close(reverse, forward_kl(LOG_Q, LOG_P)[0], rtol=1e-4, atol=0)


def test_reverse_kl_by_hand() -> None:
    # First row: 0.25 ln(1/2) + 0.5 ln 2; p = 0 where q > 0 costs what the floor makes of it.
    assert float(reverse_kl(LOG_P, LOG_Q)[0]) == pytest.approx(0.25 * math.log(2))
    assert float(reverse_kl(LOG_P, LOG_Q)[1]) == pytest.approx(math.log(0.5) + 0.5 * 70)
    torch.testing.assert_close(reverse_kl(LOG_P, LOG_Q)[0], forward_kl(LOG_Q, LOG_P)[0])


def test_skewed_kl_by_hand_and_its_bound() -> None:
    # Second row, skew 1/4: m(0) = 0.25 + 0.75 x 0.5, and p is all there.
    assert float(skewed_kl(LOG_P, LOG_Q, 0.25)[1]) == pytest.approx(-math.log(0.625))
    apart = torch.tensor([[0.0, -math.inf]]).double()
    assert float(skewed_kl(apart, apart.flip(-1), 0.1)) == pytest.approx(-math.log(0.1))


def test_log_acceptance_by_hand_and_far_away() -> None:
    assert log_acceptance(LOG_P, LOG_Q).tolist() == pytest.approx([-math.log(0.75), -math.log(0.5)])
    far = torch.tensor([[-500.0, 0.0]], requires_grad=True)
    loss = log_acceptance(torch.tensor([[0.0, -math.inf]]), far)
    (grad,) = torch.autograd.grad(loss.sum(), far)
    assert loss.item() == 500 and grad.tolist() == [[-1, 0]]  # total variation's gradient there is 0


def test_log_acceptance_has_the_gradient_of_tv_over_the_acceptance() -> None:
    log_q = LOG_Q[:1].clone().requires_grad_()
    (ours,) = torch.autograd.grad(log_acceptance(LOG_P[:1], log_q).sum(), log_q)
    (of_tv,) = torch.autograd.grad(tv(LOG_P[:1], log_q).sum(), log_q)
    # On the simplex the two ways of writing TV have the same gradient up to a constant times q.
    shift = (ours - of_tv / 0.75) / LOG_Q[:1].exp()
    torch.testing.assert_close(shift, shift[:, :1].expand_as(shift))


def test_lk_blends_by_acceptance_and_takes_the_weight_as_given() -> None:
    weight = math.exp(-3 * 0.75)
    by_hand = weight * 0.25 * math.log(2) + (1 - weight) * 0.25
    assert float(lk(LOG_P, LOG_Q, 3.0)[0]) == pytest.approx(by_hand)
    torch.testing.assert_close(lk(LOG_P, LOG_Q, 0.0), forward_kl(LOG_P, LOG_Q))
    log_q = LOG_Q[:1].clone().requires_grad_()
    (ours,) = torch.autograd.grad(lk(LOG_P[:1], log_q, 3.0).sum(), log_q)
    (kl,) = torch.autograd.grad(forward_kl(LOG_P[:1], log_q).sum(), log_q)
    (distance,) = torch.autograd.grad(tv(LOG_P[:1], log_q).sum(), log_q)
    torch.testing.assert_close(ours, weight * kl + (1 - weight) * distance)


@pytest.mark.parametrize("block_length", [1, 2, 3, 5])
def test_block_weights_are_the_gradient_of_the_accepted_length(block_length: int) -> None:
    rows = torch.tensor([0, 0, 0, 0, 0, 0, 2, 2, 5])
    acceptance = torch.rand(len(rows), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    acceptance.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for start in range(len(rows)):
        chain = torch.ones((), dtype=torch.float64)
        for token in range(start, min(start + block_length, len(rows))):
            if rows[token] != rows[start]:
                break
            chain = chain * acceptance[token]
            total = total + chain
    (want,) = torch.autograd.grad(total, acceptance)
    torch.testing.assert_close(block_weights(acceptance.detach(), rows, block_length), want)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_probabilities_leave_no_nan(kind: str) -> None:
    section = ObjectiveSection(kind=kind)
    log_p = torch.tensor([[0.0, -math.inf, -math.inf], [-1.0, -200.0, math.log(1 - math.exp(-1))]])
    log_q = torch.tensor([[-300.0, 0.0, -math.inf], [-0.7, -math.inf, math.log(1 - math.exp(-0.7))]])
    log_q.requires_grad_()
    loss = token_losses(log_p, log_q, section)
    (grad,) = torch.autograd.grad(loss.sum(), log_q)
    assert loss.isfinite().all() and grad.isfinite().all()
    assert loss[0].item() > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_never_negative_and_zero_at_the_target(kind: str, temperature: float, seed: int) -> None:
    section = ObjectiveSection(kind=kind, temperature=temperature)
    random = torch.Generator().manual_seed(seed)
    p, q = (4 * torch.randn(2, 3, 7, generator=random, dtype=torch.float64)).log_softmax(-1)
    assert (token_losses(p, q, section) > 0).all()
    torch.testing.assert_close(token_losses(p, p, section), torch.zeros(3).double(), rtol=0, atol=1e-12)


def test_temper_by_hand() -> None:
    log_p = torch.tensor([[0.8, 0.2, 0.0]]).log()
    expected = torch.tensor([[16 / 17, 1 / 17, 0.0]])
    torch.testing.assert_close(temper(log_p, 0.5).exp(), expected)
    assert temper(log_p, 1.0) is log_p


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"beta": 0.0}, {"beta": 1.0}, {"kind": "kl"}])
def test_settings_that_make_no_loss_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        ObjectiveSection(**setting)  # type: ignore[arg-type]
