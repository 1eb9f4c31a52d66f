"""Inputs of layers that must be equal on all ranks of a group, such as tokens along tp.

Tensor-parallel layers give each rank a part of the work on one input, and context parallelism a
part of one batch. With different inputs, the result mixes them but is the same on all ranks, so
that no later check notices. Layers and shardings note their inputs here in the steps in which a
GradientReducer compares them.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.group_ref import GroupRef, described
from commgrid.equality.comparison import ByRank, Fact, ends_of, first_place
from commgrid.equality.digest import MANTISSA, digest
from commgrid.errors import GridMismatchError

KEPT = 16
"""Only the first notes since the last comparison are compared; later ones are only counted."""
_MIX = -7046029254386353131  # odd; spreads p (p + 1) of a position p over 64 bits
_CHUNK = 2**20  # numbers of a fingerprint at once, which are copied to fp64
_TOLERANCE, _HALF_TOLERANCE = 1e-2, 0.1  # of the norm; whole numbers are compared exactly

Note = tuple[str, Tensor]
"""An input's name, and (3,) numbers in fp64: the tolerance, and two that depend on its values."""


Where = tuple[ProcessGroup, bool]
"""The group whose ranks have an input, and whether it is a batch, of which each takes a part."""


class InputRecord:
    """The inputs noted since they were last compared, by group, while it is open."""

    def __init__(self) -> None:
        self.notes: defaultdict[Where, list[Note]] = defaultdict(list)
        self.counts: Counter[Where] = Counter()
        self._not_compared: set[ProcessGroup] = set()  # ranks sharded other numbers of batches
        self.open()

    def open(self) -> None:
        """Record from now on."""
        _RECORDS.add(self)

    def close(self) -> None:
        """Record no more."""
        _RECORDS.discard(self)
        self.notes.clear()
        self.counts.clear()

    def facts(self, group: ProcessGroup) -> Iterator[Fact]:
        """The number of inputs of a group's layers, and their values, as facts; forgets them."""
        names, values, count = self._take((group, False))
        yield Fact(group, [count], partial(_other_calls, group))
        yield Fact(group, values, partial(_other_values, group, names), _first_input)

    def has_batches(self, group: ProcessGroup) -> bool:
        """Whether this rank has noted a batch of a group that is compared."""
        return (group, True) in self.counts and group not in self._not_compared

    def fact_of_batches(self, group: ProcessGroup) -> Fact:
        """The batches that a group's ranks have sharded, as a fact; forgets them.

        A rank may shard one alone, as to print it. Batches can then no longer be matched across
        ranks, and the group is not compared again.
        """
        names, values, count = self._take((group, True))
        head = torch.tensor([count, crc32("; ".join(names).encode())], dtype=torch.float64)

        def differs(largest: Tensor, smallest: Tensor) -> int | None:
            if not torch.equal(largest[:2], smallest[:2]):
                self._not_compared.add(group)
                return None
            return _first_input(largest[2:], smallest[2:])

        return Fact(group, torch.cat([head, values]), partial(_other_batch, group, names), differs)

    def _take(self, where: Where) -> tuple[list[str], Tensor, int]:
        """Names and numbers, (3 · KEPT,), of the first notes, and the count of all."""
        notes, count = self.notes.pop(where, []), self.counts.pop(where, 0)
        values = torch.full((KEPT, 3), torch.nan, dtype=torch.float64)
        for row, (_, numbers) in enumerate(notes):
            values[row] = torch.where(numbers.isfinite(), numbers, torch.nan)
        return [what for what, _ in notes], values.view(-1), count


def _first_input(largest: Tensor, smallest: Tensor) -> int | None:
    """The first input whose values differ by more than its tolerance."""
    high, low = largest.view(KEPT, 3), smallest.view(KEPT, 3)
    allowed = high[:, 0] * torch.maximum(high[:, 1:].abs(), low[:, 1:].abs()).amax(1)
    apart = (high - low)[:, 1:] > allowed[:, None]
    return first_place(apart.any(1) | (high[:, 0] > low[:, 0]))


def _other_calls(group: ProcessGroup, _: int, by_rank: ByRank) -> GridMismatchError:
    (fewest, low), (most, high) = ends_of(by_rank, 0)
    return GridMismatchError(
        f"the ranks of {described(group)} have called its layers {fewest:g} to {most:g} times "
        f"since the last finish() (ranks {low} and {high}), as if one of them had evaluated alone; "
        "each forward of a sliced model needs all ranks of the group"
    )


def _other_values(
    group: ProcessGroup, names: Sequence[str], place: int, _: ByRank
) -> GridMismatchError:
    return GridMismatchError(
        f"the ranks of {described(group)} have different values of {names[place]}, and compute one "
        "model together; give all of them the same batch: seed data loaders by "
        "grid.get_local_rank('dp_cp'), or broadcast each batch over the group; with dropout "
        "before it use one seed along the group; a slice of the sequence needs "
        "sequence_parallel=True"
    )


def _other_batch(
    group: ProcessGroup, names: Sequence[str], place: int, _: ByRank
) -> GridMismatchError:
    return GridMismatchError(
        f"the ranks of {described(group)} have sharded different values of {names[place]}, and "
        "each takes a part of one sequence; give all of them the same batch: seed data loaders by "
        "grid.get_local_rank('dp'), or broadcast each batch over the group; draw noise of a batch "
        "with one seed along the group"
    )


_RECORDS: weakref.WeakSet[InputRecord] = weakref.WeakSet()


def note(what: str, tensor: Tensor, group: GroupRef) -> None:
    """Note a layer's input, equal on all ranks of a group, if any InputRecord is open."""
    # First, or torch.compile guards the records, which come and go.
    if not torch.compiler.is_compiling() and _RECORDS and group.size > 1:
        _note(what, tensor, (group.group, False))


def note_batch(what: str, tensor: Tensor, group: ProcessGroup) -> None:
    """Note a batch of which each rank of a group takes a part, if any InputRecord is open.

    Activations are left out: each rank may have its own dropout on the part that it takes.
    """
    if torch.compiler.is_compiling():
        return
    activation = tensor.requires_grad or not (torch.is_grad_enabled() or _is_exact(tensor))
    if _RECORDS and group.size() > 1 and type(tensor) is Tensor and not activation:
        _note(what, tensor, (group, True))


@torch.no_grad()
def _note(what: str, tensor: Tensor, where: Where) -> None:
    if tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    noted: Note | None = None
    for record in _RECORDS:
        if record.counts[where] < KEPT:
            noted = noted or (what, fingerprint(tensor))
            record.notes[where].append(noted)
        record.counts[where] += 1


def _is_exact(tensor: Tensor) -> bool:
    """Whether it has whole numbers or booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def fingerprint(tensor: Tensor) -> Tensor:
    """(3,) in fp64 on the CPU: the tolerance, and two numbers that depend on values and positions.

    Of whole numbers a digest, compared exactly; of others the norm, and a sum with a weight in
    [-1, 1) for each position.
    """
    flat = tensor.detach().reshape(-1)
    if _is_exact(flat):
        exact = (digest(flat.long()) & MANTISSA).double()
        return torch.stack([torch.zeros_like(exact), torch.zeros_like(exact), exact]).cpu()
    half = flat.dtype in (torch.bfloat16, torch.float16)
    tolerance = flat.new_full((1,), _HALF_TOLERANCE if half else _TOLERANCE, dtype=torch.float64)
    return torch.cat([tolerance, norm_and_sum(flat)]).cpu()


def norm_and_sum(flat: Tensor) -> Tensor:
    """The norm of a flat tensor, and its sum with a weight in [-1, 1) for each position.

    Returns:
        (2,) in fp64 on its device.
    """
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    square, weighted = flat.new_zeros(2, dtype=torch.float64).unbind()
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        square += part.square().sum()
        weighted += part @ _weights(start, len(part), flat.device)
    return torch.stack([square.sqrt(), weighted])


def _weights(start: int, length: int, device: torch.device) -> Tensor:
    """Numbers in [-1, 1) for the positions from `start` on, in which no stretch repeats another.

    So exchanged rows of any length change the sum.
    """
    place = torch.arange(start + 1, start + 1 + length, device=device)
    return (place * (place + 1) * _MIX >> 40).double().div_(2**23)
