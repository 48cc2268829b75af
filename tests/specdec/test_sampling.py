"""The warp against transformers, the draw against its weights, and random numbers that are random."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.errors import UserError
from specdec.sampling import BLOCK, Purpose, Sampling, draw, uniform, warp


@pytest.fixture(autouse=True)
def small_blocks() -> None:
    """Here the blocks keep their real size."""


def reference(logits: Tensor, sampling: Sampling) -> Tensor:
    chain = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain(torch.zeros(len(logits), 1, dtype=torch.long), logits).softmax(dim=-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 20, 5000])
@pytest.mark.parametrize("top_p", [0.01, 0.8, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_warp_is_transformers_warp(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = 2 * torch.randn(16, 700, generator=torch.Generator().manual_seed(0))
    got, want = warp(logits, sampling), reference(logits, sampling)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_warp_takes_any_shape_and_works_in_fp32() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.05)
    got = warp(logits, sampling)
    assert got.dtype == torch.float32 and got.shape == logits.shape
    torch.testing.assert_close(got.view(6, 50), reference(logits.view(6, 50).float(), sampling))


def test_zero_temperature_is_the_one_hot_of_the_argmax() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    logits[2, 7] = logits[2, 31] = 9.0  # a tie: one of them, not half and half
    got = warp(logits, Sampling(temperature=0.0, top_k=3, top_p=0.5))
    assert torch.equal(got.sum(dim=-1), torch.ones(5)) and torch.equal(got.max(dim=-1).values, torch.ones(5))
    assert torch.equal(got.argmax(dim=-1), logits.argmax(dim=-1))
    assert Sampling().greedy and not Sampling(temperature=1e-3).greedy


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
    ],
)
def test_settings_out_of_range_are_refused(bad: dict[str, float]) -> None:
    (name,) = bad
    with pytest.raises(UserError, match=f"^{name} is out of range: got .*; expected ") as error:
        Sampling(**bad)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


# draw


@pytest.mark.parametrize("width", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_draw_never_takes_a_weight_of_zero(width: int) -> None:
    """Half of the weights are zero, whole blocks and both ends among them; numbers at and near the edges."""
    generator = torch.Generator().manual_seed(width)
    weights = torch.rand(2000, width, generator=generator)
    weights[torch.rand(2000, width, generator=generator) < 0.5] = 0
    if width > 2 * BLOCK:
        weights[:, :BLOCK] = 0
        weights[1000:, 2 * BLOCK :] = 0
    weights[torch.arange(2000), torch.randint(0, width, (2000,), generator=generator)] += 1e-4
    u = torch.rand(2000, dtype=torch.float64, generator=generator)
    for numbers in (
        u,
        torch.zeros_like(u),
        torch.full_like(u, 1 - 2.0**-53),
        u.float().double(),
        (8 * u).floor() / 8,
    ):
        ids = draw(weights, numbers)
        assert bool((weights.gather(1, ids.unsqueeze(1)) > 0).all())
    first, last = (
        (weights > 0).long().argmax(dim=-1),
        width - 1 - (weights > 0).long().flip(-1).argmax(dim=-1),
    )
    assert torch.equal(draw(weights, torch.zeros_like(u)), first)
    assert torch.equal(draw(weights, torch.full_like(u, 1 - 2.0**-53)), last)


def test_draw_is_the_inverse_cdf() -> None:
    """Over a fine grid of numbers each id comes as often as its weight says, weights not normalised."""
    weights = torch.rand(2 * BLOCK + 50, generator=torch.Generator().manual_seed(3)) ** 8 * 37
    size = 100_000
    grid = (torch.arange(size).double() + 0.5) / size
    ids = torch.cat([draw(weights.expand(len(u), -1), u) for u in grid.split(5000)])
    share = torch.bincount(ids, minlength=len(weights)).double() / size
    assert bool((ids.diff() >= 0).all())
    torch.testing.assert_close(share, weights.double() / weights.double().sum(), atol=1.01 / size, rtol=0)


def test_draw_has_the_right_law(g_test: Callable[[Tensor, Tensor], float]) -> None:
    probs = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.07, 0.03])
    ids = draw(probs.expand(50_000, -1), uniform(torch.arange(50_000), torch.tensor(5), Purpose.DRAFT))
    assert g_test(ids, probs) > 1e-3
    assert g_test(ids, torch.tensor([0.39, 0.0, 0.3, 0.2, 0.08, 0.03])) < 1e-3  # the test can tell


def test_draw_takes_leading_dimensions() -> None:
    weights = torch.rand(3, 4, 10, generator=torch.Generator().manual_seed(4))
    u = torch.rand(3, 4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(draw(weights, u), draw(weights.view(12, 10), u.view(12)).view(3, 4))


# uniform


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("along", ["positions", "seeds", "far seeds"])
def test_uniform_is_uniform(purpose: Purpose, along: str) -> None:
    """Along the positions of seed 0, the default, and over neighbouring and 64-bit seeds at one position."""
    many, one = torch.arange(200_000), torch.tensor(0)
    seeds, positions = {"positions": (one, many), "seeds": (many, one), "far seeds": (many << 40, one)}[along]
    u = uniform(seeds, positions, purpose)
    assert u.dtype == torch.float64 and float(u.min()) >= 0 and float(u.max()) < 1
    assert kstest(u.numpy(), "uniform").pvalue > 1e-3
    low = (u * 2**20) % 1  # the bits behind the first twenty
    assert kstest(low.numpy(), "uniform").pvalue > 1e-3
    assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < 4 / 200_000**0.5


def test_streams_are_uncorrelated() -> None:
    """Other purpose, next seed, next position, both exchanged: no pair of streams moves together."""
    seeds, positions = torch.arange(400).unsqueeze(1), torch.arange(500).unsqueeze(0)
    streams = [uniform(seeds, positions, purpose).flatten() for purpose in Purpose]
    streams.append(uniform(seeds + 1000, positions, Purpose.DRAFT).flatten())
    streams.append(uniform(seeds, positions + 1000, Purpose.DRAFT).flatten())
    streams.append(uniform(seeds + (1 << 32), positions, Purpose.DRAFT).flatten())
    streams.append(uniform(positions + 5000, seeds + 7000, Purpose.DRAFT).flatten())
    table = torch.stack(streams)
    limit = 5 / table.shape[1] ** 0.5
    for view in (table, (table - 0.5).abs(), (table * 1024) % 1):  # also in scale, and in lower bits
        off = torch.corrcoef(view) - torch.eye(len(streams), dtype=torch.float64)
        assert float(off.abs().max()) < limit


def test_numbers_depend_on_seed_position_and_purpose_alone() -> None:
    seeds, positions = torch.tensor([3, -1, 2**62, 3]), torch.tensor([7, 0, 9, 8])
    together = uniform(seeds, positions, Purpose.NEXT)
    alone = torch.stack([uniform(s, n, Purpose.NEXT) for s, n in zip(seeds, positions, strict=True)])
    assert torch.equal(together, alone) and len(set(together.tolist())) == 4
    grid = uniform(seeds.unsqueeze(1), positions.unsqueeze(0), Purpose.NEXT)
    assert torch.equal(grid.diagonal(), together)


def test_pairs_of_streams_are_jointly_uniform(g_test: Callable[[Tensor, Tensor], float]) -> None:
    """The draft's number and the one that accepts it fill the square evenly, as do neighbours in position."""
    seeds, positions = torch.arange(200).unsqueeze(1), torch.arange(1000).unsqueeze(0)
    flat = torch.full((16, 16), 1 / 256)
    draft, accept, after = (uniform(seeds, positions, purpose) for purpose in Purpose)
    pairs = [
        (draft, accept),
        (accept, after),
        (draft, after),
        (draft[:, :-1], draft[:, 1:]),
        (draft[:-1], draft[1:]),
    ]
    for a, b in pairs:
        assert g_test(((16 * a).long() * 16 + (16 * b).long()).flatten(), flat) > 1e-3
