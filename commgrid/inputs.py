"""Inputs of layers that must be equal on all ranks of a group, such as tokens along tp.

Tensor-parallel layers give each rank a part of the work on one input. With different inputs, the
result mixes them but is the same on all ranks, so that no later check notices. The layers note
their inputs here while a GradientReducer records them, in its first steps; its `finish` compares
the notes.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from commgrid.collectives.group_ref import GroupRef

KEPT = 16
"""Number of notes that are compared, the first of a step; beyond that, only their count is."""
_PERIOD = 17  # of the weights in a fingerprint
_TOLERANCE, _HALF_TOLERANCE = 1e-2, 0.1  # of the norm; whole numbers are compared exactly

Note = tuple[str, Tensor]
"""An input's name, and (3,) numbers in fp64: the tolerance, and two that depend on its values."""


class InputRecord:
    """The inputs noted since the last `take`, by group."""

    def __init__(self) -> None:
        self._notes: dict[ProcessGroup, list[Note]] = {}
        self._counts: dict[ProcessGroup, int] = {}
        _RECORDS.add(self)

    def add(self, group: ProcessGroup, note: Note) -> None:
        """Keep a note, or count it if there are `KEPT` already."""
        notes = self._notes.setdefault(group, [])
        if len(notes) < KEPT:
            notes.append(note)
        self._counts[group] = self._counts.get(group, 0) + 1

    def take(self, group: ProcessGroup) -> tuple[list[Note], int]:
        """The first notes of a group, and the number of all; then forget them."""
        return self._notes.pop(group, []), self._counts.pop(group, 0)

    def close(self) -> None:
        """Record no more."""
        _RECORDS.discard(self)
        self._notes.clear()
        self._counts.clear()


_RECORDS: weakref.WeakSet[InputRecord] = weakref.WeakSet()


@torch.no_grad()
def note(what: str, tensor: Tensor, group: GroupRef) -> None:
    """Note an input that must be equal on all ranks of a group, if any InputRecord is open."""
    if not _RECORDS or group.size == 1 or torch.compiler.is_compiling():
        return
    if tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    row = fingerprint(tensor)
    for record in _RECORDS:
        record.add(group.group, (what, row))


def fingerprint(tensor: Tensor) -> Tensor:
    """(3,) in fp64 on the CPU: the tolerance, the norm, and a sum with weights in [-1, 1]."""
    flat = tensor.detach().reshape(-1)
    flat = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()
    weights = torch.arange(len(flat), device=flat.device).remainder_(_PERIOD).double()
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    tolerance = _HALF_TOLERANCE if half else _TOLERANCE
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tolerance = 0.0  # sums of such numbers are exact up to 2^53
    else:
        weights.mul_(2 / (_PERIOD - 1)).sub_(1)
    row = torch.stack([flat.new_tensor(tolerance), flat.norm(), flat @ weights])
    return row.cpu()
