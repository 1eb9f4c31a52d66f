"""Agreement of all ranks of a save or a load: group, equal arguments and copies, progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, wraps
from typing import Any, ParamSpec, TextIO, TypeVar, cast

from torch import nn
from torch.distributed import ProcessGroup

from commgrid.checkpoint.writer import Report
from commgrid.collectives.common_group import common_group
from commgrid.collectives.objects import while_others_wait
from commgrid.collectives.plain import all_gather
from commgrid.equality.digest import device_for
from commgrid.equality.values import number_of
from commgrid.errors import (
    CheckpointError,
    CommGridError,
    GridMismatchError,
    UnknownGroupError,
)
from commgrid.rendezvous.timeouts import timeouts
from commgrid.replicas import Copy, differing, groups_along
from commgrid.resharding.item import Item, Value
from commgrid.resharding.model_state import ModelState, chunks_of
from commgrid.resharding.naming import SharedNames
from commgrid.resharding.optimizer_state import Optimizers
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.named_failures import named_failures
from commgrid.runtime.registry import get_grid
from commgrid.torch_compat.world import group_timeout

Model = nn.Module | Sequence[nn.Module]
"""A module, or a pipeline stage's chunks."""
Call = dict[str, Any]
"""The arguments of a call, compared between ranks; of `extra` a number for each value, and of
`shared` and `own_axes` what other stages have too, and members of an ensemble may have apart."""
Progress = bool | Callable[[int, int], object]

P = ParamSpec("P")
T = TypeVar("T")


def tells_failures(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: if a rank ends within the call, all others raise an error that names it.

    An error that all ranks raise together, as by `at_first`, leaves the grid usable.
    """

    @wraps(function)
    def telling(*args: P.args, **kwargs: P.kwargs) -> T:
        grid = cast("HyperCommGrid | None", kwargs.get("grid")) or get_grid()
        kwargs["grid"] = grid
        if grid.is_destroyed:  # the function has an error of its own
            return function(*args, **kwargs)
        with named_failures(
            grid, lambda: f"checkpoint.{function.__name__}", agreed=(CommGridError,)
        ):
            return function(*args, **kwargs)

    return telling


def everyone(grid: HyperCommGrid) -> ProcessGroup | None:
    """The group of all ranks of the grid; None: there is one."""
    axes = [axis for axis in reversed(grid.spec.regions[0].axes) if grid.size(axis) > 1]
    try:
        return common_group(grid.get_group(*axes), grid) if axes else None
    except UnknownGroupError as error:
        raise UnknownGroupError(
            f"the ranks of a checkpoint meet in the group of all of them, {'_'.join(axes)!r}; "
            f"leave create= out, or add it there ({error})"
        ) from error


def beside_a_disk(
    group: ProcessGroup | None, grid: HyperCommGrid, *, at_whole: bool = False
) -> AbstractContextManager[None]:
    """A block that reads or writes files, for which other ranks wait longer than for a collective.

    Args:
        group: `everyone` of the grid.
        at_whole: as `while_others_wait` has it.
    """
    seconds = min(timeouts().beat, group_timeout(grid.timeout) / 4)
    return while_others_wait(group, seconds, at_whole=at_whole)


def failure(what: str) -> Callable[[str], CheckpointError]:
    return lambda told: CheckpointError(f"{what}: {told}")


def reporter(
    progress: Progress, what: str, grid: HyperCommGrid
) -> tuple[ProgressLine | None, Report]:
    """The progress line of this rank, if it prints one, and the function that takes progress."""
    if callable(progress):
        return None, progress
    line = ProgressLine(what) if progress and grid.rank == grid.spec.grid_ranks[0] else None
    return line, line or (lambda done, total: None)


def kind_of(model: Model, optimizer: Optimizers | None) -> str | None:
    """The optimizer's class, which of several may differ between stages; "any" of a stage that has
    nothing to train, and so none."""
    trains = any(p.requires_grad for chunk in chunks_of(model) for p in chunk.parameters())
    if optimizer is None:
        return None if trains else "any"
    return "a list" if isinstance(optimizer, Sequence) else type(optimizer).__name__


def compare(calls: Sequence[Call]) -> bool:
    """Refuses ranks that call for different things; whether some have axes of the user's own."""
    _compare_extra([call.get("extra") for call in calls])
    for key in calls[0].keys() - {"extra", "shared", "own_axes"}:
        said = [(number, c[key]) for number, c in enumerate(calls) if c[key] != "any"]
        for number, value in said:
            if value != said[0][1]:
                raise GridMismatchError(
                    f"{key}={said[0][1]} on the grid's rank {said[0][0]}, and {key}={value} on its "
                    f"rank {number}; call it with the same on all"
                )
    return any(call.get("own_axes") for call in calls)


def _compare_extra(given: Sequence[Mapping[str, int] | None]) -> None:
    """Refuses values of which the first rank's would be saved for all, and others have others.

    Ranks that give none are not asked, since programs may give them on the first rank alone.
    """
    told = [(number, extra) for number, extra in enumerate(given) if extra]
    for number, extra in told:
        first = given[0] or {}
        other = [key for key in {**first, **extra} if first.get(key) != extra.get(key)]
        if other:
            raise GridMismatchError(
                f"extra[{other[0]!r}] differs between the grid's ranks 0 and {number}; the first "
                "rank's would have been saved for all. Values of a rank's own go to "
                "extra_per_rank=, and come back to it"
            )


def compare_copies(items: Sequence[Item | Value], model: ModelState) -> None:
    """Refuse to write one of several copies that differ.

    Collective over the grid, all of whose ranks have items of one model.

    Raises:
        GridMismatchError: names tensor and ranks.
    """
    grid = model.grid
    axes = dict.fromkeys(axis for region in grid.spec.regions for axis in region.axes)
    everywhere = [groups_along([axis], grid) for axis in axes if axis != "pp"]
    told = differing(_copies(items, grid), groups=[one for groups in everywhere for one in groups])
    if told is not None:
        other = (
            "where copies may differ, as kernels that are not deterministic make them, "
            'copies="first" writes the first rank\'s'
        )
        raise GridMismatchError(
            f"{told}; these should be copies, of which one would have been saved for all. Where "
            "ranks have slices, say so with a ShardedModule's shard_dims; of buffers that ranks "
            f"have of their own, with mark_buffers(…, own=); {members_of(model.own_axes, other)}"
        )


def members_of(axes: Sequence[str], otherwise: str = "") -> str:
    """The advice for an ensemble along axes of the user's own; `otherwise` where there are none."""
    if not axes:
        return otherwise
    return (
        f"members of an ensemble along {' or '.join(axes)} need a grid each, or modules with names "
        "of their own"
    )


def check_shared(told: Mapping[int, SharedNames]) -> None:
    """Refuse a copy of another stage's weight that this one does not have.

    Args:
        told: of each rank.

    Raises:
        CheckpointError: names the weight and both ranks.
    """
    for rank, shared in told.items():
        for key, names in shared.items():
            for other in key[0]:
                if len(told[other].get(key, ())) != len(names):
                    raise CheckpointError(
                        f"{names[-1]} of rank {rank} is marked as shared with ranks "
                        f"{list(key[0])}, of which rank {other} has no such weight of shape "
                        f"{key[1]}; call mark_parameters(…, shared=…) on all stages that have it"
                    )


def axes_apart(items: Sequence[Item | Value], model: ModelState) -> list[str]:
    """The axes of the user's own along which ranks have modules of other names.

    Collective over the ranks along each of these axes.
    """
    mine = number_of(sorted(item.key for item in items if item.path[0] == "model"))
    return [
        axis
        for axis in model.own_axes
        for group in groups_along([axis], model.grid)
        if len(set(all_gather(mine.to(device_for(group)).view(1), group).flatten().tolist())) > 1
    ]


def compare_members(items: Sequence[Item | Value], model: ModelState) -> None:
    """Refuse what differs along axes of the user's own, such as the members of an ensemble.

    These have one name each and other numbers, of which one member's would be there for all.
    Collective over the grid.

    Raises:
        GridMismatchError: names tensor and ranks.
    """
    apart, grid = axes_apart(items, model), model.grid
    axes = [axis for axis in model.own_axes if axis not in apart]
    groups = [one for axis in axes for one in groups_along([axis], grid)]
    told = differing(_copies(items, grid, axes), groups=groups)
    if told is not None:
        raise GridMismatchError(
            f"{told}, along an axis of your own, {' or '.join(axes)}, which no layer or reducer of "
            "the model names; one member's numbers would be there for all; "
            f"{members_of(axes)}"
        )


def _copies(
    items: Sequence[Item | Value], grid: HyperCommGrid, axes: Collection[str] | None = None
) -> list[Copy]:
    """Return the tensors of which other ranks should have copies, with the groups of these.

    Args:
        axes: along these alone; None: along all.
    """
    copies: list[Copy] = []
    num_shared = 0

    @cache
    def groups_of(named: tuple[str, ...]) -> tuple[ProcessGroup, ...]:
        return groups_along([axis for axis in named if axes is None or axis in axes], grid)

    for item in items:
        if isinstance(item, Item):
            for chunk in item.chunks:
                copies.append(Copy(item.key, chunk.data, groups_of(item.copies)))
                if item.shared is not None and axes is None:  # under a name per stage
                    key = f"shared {num_shared}"
                    copies.append(Copy(item.key, chunk.data, (item.shared,), key))
                    num_shared += 1
        elif item.copies:
            number = number_of([item.value, item.of])
            copies.append(Copy(item.key, number, groups_of(item.copies)))
    return copies


_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 10.0


class ProgressLine:
    """Writes how many bytes are done.

    Args:
        what: is done, such as `saving step 20`.
        stream: a terminal's line is written over; elsewhere a line is added every ten seconds.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what, self._stream = what, stream or sys.stderr
        self._live = self._stream.isatty()
        self._started = time.monotonic()
        self._next = self._started + (_TERMINAL_SECONDS if self._live else _LOG_SECONDS)

    def __call__(self, done: int, total: int) -> None:
        """Called as often as one likes."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_TERMINAL_SECONDS if self._live else _LOG_SECONDS)
        self._write(f"{self._what}: {size(done)} of this rank's {size(total)}")

    def _write(self, text: str, last: bool = False) -> None:
        ends = "\n" if last or not self._live else ""
        self._stream.write(f"\r\x1b[K{text}{ends}" if self._live else f"{text}{ends}")
        self._stream.flush()

    def finish(self, text: str) -> None:
        """The last word, with the seconds it took."""
        self._write(f"{text} in {time.monotonic() - self._started:.1f} s", last=True)


def size(count: int) -> str:
    """Bytes in words.

    >>> size(999), size(1_500_000), size(26_400_000_000)
    ('999 bytes', '1.5 MB', '26.4 GB')
    """
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
