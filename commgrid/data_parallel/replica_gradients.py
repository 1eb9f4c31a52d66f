"""Checks that replicas of a parameter have equal gradients along axes that do not sum them.

Along some axes ranks have copies of a parameter and its gradient is not summed: a bias or a
LayerNorm along tp. If these gradients differ, the replicas diverge: for example a LayerNorm that
sees a slice of the sequence and is not marked `partial="tp"`, or torch's clipping, which takes the
norm of one rank's slices.

Each gradient is compared once, in the first step in which it is finite and not negligible (behind a
layer that begins with zeros it is zero in the first), by its norm and by its product with a fixed
vector of ±1. Kernels that add in no fixed order differ in the last bits, so both may differ by a
little.

    finish         norm, ±1 · g of each gradient not compared yet ─► max, min over the axis
    step           the same of those just compared, as the optimizer uses them
    next finish    those of the step ─► max, min: an edit, or a step on some ranks only
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.group_ref import described, name_of
from commgrid.collectives.plain import all_reduce
from commgrid.data_parallel.bucket import GradientPart
from commgrid.data_parallel.groups import ReductionGroups
from commgrid.data_parallel.slot import KeptGradient, Slot
from commgrid.data_parallel.step_checks import Edits
from commgrid.equality.digest import device_for, extremes
from commgrid.equality.inputs import InputRecord
from commgrid.errors import GridMismatchError
from commgrid.parameters import Placement

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
_HALF_TOLERANCE = 0.1  # bf16 has 8 bits, and a backward of many layers adds up their rounding
_NEGLIGIBLE = 1e-5  # of the largest norm: smaller ones may be nothing but rounding
_MOST_STEPS = 20  # until comparing stops, also if some gradients were always zero


@dataclass(frozen=True)
class _Pending:
    """A gradient that is to be compared along one group.

    Args:
        piece: this rank's part of it.
        group: whose ranks have the same part.
    """

    piece: GradientPart
    group: ProcessGroup


class ReplicaGradients:
    """Compares gradients of replicas along the axes that do not sum them.

    Args:
        pieces: of the reducer; ranks of a group may keep pieces of different parameters.
        slots: every parameter's, the same ones in the same order on all ranks of the stage.
        groups: of the reducer.
    """

    def __init__(
        self, pieces: Sequence[GradientPart], slots: Sequence[Slot], groups: ReductionGroups
    ) -> None:
        trained = [slot.placement for slot in slots]
        split = any(
            placement.num_slices > 1 or placement.region == "expert" for placement in trained
        )  # else all ranks have the same gradients, and scale them by the same factor
        edited = groups.stage(groups.used) if split and not groups.shard else None
        self._edits = Edits(pieces, edited, _MOST_STEPS)
        layers = (group for placement in trained for group in _layer_groups(placement))
        self._input_groups = list(dict.fromkeys(layers))
        self._inputs = InputRecord()
        self._pending: list[_Pending] = []
        for piece in pieces:
            placement = piece.slot.placement
            summed = groups.axes_of(placement)
            left = [axis for axis in groups.copies_along(placement) or () if axis not in summed]
            self._pending += [_Pending(piece, group) for group in groups.along(left)]
        self._largest: dict[ProcessGroup, float] = {}  # norm of any gradient so far
        self._compared: list[_Pending] = []
        self._used: Tensor | None = None
        self._everyone, self._steps = groups.stage(), _MOST_STEPS

    def before_step(self, held: Callable[[GradientPart], Tensor | None]) -> None:
        """Records the gradients that were just compared, as an optimizer is about to use them."""
        self._edits.before_step(held)
        if self._compared:
            self._used = _fingerprints(self._compared, held)

    def rescaled(self, held: Callable[[GradientPart], Tensor | None]) -> None:
        """Records gradients that were scaled by one factor, the same on all ranks."""
        self._edits.finished(held)

    def compare(
        self, held: Callable[[GradientPart], Tensor | None], divisor: float
    ) -> GridMismatchError | None:
        """The error if they differ, on all ranks of the stage; collective over the stage.

        Args:
            held: the reducer's gradient of a piece.
            divisor: what `finish` has divided sums by.
        """
        wrong = self._edits.compare()
        self._edits.finished(held)
        if not self._steps:
            return wrong
        for group in self._input_groups:
            told = self._inputs.unequal(group, divisor)
            wrong = wrong or told
        compared, self._compared = self._compared, []
        used, self._used = self._used, None
        if compared:  # on all ranks of a group, also where no optimizer has stepped
            stepped = torch.full((len(compared), 1), float(used is not None), dtype=torch.float64)
            used = torch.zeros(len(compared), 2, dtype=torch.float64) if used is None else used
            told = _differing(compared, torch.cat([used, stepped], 1), {})[1]
            wrong = wrong or told
        if self._pending:
            found = _fingerprints(self._pending, held)
            is_done, told = _differing(self._pending, found, self._largest)
            wrong = wrong or told
            both = list(zip(self._pending, is_done, strict=True))
            self._compared = [pending for pending, done in both if done]
            self._pending = [pending for pending, done in both if not done]
        self._steps -= 1
        if self._everyone is None:
            self._stop_if_done()
            return wrong
        left = bool(self._pending or self._compared or self._input_groups)
        mine = torch.tensor([wrong is not None, left], device=device_for(self._everyone)).long()
        is_wrong, goes_on = all_reduce(mine, self._everyone, op="max").tolist()
        self._steps = self._steps if goes_on else 0
        self._stop_if_done()
        if is_wrong and wrong is None:
            return GridMismatchError(
                "other ranks have copies of a parameter with gradients that differ, or layers "
                "with inputs that differ; their errors name them"
            )
        return wrong

    def _stop_if_done(self) -> None:
        if not self._steps:
            self._compared.clear()
            self._inputs.close()

    def close(self) -> None:
        """Compares and records no more."""
        self._steps = 0
        self._stop_if_done()


def _layer_groups(placement: Placement) -> Iterator[ProcessGroup]:
    """The groups whose ranks compute one layer together on equal inputs."""
    groups = [group for _, group in placement.shards if placement.region == "dense"]
    if placement.partial is not None:
        groups.append(placement.partial)
    yield from (group.group for group in groups if group.size > 1)


def _fingerprints(
    pending: Sequence[_Pending], held: Callable[[GradientPart], Tensor | None]
) -> Tensor:
    """Norm and product with ±1 of each, (n, 2) in fp64 on the CPU; zeros where there is none."""
    rows = []
    for one in pending:
        gradient = held(one.piece)
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
    pending: Sequence[_Pending], found: Tensor, seen: dict[ProcessGroup, float]
) -> tuple[list[bool], GridMismatchError | None]:
    """Compare fingerprints; whether each entry was compared, and the first error.

    Entries that are zero or negligible on all ranks, or infinite or NaN on any, are not compared.
    All ranks of a group compare the same ones.

    Args:
        pending: of which gradients, and along which groups.
        found: (n, 2) after finish; (n, 3) of a step, the last column whether this rank took it.
        seen: by group, the largest norm of earlier steps; updated.
    """
    done, wrong = [False] * len(pending), None
    found = torch.where(found.isfinite(), found, torch.inf)
    by_group: dict[ProcessGroup, list[int]] = {}
    for i, one in enumerate(pending):
        by_group.setdefault(one.group, []).append(i)
    for group, held in by_group.items():
        mine = found[held]
        ends = extremes(mine.to(device_for(group)), group)
        largest, smallest = (each.cpu() for each in ends)
        spread = (largest - smallest).abs()
        norms = torch.where(largest.isfinite().all(1), largest[:, 0], 0.0)
        seen[group] = max(seen.get(group, 0.0), float(norms.max()))
        floor = _NEGLIGIBLE * seen[group]
        for row, i in enumerate(held):
            placement, norm = pending[i].piece.slot.placement, float(norms[row])
            done[i] = norm > floor  # a smaller one is compared once it has grown
            allowed = _TOLERANCES.get(placement.parameter.dtype, _HALF_TOLERANCE) * norm
            if wrong is None and bool((spread[row, 2:] > 0).any()):
                wrong = _partly_stepped(group)
            elif wrong is None and norm > floor and bool((spread[row, :2] > allowed).any()):
                wrong = _unequal(placement, group, edited=found.shape[1] > 2)
    return done, wrong


def _partly_stepped(group: ProcessGroup) -> GridMismatchError:
    return GridMismatchError(
        f"an optimizer has stepped on some ranks of {described(group)} and not on others since "
        "the last finish(), so that they train apart; torch's GradScaler decides by one rank's "
        "slices: use commgrid.data_parallel.GradScaler, and step on all ranks or on none"
    )


def _unequal(placement: Placement, group: ProcessGroup, *, edited: bool) -> GridMismatchError:
    if edited:
        cause = (
            "when the optimizer used it, though finish() had left equal ones; an edit between the "
            "two differed between ranks, as torch's clip_grad_norm_ is where ranks have "
            "slices: use the reducer's clip_gradients()"
        )
    else:
        cause = (
            "after finish(), so that copies would train apart; where each rank sees a part of the "
            f"sequence, say so with mark_parameters(module, partial={name_of(group)!r}); where "
            "ranks have slices, with a ShardedModule's shard_dims; elsewhere give all ranks the "
            "same input and the same dropout"
        )
    return GridMismatchError(
        f"{placement} has different gradients on the ranks of {described(group)} {cause}"
    )
