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

from commgrid.pipeline_schedules.schedule import Computation, Recv, Schedule, Send
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
        message = schedule.sent(action)
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
    found: list[Program] = []
    for order, out, into in zip(schedule.orders, sends, recvs, strict=True):
        timed: list[tuple[float, bool, Step]] = [(spans[each][1], False, each) for each in order]
        for when in {*out, *into}:  # after the actions that have ended by then
            exchange = Exchange(tuple(out.get(when, ())), tuple(into.get(when, ())))
            timed.append((when, True, exchange))
        found.append(tuple(step for _, _, step in sorted(timed, key=lambda each: each[:2])))
    return tuple(found)
