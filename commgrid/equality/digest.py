"""Digests of tensors: numbers that depend on every bit and its place.

A digest is the sum of the tensor's 8-byte words, each times its own random odd number, modulo 2^64.
Times an odd number, a word's top bit, such as a sign, changes only the top bit, and two such
changes cancel in the sum; so its upper bits are first combined with its lower ones by exclusive or.
Any difference then changes the digest, but for one in about 2^32.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache, lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

MANTISSA = 2**52 - 1
"""Whole numbers up to it are exact in fp64."""
_BLOCK = 1 << 16  # 8-byte words
_SHIFT = 33  # not 32 or 48, the distance of the signs of fp32 and bf16 numbers in a word
_AT_ONCE = 64  # blocks on a device; on the CPU one, which fits its cache
_ODD = 0x1E3779B97F4A7C15
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 4096  # bytes, which a quick digest makes two numbers of
_ROWS = (128, 32, 8)  # at once; each other number of rows would be compiled for


def digest(tensor: Tensor) -> Tensor:
    """A number that depends on every bit of a tensor and on its place.

    Returns:
        An int64 tensor of shape () on the tensor's device.

    Example:
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> bool(digest(one) == digest(one.clone())), bool(digest(one) == digest(other))
        (True, False)
    """
    bits = bits_of(tensor)
    whole = len(bits) - len(bits) % (8 // bits.element_size())
    words = bits[:whole] if whole < len(bits) else bits
    if words.storage_offset() * words.element_size() % 8:
        words = words.clone()  # torch views only aligned data as longer integers
    sums = [*_sums_of_blocks(words.view(torch.int64))]
    if whole < len(bits):
        sums += _sums_of_blocks(bits[whole:].to(torch.int64))
    total = sums[0] if sums else torch.zeros((), dtype=torch.int64, device=tensor.device)
    for each in sums[1:]:
        total = total * _ODD + each
    return total


def condensed(tensor: Tensor) -> Tensor:
    """Fewer bytes, which differ where tensors do; `digest` of them takes a CPU a third of the time.

    Of each 4,096 bytes these are the products with two columns of random int8 numbers. Rows that
    differ in one or two bytes have different products; others have equal ones once in about 2^28,
    at worst, if three bytes differ by one each, once in 2^14. The last bytes stay as they are.
    Elsewhere, and where a processor has no such instruction, it is the tensor's digest.

    Returns:
        An int8 tensor of one dim on the tensor's device; on another kind of processor, another one.
    """
    octets = bits_of(tensor).view(torch.int8)
    if octets.numel() < _ROWS[-1] * _ROW:
        return octets
    if not _has_quick_products(tensor.device):
        return digest(tensor).view(1).view(torch.int8)
    parts: list[Tensor] = []
    for count in _ROWS:
        whole = octets.numel() // (count * _ROW) * count * _ROW
        for rows in octets[:whole].view(-1, count, _ROW).unbind() if whole else ():
            parts += [torch._int_mm(rows, column) for column in _columns()]  # rows stay in a cache
        octets = octets[whole:]
    products = torch.cat(parts).view(-1).view(torch.int8)
    return torch.cat([products, octets]) if octets.numel() else products


@cache
def _has_quick_products(device: torch.device) -> bool:
    """Whether products of int8 matrices are quicker there than sums of 64-bit integers."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and is_x86 and has_library


@lru_cache(maxsize=1)
def _columns() -> tuple[Tensor, Tensor]:
    """Two columns of random numbers, each place with another ratio of the two.

    So changes of two bytes never cancel in both. Two products of such numbers with bytes add up
    within 16 bits, as old CPUs do it.
    """
    generator = torch.Generator().manual_seed(1)
    numbers = torch.arange(-63, 64, device="cpu")
    pairs = torch.cartesian_prod(numbers[64:], numbers[numbers != 0])
    pairs = pairs[torch.gcd(pairs[:, 0], pairs[:, 1]) == 1]  # each ratio once
    drawn = pairs[torch.randperm(len(pairs), generator=generator, device="cpu")[:_ROW]]
    signs = torch.randint(2, (_ROW, 1), generator=generator, device="cpu") * 2 - 1
    one, other = (drawn * signs).to(torch.int8).T.contiguous().unbind()
    return one.unsqueeze(1), other.unsqueeze(1)


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements, or parts of complex ones, as integers of their size; flat."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _sums_of_blocks(words: Tensor) -> Iterator[Tensor]:
    """For each block, the sum of w ^ (w >> 33) times a random odd number, of each word w."""
    weights = _weights(words.device)
    at_once = _BLOCK * (1 if words.device.type == "cpu" else _AT_ONCE)
    for start in range(0, len(words), at_once):
        some = words[start : start + at_once]
        mixed = (some >> _SHIFT).bitwise_xor_(some)
        whole = len(some) - len(some) % _BLOCK
        if whole:
            yield from mixed[:whole].view(-1, _BLOCK).mul_(weights).sum(1).unbind()
        if whole < len(some):
            left = mixed[whole:]
            yield left.mul_(weights[: len(left)]).sum()


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Random odd numbers for the words of a block, the same ones on every rank."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (_BLOCK,), generator=generator, device="cpu")
    return drawn.bitwise_or_(1).to(device)


def device_for(group: ProcessGroup) -> torch.device:
    """The device on which a group compares numbers: CUDA with nccl, else the CPU."""
    cuda = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
