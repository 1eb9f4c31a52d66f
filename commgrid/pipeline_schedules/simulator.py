"""Simulator: a schedule's duration, idle time and live microbatches.

A stage computes one action at a time, in its order; an action starts when its stage is free and
its dependencies are met:

    forward of part q            the forward of part q - 1, and its transfer
    backward (input) of part q   the forward of part q; the backward of part q + 1, and its transfer
    backward (weight) of part q  the backward (input) of part q

With F, I, W for forward, input gradient and weight gradient (B = I + W), p stages, v chunks, m
microbatches and free transfers, the idle time of a step is

    gpipe, 1f1b, interleaved   (p - 1) · (F + B)                          with times of one chunk
    zb-h1                      (p - 1) · (F + I) - min(m - 1, p - 1) · W  for W at most F and I
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from commgrid.errors import SpecError
from commgrid.pipeline_schedules.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Computation,
    Forward,
    Schedule,
    StageMessage,
)

Seconds = float | Mapping[tuple[int, int], float]
"""One time for all chunks, or a table of them by (stage, chunk)."""


@dataclass(frozen=True)
class Times:
    """Time of each kind of action, in any one unit.

    Args:
        forward, backward_input, backward_weight: of one chunk. A Backward takes the sum of the
            latter two.
        transfer: of an activation or a gradient between two stages; it keeps neither busy.
    """

    forward: Seconds = 1.0
    backward_input: Seconds = 1.0
    backward_weight: Seconds = 1.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        for key in ("forward", "backward_input", "backward_weight", "transfer"):
            given = getattr(self, key)
            for value in given.values() if isinstance(given, Mapping) else [given]:
                if not (math.isfinite(value) and value >= 0):
                    raise SpecError(f"{key}={given!r}: expected finite numbers of 0 or more")

    def of(self, action: Computation) -> float:
        """The time of one action.

        Raises:
            SpecError: a table that has no time for its stage and chunk.
        """
        kinds = {
            Forward: [self.forward],
            Backward: [self.backward_input, self.backward_weight],
            BackwardInput: [self.backward_input],
            BackwardWeight: [self.backward_weight],
        }[type(action)]
        place = (action.stage, action.chunk)
        try:
            return sum(kind[place] if isinstance(kind, Mapping) else kind for kind in kinds)
        except KeyError as error:
            raise SpecError(
                f"the times of {action} have no entry for (stage, chunk) {place}; add it"
            ) from error


Span = tuple[float, float]
"""Start and end."""

_STAGES = 8  # that a line lists


@dataclass(frozen=True, repr=False)
class Simulation:
    """The simulated course of a schedule with given times.

    >>> from commgrid.pipeline_schedules.schedule import one_f_one_b
    >>> print(simulate(one_f_one_b(4, 8)))
    schedule '1f1b' for 4 stages and 8 microbatches
      takes 33, bubble 37.5% of ideal time
      keeps at most 4 live microbatches a stage (4, 3, 2, 1)
      print(simulation.draw()) shows it as a staircase

    Args:
        schedule: what was simulated.
        spans: start and end of each action, in the unit of the times.
        peak_live: for each stage, the largest number of pairs of a chunk and a microbatch between
            its forward and the end of its backward (of the weight part, if split).
    """

    schedule: Schedule
    spans: Mapping[Computation, Span]
    peak_live: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """From the first action's start to the last one's end."""
        return max(end for _, end in self.spans.values())

    @property
    def busy(self) -> tuple[float, ...]:
        """For each stage, the time it computes."""
        return tuple(
            sum(self.spans[action][1] - self.spans[action][0] for action in order)
            for order in self.schedule.orders
        )

    @property
    def bubble_fraction(self) -> float:
        """Idle time over ideal time: the busiest stage's waiting time over its computing time."""
        ideal = max(self.busy)
        return (self.makespan - ideal) / ideal if ideal else 0.0

    def __repr__(self) -> str:
        return (
            f"Simulation({self.schedule}, makespan {self.makespan:g}, "
            f"bubble {self.bubble_fraction:.1%})"
        )

    def __str__(self) -> str:
        most, stages = max(self.peak_live), ", ".join(map(str, self.peak_live[:_STAGES]))
        more = ", …" if len(self.peak_live) > _STAGES else ""
        return (
            f"{self.schedule}\n"
            f"  takes {self.makespan:g}, bubble {self.bubble_fraction:.1%} of ideal time\n"
            f"  keeps at most {most} live microbatch{'es' * (most > 1)} a stage ({stages}{more})\n"
            "  print(simulation.draw()) shows it as a staircase"
        )

    def draw(self, width: int | None = None, *, columns: int | None = None) -> str:
        """A staircase: a line per stage.

        F, B, I and W with the number of the microbatch are forward, backward and its two parts,
        input and weight; chunks after the first are b, c, d.

        Args:
            width: characters per unit of time; None: as needed.
            columns: maximum length of a line; longer ones continue in blocks below, after an empty
                line. None: no limit.

        >>> from commgrid.pipeline_schedules.schedule import one_f_one_b
        >>> print(simulate(one_f_one_b(3, 3)).draw())
        stage 0  F0 F1 F2 .  .  .  .  B0=== .  B1=== .  B2===
        stage 1  .  F0 F1 .  .  B0=== F2 B1=== .  B2=== .  .
        stage 2  .  .  F0 B0=== F1 B1=== F2 B2=== .  .  .  .
        """
        width = width or 1 + max(len(str(action)) for action in self.spans)
        labels = [f"stage {stage}  " for stage in range(self.schedule.num_stages)]
        lines = []
        for order in self.schedule.orders:
            line = list(".".ljust(width)) * math.ceil(self.makespan)
            for action in order:
                start, end = (round(edge * width) for edge in self.spans[action])
                room, fill = max(end - start - 1, 0), "=" if end - start > width else " "
                line[start:end] = f"{str(action)[:room]:{fill}<{room}} "[: end - start]
            lines.append("".join(line))
        long, label = max(map(len, lines)), len(labels[-1])
        part = long if columns is None else max((columns - label) // width, 1) * width
        return "\n\n".join(
            "\n".join(
                f"{name:{label}}{line[begin : begin + part]}".rstrip()
                for name, line in zip(labels, lines, strict=True)
            )
            for begin in range(0, long, part)
        )


def simulate(schedule: Schedule, times: Times | None = None) -> Simulation:
    """Simulates a schedule.

    Args:
        schedule: any.
        times: None: every kind of action takes 1 and transfers nothing.

    Raises:
        SpecError: the schedule is stuck; names what each stage waits for.

    Example:
        >>> from commgrid.pipeline_schedules.schedule import make_schedule
        >>> for name in ("gpipe", "1f1b", "zb-h1"):
        ...     found = simulate(make_schedule(name, num_stages=4, num_microbatches=8))
        ...     print(name, found.makespan, found.bubble_fraction, found.peak_live)
        gpipe 33.0 0.375 (8, 8, 8, 8)
        1f1b 33.0 0.375 (4, 3, 2, 1)
        zb-h1 27.0 0.125 (4, 4, 4, 4)
    """
    times = times or Times()
    transfer = times.transfer if schedule.num_stages > 1 else 0.0
    spans: dict[Computation, Span] = {}
    arrived: dict[StageMessage, float] = {}
    at, free = [0] * schedule.num_stages, [0.0] * schedule.num_stages
    moving = True
    while moving:
        moving = False
        for stage, order in enumerate(schedule.orders):
            while at[stage] < len(order):
                action = order[at[stage]]
                own, needed = _AFTER.get(type(action)), schedule.needed(action)
                if own and own(stage, action.chunk, action.microbatch) not in spans:
                    break
                if needed and needed not in arrived:
                    break
                start = max(free[stage], arrived[needed]) if needed else free[stage]
                free[stage] = start + times.of(action)
                spans[action] = (start, free[stage])
                if sent := schedule.sent(action):
                    arrived[sent] = free[stage] + transfer
                at[stage] += 1
                moving = True
    stuck = [
        f"stage {stage} before {order[at[stage]]}"
        for stage, order in enumerate(schedule.orders)
        if at[stage] < len(order)
    ]
    if stuck:
        raise SpecError(f"{schedule} waits for ever: {', '.join(stuck)}")
    return Simulation(schedule, spans, tuple(_peak(order) for order in schedule.orders))


_AFTER = {Backward: Forward, BackwardInput: Forward, BackwardWeight: BackwardInput}
"""The action of the same microbatch and chunk that must end before one starts."""


def _peak(order: tuple[Computation, ...]) -> int:
    live = peak = 0
    for action in order:
        live += isinstance(action, Forward)
        peak = max(peak, live)
        live -= isinstance(action, Backward | BackwardWeight)
    return peak
