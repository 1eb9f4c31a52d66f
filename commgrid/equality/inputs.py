"""Inputs of layers that must be equal on all ranks of a group, such as tokens along tp.

Tensor-parallel layers give each rank a part of the work on one input. With different inputs, the
result mixes them but is the same on all ranks, so that no later check notices. The layers note
their inputs here in the steps in which a GradientReducer compares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.group_ref import GroupRef, described
from commgrid.equality.comparison import Fact, ends_of, first_place
from commgrid.equality.digest import digest
from commgrid.errors import GridMismatchError

KEPT = 16
"""Only the first notes since the last comparison are compared; of later ones, their number is."""
_MIX = -7046029254386353131  # odd; spreads the squares of positions over 64 bits
_CHUNK = 2**20  # numbers of a fingerprint at once, which are copied to fp64
_MANTISSA = 2**52 - 1  # whole numbers up to it are exact in fp64
_TOLERANCE, _HALF_TOLERANCE = 1e-2, 0.1  # of the norm; whole numbers are compared exactly

Note = tuple[str, Tensor]
"""An input's name, and (3,) numbers in fp64: the tolerance, and two that depend on its values."""


class InputRecord:
    """The inputs noted since the last `facts`, by group, while it is open."""

    def __init__(self) -> None:
        self._notes: dict[ProcessGroup, list[Note]] = {}
        self._counts: dict[ProcessGroup, int] = {}
        self.open()

    def open(self) -> None:
        """Record from now on."""
        _RECORDS.add(self)

    def close(self) -> None:
        """Record no more."""
        _RECORDS.discard(self)
        self._notes.clear()
        self._counts.clear()

    def is_full(self, group: ProcessGroup) -> bool:
        """Whether a group has `KEPT` notes, so that further ones are only counted."""
        return len(self._notes.get(group, ())) == KEPT

    def add(self, group: ProcessGroup, note: Note | None) -> None:
        """Count an input of a group, and keep its note; None: it is full."""
        if note is not None and not self.is_full(group):
            self._notes.setdefault(group, []).append(note)
        self._counts[group] = self._counts.get(group, 0) + 1

    def facts(self, group: ProcessGroup) -> Iterator[Fact]:
        """The number of a group's inputs, and their values, as facts; then forget them."""
        notes, count = self._notes.pop(group, []), self._counts.pop(group, 0)
        yield Fact(group, torch.tensor([count], dtype=torch.float64), partial(_other_calls, group))
        values = torch.full((KEPT, 3), torch.nan, dtype=torch.float64)
        for row, (_, numbers) in enumerate(notes):
            values[row] = torch.where(numbers.isfinite(), numbers, torch.nan)
        names = [what for what, _ in notes]
        yield Fact(group, values.view(-1), partial(_other_values, group, names), _first_input)


def _first_input(largest: Tensor, smallest: Tensor) -> int | None:
    """The first input whose values differ by more than its tolerance."""
    high, low = largest.view(KEPT, 3), smallest.view(KEPT, 3)
    allowed = high[:, 0] * torch.maximum(high[:, 1:].abs(), low[:, 1:].abs()).amax(1)
    apart = (high - low)[:, 1:] > allowed[:, None]
    return first_place(apart.any(1) | (high[:, 0] > low[:, 0]))


def _other_calls(
    group: ProcessGroup, _: int, by_rank: Mapping[int, list[float]]
) -> GridMismatchError:
    (fewest, low), (most, high) = ends_of(by_rank, 0)
    return GridMismatchError(
        f"the ranks of {described(group)} have called its layers {fewest:g} to {most:g} times "
        f"since the last finish() (ranks {low} and {high}), as if one of them had evaluated alone; "
        "each forward of a sliced model needs all ranks of the group"
    )


def _other_values(
    group: ProcessGroup, names: Sequence[str], place: int, _: Mapping[int, list[float]]
) -> GridMismatchError:
    return GridMismatchError(
        f"the ranks of {described(group)} have different values of {names[place]}, and compute one "
        "model together; give all of them the same batch: seed data loaders by "
        "grid.get_local_rank('dp_cp'), or broadcast each batch over the group; with dropout "
        "before it use one seed along the group; a slice of the sequence needs "
        "sequence_parallel=True"
    )


_RECORDS: weakref.WeakSet[InputRecord] = weakref.WeakSet()


@torch.no_grad()
def note(what: str, tensor: Tensor, group: GroupRef) -> None:
    """Note an input that must be equal on all ranks of a group, if any InputRecord is open."""
    if not _RECORDS or group.size == 1 or torch.compiler.is_compiling():
        return
    if tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    full = all(record.is_full(group.group) for record in _RECORDS)
    noted = None if full else (what, fingerprint(tensor))
    for record in _RECORDS:
        record.add(group.group, noted)


def fingerprint(tensor: Tensor) -> Tensor:
    """(3,) in fp64 on the CPU: the tolerance, and two numbers that depend on values and positions.

    Of whole numbers a digest, compared exactly; of others the norm, and a sum with a weight in
    [-1, 1) for each position.
    """
    flat = tensor.detach().reshape(-1)
    if not (flat.is_floating_point() or flat.is_complex()):
        exact = (digest(flat.long()) & _MANTISSA).double()
        return torch.stack([torch.zeros_like(exact), torch.zeros_like(exact), exact]).cpu()
    half = flat.dtype in (torch.bfloat16, torch.float16)
    tolerance = flat.new_full((), _HALF_TOLERANCE if half else _TOLERANCE, dtype=torch.float64)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    square, weighted = flat.new_zeros(2, dtype=torch.float64).unbind()
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        square += part.square().sum()
        weighted += part @ _weights(start, len(part), flat.device)
    return torch.stack([tolerance, square.sqrt(), weighted]).cpu()


def _weights(start: int, length: int, device: torch.device) -> Tensor:
    """Numbers in [-1, 1) for the positions from `start` on, in which no stretch repeats another.

    So exchanged rows of any length change the sum.
    """
    place = torch.arange(start + 1, start + 1 + length, device=device)
    return (place * (place + 1) * _MIX >> 40).double().div_(2**23)
