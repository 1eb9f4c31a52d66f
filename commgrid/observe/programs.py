"""Programs of ranks as data: collectives, messages and waits in order.

    programs = {0: [Call(tp, "all_reduce", handle="a"), Call(dp, "all_reduce"), Wait(("a",))], …}

A call without a handle is waited for where it stands. One with a handle runs beside
later calls until a `Wait` for the handle, or for ever without one. Several messages that a
backend starts as one are a `Batch`. `order` decides whether such programs come to an end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commgrid.call_records.call import Call, Handle
from commgrid.errors import SpecError


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages that are started as one, as `batch_isend_irecv` does.

    On NCCL all of them are over together, so that a wait for one is a wait for all.

    Args:
        calls: sends and receives on one communicator.
        handle: what a `Wait` names for all of them; None: each has its own.
    """

    calls: tuple[Call, ...]
    handle: Handle | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Until calls are over.

    Args:
        handles: whose; none: of all calls so far, as a synchronisation of the device.
    """

    handles: tuple[Handle, ...] = ()


Step = Call | Batch | Wait
Programs = Mapping[int, Sequence[Step]]
"""By rank, what it does first to last."""


def calls_of(step: Step) -> tuple[Call, ...]:
    """The calls that a step issues."""
    if isinstance(step, Call):
        return (step,)
    return step.calls if isinstance(step, Batch) else ()


def check_sides(programs: Programs) -> None:
    """Refuses what no rank could issue.

    Raises:
        SpecError: a rank outside its communicator, a message without its other side, a wait for a
            handle that was not issued, a member without a program.
    """
    known: set[int] = set()
    for rank, steps in programs.items():
        handles: set[Handle | None] = set()
        for step in steps:
            if isinstance(step, Wait):
                for handle in step.handles:
                    if handle not in handles:
                        raise SpecError(
                            f"rank {rank} waits for {handle!r}, which it has not issued; expected "
                            "the handle of an earlier call"
                        )
                continue
            handles.add(step.handle)
            for call in calls_of(step):
                handles.add(call.handle)
                _check_call(rank, call)
                if id(call.group) not in known:
                    known.add(id(call.group))
                    if missing := [one for one in call.group.ranks if one not in programs]:
                        raise SpecError(
                            f"ranks {missing[:8]} of {call.group.name} have no program; give those "
                            f"of all its ranks {list(call.group.ranks[:8])}"
                        )


def _check_call(rank: int, call: Call) -> None:
    ranks = call.group.ranks
    if rank not in ranks:
        raise SpecError(
            f"rank {rank} issues {call.operation} on {call.group.name} of ranks {list(ranks[:8])}, "
            "which it is not one of"
        )
    if not call.is_transfer:
        return
    if call.peer is None:
        raise SpecError(
            f"rank {rank}: {call.operation} on {call.group.name} at {call.where or '?'} takes from "
            "anybody; whom it meets is decided while it runs, and no check before can tell. Name "
            "the sender"
        )
    if call.peer not in ranks:
        raise SpecError(
            f"rank {rank}: {call.operation} on {call.group.name} with rank {call.peer}, which is "
            f"not one of its ranks {list(ranks[:8])}"
        )
