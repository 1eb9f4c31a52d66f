"""Programs of a pipeline's stages for one step: messages, headers, and the end of the step.

A stage posts an exchange and continues. It waits for a message before the computation that needs
it, and for all its sends after the last one. The first message over a boundary follows a header,
which the receiver waits for at once. On NCCL an exchange is a batch; on gloo its messages travel
one by one, sends first. In between, a stage drops sends that are over, and waits for the oldest
once sixteen are under way, as in `pipeline.p2p`.

Beside the messages, where asked for: each stage's gradients reduced over copies of the pipeline
once a chunk's last backward has passed, gradients of shared embeddings summed over the first and
the last stage, and the step's norm over all stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from commgrid.call_analysis.program import Batch, Step, Wait
from commgrid.call_analysis.verification import Verdict, check
from commgrid.call_records.call import Call, Group
from commgrid.errors import SpecError
from commgrid.pipeline_schedules.messages import Exchange, Program, programs
from commgrid.pipeline_schedules.schedule import (
    Computation,
    Forward,
    Recv,
    Schedule,
    Send,
    StageMessage,
)

MOST_LEAVING = 16
"""As many messages of a stage are on their way at most, as in `pipeline.p2p`."""


@dataclass(frozen=True)
class Around:
    """The other calls of a step.

    Args:
        copies: of the pipeline, whose gradients are averaged; 1: none are.
        shared: whether the first and last stage share weights.
        norm: whether the step ends with a reduction over all ranks, as a gradient norm.
    """

    copies: int = 1
    shared: bool = False
    norm: bool = False


def programs_of(schedule: Schedule, around: Around | None = None) -> dict[int, list[Step]]:
    """Return the program of each rank's first step; rank = copy · stages + stage.

    Args:
        schedule: any.
        around: what comes beside the messages; None: nothing.

    Raises:
        SpecError: the schedule waits for ever.

    Example:
        >>> from commgrid.pipeline_schedules.schedule import gpipe
        >>> found = programs_of(gpipe(num_stages=2, num_microbatches=1))
        >>> [step.calls[0].where for step in found[0] if isinstance(step, Batch)][:2]
        ['header of boundary 0', 'activation of microbatch 0 between parts 0 and 1']
    """
    around = around or Around()
    stages = schedule.num_stages
    made = programs(schedule)
    everyone = Group("dp_pp", tuple(range(stages * around.copies)))
    alike = [
        Group("dp", tuple(copy * stages + stage for copy in range(around.copies)))
        for stage in range(stages)
    ]
    found: dict[int, list[Step]] = {}
    for copy in range(around.copies):
        first = copy * stages
        pipeline = Group("pp", tuple(range(first, first + stages)))
        ends = Group("embedding", (first, first + stages - 1))
        for stage, program in enumerate(made):
            steps = list(_Stage(schedule, stage, pipeline, alike[stage], around).steps(program))
            if around.shared and stages > 1 and stage in (0, stages - 1):
                steps.append(Call(ends, "all_reduce", where="shared weights"))
            if around.norm and len(everyone.ranks) > 1:
                steps.append(Call(everyone, "all_reduce", where="gradient norm"))
            found[first + stage] = steps
    return found


class _Stage:
    """One rank's way through its program."""

    def __init__(
        self, schedule: Schedule, stage: int, pipeline: Group, alike: Group, around: Around
    ) -> None:
        self.schedule, self.pipeline, self.alike, self.around = schedule, pipeline, alike, around
        self.declared: set[int] = set()
        self.leaving: deque[str] = deque()
        last: dict[int, Computation] = {}
        for action in schedule.orders[stage]:
            if not isinstance(action, Forward):
                last[action.chunk] = action
        self.final = set(last.values())

    def steps(self, program: Program) -> Iterator[Step]:
        for step in program:
            if isinstance(step, Exchange):
                yield from self._exchange(step)
                continue
            needed = self.schedule.needed(step)
            if needed is not None and self.schedule.num_stages > 1:
                yield Wait((str(needed),))
            if step in self.final and self.around.copies > 1:
                handle = f"gradients {step.chunk}"
                yield Call(self.alike, "all_reduce", handle=handle, where=f"gradients after {step}")
        if self.leaving:
            yield Wait(tuple(self.leaving))
        if self.final and self.around.copies > 1:
            yield Wait(tuple(f"gradients {action.chunk}" for action in self.final))

    def _exchange(self, step: Exchange) -> Iterator[Step]:
        headers: list[Call] = []
        news: list[str] = []
        actions: tuple[Send | Recv, ...] = (*step.sends, *step.recvs)
        for action in actions:
            boundary = action.message.boundary
            if boundary not in self.declared:
                self.declared.add(boundary)
                name = f"header of boundary {boundary}"
                headers.append(self._call(action, name, (128,)))
                if isinstance(action, Send):
                    self.leaving.append(name)
                else:
                    news.append(name)
        if headers:
            yield Batch(tuple(headers))
            if news:
                yield Wait(tuple(news))
        calls = [self._call(action, str(action.message), ()) for action in actions]
        yield Batch(tuple(calls))
        self.leaving += [str(send.message) for send in step.sends]
        while len(self.leaving) > MOST_LEAVING:
            yield Wait((self.leaving.popleft(),))

    def _call(self, action: Send | Recv, name: str, shape: tuple[int, ...]) -> Call:
        operation = "send" if isinstance(action, Send) else "recv"
        ranks = self.pipeline.ranks
        return Call(self.pipeline, operation, ranks[action.peer], shape, handle=name, where=name)


def check_schedule(schedule: Schedule) -> None:
    """Refuses a schedule whose stages could not all finish, under any rules.

    Raises:
        SpecError: names stages, microbatches and what they wait for in a circle.
    """
    found = check(_by_order(schedule), "gloo")
    if not found.finishes:
        circle = "\n".join(f"  stage {p.rank} waits for {p.where}" for p in found.places)
        raise SpecError(
            f"{schedule} cannot finish: the first of these messages is sent after the second has "
            f"come, and so on round; change the order of a stage\n{circle}"
        )
    found = prove(schedule)
    if not found.finishes:
        raise SpecError(f"{schedule} cannot send all it has to: {found}\n{found.draw()}")


def _by_order(schedule: Schedule) -> dict[int, list[Step]]:
    """Each stage's computations alone: it takes what one needs just before, and sends at once."""
    pipeline = Group("pp", tuple(range(schedule.num_stages)))
    tags: dict[StageMessage, int] = {}
    found: dict[int, list[Step]] = {}
    for stage, order in enumerate(schedule.orders):
        steps: list[Step] = []
        for action in order if schedule.num_stages > 1 else ():
            needed, made = schedule.needed(action), schedule.sent(action)
            if needed is not None:
                other = needed.boundary + (needed.kind == "gradient")
                peer = schedule.place(other)[0]
                where = f"the {needed}, before {action}"
                tag = tags.setdefault(needed, len(tags))
                steps.append(Call(pipeline, "recv", peer, tag=tag, where=where))
            if made is not None:
                later = made.boundary + (made.kind == "activation")
                peer = schedule.place(later)[0]
                tag = tags.setdefault(made, len(tags))
                steps.append(Call(pipeline, "send", peer, tag=tag, handle=0, where=f"the {made}"))
        found[stage] = steps
    return found


def prove(schedule: Schedule) -> Verdict:
    """Check a schedule with every other call that a step can have, under the strictest rules.

    If it finishes, it does so under the rules of nccl and gloo, and without these calls: both only
    let calls begin earlier.
    """
    return check(programs_of(schedule, Around(copies=2, shared=True, norm=True)), "strict")
