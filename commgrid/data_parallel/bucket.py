"""Gradients laid out in flat buffers, so that one collective carries many of them.

    lane dp_cp      bucket 0                       bucket 1
                    head.weight norm.weight … pad | block1.up.weight … pad | …
                    └ rank 0 ┘└ rank 1 ┘            └ rank 0 ┘└ rank 1 ┘      (sharded)

A lane is a communicator and the buckets that it reduces. The buckets of all lanes are sent in
one order, the same on all ranks, so that no two ranks wait for each other in different lanes.
A bucket holds parameters of one dtype and device, last registered first, as backward reaches
them; parameters with copies on other stages come last, in buckets of their own. With sharded
gradients, each rank keeps one of n equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import Pending
from commgrid.data_parallel.slot import KeptGradient, Slot, State
from commgrid.parameters import Placement

Kind = tuple[ProcessGroup, ProcessGroup | None, torch.dtype, torch.device]
"""Lane group, group of stages with a copy (or None), dtype and device of a bucket's parameters."""

_LEAST_BYTES = 25 * 2**20
# A smaller part takes longer to start than to send (Megatron's rule for DistributedDataParallel).
_BYTES_PER_RANK = 4_000_000
_ALIGNMENT = 64  # elements: every parameter begins on a cache line, for any dtype


@dataclass(eq=False)
class Bucket:
    """Slots in a flat buffer of gradients, and the state of its collective.

    Args:
        slots: in order, without gaps but for alignment.
        group: the communicator of its lane.
        shared: the group whose ranks have a bucket like it, to be summed over first; None: none.
        gradient: the flat buffer; every slot's `view` is a part of it.
        own: the range of elements this rank keeps after the reduction.
        shard: whether each rank keeps its part of the sums alone, for a ShardedOptimizer.
    """

    slots: list[Slot]
    group: ProcessGroup
    shared: ProcessGroup | None
    gradient: Tensor
    own: slice
    shard: bool
    missing: set[Slot] = field(default_factory=set)
    pending: Pending | None = None

    def __post_init__(self) -> None:
        for slot in self.slots:
            slot.view = slot.of(self.gradient)
        self.missing = set(self.slots)

    @property
    def prescale(self) -> int:
        """The divisor before a sum, without which fp16 overflows at 65,504; else 1."""
        return self.group.size() if self.gradient.dtype == torch.float16 else 1

    @torch.no_grad()
    def fill(self) -> None:
        """Copies every gradient here, and zeros where this rank has none."""
        absent = [slot.view for slot in self.slots if not slot.send()]
        if absent:
            torch._foreach_zero_(absent)
        if self.prescale > 1:
            self.gradient.div_(self.prescale)

    def hide(self) -> None:
        """Puts placeholders where its collective sums a gradient."""
        for slot in self.slots:
            if slot.state is State.SENT:
                slot.parameter.grad = slot.placeholder

    @torch.no_grad()
    def hand_out(self, used: Container[Slot], *, skips: bool, exact: bool) -> None:
        """Sets `.grad` to each view, or to a copy of the dtype that optimizers expect.

        Args:
            used: the parameters that any rank has used.
            skips: whether this step has no gradients.
            exact: whether gradients keep the bucket's dtype.
        """
        dtype, copies = self.slots[0].parameter.dtype, self.gradient
        if not self.shard and not exact:
            copies = self.gradient.to(dtype)
        for slot in self.slots:
            if skips or slot not in used:
                if skips or not slot.restore():
                    slot.hand_out(None)
            elif self.shard:
                slot.placeholder.is_zeroed = False
                slot.hand_out(slot.placeholder)
            else:
                slot.hand_out(slot.view if copies is self.gradient else slot.of(copies))

    def wait(self) -> None:
        """Returns when its collective, if one is under way, has ended."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.wait()


@dataclass(eq=False)
class Lane:
    """A communicator and the buckets that it reduces, in order.

    Args:
        group: the ranks that hold copies of these parameters.
        name: the group's name, for messages.
        buckets: in the order in which they are sent.
    """

    group: ProcessGroup
    name: str
    buckets: list[Bucket] = field(default_factory=list)

    @property
    def slots(self) -> list[Slot]:
        """Every slot, in order."""
        return [slot for bucket in self.buckets for slot in bucket.slots]


@dataclass(frozen=True)
class GradientPart:
    """The range of one parameter's gradient that this rank keeps.

    Args:
        slot: the parameter's slot.
        bucket: the bucket that holds its gradient.
        start, stop: the kept range, in the parameter's own elements.
    """

    slot: Slot
    bucket: Bucket
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Whether this rank keeps all of it."""
        return self.stop - self.start == self.slot.parameter.numel()

    @cached_property
    def gradient(self) -> Tensor:
        """The kept range, flat; in the parameter's shape if it is the whole gradient."""
        return self.slot.view if self.is_whole else self.of(self.bucket.gradient)

    @property
    def held(self) -> Tensor | None:
        """The kept range of the reduced gradient, as `gradient`; None: none, or it was zeroed."""
        given = self.slot.parameter.grad
        if not self.bucket.shard:
            return given
        return self.gradient if isinstance(given, KeptGradient) else None

    def of(self, flat: Tensor) -> Tensor:
        """The kept range in a buffer that is laid out as the bucket."""
        return flat[self.slot.start + self.start : self.slot.start + self.stop]


def make_lanes(
    placements: Iterable[Placement],
    group_of: Callable[[Placement], tuple[ProcessGroup, str]],
    *,
    shard: bool,
    bucket_bytes: int | None,
    dtype: torch.dtype | None,
) -> tuple[list[Lane], list[Bucket]]:
    """Puts parameters into buckets and buckets into lanes.

    Args:
        placements: in order of use.
        group_of: the communicator, and its name, over which a parameter's gradient is summed.
        shard, bucket_bytes, dtype: as GradientReducer takes them.

    Returns:
        The lanes, and the buckets of all of them in the order in which they are sent.
    """
    lanes: dict[ProcessGroup, Lane] = {}
    buckets: list[Bucket] = []
    filling: dict[Kind, list[Placement]] = {}
    held: dict[Kind, int] = {}

    def close(key: Kind) -> None:
        found = filling.pop(key)
        del held[key]
        group, name = group_of(found[0])
        lanes.setdefault(group, Lane(group, name))
        buckets.append(_make_bucket(found, group, shard, _buffer_dtype(found[0], dtype)))

    for placement in reversed(list(placements)):
        parameter = placement.parameter
        group = group_of(placement)[0]
        key = (group, placement.sharers, parameter.dtype, parameter.device)
        filling.setdefault(key, []).append(placement)
        held[key] = held.get(key, 0) + parameter.numel() * _buffer_dtype(placement, dtype).itemsize
        if held[key] >= (bucket_bytes or max(_LEAST_BYTES, group.size() * _BYTES_PER_RANK)):
            close(key)
    for key in list(filling):
        close(key)
    buckets.sort(key=lambda bucket: bucket.shared is not None)
    for bucket in buckets:
        lanes[bucket.group].buckets.append(bucket)
    return list(lanes.values()), buckets


def _buffer_dtype(placement: Placement, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or torch.promote_types(placement.parameter.dtype, torch.float32)


def _make_bucket(
    placements: list[Placement], group: ProcessGroup, shard: bool, dtype: torch.dtype
) -> Bucket:
    slots, end = [], 0
    for placement in placements:
        slots.append(Slot(placement, end))
        end += _round_up(placement.parameter.numel(), _ALIGNMENT)
    parts = group.size() if shard else 1
    part = _round_up(-(-end // parts), _ALIGNMENT)
    gradient = torch.zeros(parts * part, dtype=dtype, device=placements[0].parameter.device)
    first = group.rank() * part if shard else 0
    return Bucket(slots, group, placements[0].sharers, gradient, slice(first, first + part), shard)


def pieces_of(buckets: Iterable[Bucket]) -> list[GradientPart]:
    """The ranges of gradients that this rank keeps, in bucket order."""
    pieces = []
    for bucket in buckets:
        for slot in bucket.slots:
            start = max(bucket.own.start, slot.start) - slot.start
            stop = min(bucket.own.stop, slot.stop) - slot.start
            if start < stop:
                pieces.append(GradientPart(slot, bucket, start, stop))
    return pieces


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
