"""Pipeline schedules as data: the computations of every stage, in order.

A pipeline of p stages with v chunks each cuts the model into p·v *parts*, dealt out like cards:
stage s has the parts s, s + p, s + 2p, …, its chunks 0, 1, 2, …

    p = 4, v = 2      stage 0   stage 1   stage 2   stage 3
            chunk 0   part 0    part 1    part 2    part 3
            chunk 1   part 4    part 5    part 6    part 7

A schedule lists each stage's computations. The messages between stages follow from it (`exchange`),
and so does the duration (`simulator`).

| schedule | from | bubble, of ideal time | live microbatches, at most |
|---|---|---|---|
| `gpipe` | GPipe, arXiv 1811.06965 | (p - 1) / (v · m) | m |
| `one_f_one_b` | PipeDream-Flush, arXiv 2006.09503 | (p - 1) / m | p - stage |
| `interleaved` | Megatron-LM, arXiv 2104.04473 section 2.2 | (p - 1) / (v · m) | more |
| `zb_h1` | zero bubble, arXiv 2401.10241 section 2.2 | a third of 1F1B's | p |

m is the number of microbatches. GPipe's bubble with chunks is for m ≥ p, the last one for that and
equal times of forward, input gradient and weight gradient, see `simulator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from commgrid.errors import SpecError
from commgrid.layout.axis_names import check_word


@dataclass(frozen=True, slots=True)
class Action:
    """Something a stage does with one microbatch in one of its chunks."""

    stage: int
    chunk: int
    microbatch: int


class Computation(Action):
    """An action that runs the chunk."""

    __slots__ = ()
    letter = ""

    def __str__(self) -> str:
        chunk = "" if self.chunk == 0 else chr(ord("a") + self.chunk)
        return f"{self.letter}{self.microbatch}{chunk}"


class Forward(Computation):
    """Runs the chunk; on the last part, the loss as well."""

    __slots__ = ()
    letter = "F"


class Backward(Computation):
    """Gradients of the chunk's inputs and of its weights."""

    __slots__ = ()
    letter = "B"


class BackwardInput(Computation):
    """Gradients of the chunk's inputs only, which the stage before waits for."""

    __slots__ = ()
    letter = "I"


class BackwardWeight(Computation):
    """Gradients of the chunk's weights, some time after its BackwardInput."""

    __slots__ = ()
    letter = "W"


@dataclass(frozen=True, slots=True)
class StageMessage:
    """A microbatch's tensors that cross from part `boundary` to `boundary + 1`, or back.

    Args:
        kind: "activation", which goes to the later part, or "gradient", which comes back.
        boundary: the number of the earlier part.
        microbatch: the number of the microbatch.
    """

    kind: str
    boundary: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} between parts {self.boundary} and " + (
            f"{self.boundary + 1}"
        )


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Sends what the chunk has computed to another stage."""

    peer: int
    message: StageMessage


@dataclass(frozen=True, slots=True)
class Recv(Action):
    """Receives what the chunk will need from another stage."""

    peer: int
    message: StageMessage


Order = tuple[Computation, ...]
"""One stage's computations, first to last."""


@dataclass(frozen=True)
class Schedule:
    """The computations of every stage in one step.

    Args:
        name: its name in messages.
        num_stages, num_microbatches, num_chunks: its size; chunks are per stage.
        orders: one per stage. Any orders whose dependencies can be met, custom ones too.
        backwards: whether it has backwards; False: it is for evaluation.

    Raises:
        SpecError: an action that is missing, there twice, or on another stage than its own.

    Example:
        >>> schedule = one_f_one_b(num_stages=2, num_microbatches=3)
        >>> [str(action) for action in schedule.orders[0]]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    orders: tuple[Order, ...]
    backwards: bool = True

    def __post_init__(self) -> None:
        if len(self.orders) != self.num_stages:
            raise SpecError(
                f"{self}: {len(self.orders)} orders of computations; expected one per stage"
            )
        for stage, order in enumerate(self.orders):
            self._check(stage, order)

    def _check(self, stage: int, order: Order) -> None:
        seen: dict[tuple[type[Computation], int, int], int] = {}
        for action in order:
            if action.stage != stage:
                raise SpecError(
                    f"{self}: stage {stage} is given {action} of stage {action.stage}; "
                    f"expected actions of stage {stage} alone"
                )
            key = (type(action), action.chunk, action.microbatch)
            seen[key] = seen.get(key, 0) + 1
        for chunk in range(self.num_chunks):
            for microbatch in range(self.num_microbatches):
                counts = [
                    seen.pop((kind, chunk, microbatch), 0)
                    for kind in (Forward, Backward, BackwardInput, BackwardWeight)
                ]
                wanted = ([1, 1, 0, 0], [1, 0, 1, 1]) if self.backwards else ([1, 0, 0, 0],)
                if counts not in wanted:
                    raise SpecError(
                        f"{self}: stage {stage} has microbatch {microbatch} of chunk {chunk} "
                        f"{counts} times in F, B, I and W; expected "
                        f"{' or '.join(map(str, wanted))}"
                    )
        if seen:
            kind, chunk, microbatch = next(iter(seen))
            raise SpecError(
                f"{self}: stage {stage} has {kind.letter}{microbatch} of chunk {chunk}, which is "
                f"outside the schedule; expected microbatches 0 to {self.num_microbatches - 1} of "
                f"chunks 0 to {self.num_chunks - 1}"
            )

    @property
    def num_parts(self) -> int:
        """Number of parts that the model is cut into."""
        return self.num_stages * self.num_chunks

    def part(self, action: Action) -> int:
        """The number of the model's part that an action is about."""
        return action.chunk * self.num_stages + action.stage

    def place(self, part: int) -> tuple[int, int]:
        """The stage and chunk that a part is."""
        chunk, stage = divmod(part, self.num_stages)
        return stage, chunk

    def sent(self, action: Computation) -> StageMessage | None:
        """The message that carries an action's result to another part; None: there is none."""
        return self._message(action, self.part(action) - (not isinstance(action, Forward)))

    def needed(self, action: Computation) -> StageMessage | None:
        """The message from another part that an action takes; None: there is none."""
        return self._message(action, self.part(action) - isinstance(action, Forward))

    def _message(self, action: Computation, boundary: int) -> StageMessage | None:
        if isinstance(action, BackwardWeight) or not 0 <= boundary < self.num_parts - 1:
            return None
        kind = "activation" if isinstance(action, Forward) else "gradient"
        return StageMessage(kind, boundary, action.microbatch)

    def __str__(self) -> str:
        chunks = f" of {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        return (
            f"schedule {self.name!r} for {self.num_stages} stages{chunks} and "
            f"{self.num_microbatches} microbatches"
        )


# -- the generators ---------------------------------------------------------------------


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards, chunk by chunk.

    Every microbatch is live in between. With chunks it is the breadth-first schedule
    (arXiv 2211.05953).

    Raises:
        SpecError: a size below 1.
    """

    def order(stage: int) -> Iterator[Computation]:
        for chunk in range(num_chunks):
            for microbatch in range(num_microbatches):
                yield Forward(stage, chunk, microbatch)
        for chunk in reversed(range(num_chunks)):
            for microbatch in range(num_microbatches):
                yield Backward(stage, chunk, microbatch)

    return _schedule("gpipe", num_stages, num_microbatches, num_chunks, order)


def one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """One forward, one backward: a microbatch is let go before the next but p - stage begins.

        warmup     p - 1 - stage forwards
        steady     a forward and a backward in turn
        cooldown   the backwards that are left

    Raises:
        SpecError: a size below 1, or chunks, with which this is `interleaved`.
    """
    _refuse_chunks("1f1b", num_chunks)

    def order(stage: int) -> Iterator[Computation]:
        warmup = min(num_stages - 1 - stage, num_microbatches)
        yield from _alternate(
            warmup,
            [Forward(stage, 0, i) for i in range(num_microbatches)],
            [Backward(stage, 0, i) for i in range(num_microbatches)],
        )

    return _schedule("1f1b", num_stages, num_microbatches, 1, order)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """1F1B over several chunks a stage, microbatches taken p at a time through each of them.

    The bubble shrinks with the number of chunks, what is sent and what is live grow with it.

    Raises:
        SpecError: a size below 1, or a number of microbatches that p does not divide.
    """
    _check_sizes(num_stages, num_microbatches, num_chunks)
    if num_microbatches % num_stages:
        raise SpecError(
            f"num_microbatches={num_microbatches}: the interleaved schedule takes microbatches "
            f"through its chunks {num_stages} at a time, one per stage; expected a multiple of "
            f"pp={num_stages}, such as {-(-num_microbatches // num_stages) * num_stages}"
        )

    def order(stage: int) -> Iterator[Computation]:
        forwards, backwards = [], []
        for first in range(0, num_microbatches, num_stages):
            for chunk in range(num_chunks):
                for microbatch in range(first, first + num_stages):
                    forwards.append(Forward(stage, chunk, microbatch))
                    backwards.append(Backward(stage, num_chunks - 1 - chunk, microbatch))
        warmup = 2 * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages
        yield from _alternate(min(warmup, len(forwards)), forwards, backwards)

    return _schedule("interleaved", num_stages, num_microbatches, num_chunks, order)


def zb_h1(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """1F1B whose weight gradients wait, so that they fill what would be idle at the end.

    Stage s keeps s microbatches' weight gradients for later, which with the forwards it has
    ahead makes p live at most on every stage, as on the first of 1F1B.

    Raises:
        SpecError: a size below 1, or chunks.
    """
    _refuse_chunks("zb-h1", num_chunks)

    def order(stage: int) -> Iterator[Computation]:
        warmup = min(num_stages - 1 - stage, num_microbatches)
        forwards = [Forward(stage, 0, i) for i in range(num_microbatches)]
        inputs = [BackwardInput(stage, 0, i) for i in range(num_microbatches)]
        for action in _alternate(warmup, forwards, inputs):
            yield action
            if isinstance(action, BackwardInput) and action.microbatch >= stage:
                yield BackwardWeight(stage, 0, action.microbatch - stage)
        for microbatch in range(max(num_microbatches - stage, 0), num_microbatches):
            yield BackwardWeight(stage, 0, microbatch)

    return _schedule("zb-h1", num_stages, num_microbatches, 1, order)


def forward_only(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """For evaluation: microbatches taken through each chunk p at a time, in any number.

    Raises:
        SpecError: a size below 1.
    """

    def order(stage: int) -> Iterator[Computation]:
        for first in range(0, num_microbatches, num_stages):
            for chunk in range(num_chunks):
                for microbatch in range(first, min(first + num_stages, num_microbatches)):
                    yield Forward(stage, chunk, microbatch)

    return _schedule(
        "forward-only", num_stages, num_microbatches, num_chunks, order, backwards=False
    )


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}
"""Schedules of `make_schedule`, by name."""


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """The schedule of a name: gpipe, 1f1b, interleaved or zb-h1.

    Raises:
        SpecError: another name, or sizes that do not fit the schedule.

    Example:
        >>> make_schedule("interleaved", num_stages=2, num_microbatches=3, num_chunks=2)
        Traceback (most recent call last):
        commgrid.errors.SpecError: num_microbatches=3: the interleaved schedule takes ...
    """
    check_word("schedule=", name, SCHEDULES)
    return SCHEDULES[name](num_stages, num_microbatches, num_chunks)


def _alternate(
    warmup: int, forwards: Sequence[Computation], backwards: Sequence[Computation]
) -> Iterator[Computation]:
    """`warmup` forwards, then one of each in turn, then the backwards that are left."""
    yield from forwards[:warmup]
    for i, backward in enumerate(backwards):
        yield from forwards[warmup + i : warmup + i + 1]
        yield backward


def _schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    order: Callable[[int], Iterator[Computation]],
    *,
    backwards: bool = True,
) -> Schedule:
    _check_sizes(num_stages, num_microbatches, num_chunks)
    orders = tuple(tuple(order(stage)) for stage in range(num_stages))
    return Schedule(name, num_stages, num_microbatches, num_chunks, orders, backwards)


def _check_sizes(num_stages: int, num_microbatches: int, num_chunks: int) -> None:
    for key, value in (
        ("num_stages", num_stages),
        ("num_microbatches", num_microbatches),
        ("num_chunks", num_chunks),
    ):
        if type(value) is not int or value < 1:
            raise SpecError(f"{key}={value!r}: expected an integer of 1 or more")


def _refuse_chunks(name: str, num_chunks: int) -> None:
    if num_chunks != 1:
        raise SpecError(
            f"num_chunks={num_chunks}: schedule {name!r} has one chunk per stage; expected 1, or "
            "schedule='interleaved', which is 1F1B over several"
        )
