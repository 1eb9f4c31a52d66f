"""Ring and all-gather: in step i each rank's queries meet the keys of the rank i before it.

    4 ranks          step 0   step 1   step 2   step 3
    rank 0 has       0        3        2        1         keys and values of these ranks
    rank 1 has       1        0        3        2

In a ring the next step's keys and values travel while a step is computed, so a rank holds those of
two ranks beside its own, for any number of ranks. Backward they come again, and the gradients of a
step's keys and values return to their owner during the next step, where they are added up
(arXiv 2310.01889). An all-gather is the same with the messages of all steps started at once, so
that a rank holds all keys that it attends.

In step i a rank sends the keys that the rank i after it attends straight to that rank: half of a
zig-zag, or nothing if the two share no document. Passing keys from neighbour to neighbour takes as
many messages and more numbers. Under full attention a rank of n that holds s positions sends,
forward, (n - 1) · s keys and as many values; backward it sends these again, and (n - 1) · s
gradients of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.first_order import first_order
from commgrid.context_parallel.agreement import named_peers, names_peers
from commgrid.context_parallel.online_softmax import OnlineSoftmax, SoftmaxBackward
from commgrid.context_parallel.plans import Step
from commgrid.context_parallel.ranges import Ranges, count
from commgrid.context_parallel.sharding import take_runs
from commgrid.torch_compat.messages import start_transfers


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, steps: Sequence[Step], group: ProcessGroup | None,
    scale: float, ahead: int = 1,
) -> Tensor:  # fmt: skip
    """Attention of this rank's queries over the sequence.

    Args:
        q: (batch, heads, positions, head_size).
        k, v: (batch, kv_heads, positions, head_size).
        steps: of `ring_steps`.
        group: None: there is but one step.
        scale: of the products of queries and keys.
        ahead: number of steps whose keys travel at once: 1 in a ring, all in an all-gather.
    """
    made: Tensor = _Ring.apply(q, k, v, tuple(steps), group, scale, ahead)  # type: ignore[no-untyped-call]
    return made


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, steps: tuple[Step, ...],
        group: ProcessGroup | None, scale: float, ahead: int,
    ) -> Tensor:  # fmt: skip
        ctx.steps, ctx.group, ctx.scale, ctx.ahead = steps, group, scale, ahead
        keys = _Keys(k, v, group, steps, ahead)
        found = OnlineSoftmax(q, scale)
        found.add(k, v, steps[0].tiles)
        for step in steps[1:]:
            arrived = keys.next()
            found.add(arrived[0], arrived[1], step.tiles)
        out, lse = found.result()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @first_order("context-parallel attention")
    @names_peers
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        steps: tuple[Step, ...] = ctx.steps
        keys = _Keys(k, v, ctx.group, steps, ctx.ahead)
        found = SoftmaxBackward(gradient, q, out, lse, ctx.scale)
        dk, dv = found.add(k, v, steps[0].tiles)
        returning = Coming(k.new_empty(0))
        for i, step in enumerate(steps[1:], 1):
            arrived = keys.next()
            theirs = torch.stack(found.add(arrived[0], arrived[1], step.tiles)).to(k.dtype)
            if i > 1:
                _give(returning.wait(), steps[i - 1].send, dk, dv)
            rows = k.new_empty(*theirs.shape[:3], count(step.send), theirs.shape[4])
            returning = _start(ctx.group, theirs, step.source, rows, step.target)
        if len(steps) > 1:
            _give(returning.wait(), steps[-1].send, dk, dv)
        dq, dk, dv = found.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
        return dq, dk, dv, None, None, None, None


def _give(rows: Tensor, runs: Ranges, dk: Tensor, dv: Tensor) -> None:
    """Adds gradients that have returned to those of this rank's keys."""
    at = 0
    for start, stop in runs:
        part = rows.narrow(3, at, stop - start)
        dk[:, :, start:stop] += part[0]
        dv[:, :, start:stop] += part[1]
        at += stop - start


class _Keys:
    """Keys and values of the other ranks, (2, batch, kv_heads, positions, head_size), by step.

    A head's positions lie one after the other, which kernels on the CPU take less time for.
    """

    def __init__(
        self, k: Tensor, v: Tensor, group: ProcessGroup | None, steps: Sequence[Step], ahead: int
    ) -> None:
        self.group, self.steps = group, iter(steps[1:])
        self.rows = torch.stack([k, v]) if len(steps) > 1 else k.new_empty(0)
        self.coming: deque[Coming] = deque()
        for _ in range(ahead):
            self._start_next()

    def next(self) -> Tensor:
        """Waits for the next step's; those of a later step set out."""
        arrived = self.coming.popleft().wait()
        self._start_next()
        return arrived

    def _start_next(self) -> None:
        step = next(self.steps, None)
        if step is None:
            return
        sent = take_runs(self.rows, step.send, 3)
        rows = sent.new_empty(*self.rows.shape[:3], step.receive, self.rows.shape[4])
        self.coming.append(_start(self.group, sent, step.target, rows, step.source))


@dataclass
class Coming:
    """A message on its way here, and one from here.

    Args:
        rows: what it fills.
        sent: kept until it has left.
        group: whose ranks they travel between.
        works: torch's handles.
        peers: group rank that each message goes to or comes from; a backend may have one handle
            for all of them.
    """

    rows: Tensor
    sent: Tensor | None = None
    group: ProcessGroup | None = None
    works: Sequence[dist.Work] = ()
    peers: Sequence[int] = ()

    def wait(self) -> Tensor:
        """The rows received, once they are here and the sent ones have left.

        Raises:
            GoneError: a rank that it is awaited from or sent to is gone, or does not answer.
        """
        one_each = len(self.works) == len(self.peers)
        for number, work in enumerate(self.works):
            with named_peers(self.group, [self.peers[number]] if one_each else self.peers):
                work.wait()
        self.sent, self.works = None, ()
        return self.rows


def _start(group: ProcessGroup | None, sent: Tensor, to: int, rows: Tensor, source: int) -> Coming:
    """Starts to send a tensor to one rank and to fill another from one; empty ones are not sent."""
    assert group is not None  # of more than one step
    sends = [(sent.contiguous(), to)] if sent.numel() else []
    recvs = [(rows, source)] if rows.numel() else []
    peers = [peer for _, peer in (*sends, *recvs)]
    with named_peers(group, peers):
        works = start_transfers(group, sends, recvs, lambda error, _: error)
    return Coming(rows, sends[0][0] if sends else None, group, works, peers)
