"""Moving boxes: what a rank sends, receives and copies of a plan, with bounded memory.

    message 1   pack, post                  wait, unpack
    message 2              pack, post                     wait, unpack
    message 3                         ...   started as soon as the buffers have room

Messages are started in the plan's order, and the first one is waited for where there is no room for
the next; `TransferPlan.messages` says why no wait is then endless. A message of one box that
lies in one piece, in the dtype and on the device that it travels in, is sent from where it is, and
received into where it is going. All others share one piece of memory, a ring that is used again and
again: fresh memory for each would cost as much as sending it. Where the backend starts many
messages at once, as NCCL does, a batch of them takes a message's place. Between ranks that share a
device the receiver copies out of the sender's ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.resharding.dtypes import dtype_of
from commgrid.resharding.ending import meet
from commgrid.resharding.local_boxes import LocalBoxes
from commgrid.resharding.plan import Message, Move
from commgrid.runtime.named_failures import blamed
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat.messages import (
    Start,
    UnderWay,
    lend,
    start_copies,
    start_transfers,
    starts_batches,
    wait_for,
)

_MESSAGES = 8  # that fit into what may be under way
_KEPT = 1 << 16  # boxes whose tensors are looked up once and not in every run
_HOST_ROOM = 1 << 24  # of buffers in a CPU's memory: more is not faster, and is not in its cache

_ALIGNED = 64  # bytes: where any element may begin, and a line of a CPU's cache


def most_of(max_bytes: int) -> int:
    """The bytes of a message where so many may be under way."""
    return max(max_bytes // _MESSAGES, 1)


def message_device(group: dist.ProcessGroup, used: frozenset[str]) -> torch.device:
    """The device of messages: the GPU if the group can send from it and all tensors are there."""
    kinds = {device.type: device for device in torch_groups.devices_of(group)}
    if "cuda" in kinds and ("cpu" not in kinds or used <= {"cuda"}):
        return kinds["cuda"]
    return kinds["cpu"]


@dataclass(frozen=True)
class _Parcel:
    """A message of this rank, and the tensors that it is made of.

    Args:
        message: of the plan.
        place: of the other rank in the group.
        straight: its bytes where they lie; None: it is packed.
        parts: each box here, and the first of its bytes in the message.
    """

    message: Message
    place: int
    straight: Tensor | None
    parts: tuple[tuple[Tensor, int, Move], ...]

    @property
    def packed_size(self) -> int:
        """The bytes of the buffer that it needs."""
        return 0 if self.straight is not None else self.message.size


Batch = Sequence[_Parcel]
"""Messages that are started at once."""


class _Way(NamedTuple):
    """How messages go to some ranks, and what they travel through."""

    start: Start
    ring: RingBuffer


@dataclass
class _UnderWay:
    batch: Batch
    buffers: list[Tensor]
    works: Sequence[UnderWay]
    room: Room
    way: _Way


class Carrier:
    """Carries out a plan on this rank, as often as needed.

    Args:
        group: of the ranks of both sides.
        ranks: its ranks, in its order.
        device: that messages travel on.
        source, target: what this rank holds.
        max_bytes: of buffers at once, unless a single message is larger.
        messages: of this rank, of `most_of(max_bytes)` bytes at most.
        copies: gives what this rank has already.
        timeout: seconds that a message may take.
        near: ranks on this rank's device, to which messages go through its memory.
        near_device: that device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        device: torch.device,
        source: LocalBoxes,
        target: LocalBoxes,
        max_bytes: int,
        messages: Sequence[Message],
        copies: Callable[[], Iterable[Move]],
        timeout: float,
        near: Collection[int] = (),
        near_device: torch.device | None = None,
    ) -> None:
        self._group, self._ranks = group, ranks
        self._device, self._near_device = device, near_device or device
        self._source, self._target = source, target
        self._messages, self._copies = messages, copies
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._near = {self._places[rank] for rank in near}
        self._in_batches = starts_batches(group, device)
        self._timeout = timeout
        self._batch = max_bytes // 2 if self._in_batches else 0
        sizes = [aligned(message.size) for message in messages]
        largest = max(sizes, default=0)
        room = max_bytes if device.type != "cpu" else min(max_bytes, max(_HOST_ROOM, 2 * largest))
        self._room = min(max(room, largest), sum(sizes))
        self._kept: dict[int, _Parcel] = {}
        self._pairs: list[tuple[Tensor, Tensor]] | None = None
        self._left = _KEPT if source.is_lasting else 0

    def holds(self, source: LocalBoxes, target: LocalBoxes) -> bool:
        """Whether it was made of these, so that it may carry once more."""
        return self._source is source and self._target is target

    @torch.no_grad()
    def carry(self) -> None:
        """Moves everything; this rank's tensors of the target are whole when it returns.

        Raises:
            GoneError: a rank that should send or receive is gone, or does not answer.
        """
        near_ring = RingBuffer(self._room, self._near_device, lend)
        near = _Way(partial(start_copies, self._group), near_ring)
        far = _Way(partial(start_transfers, self._group), RingBuffer(self._room, self._device))
        under_way: deque[_UnderWay] = deque()
        for batch in _batches(self._parcels(), self._batch):
            size = _packed_size(batch)
            way = near if batch[0].place in self._near else far
            while (room := way.ring.take(size)) is None:
                self._finish(under_way.popleft())
            under_way.append(self._start(batch, room, way))
        for target, source in self._copied():
            target.copy_(source)
        while under_way:
            self._finish(under_way.popleft())
        self._target.copy_further()

    def meet(self) -> None:
        """Wait until all ranks have finished, so that each learns of a rank that failed.

        Raises:
            GoneError: a rank is gone, or does not answer; names it.
        """
        if not self._in_batches:  # NCCL's end together
            meet(self._group, self._ranks, self._timeout)

    # -- one batch ----------------------------------------------------------------------

    def _start(self, batch: Batch, room: Room, way: _Way) -> _UnderWay:
        buffers, start = [], 0
        for parcel in batch:
            if parcel.straight is not None:
                buffers.append(parcel.straight)
                continue
            buffer = room.buffer[start : start + parcel.packed_size]
            start += aligned(parcel.packed_size)
            if parcel.message.is_send:
                for view, place in _places(parcel, buffer):
                    place.copy_(view)
            buffers.append(buffer)
        both = list(zip(batch, buffers, strict=True))
        sends, recvs = (
            [(buffer, parcel.place) for parcel, buffer in both if parcel.message.is_send is is_send]
            for is_send in (True, False)
        )

        def refused(error: RuntimeError, peer: int | None) -> Exception:
            named = [each.message for each in batch if peer in (None, each.place)]
            return self._explain(error, named)

        works = way.start(sends, recvs, refused)
        return _UnderWay(batch, buffers, works, room, way)

    def _finish(self, under_way: _UnderWay) -> None:
        """Waits for a batch, and takes what came out of its buffers."""
        ordered = sorted(under_way.batch, key=lambda parcel: not parcel.message.is_send)
        for number, work in enumerate(under_way.works):  # or one handle for all of them
            try:
                wait_for(work, None if self._in_batches else self._timeout)
            except RuntimeError as error:
                waited_for = ordered if self._in_batches else [ordered[number]]
                raise self._explain(error, [each.message for each in waited_for]) from error
        for parcel, buffer in zip(under_way.batch, under_way.buffers, strict=True):
            if not parcel.message.is_send and parcel.straight is None:
                for view, place in _places(parcel, buffer):
                    view.copy_(place)
        under_way.way.ring.give_back(under_way.room)

    def _explain(self, error: RuntimeError, messages: Sequence[Message]) -> RuntimeError:
        """The error to raise for one of torch's, which comes from one of some messages."""
        message, peers = messages[0], {each.peer for each in messages}
        if len(peers) > 1:
            return blamed(error, peers, "this rank has waited for their messages")
        how = "received from" if message.is_send else "sent to"
        return blamed(
            error, peers,
            f"it should have {how} this rank {len(message.moves)} boxes, "
            f"{message.moves[0].tensor.name} first",
        )  # fmt: skip

    # -- what is in a message -----------------------------------------------------------

    def _parcels(self) -> Iterator[_Parcel]:
        """The messages and their tensors."""
        for number, message in enumerate(self._messages):
            parcel = self._kept.get(number) or self._parcel(message)
            if number not in self._kept and self._left > 0:
                self._kept[number] = parcel
                self._left -= len(parcel.parts)
            yield parcel

    def _copied(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The target's and the source's tensors of every box that is copied."""
        if self._pairs is not None:
            yield from self._pairs
            return
        found: list[tuple[Tensor, Tensor]] = []
        most = _KEPT if self._source.is_lasting else 0
        for move in self._copies():
            pair = self._view(move, False), self._view(move, True)
            if len(found) < most:
                found.append(pair)
            yield pair
        if len(found) < most:
            self._pairs = found

    def _parcel(self, message: Message) -> _Parcel:
        parts, start = [], 0
        for move in message.moves:
            parts.append((self._view(move, message.is_send), start, move))
            start += move.size
        straight, place = None, self._places[message.peer]
        is_near = place in self._near
        if len(parts) == 1 and not (is_near and message.is_send):  # a ring alone is lent
            straight = self._straight(*parts[0], self._near_device if is_near else self._device)
        return _Parcel(message, place, straight, tuple(parts))

    def _view(self, move: Move, is_send: bool) -> Tensor:
        if is_send:
            return self._source.view(move.tensor.source, move.box)
        return self._target.view(move.tensor.name, move.box)

    def _straight(self, view: Tensor, _: int, move: Move, device: torch.device) -> Tensor | None:
        """The bytes of a message's only box where it lies; None: they need a buffer."""
        fits = view.is_contiguous() and view.device == device
        if not fits or view.dtype != dtype_of(move.tensor.dtype):
            return None
        return view.view(-1).view(torch.uint8)


def _batches(parcels: Iterable[_Parcel], most: int) -> Iterator[Batch]:
    """Parcels in order, as many at once as have so many bytes together; at least one."""
    taken: list[_Parcel] = []
    size = 0
    for parcel in parcels:
        if taken and size + aligned(parcel.message.size) > most:
            yield taken
            taken, size = [], 0
        taken.append(parcel)
        size += aligned(parcel.message.size)
    if taken:
        yield taken


def _packed_size(batch: Batch) -> int:
    """The bytes of the buffers that a batch needs."""
    return sum(aligned(parcel.packed_size) for parcel in batch)


def _places(parcel: _Parcel, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each box of a message here, and where in the buffer it is."""
    for view, start, move in parcel.parts:
        flat = buffer[start : start + move.size].view(dtype_of(move.tensor.dtype))
        yield view, flat.view(view.shape)


def aligned(size: int) -> int:
    """The bytes that a buffer of so many takes."""
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class Room:
    """A part of a ring.

    Args:
        start: its first byte.
        buffer: its bytes.
    """

    start: int
    buffer: Tensor


class RingBuffer:
    """Memory that is made at its first use.

    Args:
        size: its bytes.
        device: where it is.
        make: makes it.

    Example:
        >>> ring = RingBuffer(128, torch.device("cpu"))
        >>> one, other = ring.take(64), ring.take(64)
        >>> ring.take(64) is None
        True
        >>> ring.give_back(one)
        >>> ring.take(64).start
        0
    """

    def __init__(
        self, size: int, device: torch.device,
        make: Callable[[int, torch.device], Tensor] = lambda size, device: torch.empty(
            size, dtype=torch.uint8, device=device
        ),
    ) -> None:  # fmt: skip
        self._size, self._device, self._make = size, device, make
        self._memory: Tensor | None = None
        self._taken: deque[Room] = deque()

    def take(self, size: int) -> Room | None:
        """A room of so many bytes, at most the ring's; None: others have to come back first."""
        start = self._start(size)
        if start is None:
            return None
        if self._memory is None:
            self._memory = self._make(self._size, self._device)
        room = Room(start, self._memory[start : start + size])
        if size:
            self._taken.append(room)
        return room

    def give_back(self, room: Room) -> None:
        """Lets the oldest room be taken again; one of no bytes is none."""
        if len(room.buffer):
            oldest = self._taken.popleft()
            assert oldest is room, "rooms come back in the order in which they were taken"

    def _start(self, size: int) -> int | None:
        if not self._taken or not size:
            return 0
        first, last = self._taken[0].start, self._taken[-1]
        end = last.start + aligned(len(last.buffer))
        if last.start >= first:  # what is taken is one piece: room behind it, or before it
            if end + size <= self._size:
                return end
            return 0 if size <= first else None
        return end if end + size <= first else None
