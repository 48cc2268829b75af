"""N tokens, H hidden size, V vocabulary, M head rows, k target ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.capture import top_k_log_probs
from distill.chunked import LossSums, SparseTarget, chunked_loss, eager_loss, judge, text_target
from distill.losses import OBJECTIVES, ObjectiveSection, token_losses

N, H, V, K = 23, 16, 96, 6
KINDS = sorted(OBJECTIVES)
SHORT = torch.arange(1, V, 3)  # [32]


def make(
    dtype: torch.dtype = torch.float32, *, scale: float = 1.0, rows: int = V
) -> tuple[Tensor, Tensor, SparseTarget]:
    random = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(N, H, generator=random, dtype=torch.float64)
    weight = torch.randn(rows, H, generator=random, dtype=torch.float64) / 2
    ids, log_probs = top_k_log_probs(2 * torch.randn(N, V, generator=random), K)
    target = SparseTarget(
        token_ids=ids.long(), log_probs=log_probs.double() if dtype == torch.float64 else log_probs
    )
    return hidden.to(dtype), weight.to(dtype), target


def measure(
    function: Callable[..., LossSums], hidden: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> tuple[LossSums, Tensor, Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    sums = function(hidden, weight, *args, **kwargs)
    (sums.loss / len(hidden)).backward()
    assert hidden.grad is not None and weight.grad is not None
    return sums, hidden.grad, weight.grad


def compare(tolerance: float, *args: Any, **kwargs: Any) -> tuple[LossSums, Tensor, Tensor]:
    fast, slow = measure(chunked_loss, *args, **kwargs), measure(eager_loss, *args, **kwargs)
    for a, b in zip(fast[1:], slow[1:], strict=True):
        assert a.dtype == b.dtype and a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=max(1e-6, tolerance * float(b.abs().max())))
    for name in ("loss", "expected_acceptance_sum", "greedy_agreement_sum", "num_tokens"):
        torch.testing.assert_close(getattr(fast[0], name), getattr(slow[0], name), rtol=tolerance, atol=1e-5)
    return fast


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_parity(kind: str, temperature: float, short: bool, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, target = make(dtype)
    head_ids = SHORT if short else None
    weight = weight[SHORT] if short else weight
    section = ObjectiveSection(kind=kind, temperature=temperature, beta=0.3)
    weights = torch.linspace(0, 2, N)
    sums, grad, _ = compare(
        tolerance, hidden, weight, target, section, head_ids=head_ids, chunk_tokens=5, weights=weights
    )
    assert sums.loss.shape == () and sums.loss > 0
    assert grad[0].abs().max() == 0 and grad[1].abs().max() > 0  # weight 0, and not


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"lk"}))  # its gradient takes its weight for a constant
def test_gradient_against_finite_differences(kind: str) -> None:
    hidden, weight, target = make(torch.float64)
    section = ObjectiveSection(kind=kind, temperature=1.5)
    few = SparseTarget(token_ids=target.token_ids[:4], log_probs=target.log_probs[:4])
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0])

    def loss(hidden: Tensor, rows: Tensor) -> Tensor:
        return chunked_loss(hidden, rows, few, section, head_ids=SHORT, chunk_tokens=3, weights=weights).loss

    inputs = (hidden[:4].requires_grad_(), weight[SHORT].requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("short", [False, True])
def test_judge_gives_what_the_loss_sums(short: bool) -> None:
    hidden, weight, target = make()
    head_ids, weight = (SHORT, weight[SHORT]) if short else (None, weight)
    sums = chunked_loss(hidden, weight, target, ObjectiveSection(), head_ids=head_ids)
    acceptance, agrees = judge(hidden, weight, target, head_ids=head_ids, chunk_tokens=5)
    assert acceptance.shape == agrees.shape == (N,)
    torch.testing.assert_close(acceptance.sum(), sums.expected_acceptance_sum)
    assert float(agrees.sum()) == float(sums.greedy_agreement_sum)


@pytest.mark.parametrize("short", [False, True])
def test_cross_entropy_of_a_text(short: bool) -> None:
    """torch's own; a token off a short list adds nothing: all is in the tail, for the draft as for the text."""
    hidden, weight, _ = make()
    ids = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(3))
    section = ObjectiveSection(kind="cross_entropy")
    if short:
        sums, _, _ = measure(chunked_loss, hidden, weight[SHORT], text_target(ids), section, head_ids=SHORT)
        on_list = torch.isin(ids, SHORT)
        logits, ids = (hidden @ weight[SHORT].T)[on_list], torch.searchsorted(SHORT, ids[on_list])
    else:
        sums, _, _ = measure(chunked_loss, hidden, weight, text_target(ids), section)
        logits = hidden @ weight.T
    want = torch.nn.functional.cross_entropy(logits, ids, reduction="sum")
    torch.testing.assert_close(sums.loss.detach(), want, rtol=1e-5, atol=1e-5)


def test_bucketed_loss_by_hand() -> None:
    # q = (1/2, 1/4, 1/8, 1/8); p keeps ids 0 and 2; id 9 is off the head, its mass joins the tail.
    weight = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()[:, None]
    target = SparseTarget(
        token_ids=torch.tensor([[0, 9, 2]]), log_probs=torch.tensor([[0.5, 0.25, 0.1]]).log()
    )
    sums = chunked_loss(torch.ones(1, 1), weight, target, ObjectiveSection())
    expected = 0.1 * math.log(0.1 / 0.125) + 0.4 * math.log(0.4 / 0.375)
    assert sums.loss.item() == pytest.approx(expected, abs=1e-6)
    assert float(sums.expected_acceptance_sum) == pytest.approx(0.6)
    assert (float(sums.greedy_agreement_sum), float(sums.num_tokens)) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_vocabulary_kept_is_the_plain_objective(kind: str) -> None:
    hidden, weight, _ = make()
    section = ObjectiveSection(kind=kind)
    log_p = torch.randn(N, V, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    ids = log_p.argsort(-1, descending=True)
    target = SparseTarget(token_ids=ids, log_probs=log_p.gather(1, ids))
    log_q = (hidden @ weight.T).log_softmax(-1)
    sums, grad, _ = measure(chunked_loss, hidden, weight, target, section)
    torch.testing.assert_close(sums.loss, token_losses(log_p, log_q, section).sum(), rtol=1e-5, atol=1e-5)
    acceptance = torch.minimum(log_p, log_q).exp().sum()
    torch.testing.assert_close(sums.expected_acceptance_sum, acceptance, rtol=1e-5, atol=0)
    assert grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saturated_rows(kind: str, dtype: torch.dtype) -> None:
    hidden, weight, target = make(dtype, scale=100.0)  # logits of several hundred: q is 0 or 1 in float32
    sure = SparseTarget(
        token_ids=target.token_ids, log_probs=torch.tensor([0.0] + [-80.0] * (K - 1)).expand(N, K)
    )
    # Where q is 1 the gradient of reverse_kl is what is left of two numbers of the floor's size, 70.
    exact = 1e-3 if kind == "reverse_kl" else 1e-4
    sums, _, _ = compare(
        exact if dtype == torch.float32 else 2e-2,
        hidden,
        weight,
        sure,
        ObjectiveSection(kind=kind),
        chunk_tokens=7,
    )
    assert sums.loss.isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_all_off_the_list(kind: str) -> None:
    hidden, weight, target = make()
    off = SparseTarget(token_ids=3 * torch.arange(K).expand(N, K), log_probs=target.log_probs)
    sums, grad, _ = compare(1e-5, hidden, weight[SHORT], off, ObjectiveSection(kind=kind), head_ids=SHORT)
    # All of p is in the tail, and so is all of q: nothing to learn, nothing that can be accepted.
    assert sums.loss.item() == pytest.approx(0, abs=1e-5) and grad.abs().max() < 1e-6
    assert float(sums.expected_acceptance_sum) == 0 and float(sums.greedy_agreement_sum) == 0


def test_weight_zero_is_the_same_as_absent() -> None:
    hidden, weight, target = make()
    weights = (torch.arange(N) != 4).float()
    sums, grad, _ = measure(chunked_loss, hidden, weight, target, ObjectiveSection(), weights=weights)
    there = weights > 0
    kept = SparseTarget(token_ids=target.token_ids[there], log_probs=target.log_probs[there])
    expected = chunked_loss(hidden[there], weight, kept, ObjectiveSection())
    torch.testing.assert_close(sums.loss.detach(), expected.loss)
    torch.testing.assert_close(sums.expected_acceptance_sum, expected.expected_acceptance_sum)
    assert float(sums.num_tokens) == N - 1 and grad[4].abs().max() == 0 and grad.isfinite().all()


def test_chunks_do_not_change_the_result() -> None:
    hidden, weight, target = make()
    whole = measure(chunked_loss, hidden, weight, target, ObjectiveSection())
    for size in (1, 7, N):
        parts = measure(chunked_loss, hidden, weight, target, ObjectiveSection(), chunk_tokens=size)
        torch.testing.assert_close(parts[0].loss, whole[0].loss)
        torch.testing.assert_close(parts[1:], whole[1:], rtol=1e-5, atol=1e-6)


def test_frozen_head_no_grad_and_no_tokens() -> None:
    hidden, weight, target = make()
    hidden.requires_grad_()
    chunked_loss(hidden, weight, target, ObjectiveSection()).loss.backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.no_grad():
        assert not chunked_loss(hidden, weight, target, ObjectiveSection()).loss.requires_grad
    empty = SparseTarget(token_ids=target.token_ids[:0], log_probs=target.log_probs[:0])
    sums = chunked_loss(hidden[:0], weight, empty, ObjectiveSection())
    sums.loss.backward()
    assert (float(sums.loss.detach()), float(sums.num_tokens)) == (0, 0)


def test_learning_head_keeps_its_dtype() -> None:
    hidden, weight, target = make()
    _, grad, grad_weight = measure(chunked_loss, hidden.bfloat16(), weight, target, ObjectiveSection())
    assert grad.dtype == torch.bfloat16 and grad_weight.dtype == torch.float32
    exact = measure(chunked_loss, hidden, weight, target, ObjectiveSection())[2]
    torch.testing.assert_close(grad_weight, exact, rtol=5e-2, atol=float(exact.abs().max()) * 2e-2)


def test_no_more_than_a_chunk_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from distill import chunked

    seen: list[int] = []
    whole = chunked._chunk

    def spy(logits: Tensor, *args: Any) -> Any:
        seen.append(logits.shape[0])
        return whole(logits, *args)

    monkeypatch.setattr(chunked, "_chunk", spy)
    hidden, weight, target = make()
    chunked_loss(hidden, weight, target, ObjectiveSection(), chunk_tokens=8)
    assert seen == [8, 8, 7]


def test_wide_vocabulary() -> None:
    random = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(3, 8, generator=random), torch.randn(151_936, 8, generator=random)
    ids, log_probs = top_k_log_probs(3 * torch.randn(3, 152_064, generator=random), 64)
    target = SparseTarget(token_ids=ids.long(), log_probs=log_probs)  # padded: some ids may be past the head
    compare(1e-5, hidden, weight, target, ObjectiveSection(), chunk_tokens=2)


def test_top_k_log_probs() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.bfloat16)
    ids, log_probs = top_k_log_probs(logits, 2)
    assert ids.tolist() == [[1, 2]] and log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, logits.float().log_softmax(-1)[:, [1, 2]])
    assert top_k_log_probs(logits, 9)[0].shape == (1, 3)
