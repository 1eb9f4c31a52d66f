"""Saving beside training: the state is copied to the host's memory, and a thread writes the copy.

    step 20   save(…, background=True)    copies, agrees, starts the thread
    step 21…                              every rank's thread has a hand write its file, and says
                                          beside it what is in it; the first rank's waits for all
                                          of these and makes a checkpoint of the files
    step 30   save, load or wait          raises what went wrong, on all ranks

The threads use no group: they meet in the folder, which all ranks see, so that what the job does on
its groups meanwhile is not disturbed. At most one save is under way in a process.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.checkpoint import beside
from commgrid.checkpoint import folder as folders
from commgrid.checkpoint.boxes import Chunk
from commgrid.checkpoint.hand import Hand
from commgrid.checkpoint.items import Item, Value
from commgrid.checkpoint.progress import ProgressLine, size
from commgrid.checkpoint.storage import Report, Written, write, write_metadata
from commgrid.checkpoint.trust import read_written
from commgrid.errors import CheckpointError, GridMismatchError
from commgrid.planning.rank_lists import describe_ranks
from commgrid.replicas import Copy
from commgrid.runtime.registry import _registry

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

LAST_SECONDS = 30.0
"""How long the first rank waits for others' files once its program has ended."""

_LOOKS_EVERY = 0.02, 1.0  # seconds, more and more

Digests = dict[tuple[int, ...], list[tuple[str, str, int]]]
"""By the ranks that should have copies: name, key and checksum of each."""


@dataclass(frozen=True)
class Staged:
    """A rank's state on the host, which training does not change any more.

    Args:
        items: what it has; boxes that nobody needs of it are left out.
        copies: what other ranks should have, too.

    Its tensors are contiguous, and have no other numbers behind them.
    """

    items: list[Item | Value]
    copies: list[tuple[Copy, list[tuple[int, ...]]]]

    def tensors(self) -> list[Tensor]:
        """Each once."""
        found = [
            chunk.data for item in self.items if isinstance(item, Item) for chunk in item.chunks
        ]
        found += [each.tensor for each, _ in self.copies]
        return list({id(each): each for each in found}.values())


class Spares:
    """The memory of the last copy, for the next one: new memory costs more than copying to it."""

    def __init__(self) -> None:
        self._free: dict[_Kind, list[Tensor]] = {}
        self._wanted = True

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Takes back what nobody reads any more; what was there before is let go."""
        self.clear()
        if not self._wanted:
            return
        for each in tensors:
            self._free.setdefault(_kind_of(each, each.is_pinned()), []).append(each)

    def take(self, like: Tensor, pinned: bool) -> Tensor:
        """Memory on the host for a tensor, with any numbers in it."""
        self._wanted = True
        free = self._free.get(_kind_of(like, pinned))
        if free:
            return free.pop()
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)

    def clear(self) -> None:
        """Lets it go."""
        self._free = {}

    def end(self) -> None:
        """Lets it go, and what a save under way gives back, until somebody takes some again."""
        self._wanted = False
        self.clear()


_Kind = tuple[torch.Size, torch.dtype, bool]


def _kind_of(tensor: Tensor, pinned: bool) -> _Kind:
    return tensor.shape, tensor.dtype, pinned


def stage(
    items: Sequence[Item | Value], copies: Sequence[Copy], spares: Spares | None = None
) -> Staged:
    """Copies to the host's memory, pinned where it comes from a GPU.

    Args:
        items: all that this rank has; boxes are copied that it writes or has a copy of in `copies`.
        copies: what is to be compared.
        spares: memory to copy to, where it fits; what does not is let go. None: there is none.
    """
    spares = spares or Spares()
    made: dict[int, Tensor] = {}  # a tensor once, whoever asks
    memo: dict[int, Any] = {}
    compared = {id(each.tensor) for each in copies}
    found: list[Item | Value] = []
    for item in items:
        if isinstance(item, Value):
            found.append(replace(item, value=copy.deepcopy(item.value, memo)))
            continue
        chunks = [
            Chunk(chunk.offset, _on_host(chunk.data, made, spares))
            for chunk in item.chunks
            if item.writes or id(chunk.data) in compared
        ]
        found.append(replace(item, chunks=chunks))
    whom = [
        (replace(each, tensor=_on_host(each.tensor, made, spares), groups=()), _ranks_of(each))
        for each in copies
    ]
    if any(each.is_pinned() for each in made.values()):
        torch.cuda.current_stream().synchronize()
    spares.clear()
    return Staged(found, whom)


def _on_host(tensor: Tensor, made: dict[int, Tensor], spares: Spares) -> Tensor:
    key = id(tensor)
    if key not in made:
        pinned = tensor.device.type == "cuda"
        made[key] = spares.take(tensor, pinned)
        made[key].copy_(tensor, non_blocking=pinned)
    return made[key]


def _ranks_of(each: Copy) -> list[tuple[int, ...]]:
    return [tuple(dist.get_process_group_ranks(group)) for group in each.groups]


class BackgroundSave:
    """A save under way on this rank.

    Args:
        partial: where the files go.
        step, keep: as `save` takes them.
        staged: what this rank has.
        grid: whose ranks save.
        report: as `Report`, called on the thread.
        line: what the last word is written to, on the first rank.
        timeout: seconds that the first rank waits for the others' files.
        compares: whether copies have to be equal.
    """

    def __init__(
        self,
        partial: Path,
        step: int,
        keep: int | None,
        staged: Staged,
        grid: HyperCommGrid,
        report: Report,
        line: ProgressLine | None,
        timeout: float,
        compares: bool,
    ) -> None:
        self._partial, self._step, self._keep, self._staged = partial, step, keep, staged
        self._ranks = tuple(grid.spec.grid_ranks)
        self._number = self._ranks.index(grid.rank)
        self._report, self._line, self._timeout = report, line, timeout
        self._compares = compares
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, name=f"commgrid-save-{step}")
        self._hand = Hand(f"commgrid-hand-{step}")

    def start(self) -> None:
        """Begins to write."""
        self._hand.start()
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            self._hand.end()
            raise

    def finish(self) -> None:
        """Waits until this rank's part is done; on the first rank, until the checkpoint is.

        Raises:
            CheckpointError: it failed here.
        """
        self._hand.hurry()
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def is_under_way(self) -> bool:
        """Whether this rank's part is still being written."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            sums = beside.checksums(self._staged.tensors(), self._hand)
            digests = _digests(self._staged.copies, sums)
            put = partial(beside.put, hand=self._hand, sums=sums)
            written = write(self._partial, self._staged.items, self._number, self._report, put)
            _post(self._partial / _done(self._number), pickle.dumps((written, digests)))
            if self._number == 0:
                self._complete()
        except Exception as error:  # whatever it is, the program hears of it at its next call
            self._fail(error)
        finally:
            self._hand.end()
            SPARES.give(self._staged.tensors())
            del self._staged

    def _fail(self, error: Exception) -> None:
        told = str(error) if isinstance(error, CheckpointError) else f"{_kind(error)}: {error}"
        self._error = CheckpointError(
            f"step {self._step} was not saved to {self._partial.parent} in the background: {told}"
        )
        self._error.__cause__ = error
        print(f"commgrid: rank {self._ranks[self._number]}: {self._error}", file=sys.stderr)
        try:
            _post(self._partial / _failed(self._number), b"")
        except OSError:  # a full disk; the first rank then waits for as long as it waits for any
            return

    def _complete(self) -> None:
        """Makes a checkpoint of the files of all ranks, as soon as they are there."""
        paths = self._arrived()
        found: dict[int, Written] = {}
        digests: dict[int, Digests] = {}
        for rank, path in zip(self._ranks, paths, strict=True):
            found[rank], digests[rank] = read_written(path)
        told = _differing(digests)
        if told is not None:
            raise GridMismatchError(
                f"{told}; these should be copies, of which one would have been saved for all"
            )
        total = write_metadata(self._partial, found, self._compares)
        for path in paths:
            path.unlink()
        final = folders.end(self._partial, self._step, self._keep)
        if self._line is not None:
            self._line.finish(f"saved step {self._step}: {size(total)} to {final}")

    def _arrived(self) -> list[Path]:
        """What every rank has said that it has written."""
        numbers = range(len(self._ranks))
        until, ended = time.monotonic() + self._timeout, False
        pause, longest = _LOOKS_EVERY
        missing = set(numbers)
        while missing:
            names = {path.name for path in self._partial.iterdir()}
            if failed := [self._ranks[each] for each in numbers if _failed(each) in names]:
                raise CheckpointError(f"{describe_ranks(failed)} could not write")
            missing -= {each for each in missing if _done(each) in names}
            if not ended and not threading.main_thread().is_alive():
                ended, until = True, min(until, time.monotonic() + LAST_SECONDS)
            if missing and time.monotonic() > until:
                who = describe_ranks(sorted(self._ranks[each] for each in missing))
                if not ended:
                    raise CheckpointError(f"{who} had not written after {self._timeout:g} s")
                raise CheckpointError(
                    f"{who} had not written {LAST_SECONDS:g} s after the program's end; call "
                    "checkpoint.wait() before it"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return [self._partial / _done(each) for each in numbers]


def _kind(error: Exception) -> str:
    return type(error).__name__


def _done(number: int) -> str:
    return f".rank_{number:05}.written"


def _failed(number: int) -> str:
    return f".rank_{number:05}.failed"


def _post(path: Path, content: bytes) -> None:
    """Writes a file that is seen whole or not at all."""
    half = path.with_name(f"{path.name}.half")
    half.write_bytes(content)
    half.rename(path)


def _digests(
    copies: Iterable[tuple[Copy, list[tuple[int, ...]]]], sums: Mapping[int, int]
) -> Digests:
    found: Digests = {}
    for each, groups in copies:
        number = sums[id(each.tensor)]
        for ranks in groups:
            found.setdefault(ranks, []).append((each.name, each.key or each.name, number))
    return found


def _differing(digests: Mapping[int, Digests]) -> str | None:
    """What differs between ranks that should have copies, with who; None: nothing."""
    for ranks in dict.fromkeys(ranks for own in digests.values() for ranks in own):
        mine = digests[ranks[0]].get(ranks, [])
        for other in ranks[1:]:  # equal to the first is equal to all
            theirs = digests[other].get(ranks, [])
            if [key for _, key, _ in theirs] != [key for _, key, _ in mine]:
                return (
                    f"ranks {ranks[0]} and {other} have {len(mine)} and {len(theirs)} copies of "
                    "parameters and optimizer state, not of the same ones"
                )
            for (name, _, one), (_, _, two) in zip(mine, theirs, strict=True):
                if one != two:
                    return f"{name} differs between rank {ranks[0]} and rank {other}"
    return None


# -- at most one a process ----------------------------------------------------------------

_under_way: list[BackgroundSave] = []
SPARES = Spares()
"""What the last save in the background has copied to, until the next one or `shutdown`."""
_registry.at_shutdown.append(SPARES.end)


def begin(saving: BackgroundSave) -> None:
    """Starts a save; the one before has been finished."""
    assert not _under_way
    _under_way.append(saving)
    saving.start()


def is_under_way() -> bool:
    """Whether this process is still writing."""
    return any(each.is_under_way for each in _under_way)


def finish() -> None:
    """Waits for this process's part of a save under way, if there is one.

    Raises:
        CheckpointError: it failed here; it is told once.
    """
    if _under_way:
        _under_way.pop().finish()
