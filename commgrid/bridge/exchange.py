"""Exchange: one rank's messages of one bridge call, in one direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from commgrid.bridge.contract import Contract
from commgrid.bridge.links import Addressed, BridgeLinks
from commgrid.bridge.plan import BridgeMessage
from commgrid.context_parallel.ranges import Ranges
from commgrid.context_parallel.sharding import take_runs
from commgrid.errors import CommGridError
from commgrid.torch_compat import world as torch_world


class Moving:
    """One rank's messages of one call, in one direction.

    Args:
        links: the ranks on the bridge.
        number: the call's.
        crossing: dtype, and the dims that messages are cut in.
        plan: its messages in this direction.
        given: the tensor that it sends parts of, if it sends.
        shape: of the tensor that it receives; None: none.
    """

    def __init__(
        self,
        links: BridgeLinks,
        number: int,
        crossing: Contract,
        plan: Sequence[BridgeMessage],
        given: Tensor | None,
        shape: Sequence[int] | None,
    ) -> None:
        me = torch_world.world_rank()
        self._links, self._number, self._crossing = links, number, crossing
        self._result = None if shape is None else links.new(shape, crossing.dtype)
        self._leaving: list[Addressed] = []
        self._arriving: list[Addressed] = []
        self._gets: list[tuple[BridgeMessage, Tensor]] = []
        for message in plan:
            if message.sender == me:
                assert given is not None
                part = given.detach()
                for dim, runs in zip(crossing.dims, message.taken, strict=True):
                    part = take_runs(part, runs, dim)
                if message.receiver == me:
                    self._gets.append((message, part))
                elif part.numel():
                    self._leaving.append((part.contiguous(), message.receiver))
            elif message.receiver == me:
                assert shape is not None
                sizes = list(shape)
                for dim, rows in zip(crossing.dims, message.rows, strict=True):
                    sizes[dim] = rows
                if math.prod(sizes):
                    part = links.new(sizes, crossing.dtype)
                    self._arriving.append((part, message.sender))
                    self._gets.append((message, part))

    def forward(self) -> Tensor | None:
        """Send parts of the tensor to the target; return what this rank gets.

        All ranks make their calls in one order, so that each message is of this call.
        """
        return self._exchange(f"forward of call {self._number}")

    def backward(self) -> Tensor | None:
        """Send parts of the gradient to the source; return what this rank gets.

        Ranks tell first of which call they are, as autograd may run the backwards of the two sides
        in different orders.

        Raises:
            CommGridError: another call's gradient has come.
        """
        call = f"backward of call {self._number}"
        mine = torch.tensor([self._number], device=self._links.device)
        heads = [(self._links.new((1,), torch.int64), sender) for _, sender in self._arriving]
        self._links.exchange(call, [(mine, receiver) for _, receiver in self._leaving], heads)
        for head, sender in heads:
            if (of := int(head)) != self._number:
                raise CommGridError(
                    f"{self._links.about}: rank {sender} sent the gradient of call {of}, and this "
                    f"rank runs the backward of call {self._number}; run backward once for each "
                    "call, on all ranks of both stages in one order, also of the zero that source "
                    f"ranks get: if it was dropped, the tensor of call {of} gets no gradient. Give "
                    "x.detach() if it is to get none"
                )
        return self._exchange(call)

    def _exchange(self, call: str) -> Tensor | None:
        self._links.exchange(call, self._leaving, self._arriving)
        for message, part in self._gets:
            assert self._result is not None
            _put(self._result, part, self._crossing.dims, message)
        return self._result


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
