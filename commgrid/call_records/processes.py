"""The ranks of this host: a note of each process, and the request for its stacks.

    <tmp>/commgrid-<user>/4711.json      rank 3 of 8, of train.py, its ring
    <tmp>/commgrid-<user>/4711.stacks    where its threads are, of each SIGUSR1
    <tmp>/commgrid-<user>/4711.torch     torch's flight recorder, a second later at most

`faulthandler` writes the stacks at once, also while the main thread is in C++. Nothing here needs
torch: `commgrid dump` is another process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from commgrid.call_records import ring
from commgrid.errors import SpecError, writing
from commgrid.layout.rank_text import describe_ranks

NOTICED = 5.0
"""Seconds in which a process notices a request."""

QUIET = 0.2
"""Seconds without a new line, after which stacks are whole."""


@dataclass(frozen=True)
class Process:
    """A process with a grid.

    Args:
        pid, started: process id, which may be used again, and start time.
        rank, world_size: in its job.
        space: of process ids: containers may share a folder, and not their processes.
        job: what all ranks of a job on this host have in common.
        program: its arguments.
        ring: the file of its records; "": it has none.
        answers: whether SIGUSR1 has it write its stacks. A program's own handler stays.
    """

    pid: int
    started: str
    space: str
    rank: int
    world_size: int
    job: str
    program: str
    ring: str
    answers: bool


def folder_of_user() -> Path:
    return Path(tempfile.gettempdir()) / f"commgrid-{os.getuid()}"


def file_of(pid: int, kind: str) -> Path:
    """A file of a process: its `json`, `stacks`, `torch`, `ask` or `asked`."""
    return folder_of_user() / f"{pid}.{kind}"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that readers find whole or not at all."""
    half = path.with_name(f"{path.name}.half")
    half.write_bytes(data)
    half.rename(path)


def is_caught(pid: int) -> bool:
    """Whether a process handles SIGUSR1, in Python or in C, and does not end by it."""
    if pid == os.getpid() and signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
        return True
    status = Path(f"/proc/{pid}/status")
    text = status.read_text(errors="replace") if status.exists() else ""
    masks = (line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:"))
    return any(int(mask, 16) >> (signal.SIGUSR1 - 1) & 1 for mask in masks)


def started(pid: int) -> str:
    """When a process was started, in ticks of the kernel's; "": it has ended."""
    with suppress(OSError):
        # A name that was cut within a letter is no text.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if stat[0] not in "ZX":  # ended, and its parent has not asked how
            return stat[19]
    return ""


def boot() -> str:
    """The kernel's name of this start of the host; "": there is none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def space_of_pids() -> str:
    """The kernel's name of this process's space of process ids; "": there is none."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def remove(pid: int) -> None:
    for kind in ("json", "stacks", "torch", "ask", "asked"):
        with suppress(OSError):
            file_of(pid, kind).unlink(missing_ok=True)


def running() -> list[Process]:
    """The processes of this host with grids, by job and rank; notes of ended ones are removed."""
    found: list[Process] = []
    if folder_of_user().exists() and folder_of_user().stat().st_uid != os.getuid():
        return found
    for path in sorted(folder_of_user().glob("*.json")):
        try:
            each = Process(**json.loads(path.read_text(encoding="utf-8")))
            if each.space != space_of_pids():
                continue
            alive = started(each.pid) == each.started
            if alive:
                os.kill(each.pid, 0)
        except TypeError:  # of another version of commgrid
            continue
        except (OSError, ValueError):
            alive = False
        if alive:
            found.append(each)
        else:
            remove(int(path.stem) if path.stem.isdecimal() else 0)
    return sorted(found, key=lambda each: (each.job, each.rank))


def of_one_job(found: Sequence[Process], pid: int | None) -> list[Process]:
    """The ranks of one job.

    Args:
        found: all processes with a grid.
        pid: of one of its ranks; None: there is only one job.

    Raises:
        SpecError: there is none, or there are several.
    """
    jobs: dict[str, list[Process]] = {}
    for each in found:
        jobs.setdefault(each.job, []).append(each)
    told = "; ".join(
        f"{own[0].program}, {describe_ranks([each.rank for each in own])}, pid {own[0].pid}"
        for own in jobs.values()
    )
    if pid is not None:
        chosen = next((own for own in jobs.values() if any(e.pid == pid for e in own)), None)
        if chosen is None:
            raise SpecError(
                f"--pid {pid}: is no process of yours with a grid; those are: {told or 'none'}"
            )
        return chosen
    if not jobs:
        raise SpecError(
            "no process of yours on this host has a grid; run this where the job's ranks are, as "
            "their user"
        )
    if len(jobs) > 1:
        raise SpecError(f"{len(jobs)} jobs run here: {told}; give --pid of one of its ranks")
    return next(iter(jobs.values()))


AWAY = "it is on another host"
NO_ANSWER = "it has not answered: it has ended, or records no calls"


@dataclass(frozen=True)
class Dumped:
    """The files of one rank.

    Args:
        rank, pid: whose; 0: not known, on another host.
        stacks, records, torch: whether there are stacks, recorded calls, torch's last calls.
        why: reason that there are no stacks; "": there are.
    """

    rank: int
    pid: int
    stacks: bool
    records: bool
    torch: bool
    why: str


def dump(job: Sequence[Process], folder: Path, timeout: float) -> list[Dumped]:
    """Have each rank of a job write down where it is, and copy that and its records to a folder.

    Args:
        job: as `of_one_job` returns it.
        folder: where `rank_00003.stacks`, `rank_00003.ring` and torch's `torch_trace_rank_3` go;
            made if need be.
        timeout: seconds to wait for all.

    Raises:
        SpecError: the folder cannot be written.
    """
    until = time.monotonic() + timeout
    with writing(f"-o {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        before = {each.pid: _ask(each) for each in job}
        return [_collect(each, before[each.pid], folder, until) for each in job]


def _ask(process: Process) -> tuple[int, int] | None:
    """Send the signal, to a process that handles it.

    Returns:
        The size of its stacks before, and when torch's last calls were written before.
    """
    with suppress(OSError):
        if process.answers and is_caught(process.pid):
            before = file_of(process.pid, "stacks").stat().st_size, _written(process)
            os.kill(process.pid, signal.SIGUSR1)
            return before
    return None


def _written(process: Process) -> int:
    with suppress(OSError):
        return file_of(process.pid, "torch").stat().st_mtime_ns
    return 0


def _collect(
    process: Process, before: tuple[int, int] | None, folder: Path, until: float
) -> Dumped:
    name = f"rank_{process.rank:05}"
    stacks, torch, why = b"", False, "the program handles SIGUSR1 itself"
    if before is not None:
        stacks = whole_after(file_of(process.pid, "stacks"), before[0], until)
        why = "" if stacks else "it does not answer, or has ended"
        while stacks and _written(process) == before[1] and time.monotonic() < until:
            time.sleep(QUIET / 10)
        torch = _written(process) != before[1]
    if stacks:
        (folder / f"{name}.stacks").write_bytes(stacks)
    if torch:
        shutil.copyfile(file_of(process.pid, "torch"), folder / f"torch_trace_rank_{process.rank}")
    records = None
    with suppress(OSError, ValueError):
        records = ring.Contents(Path(process.ring).read_bytes()) if process.ring else None
    if records is not None:
        (folder / f"{name}.ring").write_bytes(records.packed())
    return Dumped(process.rank, process.pid, bool(stacks), records is not None, torch, why)


def gather(
    job: Sequence[Process], dumped: Sequence[Dumped], folder: Path, timeout: float
) -> list[Dumped]:
    """Have a rank of this host ask all others over the job's store for their records.

    Args:
        job, folder: as of `dump`, after it.
        dumped: what it has returned.
        timeout: seconds for their answers.

    Returns:
        All ranks of the job, also those that have not answered.
    """
    asking, until = job[0], time.monotonic() + timeout + NOTICED
    answers = file_of(asking.pid, "asked")
    answers.unlink(missing_ok=True)
    request = json.dumps({"folder": str(folder.absolute()), "timeout": timeout})
    write_whole(file_of(asking.pid, "ask"), request.encode())
    while not answers.exists() and time.monotonic() < until:
        time.sleep(QUIET / 10)
    answered = set(json.loads(answers.read_text())) if answers.exists() else set()
    found = {each.rank: each for each in dumped}
    for rank in range(asking.world_size):
        why = AWAY if rank in answered else NO_ANSWER
        before = found.get(rank, Dumped(rank, 0, False, False, False, why))
        found[rank] = replace(before, records=before.records or rank in answered)
    return [found[rank] for rank in sorted(found)]


def whole_after(path: Path, size: int, until: float) -> bytes:
    """Wait until a file stops growing; return its contents beyond so many bytes."""
    seen, since = size, time.monotonic()
    while time.monotonic() < until:
        with suppress(OSError):
            now = path.stat().st_size
            if now != seen:
                seen, since = now, time.monotonic()
            elif seen > size and time.monotonic() - since > QUIET:
                break
        time.sleep(QUIET / 10)
    with suppress(OSError), path.open("rb") as file:
        file.seek(size)
        return file.read()
    return b""
