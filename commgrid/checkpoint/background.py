"""Saving in the background: the state is copied to the host's memory, a thread writes the copy.

    step 20   save(…, background=True)    compares copies, copies the state, starts the thread
    step 21…                              every rank's thread writes its file, and a list of its
                                          contents; the last one makes a checkpoint of the files
    step 30   save, load or wait          raises the error of any rank, on all ranks

The threads use no process group and never wait for another rank. They meet in the folder, which
all ranks can read. If a rank dies, the checkpoint stays incomplete. A process writes one save at a
time; each grid finishes its own.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.checkpoint import folder as folders
from commgrid.checkpoint.agreement import ProgressLine, beside_a_disk, size
from commgrid.checkpoint.remote import remove_tree
from commgrid.checkpoint.trust import read_written
from commgrid.checkpoint.writer import Report, write, write_metadata
from commgrid.errors import CheckpointError
from commgrid.layout.rank_text import describe_ranks
from commgrid.resharding.item import Chunk, Item, Value
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import _registry


class BackgroundSave:
    """A save under way on this rank.

    Args:
        partial: where the files go.
        step, keep: as `save` takes them.
        staged: this rank's items on the host, of which no other code has a reference.
        grid: whose ranks save.
        report: as `Report`, called on the thread.
        line: prints that the checkpoint is complete; None: nothing is printed.
        compares: whether copies have to be equal.
    """

    def __init__(
        self,
        partial: Path,
        step: int,
        keep: int | None,
        staged: Sequence[Item | Value],
        grid: HyperCommGrid,
        report: Report,
        line: ProgressLine | None,
        compares: bool,
    ) -> None:
        self._partial, self._step, self._keep = partial, step, keep
        self._ending = partial.with_suffix(".ending")  # by which one rank takes what all wrote
        self._staged, self._compares = staged, compares
        self.grid, self._ranks = grid, tuple(grid.spec.grid_ranks)
        self._report, self._line = report, line
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, name=f"commgrid-save-{step}")

    def start(self) -> None:
        """Begin to write; the one before on its grid has been finished."""
        _under_way.append(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            self._fail(error)

    def finish(self) -> None:
        """Wait until this rank has written.

        Raises:
            CheckpointError: it failed here.
        """
        self.join()
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait until this rank has written, or failed."""
        if self._thread.ident is not None:
            self._thread.join()

    def settle(self) -> None:
        """Complete the checkpoint, or say why it never will be; all ranks that live have finished.

        Raises:
            CheckpointError: files of other ranks are not where this rank looks.
        """
        if self._ending.exists():  # the rank that completed it has ended
            self._partial = self._ending
        if not self._partial.exists():
            return
        missing = sorted({*self._missing(), *self._failed()})
        if not missing:  # on a file system that shows others' files late, or the last rank ended
            self._end()
        elif self.grid.is_destroyed:
            warnings.warn(
                f"step {self._step} was not saved to {self._partial.parent} in the background: "
                f"{describe_ranks(missing)} ended before the file was written",
                stacklevel=2,
            )
        else:
            raise CheckpointError(
                f"step {self._step} was not saved to {self._partial.parent} in the background: "
                f"{describe_ranks(missing)} wrote, but not where this rank looks; save to a folder "
                "on a file system that all nodes share"
            )

    def _run(self) -> None:
        number = self._ranks.index(self.grid.rank)
        try:
            written = write(self._partial, self._staged, number, self._report)
            half = self._partial / f".rank_{number:05}.half"
            half.write_bytes(pickle.dumps(written))
            half.rename(self._told(number))
            self._end()
        except Exception as error:  # raised by the program's next call
            self._fail(error)
            with suppress(OSError):
                self._told(number, failed=True).touch()
                self._end()
        finally:
            SPARES.give(tensors_of(self._staged))
            self._staged = ()

    def _fail(self, error: Exception) -> None:
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        self._error = CheckpointError(
            f"step {self._step} was not saved to {self._partial.parent} in the background: "
            f"{kind}{error}"
        )
        self._error.__cause__ = error
        print(f"commgrid: rank {self.grid.rank}: {self._error}", file=sys.stderr)

    def _end(self) -> None:
        """Complete the checkpoint, or delete what was written, on the last rank that finishes."""
        if self._missing() or not self._claim():
            return
        if self._failed():
            remove_tree(self._partial, ignore_errors=True)
        else:
            self._complete()

    def _missing(self) -> list[int]:
        """The ranks that have neither written nor failed; none where another has ended the save."""
        try:
            names = {path.name for path in self._partial.iterdir()}
        except FileNotFoundError:
            return []
        return [
            rank for number, rank in enumerate(self._ranks)
            if names.isdisjoint(self._told(number, failed).name for failed in (False, True))
        ]  # fmt: skip

    def _failed(self) -> list[int]:
        """The ranks that could not write."""
        numbered = enumerate(self._ranks)
        return [rank for number, rank in numbered if self._told(number, failed=True).exists()]

    def _claim(self) -> bool:
        """Return whether this rank ends the save: exactly one rank can rename the folder."""
        if self._partial != self._ending:
            try:
                self._partial = self._partial.rename(self._ending)
            except FileNotFoundError:  # another rank has
                return False
        return True

    def _complete(self) -> None:
        """Make a checkpoint of the files of all ranks."""
        paths = [self._told(number) for number in range(len(self._ranks))]
        found = {rank: read_written(path) for rank, path in zip(self._ranks, paths, strict=True)}
        total = write_metadata(self._partial, found, self._compares)
        for path in paths:
            path.unlink()
        final = folders.end(self._partial, self._step, self._keep)
        if self._line is not None:
            self._line.finish(f"saved step {self._step}: {size(total)} to {final}")

    def _told(self, number: int, failed: bool = False) -> Path:
        """Where a rank says what it has written, or that it has failed."""
        return self._partial / f".rank_{number:05}.{'failed' if failed else 'written'}"


# -- at most one a process ----------------------------------------------------------------

_under_way: list[BackgroundSave] = []
_finished: list[BackgroundSave] = []


def finish(grid: HyperCommGrid, group: ProcessGroup | None) -> None:
    """Wait for this process's part of saves under way, if there are some.

    Args:
        grid: that calls. Others' saves stay under way until theirs do, since their other ranks may
            still be writing.
        group: `everyone` of the grid, whose other ranks wait.

    Raises:
        CheckpointError: the grid's failed here; later calls do not raise it again.
    """
    _finished.clear()
    with beside_a_disk(group, grid):
        for each in list(_under_way):
            if each.grid.name == grid.name:
                _under_way.remove(each)
                _finished.append(each)
            else:
                each.join()
        for each in _finished:
            each.finish()


def settle() -> None:
    """Make sure that what was finished last is complete; on one rank when all have finished.

    Raises:
        CheckpointError: it is not; later calls do not raise it again.
    """
    while _finished:
        _finished.pop().settle()


class Spares:
    """The memory of the last copy, for the next one: new memory costs more than copying to it."""

    def __init__(self) -> None:
        self._free: dict[_Kind, list[Tensor]] = {}
        self._wanted = True

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take back tensors that are no longer read; earlier ones are freed."""
        self.clear()
        if not self._wanted:
            return
        for each in tensors:
            self._free.setdefault(_kind_of(each, each.is_pinned()), []).append(each)

    def take(self, like: Tensor, pinned: bool) -> Tensor:
        """Return an uninitialized tensor on the host."""
        self._wanted = True
        free = self._free.get(_kind_of(like, pinned))
        if free:
            return free.pop()
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)

    def clear(self) -> None:
        """Free all of it."""
        self._free = {}

    def end(self) -> None:
        """Free all of it, and what a save under way gives back, until the next `take`."""
        self._wanted = False
        self.clear()


SPARES = Spares()
"""The memory of the last save in the background, until the next one or `shutdown`."""
_registry.at_shutdown.append(SPARES.end)

_Kind = tuple[torch.Size, torch.dtype, bool]


def _kind_of(tensor: Tensor, pinned: bool) -> _Kind:
    return tensor.shape, tensor.dtype, pinned


def stage(items: Sequence[Item | Value], spares: Spares | None = None) -> list[Item | Value]:
    """Copy items to the host's memory, pinned where they come from a GPU.

    Args:
        items: with the boxes that are copied.
        spares: memory to copy to; what does not fit is freed. None: copy to new memory.

    Returns:
        The same items; their tensors are contiguous, and have storage of their own.
    """
    spares = spares or Spares()
    made: dict[int, Tensor] = {}  # by the original's id: a tensor of several items is copied once
    memo: dict[int, Any] = {}
    found: list[Item | Value] = []
    for item in items:
        if isinstance(item, Value):
            found.append(replace(item, value=copy.deepcopy(item.value, memo)))
        else:
            chunks = [Chunk(c.offset, _on_host(c.data, made, spares)) for c in item.chunks]
            found.append(replace(item, chunks=chunks))
    if any(each.is_pinned() for each in made.values()):
        torch.cuda.current_stream().synchronize()
    spares.clear()
    return found


def tensors_of(staged: Iterable[Item | Value]) -> list[Tensor]:
    """Return the tensors of staged items, each once."""
    chunks = [chunk for item in staged if isinstance(item, Item) for chunk in item.chunks]
    return list({id(chunk.data): chunk.data for chunk in chunks}.values())


def _on_host(tensor: Tensor, made: dict[int, Tensor], spares: Spares) -> Tensor:
    key = id(tensor)
    if key not in made:
        pinned = tensor.device.type == "cuda"
        made[key] = spares.take(tensor, pinned)
        made[key].copy_(tensor, non_blocking=pinned)
    return made[key]
