"""What ranks compare of their copies: every bit counts, wherever in memory it lies."""

from typing import Any

import pytest
import torch

import commgrid
from commgrid import replicas
from commgrid.equality.digest import _columns, condensed, digest
from commgrid.replicas import Copy, differing
from commgrid.testing import run_on_ranks

TYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool,
    torch.complex64,
]  # fmt: skip


def drawn(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    if dtype.is_complex:
        return torch.randn(size, dtype=dtype, generator=generator)
    return (torch.randn(size, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 1000, 140_003])
def test_a_digest_is_of_the_values_alone_and_of_every_bit(size: int, dtype: torch.dtype) -> None:
    base = drawn(size + 3, dtype)
    for offset in (0, 1, 3):
        held = base[offset : offset + size]
        number = digest(held)
        assert number == digest(held.clone())
        for index in {0, size // 2, size - 1}:
            other = held.clone()
            if dtype == torch.bool:
                other[index] = ~other[index]
            else:
                other.view(torch.uint8)[index * other.element_size()] ^= 1
            assert digest(other) != number, (offset, index)
        first, last = held[0].clone(), held[-1].clone()
        if first != last:
            swapped = held.clone()
            swapped[0], swapped[-1] = last, first
            assert digest(swapped) != number


@pytest.mark.parametrize("dtype", [t for t in TYPES if t.is_floating_point], ids=str)
@pytest.mark.parametrize("size", [2, 4, 16, 64, 1000])
def test_signs_count_however_many_change(size: int, dtype: torch.dtype) -> None:
    """A sign is a word's top bit, of which two cancel in a plain weighted sum modulo 2^64."""
    held = drawn(size, dtype)
    assert digest(held) != digest(-held)
    signs = torch.tensor([1 - 2 * (i.bit_count() % 2) for i in range(size)])  # + - - + - + + -
    for pattern in (signs, signs.flip(0), torch.ones(size).index_fill(0, torch.tensor([0, 1]), -1)):
        ones = pattern.to(dtype)
        assert digest(ones) != digest(-ones)


def test_a_digest_is_what_its_formula_says() -> None:
    """The sum of w ^ (w >> 33) times a number for its place in the block, block after block."""
    odd, modulus, block = 0x1E3779B97F4A7C15, 1 << 64, 1 << 16
    weights = [digest(one).item() for one in torch.eye(3, dtype=torch.int64)]
    assert all(weight % 2 for weight in weights)
    assert len(set(weights)) == 3
    ones = [digest(torch.ones(1, dtype=torch.int64)).item()]
    assert ones == weights[:1]
    words = torch.randint(-(2**62), 2**62, (3,), generator=torch.manual_seed(0))
    total = sum((w ^ (w >> 33)) * weight for w, weight in zip(words.tolist(), weights, strict=True))
    assert digest(words).item() % modulus == total % modulus
    for count in (block - 1, block, block + 1, 70 * block + 7):
        words = torch.randint(-(2**62), 2**62, (count,), generator=torch.manual_seed(count))
        joined = 0
        for start in range(0, count, block):
            joined = joined * odd + digest(words[start : start + block]).item()
        assert digest(words).item() % modulus == joined % modulus


# -- condensed tensors --------------------------------------------------------------------

BLOCK = 4096 * 128  # bytes


def quick(tensor: torch.Tensor) -> int:
    return int(digest(condensed(tensor)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("more", [0, 1, 4099, 4096 * 43])
def test_condensed_bytes_are_of_every_bit_and_place_too(dtype: torch.dtype, more: int) -> None:
    size = (2 * BLOCK + more) // dtype.itemsize
    held = drawn(size, torch.float32) > 0 if dtype == torch.bool else drawn(size, dtype)
    number = quick(held)
    assert number == quick(torch.empty(size + 3, dtype=dtype)[3:].copy_(held))  # elsewhere
    assert len(condensed(held)) < held.nbytes / 20
    octets = held.view(torch.uint8)
    for place in (0, 5, 4095, 4096, BLOCK - 1, BLOCK, 2 * BLOCK - 1, len(octets) - 1):
        other = held.clone()
        other.view(torch.uint8)[place] ^= 1 if dtype == torch.bool else 128
        assert quick(other) != number, place
    one, two = octets[:4096].clone(), octets[4096:8192].clone()
    assert not torch.equal(one, two)
    swapped = held.clone()
    swapped.view(torch.uint8)[:8192] = torch.cat([two, one])
    assert quick(swapped) != number


@pytest.mark.parametrize("dtype", [t for t in TYPES if t.is_floating_point], ids=str)
def test_signs_and_places_within_a_row_count(dtype: torch.dtype) -> None:
    """Each row of 4,096 bytes is two numbers; no sign or order of its elements cancels there."""
    size = 32 * 4096 // dtype.itemsize
    ones = torch.ones(size, dtype=dtype)
    numbers = {quick(ones), quick(-ones)}
    for step in range(1, 12):  # of an even count, each its own
        signs = torch.ones(size, dtype=dtype)
        signs.view(-1, 1 << step)[:, : 1 << (step - 1)] = -1
        numbers |= {quick(signs), quick(-signs)}
    held = drawn(size, dtype)
    numbers |= {quick(held), quick(held.roll(1)), quick(held.flip(0))}
    numbers |= {quick(held.view(2, -1).flip(0).reshape(-1))}
    assert len(numbers) == 2 * 12 + 4


def test_no_two_bytes_of_a_row_cancel_in_both_columns() -> None:
    """Changes of a and b cancel if a times a byte's two numbers is -b times the other byte's."""
    columns = torch.cat(_columns(), 1).to(torch.int64)
    assert int(columns.abs().min()) == 1
    reduced = columns // torch.gcd(*columns.unbind(1)).unsqueeze(1) * columns[:, :1].sign()
    assert len(reduced.unique(dim=0)) == len(columns) == 4096


@pytest.mark.parametrize("place", [0, 1])
def test_changes_that_cancel_in_one_column_show_in_the_other(place: int) -> None:
    numbers = _columns()[place][:, 0]
    one, other = (numbers == numbers[7]).nonzero().flatten()[:2].tolist()
    rows = torch.zeros(8 * 4096, dtype=torch.int8)
    changed = rows.clone()
    changed[one], changed[other] = 1, -1
    assert not (changed.view(8, -1).long() @ numbers.long()).any()
    assert quick(changed) != quick(rows)


def test_products_are_exact_at_their_largest() -> None:
    """Pairs of products stay within 16 bits, in which processors without VNNI add them."""
    for column in _columns():
        assert int(column.abs().max()) == 63
        for extreme in (-128, 127):
            rows = torch.full((128, 4096), extreme, dtype=torch.int8)
            rows[1::2] = torch.where(column[:, 0] > 0, extreme, -extreme - 1).to(torch.int8)
            exact = rows.to(torch.int64) @ column.to(torch.int64)
            assert torch.equal(torch._int_mm(rows, column).to(torch.int64), exact)


def told_on_two_kinds_of_processors() -> list[Any]:
    grid = commgrid.initialize()
    rank = grid.rank
    if rank == 0:
        replicas.condensed = lambda tensor: condensed(tensor) + 1  # type: ignore[assignment]
    group = grid.get_group("dp")
    same, large = torch.ones(3), torch.ones(BLOCK)
    copies = [Copy("same", same, (group,)), Copy("large", large, (group,))]
    equal = differing(copies)
    large[7] = rank
    found = [equal, differing(copies)]
    commgrid.shutdown()
    return found


def test_processors_that_condense_otherwise_compare_by_the_common_digest() -> None:
    for equal, told in run_on_ranks(told_on_two_kinds_of_processors, 2):
        assert equal is None
        assert told == "large differs between rank 0 and rank 1 of group 'dp'"
