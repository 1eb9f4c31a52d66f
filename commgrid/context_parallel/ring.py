"""Ring attention: in step i each rank's queries meet the keys of the rank i before it.

    4 ranks          step 0   step 1   step 2   step 3
    rank 0 has       0        3        2        1         keys and values of these ranks
    rank 1 has       1        0        3        2

While a step is computed, the next one's keys and values travel, so a rank holds those of two ranks
beside its own, for any number of ranks. Backward they come again, and the gradients of a step's
keys and values return to their owner during the next step, where they are added up
(arXiv 2310.01889).

In step i a rank sends the keys that the rank i after it attends straight to that rank: half of a
zig-zag, or nothing if the two share no document. Passing keys from neighbour to neighbour takes as
many messages and more numbers. Under full attention a rank of n that holds s positions sends,
forward, (n - 1) · s keys and as many values; backward it sends these again, and (n - 1) · s
gradients of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.first_order import first_order
from commgrid.context_parallel.agreement import names_peers
from commgrid.context_parallel.balance import Ranges
from commgrid.context_parallel.kernels import wide
from commgrid.context_parallel.online_softmax import OnlineSoftmax, SoftmaxBackward
from commgrid.context_parallel.plans import Step
from commgrid.context_parallel.ranges import count
from commgrid.context_parallel.sharding import add_runs, take_runs
from commgrid.runtime.named_failures import GoneError
from commgrid.store.search import first_line
from commgrid.torch_compat.messages import start_transfers
from commgrid.torch_compat.peer_errors import is_peer_failure


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, steps: Sequence[Step], group: ProcessGroup | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attention of this rank's queries over the sequence.

    Args:
        q: (batch, heads, positions, head_size).
        k, v: (batch, kv_heads, positions, head_size).
        steps: of `ring_steps`.
        group: None: there is but one step.
        scale: of the products of queries and keys.
    """
    made: Tensor = _Ring.apply(q, k, v, tuple(steps), group, scale)  # type: ignore[no-untyped-call]
    return made


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, steps: tuple[Step, ...],
        group: ProcessGroup | None, scale: float,
    ) -> Tensor:  # fmt: skip
        ctx.steps, ctx.group, ctx.scale = steps, group, scale
        links = RingLinks(group, steps)
        keys = _Keys(k, v, links)
        found = OnlineSoftmax(q, scale)
        coming = keys.start(1)
        found.add(k, v, steps[0].tiles)
        for i, step in enumerate(steps[1:], 1):
            arrived = coming.wait()
            coming = keys.start(i + 1)
            found.add(*unpack(arrived), step.tiles)
        coming.wait()
        out, lse = found.result()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @first_order("context-parallel attention")
    @names_peers
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        steps: tuple[Step, ...] = ctx.steps
        links = RingLinks(ctx.group, steps)
        keys = _Keys(k, v, links)
        found = SoftmaxBackward(gradient, q, out, lse, ctx.scale)
        dk, dv = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (k, v))
        coming = keys.start(1)
        found.add(k, v, steps[0].tiles, dk, dv)
        returning = Coming(k.new_empty(0))
        for i, step in enumerate(steps[1:], 1):
            arrived = coming.wait()
            coming = keys.start(i + 1)
            theirs = torch.zeros_like(arrived, dtype=wide(k.dtype))
            found.add(*unpack(arrived), step.tiles, *unpack(theirs))
            if i > 1:
                _give(returning.wait(), steps[i - 1].send, dk, dv)
            rows = k.new_empty(count(step.send), *theirs.shape[1:])
            returning = links.start(
                f"gradients of step {i}", theirs.to(k.dtype), step.source, rows, step.target
            )
        coming.wait()
        if len(steps) > 1:
            _give(returning.wait(), steps[-1].send, dk, dv)
        dq, dk, dv = found.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
        return dq, dk, dv, None, None, None


def pack(k: Tensor, v: Tensor) -> Tensor:
    """(batch, kv_heads, positions, head_size) twice, as (positions, 2, batch, kv_heads, head_size),
    so that ranges of positions are contiguous."""
    return torch.stack([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], 1)


def unpack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """What was packed, as views."""
    k, v = rows.permute(1, 2, 3, 0, 4).unbind()
    return k, v


def _give(rows: Tensor, runs: Ranges, dk: Tensor, dv: Tensor) -> None:
    """Adds gradients that have returned to those of this rank's keys."""
    add_runs(dk.permute(2, 0, 1, 3), runs, rows[:, 0])
    add_runs(dv.permute(2, 0, 1, 3), runs, rows[:, 1])


class _Keys:
    """This rank's keys and values, and what it gets of the others', step by step."""

    def __init__(self, k: Tensor, v: Tensor, links: RingLinks) -> None:
        self.links = links
        self.rows = pack(k, v) if len(links.steps) > 1 else k.new_empty(0)

    def start(self, number: int) -> Coming:
        """Starts the messages of a step, or none if there is none."""
        if number >= len(self.links.steps):
            return Coming(self.rows)
        step = self.links.steps[number]
        sent = take_runs(self.rows, step.send)
        rows = self.rows.new_empty(step.receive, *self.rows.shape[1:])
        return self.links.start(f"keys of step {number}", sent, step.target, rows, step.source)


def _explained(error: RuntimeError, what: str) -> RuntimeError:
    """The error to raise for one of torch's, which may be another rank's."""
    return GoneError(f"{what}: {first_line(error)}") if is_peer_failure(error) else error


@dataclass
class Coming:
    """A message on its way here, and one from here.

    Args:
        rows: what it fills.
        sent: kept until it has left.
        works: torch's handles.
        what: for the error.
    """

    rows: Tensor
    sent: Tensor | None = None
    works: Sequence[dist.Work] = ()
    what: str = ""

    def wait(self) -> Tensor:
        """The rows received, once they are here and the sent ones have left.

        Raises:
            GoneError: a rank that it is awaited from or sent to is gone, or does not answer.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise _explained(error, self.what) from error
        self.sent, self.works = None, ()
        return self.rows


class RingLinks:
    """Messages of rows between the ranks of a group; empty ones are not sent."""

    def __init__(self, group: ProcessGroup | None, steps: Sequence[Step]) -> None:
        self.group, self.steps = group, steps

    def start(self, what: str, sent: Tensor, to: int, rows: Tensor, source: int) -> Coming:
        """Starts to send a tensor to one rank and to fill another from one."""
        assert self.group is not None  # of more than one step
        ranks = dist.get_process_group_ranks(self.group)
        about = (
            f"rank {ranks[source]} or rank {ranks[to]} is gone or does not answer: rank "
            f"{dist.get_rank()} waited in ring attention over group {self.group.group_desc!r} for "
            f"the {what} from the one and gave the other its own"
        )
        sent = sent.contiguous()
        works = start_transfers(
            self.group,
            [(sent, to)] if sent.numel() else [],
            [(rows, source)] if rows.numel() else [],
            lambda error, _: _explained(error, about),
        )
        return Coming(rows, sent, works, about)
