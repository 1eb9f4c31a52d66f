"""Checks that replicas of a parameter have equal gradients along axes that do not sum them.

Along some axes ranks have copies of a parameter and its gradient is not summed: a bias or a norm
along tp. If these gradients differ, the replicas diverge: for example a norm that sees a slice of
the sequence and is not marked `partial="tp"`, or torch's clipping, which takes the norm of one
rank's slices.

Each gradient is compared once, in the first step in which it is not zero (a layer that begins with
zeros passes none on in the first), by its norm and by its product with a fixed vector of ±1.
Kernels that add in no fixed order differ in the last bits, so both may differ by a little.

    finish   norm, ±1 · g of each gradient that was not compared yet ─► max, min over the axis
    step     the same of the compared gradients, to find edits ─► compared in the next finish
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.plain import all_reduce
from commgrid.copies import copied_axes, groups_along
from commgrid.data_parallel.buckets import Piece
from commgrid.data_parallel.consistency import stage_group
from commgrid.data_parallel.kept import KeptGradient
from commgrid.errors import GridMismatchError
from commgrid.parameters import Placement
from commgrid.planning.rank_lists import describe_ranks
from commgrid.runtime.grid import HyperCommGrid

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
_HALF = 0.1  # bf16 has 8 bits, and a backward of many layers adds up their rounding
_NEGLIGIBLE = 1e-5  # of the largest norm: smaller ones may be nothing but rounding
_MOST_STEPS = 20  # until comparing stops, also if some gradients were always zero


@dataclass
class _Armed:
    """A gradient that is to be compared.

    Args:
        piece: this rank's part of it.
        groups: the groups along which ranks have the same part.
    """

    piece: Piece
    groups: tuple[ProcessGroup, ...]


class ReplicaGradients:
    """Compares gradients of replicas along the axes that do not sum them.

    Args:
        pieces: of the reducer.
        grid: the reducer's grid.
        summed: the axes over which a parameter's gradient is summed.
        used: the axes over which the model is one model.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        grid: HyperCommGrid,
        summed: Callable[[Placement], set[str]],
        used: set[str],
    ) -> None:
        self._armed: list[_Armed] = []
        for piece in pieces:
            placement = piece.slot.placement
            axes = copied_axes(placement, grid) or ()
            left = [axis for axis in axes if axis in used and axis not in summed(placement)]
            groups = groups_along(left, grid)
            if groups:
                self._armed.append(_Armed(piece, groups))
        self._compared: list[_Armed] = []
        self._edited: tuple[list[_Armed], Tensor] | None = None
        self._everyone, self._steps = stage_group(grid), _MOST_STEPS

    def before_step(self, held: Callable[[Piece], Tensor | None]) -> None:
        """Records the gradients that were just compared, as an optimizer is about to use them."""
        compared, self._compared = self._compared, []
        if compared:
            self._edited = compared, _fingerprints([held(armed.piece) for armed in compared])

    def compare(self, held: Callable[[Piece], Tensor | None]) -> GridMismatchError | None:
        """The error if they differ, on all ranks of the stage; collective over the stage."""
        wrong: GridMismatchError | None = None
        if not self._steps:
            return None
        if self._edited is not None:
            (compared, noted), self._edited = self._edited, None
            _, told = _differing(compared, noted)
            wrong = None if told is None else _error(told, edited=True)
        if self._armed:
            found = _fingerprints([held(armed.piece) for armed in self._armed])
            nonzero, told = _differing(self._armed, found)
            wrong = wrong or (None if told is None else _error(told, edited=False))
            self._compared = [one for one, is_in in zip(self._armed, nonzero, strict=True) if is_in]
            self._armed = [
                one for one, is_in in zip(self._armed, nonzero, strict=True) if not is_in
            ]
        self._steps -= 1
        if self._everyone is None:
            return wrong
        mine = torch.tensor([wrong is not None, bool(self._armed or self._compared)])
        on = "cuda" if "nccl" in dist.get_backend(self._everyone) else "cpu"
        is_wrong, goes_on = all_reduce(mine.long().to(on), self._everyone, op="max").tolist()
        self._steps = self._steps if goes_on else 0
        if is_wrong and wrong is None:
            return GridMismatchError(
                "other ranks have copies of a parameter with gradients that differ; their errors "
                "name them"
            )
        return wrong


def _fingerprints(gradients: Sequence[Tensor | None]) -> Tensor:
    """Norm and product with ±1 of each, (n, 2) in fp64 on the CPU; zeros where there is none."""
    rows = []
    for gradient in gradients:
        if gradient is None or isinstance(gradient, KeptGradient):
            rows.append(torch.zeros(2, dtype=torch.float64))
            continue
        flat = gradient.detach().reshape(-1).double()
        signs = _signs(len(flat)).to(flat.device)
        rows.append(torch.stack([flat.norm(), flat @ signs]).cpu())
    return torch.stack(rows)


def _signs(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    bits = torch.randint(2, (count,), generator=generator, device="cpu")
    return bits.mul_(2).sub_(1).double()


def _differing(
    armed: Sequence[_Armed], found: Tensor
) -> tuple[list[bool], tuple[Placement, ProcessGroup] | None]:
    """Flags of the entries that are nonzero on any rank; the first that differs and its group."""
    nonzero, told = [bool(row.any()) for row in found], None
    by_group: dict[ProcessGroup, list[int]] = {}
    for i, one in enumerate(armed):
        for group in one.groups:
            by_group.setdefault(group, []).append(i)
    for group, held in by_group.items():
        mine = found[held]
        cuda = "nccl" in dist.get_backend(group)
        both = torch.cat([mine, -mine]).to("cuda" if cuda else "cpu")
        largest, smallest = all_reduce(both, group, op="max").cpu().chunk(2)
        spread = (largest + smallest).abs()
        norms = largest[:, 0]
        floor = _NEGLIGIBLE * float(norms.max())
        for row, i in enumerate(held):
            nonzero[i] = nonzero[i] or float(norms[row]) > 0
            dtype = armed[i].piece.slot.parameter.dtype
            allowed = _TOLERANCES.get(dtype, _HALF) * float(norms[row])
            is_over = float(norms[row]) > floor and bool((spread[row] > allowed).any())
            if told is None and is_over:
                told = armed[i].piece.slot.placement, group
    return nonzero, told


def _error(told: tuple[Placement, ProcessGroup], *, edited: bool) -> GridMismatchError:
    placement, group = told
    axis = group.group_desc.partition(",")[0]
    ranks = describe_ranks(dist.get_process_group_ranks(group))
    if edited:
        cause = (
            "when the optimizer used it, though finish() had left equal ones; an edit between the "
            "two was another one on each rank, as torch's clip_grad_norm_ is where ranks have "
            "slices: use the reducer's clip_gradients()"
        )
    else:
        cause = (
            "after finish(), so that copies would train apart; where each rank sees a part of the "
            f"sequence, say so with mark_parameters(module, partial={axis!r}); where ranks have "
            "slices, with a ShardedModule's shard_dims; elsewhere give all ranks the same input "
            "and the same dropout"
        )
    return GridMismatchError(
        f"{placement} has another gradient on each rank of group {axis!r} ({ranks}) {cause}"
    )
