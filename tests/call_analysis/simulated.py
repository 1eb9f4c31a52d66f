"""Traces of ranks that never ran: their calls are listed, and then matched in a virtual time.

A program is taken to issue the same calls for all data, so each rank's list is made by
calling it once with a `Calls` in place of `torch.distributed`. `traces` then plays all lists side
by side: the n-th collective of a group ends when all members have issued it, the n-th send when
its receive is issued, and a wait that takes longer than `timeout` fails and ends its program, as
gloo's does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from commgrid.call_records import call as records
from commgrid.call_records.call import Group
from commgrid.call_records.trace import Trace

TICK = 1e-6  # seconds between two steps of a rank


@dataclass(eq=False)
class Call:
    """One call: what a trace says of it, and when it was issued and its wait was over.

    Args:
        about: the arguments of its record.
        meets: the same for all calls that end together.
        members: how many calls end together.
    """

    about: dict[str, Any]
    meets: tuple[Any, ...]
    members: int
    issued: float | None = None
    ended: float | None = None


@dataclass
class Calls:
    """`torch.distributed` of one rank, as far as programs here use it; issues nothing."""

    rank: int
    steps: list[tuple[str, Any]] = field(default_factory=list)
    _numbers: Counter[Any] = field(default_factory=Counter)

    def sleep(self, seconds: float) -> None:
        self.steps.append(("sleep", seconds))

    def all_reduce(
        self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, group: Group,
        async_op: bool = False,
    ) -> Work | None:  # fmt: skip
        return self._collective("all_reduce", x, group, None, async_op, reduction=op.name)

    def broadcast(self, x: Tensor, root: int, group: Group) -> None:
        self._collective("broadcast", x, group, root)

    def reduce(self, x: Tensor, root: int, group: Group) -> None:
        self._collective("reduce", x, group, root, reduction="SUM")

    def all_gather(
        self, parts: Sequence[Tensor], x: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        output = sum(each.nbytes for each in parts)
        return self._collective("all_gather", x, group, None, async_op, output=output)

    def gather(self, x: Tensor, parts: Sequence[Tensor] | None, dst: int, group: Group) -> None:
        self._collective("gather", x, group, dst)

    def scatter(self, x: Tensor, parts: Sequence[Tensor] | None, src: int, group: Group) -> None:
        self._collective("scatter", x, group, src)

    def reduce_scatter_tensor(self, out: Tensor, x: Tensor, group: Group) -> None:
        self._collective("reduce_scatter", x, group, None, reduction="SUM")

    def all_to_all_single(self, out: Tensor, x: Tensor, group: Group) -> None:
        self._collective("all_to_all", x, group, None)

    def barrier(self, group: Group) -> None:
        self._collective("barrier", None, group, None)

    def send(self, x: Tensor, peer: int, group: Group) -> None:
        self._add("send", x, group, peer, (self.rank, peer))

    def recv(self, x: Tensor, peer: int, group: Group) -> None:
        self._add("recv", x, group, peer, (peer, self.rank))

    def _collective(
        self, operation: str, x: Tensor | None, group: Group, root: int | None,
        later: bool = False, output: int | None = None, reduction: str = "",
    ) -> Work | None:  # fmt: skip
        return self._add(operation, x, group, root, (), later, output, reduction)

    def _add(
        self, operation: str, x: Tensor | None, group: Group, peer: int | None,
        ends: tuple[int, ...], later: bool = False, output: int | None = None,
        reduction: str = "",
    ) -> Work | None:  # fmt: skip
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__:
            assert frame.f_back is not None
            frame = frame.f_back
        where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        number, of = self._numbers[group.name], (group.name, ends, operation if ends else "")
        turn = self._numbers[of]
        self._numbers[group.name] += 1
        self._numbers[of] += 1
        about = {
            "group": group, "number": number, "operation": operation, "turn": turn,
            "shape": () if x is None else tuple(x.shape), "bytes": 0 if x is None else x.nbytes,
            "dtype": "" if x is None else str(x.dtype).removeprefix("torch."),
            "output": output, "reduction": reduction, "where": f"{where} {frame.f_code.co_name}",
            "peer" if ends else "root": peer,
        }  # fmt: skip
        call = Call(about, (group, ends, turn), 2 if ends else len(group.ranks))
        self.steps.append(("issue", call))
        work = Work(self.steps, call)
        if later:
            return work
        work.wait()
        return None


@dataclass
class Work:
    """What an asynchronous call returns."""

    steps: list[tuple[str, Any]]
    call: Call

    def wait(self) -> None:
        self.steps.append(("wait", self.call))


def traces(ranks: Sequence[Calls], groups: Sequence[Group], timeout: float) -> list[Trace]:
    """The record of each rank after its program has ended, or a wait has failed.

    Args:
        timeout: seconds that a wait may last; 0: nothing is sent, and every wait is over at once.
    """
    came: dict[tuple[Any, ...], list[float]] = {}
    clocks, places = [0.0] * len(ranks), [0] * len(ranks)
    failed: dict[int, Call] = {}

    def step(rank: int) -> bool:
        """Whether the rank's next step could be taken."""
        what, given = ranks[rank].steps[places[rank]]
        clocks[rank] += TICK
        if what == "sleep":
            clocks[rank] += given
        elif what == "issue":
            given.issued = clocks[rank]
            came.setdefault(given.meets, []).append(clocks[rank])
        elif timeout:
            times = came[given.meets]
            if len(times) < given.members:
                return False
            if max(times) > given.issued + timeout:
                failed[rank] = given
                clocks[rank] = given.issued + timeout
                return False
            clocks[rank] = given.ended = max(clocks[rank], *times)
        else:
            given.ended = clocks[rank]
        places[rank] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank, calls in enumerate(ranks):
            while rank not in failed and places[rank] < len(calls.steps) and step(rank):
                moved = True
    for rank, calls in enumerate(ranks):  # who still waits does so in vain
        if rank not in failed and places[rank] < len(calls.steps):
            failed[rank] = calls.steps[places[rank]][1]
            clocks[rank] = failed[rank].issued + timeout  # type: ignore[operator]
    return [
        Trace(
            rank,
            tuple(_recorded(call, failed.get(rank)) for call in _issued(calls)),
            groups=tuple(each for each in groups if rank in each.ranks),
            entered=Counter(
                call.about["group"] for call in _issued(calls)
                if call.about["operation"] not in ("send", "recv")
            ),
            at=clocks[rank],
            host="one",
        )
        for rank, calls in enumerate(ranks)
    ]  # fmt: skip


def _issued(calls: Calls) -> list[Call]:
    return [given for what, given in calls.steps if what == "issue" and given.issued is not None]


def _recorded(call: Call, failed: Call | None) -> records.Call:
    assert call.issued is not None
    return records.Call(
        **call.about, began=call.issued, issued=call.issued, ended=call.ended,
        waiting=call is failed,
    )  # fmt: skip
