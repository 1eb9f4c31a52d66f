"""Agreement of all ranks once gradients are summed: parameters used, divisor, finiteness.

one vector on the device  │ lane dp_cp: has a gradient … , counts nothing, count │ lane edp …
each part is summed over its group, and squares over the whole model where they are needed
read once by the host     divisor, parameters used, whether all gradients are finite
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import start_all_reduce_
from commgrid.collectives.objects import gathered
from commgrid.data_parallel.bucket import Bucket, GradientPart, Lane
from commgrid.data_parallel.norm import SquareSum
from commgrid.data_parallel.slot import Slot, State
from commgrid.errors import CommGridError, GridMismatchError, ShapeError


class SyncResult:
    """Computed once a step, the same on all ranks of each group.

    Args:
        lanes, buckets, pieces: the reducer's.
        group, name: the group over which counts are added up.
        squares: of the pieces' gradients.
        lopsided: whether a parameter may have a gradient on some ranks only.

    Attributes:
        used: the parameters of which any rank had a gradient in the last step.
        is_finite: whether all its gradients were finite, if that was looked at.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        buckets: Sequence[Bucket],
        pieces: Sequence[GradientPart],
        group: ProcessGroup,
        name: str,
        *,
        squares: SquareSum,
        lopsided: bool,
    ) -> None:
        self._buckets, self._pieces = buckets, pieces
        self._group, self._name = group, name
        self._squares, self._may_be_lopsided = squares, lopsided
        self.used: set[Slot] = set()
        self.is_finite = True
        self._told: list[tuple[Lane, slice]] = []
        """Each lane's range of the vector: of each slot, whether it has a gradient; whether this
        rank counts nothing; its count, and whether it gave one."""
        end = 0
        counts = [] if any(lane.group == group for lane in lanes) else [Lane(group, name)]
        for lane in (*lanes, *counts):
            start, end = end, end + len(lane.slots) + 3
            self._told.append((lane, slice(start, end)))
        self._where = {
            id(slot): own.start + i for lane, own in self._told for i, slot in enumerate(lane.slots)
        }

    def reach(
        self, count: float | Tensor | None, *, look: bool
    ) -> tuple[float, CommGridError | None]:
        """Return the divisor and an error or None; sets `used` and `is_finite`, alike on all ranks.

        Args:
            count: as for `GradientReducer.finish`.
            look: whether to check that all gradients of the model are finite.
        """
        numbers = self._numbers(count)
        for bucket in self._buckets:
            if bucket.shared is not None:  # one stage's use is every stage's that has a copy
                first = self._where[id(bucket.slots[0])]
                own = numbers[first : first + len(bucket.slots)]
                start_all_reduce_(own, bucket.shared).wait()
                own.clamp_(max=1)
        pending = [
            start_all_reduce_(numbers[place], lane.group)
            for lane, place in self._told if lane.group.size() > 1
        ]  # fmt: skip
        for each in pending:
            each.wait()
        squares = numbers.new_zeros(())
        if look:
            squares = self._squares.of([piece.gradient for piece in self._pieces])
        *heard, total = torch.cat([numbers, squares.view(1)]).tolist()
        divisor, wrong = self._divisor(count, heard)
        self.is_finite = math.isfinite(total)
        self.used.clear()
        for lane, place in self._told:
            *having, absent, _, _ = heard[place]
            self.used |= {slot for slot, n in zip(lane.slots, having, strict=True) if n}
            if wrong is None and not self._may_be_lopsided:
                wrong = _lopsided(lane, having, absent)
        return divisor, wrong

    def _numbers(self, count: float | Tensor | None) -> Tensor:
        known = count if count is not None and not isinstance(count, Tensor) else 0.0
        absent = float(count is not None and not isinstance(count, Tensor) and count == 0)
        listed: list[float] = []
        for lane, _ in self._told:
            listed += [float(slot.state is State.SENT) for slot in lane.slots]
            listed += [absent, float(known), float(count is not None)]
        device = self._squares.device
        made = torch.tensor(listed, dtype=torch.float64, pin_memory=device.type == "cuda")
        numbers = made.to(device, non_blocking=True)
        if isinstance(count, Tensor):  # which the host need not know
            given = count.detach().to(device, torch.float64, non_blocking=True)
            for _, own in self._told:
                numbers[own.stop - 3] = (given == 0).double()
                numbers[own.stop - 2] = given
        return numbers

    def _divisor(
        self, count: float | Tensor | None, heard: Sequence[float]
    ) -> tuple[float, CommGridError | None]:
        size = self._group.size()
        *_, total, given = next(heard[own] for lane, own in self._told if lane.group == self._group)
        if 0 < given < size:
            return 1.0, GridMismatchError(
                f"finish(count={count}): {int(given)} of the {size} ranks of group "
                f"{self._name!r} ({dist.get_process_group_ranks(self._group)}) gave a count and "
                "the others gave none; give count= on every rank or on none"
            )
        if count is None:
            return float(size), None
        if total > 0:
            return total, None
        return 1.0, ShapeError(
            f"finish(count={count}): the counts of the {size} ranks of group "
            f"{self._name!r} add up to {total:g}; expected above 0"
        )


def _lopsided(lane: Lane, heard: Sequence[float], absent: float) -> CommGridError | None:
    size = lane.group.size()
    for slot, having in zip(lane.slots, heard, strict=True):
        if 0 < having < size - absent:
            mine = "one" if slot.state is State.SENT else "none"
            return GridMismatchError(
                f"{slot.placement}: {int(having)} of the {size} ranks of group {lane.name!r} "
                f"({dist.get_process_group_ranks(lane.group)}) have a gradient for it, and "
                f"this rank has {mine}; every rank must use it in a step, or none, or say "
                'GradientReducer(unused="zero") to count it as zero where it is not used'
            )
    return None


def check_finite(pieces: Sequence[GradientPart], whole: ProcessGroup | None) -> CommGridError:
    """The error of a step with gradients that are not finite; collective over `whole`."""
    mine = [str(p.slot.placement) for p in pieces if not bool(p.gradient.isfinite().all())]
    ranks = [dist.get_rank()] if whole is None else dist.get_process_group_ranks(whole)
    found = [mine[:2]] if whole is None else gathered(mine[:2], whole)
    told = [
        f"{' and '.join(names)} on rank {rank}"
        for rank, names in zip(ranks, found, strict=True) if names
    ]  # fmt: skip
    more = f", and on {len(told) - 4} more ranks" if len(told) > 4 else ""
    return CommGridError(
        f"gradients are infinite or NaN: {'; '.join(told[:4]) or 'their squares overflow'}{more}; "
        'lower the learning rate or the loss scale, or let GradientReducer(not_finite="skip") '
        "leave such steps out"
    )
