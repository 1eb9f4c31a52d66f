"""What ranks compare of their copies: every bit counts, wherever in memory it lies."""

import pytest
import torch

from commgrid.copies import digest

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


def test_a_digest_is_what_its_formula_says() -> None:
    """Blocks of 2^16 words, the i-th of each times (2 i + 1) · odd, one block after the other."""
    odd, modulus, block = 0x1E3779B97F4A7C15, 1 << 64, 1 << 16
    for count in (1, 100, block - 1, block, 5 * block + 7):
        words = torch.randint(-(2**62), 2**62, (count,), generator=torch.manual_seed(count))
        total = 0
        for start in range(0, count, block):
            part = words[start : start + block].tolist()
            summed = sum(word * (2 * i + 1) for i, word in enumerate(part)) * odd
            total = (total * odd if start else 0) + summed
        assert digest(words).item() % modulus == total % modulus
