"""Counts of lost numbers, against conversions by torch."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from commgrid.equality.lost_numbers import Lost, lost_numbers, narrows

SOURCES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]
TARGETS = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn,
]  # fmt: skip
PAIRS = [pair for pair in product(SOURCES, TARGETS) if narrows(*pair)]


def at_the_limits(dtype: torch.dtype) -> torch.Tensor:
    """Numbers just below, at and just above those from which a dtype holds infinity, or zero."""
    limits = torch.finfo(dtype)
    largest, least = limits.max, limits.smallest_normal * limits.eps
    factors = torch.tensor([0.5, 0.75, 1.0, 1.5, 2.0], dtype=torch.float64)
    halves = torch.tensor([-0.01, 0.0, 0.01], dtype=torch.float64) * limits.eps
    above = largest * (1 + limits.eps / 4 + torch.cat([halves, factors * limits.eps]))
    below = least * torch.cat([0.5 + halves, factors, torch.tensor([1e-3, 0.49, 0.51])])
    plain = torch.tensor([0.0, 1.0, torch.inf, torch.nan], dtype=torch.float64)
    return torch.cat([above, below, plain, -above, -below, -plain])


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} to {pair[1]}")
@pytest.mark.parametrize("ordinary", [0, 70_000])
def test_it_counts_what_a_conversion_loses(
    pair: tuple[torch.dtype, torch.dtype], ordinary: int
) -> None:
    source, target = pair
    numbers = torch.cat([torch.ones(ordinary), at_the_limits(target)]).to(source)
    before, after = numbers.double(), numbers.to(target).double()
    overflowed = int((before.isfinite() & ~after.isfinite()).sum())
    vanished = int(((before != 0) & (after == 0)).sum())
    name = str(target).removeprefix("torch.")
    assert lost_numbers(numbers, target, 7) == Lost(name, overflowed, vanished, 7)


def test_of_complex_numbers_both_parts_count() -> None:
    parts = torch.tensor([[1e-50, 1e300], [1.0, 1e300]], dtype=torch.float64)
    lost = lost_numbers(torch.view_as_complex(parts), torch.complex64, 4)
    assert lost == Lost("complex64", overflowed=2, vanished=1, total=8)


def test_ordinary_weights_lose_nothing() -> None:
    weights = torch.arange(-50_000, 50_001) / 25_000  # with a zero
    assert lost_numbers(weights, torch.bfloat16, 100_001) == Lost("bfloat16", 0, 0, 100_001)
