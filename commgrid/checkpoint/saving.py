"""Saving: each rank writes its share, and the first rank completes the checkpoint."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from commgrid.checkpoint import folder as folders
from commgrid.checkpoint.agreement import (
    Call,
    Model,
    Progress,
    ProgressLine,
    axes_apart,
    beside_a_disk,
    check_shared,
    compare,
    compare_copies,
    compare_members,
    everyone,
    failure,
    kind_of,
    reporter,
    size,
    tells_failures,
)
from commgrid.checkpoint.background import SPARES, BackgroundSave, finish, settle, stage
from commgrid.checkpoint.memory import keep_items
from commgrid.checkpoint.remote import is_remote, remove_tree
from commgrid.checkpoint.trust import storable, warn_if_untrusted
from commgrid.checkpoint.values import OWN, own_path
from commgrid.checkpoint.writer import Report, write, write_metadata
from commgrid.collectives.objects import at_first
from commgrid.equality.values import numbers_of
from commgrid.errors import CheckpointError, SpecError
from commgrid.layout.axis_names import check_word
from commgrid.layout.ranks import whole_number
from commgrid.resharding.holders import Turns
from commgrid.resharding.item import Item, Value
from commgrid.resharding.model_state import ModelState
from commgrid.resharding.naming import shared_in
from commgrid.resharding.optimizer_state import Optimizers, OptimizerState
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid

COPIES = ("compare", "first")


@tells_failures
def save(
    folder: str | Path,
    step: int,
    model: Model,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    extra_per_rank: Mapping[str, Any] | None = None,
    keep: int | None = None,
    copies: str = "compare",
    background: bool = False,
    keep_in_memory: bool = False,
    progress: Progress = True,
    grid: HyperCommGrid | None = None,
) -> Path:
    """Writes a checkpoint; on all ranks of the grid. It is complete on return, unless `background`.

    In the background it returns when the state is copied, and threads write the copy during the
    next steps. The checkpoint gets its name when all ranks have written.

    Copies are compared to the last bit and written once; ranks share the writing evenly. Weights
    that an optimizer is still gathering are waited for. A crash at any moment leaves the
    checkpoints before it as they were.

    Args:
        folder: of checkpoints, on a file system that all nodes share; made if need be. A URL, such
            as `s3://bucket/runs`, is opened by fsspec.
        step: names the checkpoint, and replaces one of its name.
        model: of commgrid's layers, plain modules, FSDP2's or DTensor's; or a pipeline stage's
            chunks. Modules have the names that they have in the whole model; buffers are equal on
            all ranks, or say by `mark_buffers` how they lie.
        optimizer: a ShardedOptimizer, or an element-wise one of torch.optim; one of whole matrices
            for parameters of which every rank has all; or a list, with other parameters each.
        extra: picklable values of the job, equal on all ranks that give any, the first one among
            them; what is no tensor or plain value loads with `trusted=True` only, of which a
            warning tells. NumPy's numbers are saved as Python's.
        extra_per_rank: likewise, what this rank has of its own, such as `random_states()` or a
            data loader's state.
        keep: how many checkpoints up to this step the folder is to have, older ones are deleted;
            None: all.
        copies: "compare" refuses copies of which any bit differs, of tensors, learning rates and
            other options, extra states of modules, and `extra`; "first" writes those of the first
            rank that has them, for programs whose kernels are not deterministic.
        background: True: return once copies are compared and what the rank writes is copied to the
            host's memory, pinned where it comes from a GPU. Later errors are raised by the next
            `save`, `load` or `wait`, on all ranks. At most one save is under way: the next call
            waits for it, except for ranks that have died.
        keep_in_memory: whether to `keep` the state as well.
        progress: True: bytes on the first rank's stderr, in the background one line on that of the
            rank which finishes last; or called on every rank with its own bytes done and to do, in
            the background on a thread; False: nothing.
        grid: None: the default one.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on all ranks: it could not be written, copies of a parameter or of
            optimizer state differ between ranks, stages have different parameters of one name, a
            parameter is sliced over something that is not of the grid, or the optimizer is not
            element-wise; names the ranks that found it. Or an earlier one was not, in the
            background.
        PeerFailedError, PeerTimeoutError: a rank is gone; names it. The grid is then destroyed. A
            rank may write for longer than the grid's timeout.
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
    group = everyone(grid)
    failed = failure(f"step {step} was not saved to {folder}")
    first = copies == "first"
    state = _State(step, model, optimizer, extra or {}, extra_per_rank or {}, grid, first)
    saving = _Saving(grid, group, folders.local(folder), state, keep, copies)

    def call() -> Call:
        return saving.call() | {"background": background, "keep_in_memory": keep_in_memory}

    saving.partial, has_members = at_first(group, call, saving.begin, failed)
    if has_members:
        at_first(group, state.separate_members, lambda _: None, failed)
    line, report = reporter(progress, f"saving step {step}", grid)
    try:
        if keep_in_memory:
            not_kept = failure(f"step {step} was not kept in memory")
            keep_items(step, state.items, grid, group, not_kept)
        at_first(group, saving.stage if background else saving.check, lambda _: None, failed)
        if background:
            return saving.start(progress)
        total, final = at_first(group, lambda: saving.write(report), saving.complete, failed)
    except CheckpointError:
        saving.give_up()  # no rank is writing any more
        raise
    if line is not None:
        line.finish(f"saved step {step}: {size(total)} to {final}")
    return final


@tells_failures
def keep(
    step: int,
    model: Model,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    extra_per_rank: Mapping[str, Any] | None = None,
    grid: HyperCommGrid | None = None,
) -> None:
    """Keeps the state in the host's memory, for `commgrid.recover` after a failure; on all ranks.

    Every rank keeps its own state. Tensors without a copy on another host are also sent to a
    neighbour along dp on another host; where all ranks are on one host, to another process. The
    last two states are kept, pinned where they come from a GPU.

    Args:
        step: the number that `recover` returns.
        model, optimizer, extra, extra_per_rank, grid: as `save` takes them.

    Raises:
        CheckpointError: on all ranks: a rank cannot; names it.

    Example:
        >>> import commgrid, torch
        >>> from commgrid import checkpoint
        >>> grid = commgrid.initialize()
        >>> model = torch.nn.Linear(2, 1)
        >>> checkpoint.keep(20, model, extra={"epoch": 1})
        >>> commgrid.recover(None, model).step
        20
        >>> commgrid.shutdown()
    """
    grid = grid or get_grid()
    group = everyone(grid)
    failed = failure(f"step {step} was not kept in memory")
    state = _State(step, model, optimizer, extra or {}, extra_per_rank or {}, grid)

    def call() -> Call:
        return {"extra": numbers_of(extra)} | state.call()

    if at_first(group, call, compare, failed):
        at_first(group, state.separate_members, lambda _: None, failed)
    at_first(group, state.check_values, lambda _: None, failed)
    at_first(group, lambda: compare_members(state.items, state.of_model), lambda _: None, failed)
    keep_items(step, state.items, grid, group, failed)


@tells_failures
def wait(*, grid: HyperCommGrid | None = None) -> None:
    """Waits for a save in the background; on all ranks of the grid.

    Raises:
        CheckpointError: on all ranks: it failed, and where.
    """
    grid = grid or get_grid()
    failed = failure("a save failed")
    group = everyone(grid)

    def complete(_: list[None]) -> None:
        with beside_a_disk(group, grid, at_whole=True):
            settle()

    at_first(group, lambda: finish(grid, group), complete, failed)


@dataclass
class _State:
    """The state to save; the first fields are arguments of `save`.

    Args:
        grid: whose ranks save.
        first: True: of copies, the first rank's are written; False: ranks take turns.

    Attributes:
        items: what this rank has of it, after `call`.
        of_model: the model's part, likewise.
    """

    step: int
    model: Model
    optimizer: Optimizers | None
    extra: Mapping[str, Any]
    extra_per_rank: Mapping[str, Any]
    grid: HyperCommGrid
    first: bool = False
    items: list[Item | Value] = field(init=False)
    of_model: ModelState = field(init=False)
    _of_optimizer: OptimizerState | None = field(default=None, init=False)

    def call(self) -> Call:
        """List the items; return what has to be equal on all ranks."""
        step = whole_number("step", self.step, 0)
        said = {"step": step, "optimizer": kind_of(self.model, self.optimizer)}
        self.items = [*self._list()]
        return said | {"own_axes": self.of_model.own_axes}

    def check_values(self, copies: bool = True) -> None:
        """As `OptimizerState.check_values`; collective."""
        if self._of_optimizer is not None:
            self._of_optimizer.check_values(copies)

    def separate_members(self) -> None:
        """List the items once more, of members whose modules have other names; collective."""
        if apart := axes_apart(self.items, self.of_model):
            # Tensors that members have under one name are compared when all have written.
            self.items = [replace(item, repeats=not self.first) for item in self._list(apart)]

    def _list(self, apart: Collection[str] = ()) -> Iterator[Item | Value]:
        """Yield what this rank has of it.

        Args:
            apart: as `ModelState` takes it.
        """
        turns = Turns(self.grid, self.first)
        state = self.of_model = ModelState(self.model, self.grid, apart=apart)
        yield from state.items(turns)
        if self.optimizer is not None:
            self._of_optimizer = OptimizerState(self.optimizer, state)
            yield from self._of_optimizer.items(turns)
        is_first = self.grid.rank == self.grid.spec.grid_ranks[0]
        yield Value(("step",), operator.index(self.step), is_first)
        for key, value in _named("extra", self.extra).items():
            yield Value(("extra", key), value, is_first)
        if self.extra_per_rank:
            yield Value(own_path(self.grid), dict(_named(OWN, self.extra_per_rank)))


class _Saving:
    """One rank's part in saving a checkpoint."""

    def __init__(
        self,
        grid: HyperCommGrid,
        group: ProcessGroup | None,
        folder: Path,
        state: _State,
        keep: int | None,
        copies: str,
    ) -> None:
        self._grid, self._group, self._folder, self._state = grid, group, folder, state
        self._keep, self._copies, self._compares = keep, copies, not state.first
        self._number = grid.spec.grid_ranks.index(grid.rank)
        self._staged: list[Item | Value] = []
        self.partial: Path  # what `begin` has returned on the first rank

    def call(self) -> Call:
        """Finish the save before, list what this rank has, and return what is compared."""
        finish(self._grid, self._group)
        keep = None if self._keep is None else whole_number("keep", self._keep)
        check_word("copies=", self._copies, COPIES)
        extra = numbers_of(self._state.extra) if self._compares else None
        call = self._state.call() | {"keep": keep, "copies": self._copies, "extra": extra}
        for item in self._state.items:
            if isinstance(item, Value) and item.writes and item.path[0] != "optimizer":
                warn_if_untrusted(item.key, storable(item.value))
        return call | {"shared": shared_in(self._state.items)}

    def begin(self, calls: list[Call]) -> tuple[Path, bool]:
        """Make the folder to write to, and say whether there may be members of an ensemble.

        On the first rank, with the calls of all.
        """
        has_members = compare(calls)
        ranks = self._grid.spec.grid_ranks
        check_shared({rank: call["shared"] for rank, call in zip(ranks, calls, strict=True)})
        with beside_a_disk(self._group, self._grid, at_whole=True):
            settle()
            return folders.begin(self._folder, self._state.step), has_members

    def check(self) -> None:
        """Refuse copies that differ, and state that differs between parts of a parameter."""
        state = self._state
        if self._compares:
            compare_copies(state.items, state.of_model)
        state.check_values(self._compares)
        if not self._compares:
            compare_members(state.items, state.of_model)

    def write(self, report: Report) -> Any:
        """Write this rank's file; return its contents for `complete`."""
        with beside_a_disk(self._group, self._grid):
            return write(self.partial, self._state.items, self._number, report)

    def complete(self, written: list[Any]) -> tuple[int, Path]:
        """Make a checkpoint of all ranks' files; return bytes and folder. On the first rank."""
        found = dict(zip(self._grid.spec.grid_ranks, written, strict=True))
        with beside_a_disk(self._group, self._grid, at_whole=True):
            total = write_metadata(self.partial, found, self._compares)
            return total, folders.end(self.partial, self._state.step, self._keep)

    def stage(self) -> None:
        """Check, and copy what `start` writes."""
        if is_remote(self.partial):
            raise SpecError(
                f"background=True: the threads agree by renaming a folder at once, which "
                f"{self.partial.parent} does not do; save to a mounted folder, or leave it out"
            )
        self.check()
        needed = [  # to write, or for a digest
            item if isinstance(item, Value) or item.writes or item.repeats
            else replace(item, chunks=[])
            for item in self._state.items
        ]  # fmt: skip
        self._staged = stage(needed, SPARES)

    def start(self, progress: Progress) -> Path:
        """Write in the background; return where the checkpoint is going to be."""
        step, keep, staged = self._state.step, self._keep, self._staged
        report = progress if callable(progress) else lambda *_: None
        line = ProgressLine(f"saving step {step}") if progress is True else None
        BackgroundSave(
            self.partial, step, keep, staged, self._grid, report, line, self._compares
        ).start()
        return folders.final(self.partial, step)

    def give_up(self) -> None:
        """Delete the files, on the first rank."""
        if self._number == 0:
            remove_tree(self.partial, ignore_errors=True)


def _named(what: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in given:
        if not isinstance(key, str):
            raise SpecError(f"{what}={{{key!r}: …}}: expected names as keys")
    return given
