"""Exchanges: the messages between stages for a schedule, in an order without a deadlock.

A schedule is first simulated with every forward, input gradient and weight gradient taking 1. The
result of an action that ends at time t is sent at t, and received at t: on both stages after all
actions that have ended by then. The messages of a stage at one time are one exchange.

    stage 0   F0 ─┬─ F1 ─┬─ …            at time 1: stage 0 sends F0's result, stage 1 receives it
    stage 1    .  └─ F0 ─┼─ B0 ══ …      at time 2: stage 0 sends F1's, and so on
                         └ received before B0, which runs meanwhile

So every exchange meets exchanges of the same time only. Even if stages waited in each exchange
until it is complete, they would never wait for each other in a circle. This needs no buffering by
the network, and no order of the messages within one exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

from commgrid.pipeline_schedules.schedule import (
    BackwardWeight,
    Computation,
    Forward,
    Recv,
    Schedule,
    Send,
    StageMessage,
)
from commgrid.pipeline_schedules.simulator import simulate


@dataclass(frozen=True)
class Exchange:
    """The messages of a stage at one time, in one batch."""

    sends: tuple[Send, ...]
    recvs: tuple[Recv, ...]


Step = Computation | Exchange
Program = tuple[Step, ...]
"""All a stage does in one step of training, first to last."""


def programs(schedule: Schedule) -> tuple[Program, ...]:
    """Each stage's computations and exchanges.

    Raises:
        SpecError: the schedule deadlocks.

    Example:
        >>> from commgrid.pipeline_schedules.schedule import gpipe
        >>> for step in programs(gpipe(num_stages=2, num_microbatches=1))[1]:
        ...     print(step if isinstance(step, Computation) else [*step.sends, *step.recvs])
        [Recv(stage=1, chunk=0, microbatch=0, peer=0, message=StageMessage(kind='activation', \
boundary=0, microbatch=0))]
        F0
        B0
        [Send(stage=1, chunk=0, microbatch=0, peer=0, message=StageMessage(kind='gradient', \
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


def message_of(schedule: Schedule, action: Computation) -> StageMessage | None:
    """The message that carries an action's result to another part; None: there is none."""
    part = schedule.part(action)
    if isinstance(action, Forward):
        last = part + 1 == schedule.num_parts
        return None if last else StageMessage("activation", part, action.microbatch)
    if isinstance(action, BackwardWeight) or part == 0:
        return None
    return StageMessage("gradient", part - 1, action.microbatch)
