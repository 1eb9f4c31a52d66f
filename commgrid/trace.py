"""Records of collectives: each by the name of its group, with its line and its time.

    commgrid.initialize(tp=2, trace=True)         or COMMGRID_TRACE=1, or trace.start()
    …
    print(commgrid.trace.summary())               this rank's
    commgrid.trace.save("runs/trace")             a file of each rank; COMMGRID_TRACE=runs/trace
    commgrid trace runs/trace -o trace.json       for Perfetto

It sees what Python hands to torch's process groups: commgrid's collectives, torch's, Megatron's. It
does not see what never comes through Python: DistributedDataParallel's all-reduces, functional
collectives as DTensor issues them, and what torch.compile has taken in. Times are the host's: from
the call to the end of the wait for it; on CUDA the wait is for the stream, not for the device.
"""

from __future__ import annotations

from pathlib import Path

from commgrid.call_records import files as trace_files
from commgrid.call_records.table import as_table, summed
from commgrid.call_records.trace import Trace
from commgrid.errors import CommGridError
from commgrid.recording import recorder, remote
from commgrid.runtime.registry import live_grids
from commgrid.torch_compat.world import is_initialized, world_rank

__all__ = ["is_on", "save", "start", "step", "stop", "summary"]

_kept: list[recorder.Recorder] = []  # of the last recording, once it has ended


def start(capacity: int = recorder.CAPACITY) -> None:
    """Begins to record this process's calls; while it records already, nothing changes.

    Args:
        capacity: how many calls are kept, the last ones; 136 bytes each.
    """
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
    """Note that a training step begins; nothing happens while this process does not record.

    `commgrid trace DIR --steps` says how long each rank has waited in each step.
    """
    recording = recorder.current()
    if recording is not None:
        recording.step(number)


def is_on() -> bool:
    """Whether this process records."""
    found = recorder.current()
    return found is not None and found.is_asked


def recorded() -> Trace:
    """This rank's calls.

    Raises:
        CommGridError: nothing was ever recorded.
    """
    return trace_files.parse([_recorder().contents()])[0]


def _recorder() -> recorder.Recorder:
    found = recorder.current() or next(iter(_kept), None)
    if found is None:
        raise CommGridError(
            "nothing was recorded; commgrid.initialize(trace=True), COMMGRID_TRACE=1 or "
            "commgrid.trace.start() begins to"
        )
    return found


def summary(most: int = 30) -> str:
    """This rank's calls by group, operation and place: how many, bytes, seconds, share.

    Args:
        most: lines.

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
    """Writes this rank's calls to `rank_00003.ring` in a folder, which is made if need be.

    Raises:
        CommGridError: nothing was ever recorded, or the file cannot be written.
    """
    return _recorder().save(Path(folder))
