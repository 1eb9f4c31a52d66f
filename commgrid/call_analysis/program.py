"""Programs of ranks as data: collectives, messages and waits in order.

    programs = {0: [Call(tp, "all_reduce", handle="a"), Call(dp, "all_reduce"), Wait(("a",))], …}

A call without a handle is waited for where it stands. One with a handle runs beside
later calls until a `Wait` for the handle, or for ever without one. Several messages that a
backend starts as one are a `Batch`. The steps of one thread follow each other; those of a rank's
threads are listed as they were issued. `rules` decides whether such programs come to an end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from commgrid.call_analysis.event import EventSide
from commgrid.call_analysis.finding import Finding
from commgrid.call_analysis.standing import Standings
from commgrid.call_analysis.wait_cycle import for_ever
from commgrid.call_records.call import Call, Group, Handle
from commgrid.call_records.trace import Trace
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
        thread: the number of the thread that waits.
    """

    handles: tuple[Handle, ...] = ()
    thread: int = 0


Step = Call | Batch | Wait
Programs = Mapping[int, Sequence[Step]]
"""By rank, what it does first to last."""


def calls_of(step: Step) -> tuple[Call, ...]:
    """The calls that a step issues."""
    if isinstance(step, Call):
        return (step,)
    return step.calls if isinstance(step, Batch) else ()


def thread_of(step: Step) -> int:
    """The thread of its rank that takes a step."""
    return step.thread if not isinstance(step, Batch) else step.calls[0].thread if step.calls else 0


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


def from_traces(found: Sequence[Trace]) -> dict[int, list[Step]]:
    """Return the program of every rank.

    Raises:
        SpecError: a trace whose first calls were not kept, a communicator that is no grid's, a
            rank without a trace, or groups that ranks have made in different orders.
    """
    if (crossed := crossed_group(found)) is not None:
        raise SpecError(crossed.text)
    traced = {trace.rank for trace in found}
    programs: dict[int, list[Step]] = {}
    for trace in found:
        if trace.dropped:
            raise SpecError(
                f"rank {trace.rank}: its first {trace.dropped:,} calls were not kept, and what "
                "they met cannot be told; trace fewer steps, or commgrid.trace.start(capacity=…)"
            )
        checked = set()
        for call in trace.calls:
            if id(call.group) not in checked:
                checked.add(id(call.group))
                _check_members(trace, call, traced)
        programs[trace.rank] = _steps(trace)
    return programs


def crossed_group(found: Sequence[Trace]) -> Finding | None:
    """Find a group that torch has numbered, and whose members differ between ranks.

    torch counts the groups that `new_group` makes: every rank makes all of them, in one order.
    """
    first: dict[str, tuple[int, Group]] = {}
    for trace in found:
        for group in trace.groups:
            key = group.key or group.name
            if not group.ranks or not key.partition("@")[0].isdecimal():
                continue
            rank, other = first.setdefault(key, (trace.rank, group))
            if other.ranks != group.ranks:
                since = min((call.began for each in found for call in each.calls), default=0.0)
                return Finding(
                    "other members", (rank, trace.rank), group.name, (), "new_group", 0, (), (),
                    since, None,
                    f"group {group.name} has ranks {list(other.ranks)} on rank {rank} and "
                    f"{list(group.ranks)} on rank {trace.rank}: they call "
                    "torch.distributed.new_group in different orders. Have every rank make all "
                    "groups, in one order",
                )  # fmt: skip
    return None


def whole(standings: Standings) -> list[Trace]:
    """Traces with only the calls of which it is known whether all sides issue them.

    Left out are calls on a communicator whose ranks or records are missing, messages to a rank that
    receives from any source, and calls of which another side may still be issued, as its rank runs,
    was killed or was stopped. A rank in a deadlock issues nothing more.
    """
    waits = [wait for own in standings.waits.values() for wait in own]
    stuck = {(wait.rank, wait.call.thread) for wait in for_ever(standings, waits)}

    def is_open(rank: int) -> bool:
        if standings.is_unknown(rank):
            return True
        trace, own = standings.traces[rank], {(rank, each) for each in standings.threads(rank)}
        is_dry = all(group.backend == "fake" for group in trace.groups)  # saved at its end
        return not (trace.state in ("", "ended") or is_dry or (own and own <= stuck))

    def is_known(side: EventSide | None) -> bool:
        if side is None or not side.call.group.ranks:
            return False
        ranks = (*side.call.group.ranks, *side.event.needs)
        return standings.traces.keys() >= set(ranks) and not any(
            is_open(rank) for rank in standings.absent(side.event)
        )

    sides = standings.matched.sides
    return [
        replace(
            trace,
            calls=tuple(
                call for call, side in zip(trace.calls, sides[trace.rank], strict=True)
                if is_known(side)
            ),
        )
        for trace in standings.traces.values()
    ]  # fmt: skip


def _check_members(trace: Trace, call: Call, traced: set[int]) -> None:
    """Refuse a call on a communicator of which not all ranks have a trace."""
    if not call.group.ranks:
        raise SpecError(
            f"rank {trace.rank}: {call.operation} at {call.where} is on {call.group.name!r}, "
            "which is no communicator of a commgrid grid; whose ranks it has is not known"
        )
    if missing := [rank for rank in call.group.ranks if rank not in traced]:
        raise SpecError(
            f"rank {missing[0]} of {call.group.short} has no trace beside rank "
            f"{trace.rank}'s; give the folder with those of all ranks"
        )


def _steps(trace: Trace) -> list[Step]:
    """A rank's calls and waits, by time; a call that was over at its return has waited."""
    timed: list[tuple[float, int, Step | int]] = []
    batches: dict[int, list[Call]] = {}
    for at, made in enumerate(trace.calls):
        batch = trace.batches.get((made.group, made.number or 0))
        waited_here = batch is None and (made.issued is None or made.ended == made.issued)
        call = replace(made, handle=None if waited_here else at)
        if batch is None:
            timed.append((made.began, 2 * at, call))
        else:
            if batch not in batches:
                timed.append((made.began, 2 * at, batch))
            batches.setdefault(batch, []).append(call)
        if not waited_here and made.ended is not None and made.ended != made.issued:
            timed.append((made.ended, 2 * at + 1, Wait((at,), made.thread)))
    timed.sort(key=lambda each: each[:2])
    return [Batch(tuple(batches[step])) if isinstance(step, int) else step for _, _, step in timed]
