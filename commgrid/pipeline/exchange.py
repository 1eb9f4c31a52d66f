"""What the stages send each other for a schedule, in an order in which nobody waits for ever.

A schedule is first simulated with every forward, input gradient and weight gradient taking 1. The
result of an action that ends at time t is sent at t, and received at t: on both stages after all
actions that have ended by then. What a stage sends and receives at one time is one exchange.

    stage 0   F0 ─┬─ F1 ─┬─ …            at time 1: stage 0 sends F0's result, stage 1 receives it
    stage 1    .  └─ F0 ─┼─ B0 ══ …      at time 2: stage 0 sends F1's, and so on
                         └ received before B0, which runs meanwhile

So every exchange meets exchanges of the same time only, and time goes on: even stages that would
wait in each exchange until it is complete never wait for each other in a circle. It takes no care
of the network's buffering, nor of the order in which one exchange's messages are started.
"""

from __future__ import annotations

from dataclasses import dataclass

from commgrid.errors import SpecError
from commgrid.pipeline.schedule import (
    BackwardWeight,
    Computation,
    Forward,
    Message,
    Recv,
    Schedule,
    Send,
)
from commgrid.pipeline.simulator import simulate


@dataclass(frozen=True)
class Exchange:
    """What a stage sends and receives at one time, in one batch."""

    sends: tuple[Send, ...]
    recvs: tuple[Recv, ...]


Step = Computation | Exchange
Program = tuple[Step, ...]
"""All a stage does in one step of training, first to last."""


def programs(schedule: Schedule) -> tuple[Program, ...]:
    """Each stage's computations and exchanges.

    Raises:
        SpecError: the schedule waits for ever.

    Example:
        >>> from commgrid.pipeline.schedule import gpipe
        >>> for step in programs(gpipe(num_stages=2, num_microbatches=1))[1]:
        ...     print(step if isinstance(step, Computation) else [*step.sends, *step.recvs])
        [Recv(stage=1, chunk=0, microbatch=0, peer=0, message=Message(kind='activation', \
boundary=0, microbatch=0))]
        F0
        B0
        [Send(stage=1, chunk=0, microbatch=0, peer=0, message=Message(kind='gradient', \
boundary=0, microbatch=0))]
    """
    spans = simulate(schedule).spans
    sends: list[dict[float, list[Send]]] = [{} for _ in schedule.orders]
    recvs: list[dict[float, list[Recv]]] = [{} for _ in schedule.orders]
    for action, (_, when) in spans.items():
        message = message_of(schedule, action)
        if message is None:
            continue
        later = message.boundary + (message.kind == "activation")
        stage, chunk = schedule.place(later)
        if stage == action.stage:
            continue  # between two chunks of one stage
        send = Send(action.stage, action.chunk, action.microbatch, stage, message)
        recv = Recv(stage, chunk, action.microbatch, action.stage, message)
        sends[action.stage].setdefault(when, []).append(send)
        recvs[stage].setdefault(when, []).append(recv)
    return tuple(
        _program(
            [(spans[action][1], action) for action in order],
            {
                when: Exchange(tuple(out.get(when, ())), tuple(into.get(when, ())))
                for when in sorted({*out, *into})
            },
        )
        for order, out, into in zip(schedule.orders, sends, recvs, strict=True)
    )


def _program(order: list[tuple[float, Computation]], exchanges: dict[float, Exchange]) -> Program:
    """Each exchange after the actions that have ended by its time."""
    steps: list[Step] = []
    waiting = list(reversed(exchanges))
    for end, action in order:
        while waiting and waiting[-1] < end:
            steps.append(exchanges[waiting.pop()])
        steps.append(action)
    return (*steps, *(exchanges[when] for when in reversed(waiting)))


def message_of(schedule: Schedule, action: Computation) -> Message | None:
    """What an action's result is to another part; None: nothing."""
    part = schedule.part(action)
    if isinstance(action, Forward):
        last = part + 1 == schedule.num_parts
        return None if last else Message("activation", part, action.microbatch)
    if isinstance(action, BackwardWeight) or part == 0:
        return None
    return Message("gradient", part - 1, action.microbatch)


def check_programs(stages: tuple[Program, ...]) -> None:
    """Proves that stages that wait in every exchange until it is complete all come to an end.

    Raises:
        SpecError: a message that is sent or received only, or stages that wait in a circle; names
            the exchanges they are stuck in.
    """
    sent = {send.message for program in stages for step in program for send in _sends(step)}
    received = {recv.message for program in stages for step in program for recv in _recvs(step)}
    for message in sent ^ received:
        how = "sent, but never received" if message in sent else "received, but never sent"
        raise SpecError(f"the {message} is {how}")
    at = [0] * len(stages)
    moving = True
    while moving:
        moving = False
        for stage, program in enumerate(stages):
            while at[stage] < len(program) and isinstance(program[at[stage]], Computation):
                at[stage] += 1
                moving = True
        for group in _complete(stages, at):
            moving = True
            for stage in group:
                at[stage] += 1
    stuck = [f"stage {s} at step {i}" for s, i in enumerate(at) if i < len(stages[s])]
    if stuck:
        raise SpecError(f"the stages wait for each other in a circle: {', '.join(stuck)}")


def _complete(stages: tuple[Program, ...], at: list[int]) -> list[set[int]]:
    """Sets of stages whose current exchanges are complete among themselves."""
    current = {s: program[at[s]] for s, program in enumerate(stages) if at[s] < len(program)}
    offered = {send.message for step in current.values() for send in _sends(step)}
    wanted = {recv.message for step in current.values() for recv in _recvs(step)}
    waiting = {stage for stage, step in current.items() if isinstance(step, Exchange)}
    while True:
        met = {
            stage for stage in waiting
            if all(s.message in wanted and s.peer in waiting for s in _sends(current[stage]))
            and all(r.message in offered and r.peer in waiting for r in _recvs(current[stage]))
        }  # fmt: skip
        if met == waiting:
            return [met] if met else []
        waiting = met


def _sends(step: Step) -> tuple[Send, ...]:
    return step.sends if isinstance(step, Exchange) else ()


def _recvs(step: Step) -> tuple[Recv, ...]:
    return step.recvs if isinstance(step, Exchange) else ()
