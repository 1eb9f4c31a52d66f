"""Bitwise comparison of replicas between ranks.

Every tensor gets a digest: the sum of its 8-byte words, each times its own random odd number,
modulo 2^64. Of a word's top bit, such as the sign of a number, a product keeps only that bit, and
two of them would cancel in the sum; so its upper bits are first combined with its lower ones by
exclusive or. Any difference then changes the digest, but for one in about 2^32.

Ranks of a group compare the largest and smallest digest, first of all tensors' digests together,
and if these differ of each tensor, two numbers a tensor for any number of ranks; then those of the
first tensor that differs are gathered, to name the ranks.

On CPUs the first comparison is of `quick_digest`s. These are equal for equal tensors on one kind of
processor, and on two kinds may not be. So only `digest`s say that tensors differ.

    copies along dp and tp      compared along dp, then along tp; ranks equal along both are equal
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.common_group import DATA, common_group
from commgrid.collectives.group_ref import name_of
from commgrid.collectives.plain import all_gather, all_reduce
from commgrid.errors import NotInGroupError, UnknownGroupError
from commgrid.layout.rank_text import describe_ranks
from commgrid.torch_compat.int8 import has_quick_products, products

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

_BLOCK = 1 << 16  # 8-byte words
_SHIFT = 33  # not 32 or 48, the distance of the signs of fp32 and bf16 numbers in a word
_AT_ONCE = 64  # blocks on a device; on the CPU one, which fits its cache
_ODD = 0x1E3779B97F4A7C15
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 4096  # bytes, which a quick digest makes 8 numbers of
_ROWS = 128  # at once; each other number of rows would be compiled for
Digest = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Copy:
    """A tensor that should be equal on all ranks of some groups.

    Args:
        name: its name in messages.
        tensor: this rank's tensor.
        groups: the groups along which it should be equal.
        key: its common name on all ranks of the groups; "": `name`.
    """

    name: str
    tensor: Tensor
    groups: tuple[ProcessGroup, ...]
    key: str = ""


def digest(tensor: Tensor) -> Tensor:
    """A number that depends on every bit of a tensor and on its place.

    Returns:
        An int64 tensor of shape () on the tensor's device.

    Example:
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> bool(digest(one) == digest(one.clone())), bool(digest(one) == digest(other))
        (True, False)
    """
    bits = _bits(tensor)
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


def quick_digest(tensor: Tensor) -> Tensor:
    """Likewise, on a CPU in a fifth of the time; the value may be another on another processor.

    Of each 4,096 bytes the products with 8 columns of random int8 numbers are taken, and these are
    digested. Two rows that differ have equal products once in about 2^55. Elsewhere, and where a
    processor has no such instruction, it is `digest`.
    """
    if not has_quick_products(tensor.device):
        return digest(tensor)
    octets = _bits(tensor).view(torch.int8)
    block = _ROW * _ROWS
    whole = len(octets) - len(octets) % block
    if not whole:
        return digest(tensor)
    columns = _columns()
    sums = torch.stack([products(rows, columns) for rows in octets[:whole].view(-1, _ROWS, _ROW)])
    total = digest(sums)
    return total * _ODD + digest(octets[whole:]) if whole < len(octets) else total


@lru_cache(maxsize=1)
def _columns() -> Tensor:
    """Random numbers; two products of them with bytes add up within 16 bits, as old CPUs do it."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-63, 64, (_ROW, 8), dtype=torch.int8, generator=generator, device="cpu")


def _bits(tensor: Tensor) -> Tensor:
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


def differing(
    copies: Iterable[Copy],
    everyone: ProcessGroup | None = None,
    groups: Iterable[ProcessGroup] = (),
) -> str | None:
    """Describe how replicas differ, or return None.

    Collective over every group given, and over `everyone`; all of their ranks must give the same
    groups in the same order.

    Args:
        copies: this rank's, in one order on all ranks of their groups.
        everyone: ranks that all return a description if any of them differ; None: only the ranks
            of a group with a difference do.
        groups: compared over first, also on a rank that has no copies along them.

    Returns:
        A sentence that names tensor and ranks; on ranks whose own copies are equal, without them.
    """
    by_group: dict[ProcessGroup, list[Copy]] = {group: [] for group in groups}
    for copy in copies:
        for group in copy.groups:
            by_group.setdefault(group, []).append(copy)
    digests = _Digests()
    told: str | None = None
    for group, its_copies in by_group.items():
        told = _compare(group, its_copies, digests) or told
    if everyone is not None and everyone.size() > 1:
        mine = torch.tensor([told is not None], dtype=torch.int64, device=_device(everyone))
        if bool(all_reduce(mine, everyone, op="max").item()):
            return told or "other ranks of the grid have copies that differ; their errors name them"
    return told


def _device(group: ProcessGroup) -> torch.device:
    """The device for exchanging a group's digests: CUDA with nccl, else the CPU."""
    cuda = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


class _Digests:
    """Digests of copies, each taken once for all groups; of copies that live as long."""

    def __init__(self) -> None:
        self._found: dict[tuple[Digest, int], Tensor] = {}

    def of(self, copies: Sequence[Copy], how: Digest, device: torch.device) -> Tensor:
        """Return one number a copy, without its last bit, so that every one has a negative."""
        numbers = []
        for copy in copies:
            key = how, id(copy.tensor)
            if key not in self._found:
                self._found[key] = how(copy.tensor) + _kind(copy.tensor.dtype, copy.tensor.shape)
            numbers.append(self._found[key].to(device))
        if not numbers:
            return torch.zeros(0, dtype=torch.int64, device=device)
        return torch.stack(numbers).bitwise_right_shift(1)


@lru_cache(maxsize=4096)
def _kind(dtype: torch.dtype, shape: torch.Size) -> int:
    """A number for a tensor's type and shape, on which a digest does not depend."""
    return int.from_bytes(hashlib.sha256(f"{dtype} {tuple(shape)}".encode()).digest()[:7], "big")


def _compare(group: ProcessGroup, copies: Sequence[Copy], digests: _Digests) -> str | None:
    device, ranks = _device(group), dist.get_process_group_ranks(group)
    named = name_of(group)
    listed = hashlib.sha256("\n".join(c.key or c.name for c in copies).encode()).digest()[:7]
    mine = digests.of(copies, quick_digest, device)
    head = torch.tensor([len(copies), int.from_bytes(listed, "big"), 0], device=device)
    head[2] = digest(mine).bitwise_right_shift(1)  # of all, so that equal ones take one exchange
    spread = _spread(head, group).tolist()
    if spread[0] or spread[1]:
        heads = all_gather(head[:2], group).view(-1, 2).tolist()
        who = _holders(ranks, [tuple(one) for one in heads])
        told = " and ".join(f"{count} on {describe_ranks(r)}" for (count, _), r in who)
        return (
            f"tensors of which the ranks of group {named!r} should have copies are not the same "
            f"ones: {told}, of parameters and optimizer state"
        )
    if not spread[2]:
        return None
    mine = digests.of(copies, digest, device)
    odd = _spread(mine, group).nonzero().flatten()
    if not len(odd):
        return None
    first = int(odd[0])
    who = _holders(ranks, all_gather(mine[first : first + 1], group).tolist())
    others = f", and so do {len(odd) - 1} more tensors" if len(odd) > 1 else ""
    told = " and ".join(describe_ranks(holding) for _, holding in who)
    return f"{copies[first].name} differs between {told} of group {named!r}{others}"


def _holders(ranks: Sequence[int], found: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Each distinct value with its ranks, fewest ranks first."""
    holders: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, found, strict=True):
        holders.setdefault(value, []).append(rank)
    return sorted(holders.items(), key=lambda item: len(item[1]))


def _spread(numbers: Tensor, group: ProcessGroup) -> Tensor:
    """Whether each number differs between the ranks of a group."""
    both = all_reduce(torch.cat([numbers, -numbers]), group, op="max")
    largest, smallest = both.chunk(2)
    return largest != -smallest


def groups_along(
    axes: Iterable[str], grid: HyperCommGrid, data: Sequence[str] = DATA
) -> tuple[ProcessGroup, ...]:
    """The grid's groups along each of some axes, of more than one rank.

    If one was not created, returns a created group of just these axes instead; failing that, the
    groups that were created. Each is the `common_group` of its ranks.
    """
    wanted = [axis for axis in axes if grid.size(axis) > 1]
    found = []
    for axis in wanted:
        with suppress(UnknownGroupError, NotInGroupError):
            found.append(common_group(grid.get_group(axis), grid, data))
    if len(found) == len(wanted):
        return tuple(found)
    for name in grid.group_names:
        definition = grid.spec.definitions[name]
        long = {axis for axis in definition.axes if grid.size(axis) > 1}
        if definition.is_whole and long == set(wanted):
            return (common_group(grid.get_group(name), grid, data),)
    return tuple(found)
