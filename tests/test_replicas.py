"""What ranks compare of their copies: every bit counts, wherever in memory it lies."""

import pytest
import torch

from commgrid.replicas import digest

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
