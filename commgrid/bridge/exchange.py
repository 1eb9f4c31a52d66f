"""One way of one call: cuts out what this rank sends, and puts together what it gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from commgrid.bridge.contract import Contract
from commgrid.bridge.headers import LENGTH, PendingGradients
from commgrid.bridge.links import Addressed, BridgeLinks
from commgrid.bridge.plan import BridgeMessage
from commgrid.context_parallel.ranges import Ranges
from commgrid.context_parallel.sharding import take_runs
from commgrid.torch_compat import world as torch_world


class Moving:
    """One rank's messages of one call, in one direction.

    Args:
        links: the ranks on the bridge.
        ledger: of this rank's calls.
        number: the call's.
        crossing: dtype, and the dims that messages are cut in.
        plan: its messages in this direction.
        given: the tensor that it sends parts of, if it sends.
        shape: of the tensor that it receives; None: none.
    """

    def __init__(
        self,
        links: BridgeLinks,
        ledger: PendingGradients,
        number: int,
        crossing: Contract,
        plan: Sequence[BridgeMessage],
        given: Tensor | None,
        shape: Sequence[int] | None,
    ) -> None:
        me = torch_world.world_rank()
        self._links, self._ledger, self._number = links, ledger, number
        self._crossing = crossing
        self._result = None if shape is None else links.new(shape, crossing.dtype)
        self._parts: dict[int, Tensor] = {}  # by sender
        self._leaving: list[Addressed] = []
        for message in plan:
            if message.sender == me:
                assert given is not None
                part = given.detach()
                for dim, runs in zip(crossing.dims, message.taken, strict=True):
                    part = take_runs(part, runs, dim)
                if message.receiver == me:
                    self._parts[me] = part
                elif part.numel():
                    self._leaving.append((part.contiguous(), message.receiver))
        self._gets = [message for message in plan if message.receiver == me]
        self._shapes = {} if shape is None else shapes_of(plan, crossing.dims, shape)

    def forward(self) -> Tensor | None:
        """Send parts of the tensor to the target; return what this rank gets.

        All ranks make their calls in one order, so that each message is of this call.
        """
        heads = {sender: self._new_head() for sender in self._shapes}
        self._parts |= {
            sender: self._links.new(shape, self._crossing.dtype)
            for sender, shape in self._shapes.items()
        }
        arriving = [
            one for sender in heads
            for one in ((heads[sender], sender), (self._parts[sender], sender))
        ]  # fmt: skip
        leaving = [
            one
            for pair in zip(self._heads(to_target=True), self._leaving, strict=True)
            for one in pair
        ]
        self._links.exchange(f"forward of call {self._number}", leaving, arriving)
        for sender, head in heads.items():
            self._ledger.hear(head.tolist(), sender)
        return self._put_all()

    def backward(self) -> Tensor | None:
        """Send parts of the gradient to the source; return what this rank gets.

        Gradients of other calls, whose backward runs later here, are kept until then.
        """
        call = f"backward of call {self._number}"
        self._ledger.send(self._number, [receiver for _, receiver in self._leaving])
        kept = {sender: self._ledger.take(self._number, sender) for sender in self._shapes}
        self._parts |= {sender: part for sender, part in kept.items() if part is not None}
        waiting = [sender for sender, part in kept.items() if part is None]
        heads, parts = self._heads(to_target=False), self._leaving
        while heads or waiting:
            came = {sender: self._new_head() for sender in waiting}
            self._links.exchange(call, heads, [(head, sender) for sender, head in came.items()])
            calls = {sender: int(head[0]) for sender, head in came.items()}
            found = {
                sender: self._links.new(self._shape(of, sender), self._crossing.dtype)
                for sender, of in calls.items()
            }
            self._links.exchange(call, parts, [(part, sender) for sender, part in found.items()])
            for sender, part in found.items():
                if calls[sender] == self._number:
                    self._parts[sender] = part
                else:
                    self._ledger.keep(calls[sender], sender, part)
            waiting = [sender for sender in waiting if calls[sender] != self._number]
            heads, parts = [], []
        self._ledger.settle(self._number)
        return self._put_all()

    def _shape(self, call: int, sender: int) -> tuple[int, ...]:
        return self._shapes[sender] if call == self._number else self._ledger.shape(call, sender)

    def _heads(self, to_target: bool) -> list[Addressed]:
        heads: list[Addressed] = []
        for _, receiver in self._leaving:
            numbers = self._ledger.head(self._number, receiver if to_target else None)
            heads.append((torch.tensor(numbers, device=self._links.device), receiver))
        return heads

    def _new_head(self) -> Tensor:
        return self._links.new((LENGTH,), torch.int64)

    def _put_all(self) -> Tensor | None:
        for message in self._gets:
            part = self._parts.get(message.sender)
            if part is not None:
                assert self._result is not None
                _put(self._result, part, self._crossing.dims, message)
        return self._result


def shapes_of(
    plan: Sequence[BridgeMessage], dims: Sequence[int], shape: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return the shapes of the messages that this rank gets from others, but for empty ones.

    Args:
        plan: of one direction of a call.
        dims: that they are cut in.
        shape: of the whole that this rank gets.
    """
    me, found = torch_world.world_rank(), {}
    for message in plan:
        if message.receiver == me != message.sender:
            sizes = list(shape)
            for dim, rows in zip(dims, message.rows, strict=True):
                sizes[dim] = rows
            if math.prod(sizes):
                found[message.sender] = tuple(sizes)
    return found


def _put(result: Tensor, part: Tensor, dims: Sequence[int], message: BridgeMessage) -> None:
    """Copies a message's rows to where they go, or adds them."""
    for runs in product(*map(_with_rows, message.put)):
        into, of = result, part
        for dim, (start, stop, row) in zip(dims, runs, strict=True):
            into = into.narrow(dim, start, stop - start)
            of = of.narrow(dim, row, stop - start)
        if message.adds:
            into += of
        else:
            into.copy_(of)


def _with_rows(runs: Ranges) -> list[tuple[int, int, int]]:
    """Each run, and the row of the message that it begins with."""
    found, row = [], 0
    for start, stop in runs:
        found.append((start, stop, row))
        row += stop - start
    return found
