"""One way of one call: cuts out what this rank sends, and puts together what it gets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from torch import Tensor

from commgrid.bridge.crossing import Crossing
from commgrid.bridge.links import Addressed, Links
from commgrid.bridge.plan import Message
from commgrid.context_parallel.balance import Ranges
from commgrid.context_parallel.sharding import take_runs
from commgrid.torch_compat import world as torch_world


def move(
    links: Links,
    plan: Sequence[Message],
    crossing: Crossing,
    given: Tensor | None,
    shape: Sequence[int] | None,
    call: str,
) -> Tensor | None:
    """Sends parts of a tensor to other ranks and returns what this one gets.

    Args:
        links: the ranks on the bridge.
        plan: this rank's messages.
        crossing: dtype, and the dims that they are cut in.
        given: what it sends parts of, if it sends.
        shape: of what it gets; None: nothing.
        call: for messages.
    """
    me, dims = torch_world.world_rank(), crossing.dims
    leaving: list[Addressed] = []
    arriving: list[Addressed] = []
    puts: list[tuple[Message, Tensor]] = []
    result = None if shape is None else links.new(shape, crossing.dtype)
    for message in plan:
        if message.sender == me:
            assert given is not None
            part = given.detach()
            for dim, runs in zip(dims, message.taken, strict=True):
                part = take_runs(part, runs, dim)
            if message.receiver == me:
                puts.append((message, part))
            else:
                leaving.append((part.contiguous(), message.receiver))
        else:
            assert result is not None
            sizes = list(result.shape)
            for dim, rows in zip(dims, message.rows, strict=True):
                sizes[dim] = rows
            arriving.append((links.new(sizes, crossing.dtype), message.sender))
            puts.append((message, arriving[-1][0]))
    links.exchange(call, leaving, arriving)
    for message, part in puts:
        assert result is not None
        _put(result, part, dims, message)
    return result


def _put(result: Tensor, part: Tensor, dims: Sequence[int], message: Message) -> None:
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
