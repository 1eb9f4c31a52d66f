"""Random numbers by their place: bit for bit those of scalar Python, and random."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from commgrid.tensor_parallel import counter_rng, slices
from commgrid.tensor_parallel.counter_rng import DOUBLE, SINGLE, Law, Normal, Uniform
from commgrid.tensor_parallel.init import seed_of
from tests.tensor_parallel import scalar_rng

N = 2**20
SIGMAS = 4.5  # how far a statistic of a fixed seed may lie from what is expected


def made(law: Law, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    full = torch.empty(shape, dtype=dtype)
    slices.fill(full, shape, (0,) * len(shape), law, seed)
    return full


def scalars(law: Law, seed: int, places: list[int], dtype: torch.dtype) -> Tensor:
    wide = dtype == torch.float64
    if isinstance(law, Uniform):
        found = [scalar_rng.uniform(seed, place, law.low, law.high, wide) for place in places]
    else:
        form = DOUBLE if wide else SINGLE
        tables = (form.log, form.sine, form.cosine)
        found = [scalar_rng.normal(seed, p, law.mean, law.std, wide, tables) for p in places]
    return torch.tensor(found, dtype=torch.float64).to(dtype)


LAWS = [Normal(0, 1), Normal(0.3, 0.02), Uniform(-0.1, 0.1), Uniform(2, 5)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_every_bit_is_that_of_one_number_at_a_time(law: Law, dtype: torch.dtype) -> None:
    for seed in (0, 1, 2**63 - 2, seed_of("0/layers.3.mlp")):
        found = made(law, seed, 50, 21, dtype=dtype).flatten()
        assert torch.equal(found, scalars(law, seed, list(range(1050)), dtype)), seed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_tails_and_what_is_next_to_zero_are_so_too(dtype: torch.dtype) -> None:
    found = made(Normal(0, 1), 5, N, dtype=dtype)
    order = found.abs().sort().indices
    places = torch.cat([order[:300], order[-300:]])
    assert torch.equal(found[places], scalars(Normal(0, 1), 5, places.tolist(), dtype))
    assert found.abs().max() > 4.7


@pytest.mark.parametrize("place", [2**31 - 3, 2**32 - 3, 2**40 + 7, 2**61 + 10**9])
@pytest.mark.parametrize("law", LAWS[:1] + LAWS[2:3], ids=str)
def test_places_in_weights_of_any_size(law: Law, place: int) -> None:
    for dtype in (torch.float32, torch.float64):
        found = torch.empty(9, dtype=dtype)
        slices.fill(found, (2**62,), (place,), law, 3)
        assert torch.equal(found, scalars(law, 3, list(range(place, place + 9)), dtype))


def test_a_step_that_is_too_regular_is_made_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_rng, "mixed", lambda z: z & 1)
    step = counter_rng.stream(1)[1] & (2**64 - 1)
    assert step == 0xAAAAAAAAAAAAAAAB
    assert (step ^ (step >> 1)).bit_count() >= 24


def test_normal_numbers_are_those_of_box_and_muller() -> None:
    found = made(Normal(0, 1), 7, 20_000, dtype=torch.float64)
    exact = torch.tensor([scalar_rng.exact(7, i) for i in range(20_000)], dtype=torch.float64)
    # Two roundings of the radius and two of the angle's function, of numbers up to 5.
    assert (found - exact).abs().max() < 4e-15


def test_fp32_has_the_weights_of_fp64() -> None:
    for law in (Normal(0, 1), Uniform(-1, 1)):
        both = [made(law, 7, N, dtype=dtype) for dtype in (torch.float32, torch.float64)]
        gap = (both[0] - both[1]).abs()
        assert (gap > 1e-6).double().mean() <= 2e-4  # near zero, where fp32 rounds u to 1
        assert gap.max() < 4e-4
        low = made(law, 7, N, dtype=torch.bfloat16)
        assert torch.equal(low, both[0].bfloat16())


# -- are they random? -----------------------------------------------------------------------


def as_normal(law: Law, x: Tensor) -> Tensor:
    """The numbers' ranks under their law, from 0 to 1."""
    x = x.double()
    if isinstance(law, Uniform):
        return (x - law.low) / (law.high - law.low)
    whole = torch.special.ndtr((x - law.mean) / law.std)
    ends = torch.tensor([law.low, law.high], dtype=torch.float64)
    low, high = torch.special.ndtr((ends - law.mean) / law.std)
    return (whole - low) / (high - low)


CUT = Normal(0.01, 0.02, -0.02, 0.05)
RANDOM = [(Normal(0, 1), torch.float32), (Normal(0, 1), torch.float64),
          (Uniform(-1, 3), torch.float32), (Uniform(-1, 3), torch.float64),
          (CUT, torch.float32)]  # fmt: skip


@pytest.mark.parametrize(("law", "dtype"), RANDOM, ids=str)
@pytest.mark.parametrize("seed", [0, 1, seed_of("0/layers.0")])
def test_the_distribution(law: Law, dtype: torch.dtype, seed: int) -> None:
    x = made(law, seed, N, dtype=dtype)
    rank = as_normal(law, x)
    for part in (rank, rank[::2], rank[1::2], rank[: N // 64]):
        n = len(part)
        # Kolmogorov and Smirnov's distance, which exceeds 2.2 / √n once in 10,000 times.
        steps = torch.arange(n + 1, dtype=torch.float64) / n
        ordered = part.sort().values
        distance = max((steps[1:] - ordered).max().item(), (ordered - steps[:-1]).max().item())
        assert distance * math.sqrt(n) < 2.2
    if law == Normal(0, 1):
        x = x.double()
        for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            off = (x**power).mean().item() - expected
            assert abs(off) < SIGMAS * math.sqrt(variance / N), power
    elif law == CUT:
        assert -0.02 <= x.min() < -0.0199
        assert 0.0499 < x.max() <= 0.05000001


def uncorrelated(one: Tensor, other: Tensor) -> bool:
    """Neither the numbers nor their sizes, in units of their own scatter."""
    pairs = ((one, other), (one.square() - 1, other.square() - 1), (one.square() - 1, other))
    for a, b in pairs:
        r = (a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()
        if abs(r.item()) * math.sqrt(len(a)) >= SIGMAS:
            return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighbours_and_rows_have_nothing_in_common(dtype: torch.dtype) -> None:
    for seed in (0, 1, 2):
        x = made(Normal(0, 1), seed, N, dtype=dtype).double()
        for lag in (1, 2, 3, 4, 64, 1000, 1024, N // 2):
            assert uncorrelated(x[:-lag], x[lag:]), (seed, lag)
        assert uncorrelated(x[::2], x[1::2])
        assert uncorrelated(x, x.flip(0))


def test_seeds_and_names_have_nothing_in_common() -> None:
    names = [seed_of(f"{seed}/layers.{layer}.up") for seed in (0, 1) for layer in (0, 1, 10)]
    seeds = [0, 1, 2, 3, ~0, 2**32, 2**62, *names]
    drawn = [made(Normal(0, 1), seed, N // 4).double() for seed in seeds]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            for lag in (0, 1, 2):
                assert uncorrelated(one[lag:], other[: len(one) - lag])


def test_bits_are_even() -> None:
    for seed in (0, 1, 2):
        maker = counter_rng.PairMaker(2**18, False, torch.device("cpu"))
        rows = torch.tensor([[0]])
        bits = maker._bits(maker._hashed, rows, 2**18, seed)
        for bit in range(64):
            share = (bits >> bit & 1).double().mean().item()
            assert abs(share - 0.5) < SIGMAS * 0.5 / 2**9, bit


def test_numbers_repeat_no_more_than_chance_has_it() -> None:
    n = 2**20
    wide = made(Uniform(-1, 1), 3, n, dtype=torch.float64)
    assert len(wide.unique()) == n  # 2⁵³ values: a pair in 16,000 such tensors
    narrow = made(Uniform(-1, 1), 3, n)
    # Of 24 bits and an exponent: the chance that two are equal is a sum over exponents.
    chance = sum((0.5 / 4**k) / 2**24 * 0.5 for k in range(9))
    expected = n * (n - 1) / 2 * chance
    counts = narrow.unique(return_counts=True)[1].double()
    repeated = (counts * (counts - 1) / 2).sum().item()
    assert abs(repeated - expected) < SIGMAS * math.sqrt(expected)
    for dtype, chances in ((torch.float64, 0), (torch.float32, None)):
        x = made(Normal(0, 1), 3, n, dtype=dtype)
        if chances == 0:
            assert len(x.unique()) == n
        else:  # torch's own have 24 bits of radius and angle, and repeat as often or more
            torch.manual_seed(0)
            theirs = torch.empty(n).normal_()
            assert n - len(x.unique()) < 1.2 * (n - len(theirs.unique()))
