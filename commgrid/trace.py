"""Trace: a record of each collective, with its group's name, its line and its time.

    commgrid.initialize(tp=2, trace=True)         or COMMGRID_TRACE=1, or trace.start()
    …
    print(commgrid.trace.summary())               this rank's calls
    commgrid.trace.save("runs/trace")             one file a rank; or COMMGRID_TRACE=runs/trace
    commgrid trace runs/trace -o trace.json       for Perfetto

Recorded are calls that Python makes on torch's process groups: by commgrid, torch or Megatron. Not
recorded are calls made in C++: DistributedDataParallel's all-reduces, functional collectives such
as DTensor's, and calls inside compiled graphs. Times are the host's, from the call to the end of
the wait for it; on CUDA the wait is for the stream, not for the device.
"""

from __future__ import annotations

from pathlib import Path

from commgrid.call_records import files as trace_files
from commgrid.call_records.table import as_table, summed
from commgrid.call_records.trace import Trace
from commgrid.errors import CommGridError, SpecError
from commgrid.recording import recorder, remote
from commgrid.runtime.registry import live_grids
from commgrid.torch_compat.world import is_initialized, world_rank

__all__ = ["is_on", "recorded", "save", "start", "step", "stop", "summary"]

_kept: list[recorder.Recorder] = []  # the recorder of the last recording


def start(capacity: int = recorder.CAPACITY) -> None:
    """Start recording this process's calls. A second start changes nothing.

    Args:
        capacity: number of calls that are kept, the last ones; 136 bytes each. Where a grid of
            `verify="order"` has started a recorder, that one and its capacity are used.

    Raises:
        SpecError: `capacity` is no whole number from 1.
    """
    if type(capacity) is not int or capacity < 1:
        raise SpecError(f"capacity={capacity!r}: expected a number of calls, from 1")
    if is_on():
        return
    started = recorder.start(capacity)
    _kept[:] = [started]
    if is_initialized():
        started.set_rank(world_rank())
    for grid in live_grids():
        started.meet(grid)
    remote.follow()


def stop() -> None:
    """End recording. The records stay until the next start."""
    stopped = recorder.stop()
    if stopped is not None:
        _kept[:] = [stopped]
    remote.follow()


def step(number: int) -> None:
    """Note that a training step begins, if this process records.

    `commgrid trace DIR --steps` shows how long each rank has waited in each step.
    """
    recording = recorder.current()
    if recording is not None:
        recording.step(number)


def is_on() -> bool:
    """Whether this process records."""
    found = recorder.current()
    return found is not None and found.is_asked


def recorded() -> Trace:
    """Return this rank's calls.

    Raises:
        CommGridError: nothing was ever recorded.
    """
    return trace_files.parse([_recorder().contents()])[0]


def _recorder() -> recorder.Recorder:
    found = recorder.current() or next(iter(_kept), None)
    if found is None:
        raise CommGridError(
            "nothing was recorded; start with commgrid.initialize(trace=True), COMMGRID_TRACE=1 or "
            "commgrid.trace.start()"
        )
    return found


def summary(most: int = 30) -> str:
    """Return a table of this rank's calls by group, operation and place.

    Args:
        most: number of rows.

    Raises:
        CommGridError: nothing was ever recorded.

    Example:
        >>> import commgrid, torch
        >>> grid = commgrid.initialize(trace=True)
        >>> torch.distributed.broadcast(torch.ones(4), 0, grid.get_group("dp"))
        >>> commgrid.trace.stop()
        >>> commgrid.trace.summary().splitlines()[1].split()[2:5]
        ['broadcast', '1', '16']
        >>> commgrid.shutdown()
    """
    return as_table(summed([recorded()]), most)


def save(folder: str | Path) -> Path:
    """Write this rank's calls to `rank_00003.ring` in a folder, which is created if missing.

    Raises:
        CommGridError: nothing was ever recorded, or the file cannot be written.
    """
    return _recorder().save(Path(folder))
