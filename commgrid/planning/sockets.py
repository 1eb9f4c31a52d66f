"""Open files, connections and threads of a rank's communicators.

| backend | at start | once all of it is in use |
|---|---|---|
| gloo, connected at start | 4 files, one a pair of ranks, 3 threads | the same |
| gloo, connected at first use | 4 files, 2 threads | one file more for each pair that has talked |
| gloo, one rank | 1 thread | the same |
| gloo of WORLD | as connected at start: torch connects all pairs | the same |
| NCCL, connected at start | 6 files, 3 threads, a ring's data; torch's 2 threads | trees' data |
| NCCL, connected at first use | 2 threads of torch's | as connected at start |

gloo's numbers are measured, and a test measures them again. NCCL's are counted in its sources
(`src/bootstrap.cc`: two connections of a ring and listeners for the ring, peers and the proxy, the
latter also on a Unix socket; `src/transport/net_socket.cc`: a control and a data socket a
connection), for IP sockets and two channels; NVLink and InfiniBand open fewer files than these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from commgrid.errors import SpecError
from commgrid.planning.plan import GroupPlan

GLOO_DEVICE_FILES = 4
"""A device's epoll, the two ends of a pipe that wakes it, and its listener."""
NCCL_BOOTSTRAP_FILES = 6
NCCL_BOOTSTRAP_CONNECTIONS = 2
NCCL_CHANNELS = 2
NCCL_FILES_PER_CONNECTION = 2
_RING, _TREES = 2, 6  # connections of a channel: to and from its neighbours, of two trees at most


@dataclass(frozen=True)
class Need:
    """Open files, the connections among them, and threads."""

    files: int = 0
    connections: int = 0
    threads: int = 0

    def __add__(self, other: Need) -> Need:
        return Need(
            self.files + other.files,
            self.connections + other.connections,
            self.threads + other.threads,
        )


_GRID = Need(files=1, connections=1, threads=1)


@dataclass(frozen=True)
class GroupNeed:
    """Files and threads of one communicator.

    Args:
        names: every name it answers to.
        size: its number of ranks.
        start: once the grid is ready.
        most: once every pair of its ranks has talked.
    """

    names: tuple[str, ...]
    size: int
    start: Need
    most: Need


def needs(plan: GroupPlan, backend: str) -> tuple[GroupNeed, ...]:
    """Files and threads of each communicator of a rank, in creation order.

    Args:
        backend: unless the groups table gives one: `gloo`, `nccl`, `cpu:gloo,cuda:nccl`.

    Example:
        >>> from commgrid.planning.spec import GridSpec
        >>> plan = GroupPlan.for_rank(GridSpec.build(tp=4).resolve(8), 0)
        >>> [(n.names[0], n.start.files, n.most.files) for n in needs(plan, "gloo")][:2]
        [('tp', 7, 7), ('cp', 0, 0)]
    """
    return tuple(
        GroupNeed(
            planned.names,
            planned.size,
            *_of_group(planned.size, planned.options.backend or backend, planned.connect),
        )
        for planned in plan.communicators
    )


def total(found: tuple[GroupNeed, ...]) -> tuple[Need, Need]:
    """The sums at start and at most, with a grid's connection to the store and thread for dumps."""
    return sum((n.start for n in found), _GRID), sum((n.most for n in found), _GRID)


def _kinds(backend: str) -> set[str]:
    names = {pair.rpartition(":")[2].lower() for pair in backend.split(",")}
    return {"nccl" if name.startswith("nccl") else name for name in names}  # torch has several


@cache
def _of_group(size: int, backend: str, connect: bool) -> tuple[Need, Need]:
    start, most = Need(), Need()
    kinds = _kinds(backend)
    if "gloo" in kinds and size == 1:
        start, most = start + Need(threads=1), most + Need(threads=1)
    elif "gloo" in kinds:
        idle = Need(GLOO_DEVICE_FILES, 0, 3 if connect else 2)
        pairs = Need(size - 1, size - 1, 0)
        start, most = start + idle + (pairs if connect else Need()), most + idle + pairs
    if "nccl" in kinds:
        watching = Need(threads=2)
        start, most = start + watching, most + watching
        if size > 1:
            start += _nccl(_RING) if connect else Need()
            most += _nccl(_RING + _TREES)
    return start, most


def _nccl(per_channel: int) -> Need:
    """A connected communicator of NCCL's."""
    data = NCCL_CHANNELS * per_channel
    return Need(
        NCCL_BOOTSTRAP_FILES + NCCL_FILES_PER_CONNECTION * data,
        NCCL_BOOTSTRAP_CONNECTIONS + NCCL_FILES_PER_CONNECTION * data,
        3,
    )


def check_limits(plan: GroupPlan, backend: str) -> None:
    """Refuses a grid that would run out of open files while it starts, before it opens any.

    Raises the process's soft limit as far as needed and allowed. gloo ends a process that runs out,
    and the others see timeouts.

    Raises:
        SpecError: the limit is too low; names the groups that need most.
    """
    found = needs(plan, backend)
    need = _GRID.files + sum(each.start.files for each in found)
    try:
        import resource

        held = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):  # where there is no such limit, or nothing tells of it
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    if soft == endless or held + need <= soft:
        return
    if hard == endless or held + need <= hard:
        # As far as it goes: what connects at first use comes later.
        raised = hard if hard != endless else max(held + total(found)[1].files, 65_536)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        return
    largest = ", ".join(_largest(found))
    raise SpecError(
        f"the grid needs {need:,} open files on this rank to start, of which {hard - held:,} are "
        f"left (limit {hard:,}, {held:,} open); most take {largest}. Raise the limit (ulimit -Hn, "
        "LimitNOFILE), connect fewer at start (connect=), create fewer (create=), or use "
        "backend=nccl, which opens a few however many ranks a group has"
    )


def _largest(found: tuple[GroupNeed, ...]) -> Iterator[str]:
    for each in sorted(found, key=lambda n: -n.start.files)[:3]:
        yield f"{each.names[0]!r} ({each.size:,} ranks, {each.start.files:,} files)"
