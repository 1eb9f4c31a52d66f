"""Inputs of layers that must be equal on all ranks of a group, such as tokens along tp.

Tensor-parallel layers give each rank a part of the work on one input. With different inputs, the
result mixes them but is the same on all ranks, so that no later check notices. The layers note
their inputs here while a GradientReducer records them, in its first steps; its `finish` compares
the notes.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.group_ref import GroupRef, described
from commgrid.equality.digest import device_for, digest, extremes
from commgrid.errors import GridMismatchError

KEPT = 16
"""Only the first notes since the last comparison are compared; of later ones, their number is."""
_ROUNDING = 1e-9  # of counts that are fractions, added up in another order
_MIX = -7046029254386353131  # odd; spreads the squares of positions over 64 bits
_CHUNK = 2**20  # numbers of a fingerprint at once, which are copied to fp64
_MANTISSA = 2**52 - 1  # whole numbers up to it are exact in fp64
_TOLERANCE, _HALF_TOLERANCE = 1e-2, 0.1  # of the norm; whole numbers are compared exactly

Note = tuple[str, Tensor]
"""An input's name, and (3,) numbers in fp64: the tolerance, and two that depend on its values."""


class InputRecord:
    """The inputs noted since the last `take`, by group."""

    def __init__(self) -> None:
        self._notes: dict[ProcessGroup, list[Note]] = {}
        self._counts: dict[ProcessGroup, int] = {}
        _RECORDS.add(self)

    def is_full(self, group: ProcessGroup) -> bool:
        """Whether a group has `KEPT` notes, so that further ones are only counted."""
        return len(self._notes.get(group, ())) == KEPT

    def add(self, group: ProcessGroup, note: Note | None) -> None:
        """Count an input of a group, and keep its note; None: it is full."""
        if note is not None and not self.is_full(group):
            self._notes.setdefault(group, []).append(note)
        self._counts[group] = self._counts.get(group, 0) + 1

    def take(self, group: ProcessGroup) -> tuple[list[Note], int]:
        """The first notes of a group, and the total count; then forget them."""
        return self._notes.pop(group, []), self._counts.pop(group, 0)

    def unequal(self, group: ProcessGroup, divisor: float) -> GridMismatchError | None:
        """The error if ranks of a group have different notes or counts; collective over the group.

        The notes are those since the last call.

        Args:
            group: whose ranks compute layers together.
            divisor: the sum of counts by which gradients are divided.
        """
        notes, count = self.take(group)
        mine = torch.zeros(KEPT + 1, 3, dtype=torch.float64)
        mine[0, :2] = torch.tensor([count, divisor], dtype=torch.float64)
        for row, (_, numbers) in enumerate(notes, 1):
            mine[row] = numbers
        mine = torch.where(mine.isfinite(), mine, 0.0)
        found = extremes(mine.to(device_for(group)), group)
        largest, smallest = (each.cpu() for each in found)
        spread = largest - smallest
        if spread[0, 0] > 0:
            return _other_calls(group, int(smallest[0, 0]), int(largest[0, 0]))
        for row, (what, _) in enumerate(notes, 1):
            allowed = largest[row, 0] * largest[row, 1:].abs().max()
            if spread[row, 0] > 0 or bool((spread[row, 1:] > allowed).any()):
                return _other_values(group, what)
        if spread[0, 1] > _ROUNDING * largest[0, 1]:
            return _other_counts(group, float(smallest[0, 1]), float(largest[0, 1]))
        return None

    def close(self) -> None:
        """Record no more."""
        _RECORDS.discard(self)
        self._notes.clear()
        self._counts.clear()


def _other_calls(group: ProcessGroup, fewest: int, most: int) -> GridMismatchError:
    return GridMismatchError(
        f"the ranks of {described(group)} have called its layers {fewest} to {most} times since "
        "the last finish(), as if one of them had evaluated alone; each forward of a sliced model "
        "needs all ranks of the group"
    )


def _other_values(group: ProcessGroup, what: str) -> GridMismatchError:
    return GridMismatchError(
        f"the ranks of {described(group)} have different values of {what}, and compute one model "
        "together; give all of them the same batch: seed data loaders by "
        "grid.get_local_rank('dp_cp'), or broadcast each batch over the group; with dropout "
        "before it use one seed along the group; a slice of the sequence needs "
        "sequence_parallel=True"
    )


def _other_counts(group: ProcessGroup, least: float, most: float) -> GridMismatchError:
    return GridMismatchError(
        f"finish(count=…) divides by {least:g} to {most:g} on ranks of {described(group)}, which "
        "have the same samples; count those of the whole batch, not of this rank's slice of the "
        "sequence"
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
