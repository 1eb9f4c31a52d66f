"""Agreement of all ranks once gradients are summed: parameters used, divisor, finiteness.

one vector on the device  │ lane dp_cp: has a gradient … , counts nothing │ count │ lane edp …
each part is summed over its group, and squares over the whole model where they are needed
read once by the host     divisor, parameters used, whether all gradients are finite
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import start_all_reduce_
from commgrid.collectives.objects import gathered
from commgrid.data_parallel.bucket import Bucket, GradientPart, Lane
from commgrid.data_parallel.norm import device_of, sum_of_squares
from commgrid.data_parallel.slot import Slot, State
from commgrid.errors import CommGridError, GridMismatchError, ShapeError

_KEPT = 16  # tensors of shares, for steps in which other parameters have gradients


@dataclass(frozen=True)
class _Told:
    """A group's range in the vector.

    Args:
        group: the group over which the range is summed.
        lane: the lane whose slots' flags come first, then whether this rank counts nothing; None:
            the group has no lane and only adds up counts.
        start, stop: the range.
        count: index of the count, followed by whether one was given; None: not in this range.
    """

    group: ProcessGroup
    lane: Lane | None
    start: int
    stop: int
    count: int | None


class SyncResult:
    """Computed once a step, the same on all ranks of each group.

    Args:
        lanes, buckets, pieces: the reducer's.
        group, name: the group over which counts are added up.
        whole: the ranks that together hold every gradient; None: this one does.
        parts: for each piece, the number of distinct ones in its place on all ranks.
        model: the model, whose device is used.
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
        whole: ProcessGroup | None,
        parts: Sequence[float],
        model: nn.Module,
        lopsided: bool,
    ) -> None:
        self._buckets, self._group, self._name = buckets, group, name
        self.whole, self.is_finite, self._may_be_lopsided = whole, True, lopsided
        self.used: set[Slot] = set()
        self._device = device_of(model)
        self._told = _lay_out(lanes, group)
        self._where = {
            id(slot): told.start + i
            for told in self._told if told.lane is not None
            for i, slot in enumerate(told.lane.slots)
        }  # fmt: skip
        size = self.whole.size() if self.whole is not None else 1
        self._pieces, self._shares = pieces, [part / size for part in parts]
        self._tensors: dict[tuple[int, ...], Tensor] = {}

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
            start_all_reduce_(numbers[told.start : told.stop], told.group)
            for told in self._told if told.group.size() > 1
        ]  # fmt: skip
        for each in pending:
            each.wait()
        squares = numbers.new_zeros(())
        if look:
            squares = self.squares([piece.gradient for piece in self._pieces])
        *heard, total = torch.cat([numbers, squares.view(1)]).tolist()
        divisor, wrong = self._divisor(count, heard)
        self.is_finite = math.isfinite(total)
        self.used.clear()
        for told in self._told:
            if told.lane is not None:
                having = heard[told.start : told.stop]
                self.used |= {s for s, count in zip(told.lane.slots, having, strict=False) if count}
                if wrong is None and not self._may_be_lopsided:
                    wrong = _lopsided(told.lane, having)
        return divisor, wrong

    def _numbers(self, count: float | Tensor | None) -> Tensor:
        known = count if count is not None and not isinstance(count, Tensor) else 0.0
        absent = float(count is not None and not isinstance(count, Tensor) and count == 0)
        listed: list[float] = []
        for told in self._told:
            if told.lane is not None:
                listed += [float(slot.state is State.SENT) for slot in told.lane.slots]
                listed.append(absent)
            if told.count is not None:
                listed += [float(known), float(count is not None)]
        made = torch.tensor(listed, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        numbers = made.to(self._device, non_blocking=True)
        if isinstance(count, Tensor):  # which the host need not know
            given = count.detach().to(self._device, torch.float64, non_blocking=True)
            for told in self._told:
                if told.count is not None:
                    numbers[told.count] = given
                if told.lane is not None:
                    numbers[told.start + len(told.lane.slots)] = (given == 0).double()
        return numbers

    def _divisor(
        self, count: float | Tensor | None, heard: Sequence[float]
    ) -> tuple[float, CommGridError | None]:
        size = self._group.size()
        place = next(told.count for told in self._told if told.count is not None)
        total, given = heard[place], heard[place + 1]
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

    def squares(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The sum of the squares of all gradients of the unsharded model.

        Args:
            gradients: one for each of this rank's pieces; None: it has none.

        Returns:
            A float64 tensor of shape () on the model's device, the same on every rank.
        """
        return sum_of_squares(gradients, self._shares_of, self.whole, self._device)

    def _shares_of(self, held: tuple[int, ...]) -> Tensor:
        """The share of each square, on the device; kept, as most steps have the same pieces."""
        if held not in self._tensors:
            if len(self._tensors) == _KEPT:
                self._tensors.clear()
            shares = [self._shares[i] for i in held]
            self._tensors[held] = torch.tensor(shares, dtype=torch.float64, device=self._device)
        return self._tensors[held]


def _lay_out(lanes: Sequence[Lane], group: ProcessGroup) -> list[_Told]:
    found: list[_Told] = []
    end = 0
    for lane in lanes:
        start, end = end, end + len(lane.slots) + 1
        count = end if lane.group == group else None
        end += 2 * (count is not None)
        found.append(_Told(lane.group, lane, start, end, count))
    if all(told.count is None for told in found):
        found.append(_Told(group, None, end, end + 2, end))
    return found


def _lopsided(lane: Lane, heard: Sequence[float]) -> CommGridError | None:
    size, absent = lane.group.size(), heard[len(lane.slots)]
    for slot, having in zip(lane.slots, heard, strict=False):
        if 0 < having < size - absent:
            mine = "one" if slot.state is State.SENT else "none"
            return GridMismatchError(
                f"{slot.placement}: {int(having)} of the {size} ranks of group {lane.name!r} "
                f"({dist.get_process_group_ranks(lane.group)}) have a gradient for it, and "
                f"this rank has {mine}; every rank must use it in a step, or none, or say "
                'GradientReducer(unused="zero") to count it as zero where it is not used'
            )
    return None


def check_finite(
    pieces: Sequence[GradientPart], whole: ProcessGroup | None, model: nn.Module
) -> CommGridError:
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
