"""Moving boxes: what a rank sends, receives and copies of a plan, with bounded memory.

    batch 1   pack, post      │ wait, unpack
    batch 2                   pack, post      │ wait, unpack          two batches are under way

Messages are started in the plan's order, whole batches at a time, and the first batch is waited for
before a third is started; `TransferPlan.messages` says why nobody then waits for ever. A message of
one box that lies in one piece, in the dtype and on the device that it travels in, is sent from
where it is, and received into where it is going.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.runtime.failures import GoneError
from commgrid.runtime.torch_transfers import start_transfers
from commgrid.runtime.torch_world import first_line, is_peer_failure
from commgrid.transfer.held import Held
from commgrid.transfer.plan import Message, Move

_UNDER_WAY = 2  # batches
_MESSAGES = 8  # that fit into what may be under way


def most_of(max_bytes: int) -> int:
    """The bytes of a message where so many may be under way."""
    return max(max_bytes // _MESSAGES, 1)


@dataclass
class _Travelling:
    message: Message
    buffer: Tensor
    works: list[dist.Work]
    in_place: bool


class Carrier:
    """Carries out a plan on this rank.

    Args:
        group: of the ranks of both sides.
        ranks: its ranks, in its order.
        device: that messages travel on.
        source, target: what this rank holds.
        max_bytes: of buffers under way at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        device: torch.device,
        source: Held,
        target: Held,
        max_bytes: int,
    ) -> None:
        self._group, self._device = group, device
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._source, self._target = source, target
        self._room = max_bytes // _UNDER_WAY

    @torch.no_grad()
    def carry(self, messages: Sequence[Message], copies: Iterable[Move]) -> None:
        """Moves everything; the target's tensors are whole when it returns.

        Raises:
            GoneError: a rank that should send or receive is gone, or does not answer.
        """
        under_way: deque[list[_Travelling]] = deque()
        batches = self._batches(messages)
        for batch in islice(batches, _UNDER_WAY):
            under_way.append(self._start(batch))
        for move in copies:
            target = self._target.view(move.tensor.name, move.box)
            target.copy_(self._source.view(move.tensor.source, move.box))
        while under_way:
            self._finish(under_way.popleft())
            for batch in islice(batches, 1):
                under_way.append(self._start(batch))
        self._target.copy_further()

    def _batches(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        taken: list[Message] = []
        size = 0
        for message in messages:
            if taken and size + message.size > self._room:
                yield taken
                taken, size = [], 0
            taken.append(message)
            size += message.size
        if taken:
            yield taken

    def _start(self, batch: Sequence[Message]) -> list[_Travelling]:
        travelling = []
        for message in batch:
            straight = self._straight(message)
            buffer = straight
            if buffer is None:
                buffer = torch.empty(message.size, dtype=torch.uint8, device=self._device)
                if message.is_send:
                    self._pack(message, buffer)
            travelling.append(_Travelling(message, buffer, [], straight is not None))
        sends, recvs = (
            [(t.buffer, self._places[t.message.peer]) for t in travelling if t.message.is_send is s]
            for s in (True, False)
        )
        try:
            works = start_transfers(self._group, sends, recvs)
        except RuntimeError as error:
            raise self._explain(error, batch[0]) from error
        ordered = sorted(travelling, key=lambda t: not t.message.is_send)
        for place, each in enumerate(ordered):  # or one handle for all of them
            each.works = [works[place]] if len(works) == len(ordered) else works
        return travelling

    def _finish(self, batch: Iterable[_Travelling]) -> None:
        for each in batch:
            try:
                for work in each.works:
                    work.wait()
            except RuntimeError as error:
                raise self._explain(error, each.message) from error
            if not each.message.is_send and not each.in_place:
                self._unpack(each.message, each.buffer)

    def _view(self, move: Move, is_send: bool) -> Tensor:
        if is_send:
            return self._source.view(move.tensor.source, move.box)
        return self._target.view(move.tensor.name, move.box)

    def _straight(self, message: Message) -> Tensor | None:
        """The bytes of a message's only box where it lies; None: they need a buffer."""
        if len(message.moves) > 1:
            return None
        (move,) = message.moves
        view = self._view(move, message.is_send)
        fits = view.is_contiguous() and view.device == self._device
        if not fits or view.dtype != _dtype(move):
            return None
        return view.view(-1).view(torch.uint8)

    def _pack(self, message: Message, buffer: Tensor) -> None:
        for move, place in _places(message, buffer):
            place.copy_(self._view(move, True))

    def _unpack(self, message: Message, buffer: Tensor) -> None:
        for move, place in _places(message, buffer):
            self._view(move, False).copy_(place)

    def _explain(self, error: RuntimeError, message: Message) -> RuntimeError:
        if not is_peer_failure(error):
            return error
        how = "received from" if message.is_send else "sent to"
        return GoneError(
            f"rank {message.peer} is gone or does not answer: it should have {how} this rank "
            f"{len(message.moves)} boxes, {message.moves[0].tensor.name} first "
            f"({first_line(error)})"
        )


def _dtype(move: Move) -> torch.dtype:
    found: torch.dtype = getattr(torch, move.tensor.dtype)
    return found


def _places(message: Message, buffer: Tensor) -> Iterator[tuple[Move, Tensor]]:
    """Each box of a message, and where in the buffer it is."""
    start = 0
    for move in message.moves:
        flat = buffer[start : start + move.size].view(_dtype(move))
        yield move, flat.view(move.box[1])
        start += move.size
