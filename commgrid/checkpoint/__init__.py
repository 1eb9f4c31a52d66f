"""Checkpoints that any grid can load, whatever grid wrote them.

    save("runs/7", 20, model, optimizer, extra={"tokens": 81_920})      on all ranks of a grid
    load("runs/7", model, optimizer).step                               on all ranks of any grid

A checkpoint is a folder of torch.distributed.checkpoint's, which its own tools open. Names in it:

| name | holds |
|---|---|
| `model.<parameter>` | the full parameter, in the boxes that ranks had of it; buffers likewise |
| `optimizer.state.<parameter>.<key>` | its state; `master` for half precision's fp32 copy |
| `optimizer.param_groups.<parameter>.<key>` | the options of its group, as torch flattens them |
| `extra.<key>` | what the job adds |

A parameter that modules share has the first of its names. It can be opened without commgrid:
`torch.distributed.checkpoint.load` into the unsharded model, or into one sharded otherwise, and
`torch.distributed.checkpoint.format_utils.dcp_to_torch_save` for one file.
"""

from __future__ import annotations

import operator
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from commgrid.checkpoint import folder as folders
from commgrid.checkpoint.items import Item, Value, key_of
from commgrid.checkpoint.layout import Turns
from commgrid.checkpoint.model_state import ModelState, chunks_of
from commgrid.checkpoint.optimizer_state import OptimizerState, copy_of
from commgrid.checkpoint.progress import ProgressLine, size
from commgrid.checkpoint.storage import Report, Stored, write, write_metadata
from commgrid.errors import CheckpointError, GridMismatchError, SpecError, UnknownGroupError
from commgrid.objects import at_first
from commgrid.registry import get_grid

if TYPE_CHECKING:
    from commgrid.grid import HyperCommGrid

__all__ = ["Restored", "load", "save", "steps"]

Model = nn.Module | Sequence[nn.Module]
Call = dict[str, int | str | None]
Progress = bool | Callable[[int, int], object]


@dataclass(frozen=True)
class Restored:
    """What `load` has loaded.

    Args:
        step: the checkpoint's.
        folder: the checkpoint's.
        extra: what was saved with it.
    """

    step: int
    folder: Path
    extra: dict[str, Any]


def steps(folder: str | Path) -> list[int]:
    """The steps of which a folder has complete checkpoints, ascending."""
    return list(folders.complete(Path(folder)))


def save(
    folder: str | Path,
    step: int,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    progress: Progress = True,
    grid: HyperCommGrid | None = None,
) -> Path:
    """Writes a checkpoint; on all ranks of the grid, and complete when it returns on any.

    What ranks have copies of is written once; they share that out evenly. A crash at any moment
    leaves the checkpoints before it as they were.

    Args:
        folder: of checkpoints, on a file system that all nodes share; made if need be.
        step: names the checkpoint, and replaces one of its name.
        model: of commgrid's layers, plain modules, FSDP2's or DTensor's; or a pipeline stage's
            chunks. Modules have the names that they have in the whole model; buffers are equal on
            all ranks.
        optimizer: a ShardedOptimizer, or an element-wise one of torch.optim.
        extra: picklable values of the job, equal on all ranks.
        keep: how many checkpoints up to this step the folder is to have, older ones are deleted;
            None: all.
        progress: True: bytes on the first rank's stderr; or called on every rank with its own bytes
            done and to do; False: nothing.
        grid: None: the default one.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on all ranks: it could not be written, stages have different parameters of
            one name, a parameter is sliced over something that is not of the grid, or the optimizer
            is not element-wise; names the ranks that found it. A rank that writes for longer than
            the grid's timeout is torch's error on the others.
        UnknownGroupError: the grid has no group of all its ranks.

    Example:
        >>> import commgrid, tempfile, torch
        >>> from commgrid import checkpoint
        >>> grid = commgrid.initialize()
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     _ = checkpoint.save(runs, 20, model, extra={"epoch": 1}, progress=False)
        ...     restored = checkpoint.load(runs, model, progress=False)
        ...     checkpoint.steps(runs), restored.step, restored.extra
        ([20], 20, {'epoch': 1})
        >>> commgrid.shutdown()
    """
    grid = grid or get_grid()
    group = _everyone(grid)
    what = f"step {step} was not saved to {folder}"
    items: list[Item | Value] = []

    def plan() -> Call:
        kept = None if keep is None else _count("keep", keep, 1)
        call = {"step": _count("step", step, 0), "optimizer": _kind(model, optimizer), "keep": kept}
        items.extend(_items(grid, step, model, optimizer, extra or {}))
        return call

    def begin(calls: list[Call]) -> Path:
        _compare(calls)
        return folders.begin(Path(folder).absolute(), step)

    partial = at_first(group, plan, begin, _failure(what))
    line, report = _reporter(progress, f"saving step {step}", grid)

    def whole(written: list[Any]) -> tuple[int, Path]:
        found = dict(zip(grid.spec.rank_range, written, strict=True))
        return write_metadata(partial, found), folders.end(partial, step, keep)

    number = grid.spec.rank_range.index(grid.rank)
    try:
        total, final = at_first(
            group, lambda: write(partial, items, number, report), whole, _failure(what)
        )
    except CheckpointError:
        if number == 0:  # nobody is writing any more
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if line is not None:
        line.finish(f"saved step {step}: {size(total)} to {final}")
    return final


def load(
    folder: str | Path,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    progress: Progress = True,
    grid: HyperCommGrid | None = None,
) -> Restored:
    """Loads a checkpoint that any grid wrote, or one process; on all ranks of the grid.

    Nothing is changed before all ranks have read all that they need; until then parameters are held
    once more on the CPU, and optimizer state where it is going to be. Numbers of another precision
    are converted; where half-precision weights were saved with fp32 copies, wider ones are taken
    from these.

    Args:
        folder: of checkpoints, or one of these itself.
        model, optimizer: as `save` takes them, cut in any way; without an optimizer its state in
            the checkpoint is left alone.
        step: None: the last complete one.
        progress, grid: as `save`'s.

    Raises:
        CheckpointError: on all ranks: no such checkpoint, half a one, or one of another model or
            optimizer; names what is missing or differs, and which ranks found it. Should a module
            refuse its extra state after all that, it says that the model is not to be used.
        UnknownGroupError: the grid has no group of all its ranks.
    """
    grid = grid or get_grid()
    group = _everyone(grid)

    def call() -> Call:
        return {"step": step, "optimizer": _kind(model, optimizer)}

    def choose(calls: list[Call]) -> tuple[int, Path]:
        _compare(calls)
        chosen, path = folders.find(Path(folder).absolute(), step)
        stored = Stored(path)
        stored.check_files()
        if chosen is None:
            chosen = stored.read([Value(("step",))], lambda *_: None)["step"]
        return chosen, path

    found, path = at_first(group, call, choose, _failure("nothing was loaded"))
    failure = _failure(f"nothing was loaded from {path}")
    loading = _Loading(grid, path, model, optimizer)
    at_first(group, loading.plan, loading.check_all, failure)
    line, report = _reporter(progress, f"loading step {found}", grid)
    at_first(group, lambda: loading.read(report), lambda _: None, failure)
    partly = _failure(f"the model is not to be used, as {path} was loaded in part")
    at_first(group, loading.take, lambda _: None, partly)
    if line is not None:
        line.finish(f"loaded step {found} from {path}")
    return Restored(found, path, loading.extra)


class _Loading:
    """One rank's part in loading a checkpoint."""

    def __init__(
        self, grid: HyperCommGrid, path: Path, model: Model, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._grid, self._path = grid, path
        self._given = model, optimizer

    def plan(self) -> list[str]:
        """Compares what is needed with what is there; returns the names of this rank's model."""
        model, optimizer = self._given
        self._stored = Stored(self._path)
        self._model = ModelState(model, self._grid)
        self._live = list(self._model.items(Turns(self._grid)))
        self._stored.check(self._live)
        self._staged = [self._source(i) if isinstance(i, Item) else i for i in self._live]
        self._optimizer = OptimizerState(optimizer, self._model) if optimizer is not None else None
        self._extra = [Value(_path(key)) for key in self._stored.keys if key.startswith("extra.")]
        self._needed = [*self._staged, *self._extra]
        if self._optimizer is not None:
            self._needed += self._optimizer.targets(self._stored.keys)
        # One rank of each stage tells, since the others of it have the same names.
        stage = self._grid.spec.regions[0].axes
        others = (self._grid.coordinate[axis] for axis in stage if axis != "pp")
        updated = self._optimizer.keys if self._optimizer is not None else []
        return [] if any(others) else [*(item.key for item in self._live), *updated]

    def _source(self, item: Item) -> Item:
        """What a tensor of the model is read into, and from: an fp32 copy where that says more."""
        staged = item.staged()
        stored, copy = self._stored.keys[item.key], copy_of(item.path)
        exact = torch.promote_types(item.dtype, stored.properties.dtype)
        if key_of(copy) in self._stored.keys and exact != stored.properties.dtype:
            return replace(staged, path=copy)
        return staged

    def check_all(self, names: list[list[str]]) -> None:
        """Whether all stages together have all of the checkpoint's model."""
        known = {name for own in names for name in own}
        there = [key for key in self._stored.keys if key.startswith("model.")]
        if self._optimizer is not None:
            options = [k for k in self._stored.keys if k.startswith("optimizer.param_groups.")]
            there += dict.fromkeys(f"{key.rpartition('.')[0]}." for key in options)
        unknown = [key.rstrip(".") for key in there if key not in known]
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise CheckpointError(
                f"of another model: it also has {', '.join(unknown[:3])}{more}, which no rank has"
            )

    def read(self, report: Report) -> None:
        """Into memory of its own."""
        self._values = self._stored.read(self._needed, report)
        if self._optimizer is not None:
            self._optimizer.check_options(self._values)

    @torch.no_grad()
    def take(self) -> None:
        """Puts everything in place; first what modules might refuse."""
        self._model.set_values(self._values)
        for live, staged in zip(self._live, self._staged, strict=True):
            if isinstance(live, Item) and isinstance(staged, Item):
                live.take(staged)
        if self._optimizer is not None:
            self._optimizer.take(self._values)
        else:
            self._model.tell_loaded()

    @property
    def extra(self) -> dict[str, Any]:
        """What the job has saved beside it."""
        return {value.path[-1]: self._values[value.key] for value in self._extra}


def _items(
    grid: HyperCommGrid,
    step: int,
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
) -> Iterator[Item | Value]:
    turns = Turns(grid)
    state = ModelState(model, grid)
    yield from state.items(turns)
    if optimizer is not None:
        yield from OptimizerState(optimizer, state).items(turns)
    is_first = grid.rank == grid.spec.rank_range[0]
    yield Value(("step",), step, is_first)
    for key, value in extra.items():
        yield Value(("extra", str(key)), value, is_first)


def _kind(model: Model, optimizer: torch.optim.Optimizer | None) -> str | None:
    """The optimizer's class; "any" of a stage that has nothing to train, and so none."""
    trains = any(p.requires_grad for chunk in chunks_of(model) for p in chunk.parameters())
    if optimizer is None:
        return None if trains else "any"
    return type(optimizer).__name__


def _count(key: str, given: Any, least: int) -> int:
    try:
        count = operator.index(given)
    except TypeError:
        count = least - 1
    if count < least:
        raise SpecError(f"{key}={given!r}: expected a whole number from {least}")
    return count


def _compare(calls: Sequence[Call]) -> None:
    """Refuses ranks that call for different things."""
    for key in calls[0]:
        said = [(number, c[key]) for number, c in enumerate(calls) if c[key] != "any"]
        for number, value in said:
            if value != said[0][1]:
                raise GridMismatchError(
                    f"{key}={said[0][1]} on the grid's rank {said[0][0]}, and {key}={value} on its "
                    f"rank {number}; call it with the same on all"
                )


def _path(key: str) -> tuple[str, str]:
    first, _, rest = key.partition(".")
    return first, rest


def _everyone(grid: HyperCommGrid) -> ProcessGroup | None:
    """The group of all ranks of the grid; None: there is one."""
    axes = [axis for axis in reversed(grid.spec.regions[0].axes) if grid.size(axis) > 1]
    try:
        return grid.get_group(*axes) if axes else None
    except UnknownGroupError as error:
        raise UnknownGroupError(
            f"the ranks of a checkpoint meet in the group of all of them, {'_'.join(axes)!r}; "
            f"leave create= out, or add it there ({error})"
        ) from error


def _failure(what: str) -> Callable[[str], CheckpointError]:
    return lambda told: CheckpointError(f"{what}: {told}")


def _reporter(
    progress: Progress, what: str, grid: HyperCommGrid
) -> tuple[ProgressLine | None, Report]:
    """What writes the last word, if anything does, and what is told how far it is."""
    if callable(progress):
        return None, progress
    line = ProgressLine(what) if progress and grid.rank == grid.spec.rank_range[0] else None
    return line, line or (lambda done, total: None)
