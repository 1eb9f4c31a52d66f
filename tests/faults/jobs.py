"""Jobs of eight forked ranks, one of which meets with a fault: what the others see, how soon."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from commgrid.testing import Ranks
from tests.faults.moments import MOMENTS, Limits, now
from tests.waiting import until, until_waiting

RANKS = 8
VICTIMS = {"first": 0, "middle": 3, "last": 7}
AT_ONCE = 4  # jobs; most of their time they wait for something
LONGEST = 180.0  # seconds until what has not ended by itself is killed, and counted as left


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raises() -> None:
    raise ValueError("no such token")


def exits() -> None:
    sys.exit(0)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def disk_full() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))


FAULTS: dict[str, Callable[[], object]] = {
    "kill -9": killed,
    "SIGSTOP": stopped,
    "exception": raises,
    "exit 0": exits,
    "out of memory": out_of_memory,
    "full disk": disk_full,
}


@dataclass(frozen=True)
class Row:
    """One fault at one moment on one rank."""

    fault: str
    moment: str
    victim: str

    def __str__(self) -> str:
        return f"{self.fault} × {self.moment} × {self.victim}"


STARTING = ("before initialize", "while agreeing", "while creating groups")
SILENT = ("kill -9", "SIGSTOP")
"""Faults whose victim tells nobody."""


def limits_of(row: Row) -> Limits:
    """Short where the fault is only noticed once a time is over, else longer than the job lasts.

    So a survivor of the others that ends has learned of the fault by itself.
    """
    starting = row.moment == "before initialize" or row.fault in SILENT
    return Limits(
        timeout=4.0 if row.fault == "SIGSTOP" else 2 * LONGEST,
        startup=20.0 if row.moment in STARTING and starting else 2 * LONGEST,
    )


ROWS = [
    Row(fault, moment, victim)
    for moment in MOMENTS
    for fault in FAULTS
    if fault != "full disk" or moment == "in a checkpoint save"
    for victim in VICTIMS
]


@dataclass(frozen=True)
class Seen:
    """What a rank has ended with.

    Args:
        kind, message: of its error; empty where it had none.
        raised: seconds after the fault, as the others count.
    """

    kind: str
    message: str
    raised: float


@dataclass
class Outcome:
    """What a row has come to.

    Args:
        survivors: by rank, all but the victim.
        victim: what the victim itself ended with, where it lived to tell.
        left: ranks whose processes had to be killed.
        stacks: where these hung.
        began: whether the victim came to its moment.
    """

    row: Row
    survivors: dict[int, Seen] = field(default_factory=dict)
    victim: Seen | None = None
    left: list[int] = field(default_factory=list)
    stacks: str = ""
    began: bool = False

    @property
    def seconds(self) -> float:
        """Until the last survivor had its error."""
        return max((seen.raised for seen in self.survivors.values()), default=LONGEST)

    @property
    def kinds(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for seen in self.survivors.values():
            kind = seen.kind or "no error"
            found[kind] = found.get(kind, 0) + 1
        return found


class Job:
    """The processes of one row."""

    def __init__(self, row: Row) -> None:
        self.row, self.victim = row, VICTIMS[row.victim]
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.ranks = Ranks(
            _rank, RANKS, row, self.folder, per_rank=[(rank,) for rank in range(RANKS)],
            backend=None, launcher="torchrun", killable=True,
        ).start()  # fmt: skip
        self.until, self.continued = now() + LONGEST, False

    def is_over(self) -> bool:
        """Whether all have ended; lets a stopped victim go on once the others have.

        Again and again: it may stop only after that.
        """
        living = self.ranks.living()
        if not living or now() > self.until:
            return True
        if living == [self.victim] and self.row.fault == "SIGSTOP":
            if not self.continued:  # what is left of the others' time may be too little for it
                self.continued, self.until = True, max(self.until, now() + LONGEST / 2)
            os.kill(self.ranks.pid(self.victim), signal.SIGCONT)
        return False

    def outcome(self) -> Outcome:
        """The outcome of the row; ends ranks that are left."""
        self.ranks.close()
        found = Outcome(self.row)
        acted = self.folder / "acted"
        found.began = acted.exists()
        began = float(acted.read_text()) if found.began else 0.0
        for rank, end in self.ranks.outcomes.items():
            if end.late:
                found.left.append(rank)
                found.stacks += str(end)
            seen = None
            if end.returned:
                kind, message, raised = end.value
                seen = Seen(kind, message, raised - began)
            if rank == self.victim:
                found.victim = seen
            elif seen is not None:
                found.survivors[rank] = seen
        shutil.rmtree(self.folder, ignore_errors=True)
        return found


def run(rows: Sequence[Row], at_once: int = AT_ONCE) -> Iterator[Outcome]:
    """Runs a job for each row, some of them beside each other; outcomes as they come."""
    waiting, running = list(rows), list[Job]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(Job(waiting.pop(0)))
            for job in [each for each in running if each.is_over()]:
                running.remove(job)
                yield job.outcome()
            time.sleep(0.01)  # a poll
    finally:
        for job in running:
            job.outcome()


def _rank(row: Row, folder: Path, rank: int) -> tuple[str, str, float]:
    """Kind and message of the rank's error, and when it came."""
    own = folder / f"{rank}.process"
    own.with_suffix(".partial").write_text(str(os.getpid()))
    own.with_suffix(".partial").rename(own)
    limits = limits_of(row)

    def act() -> None:
        others = [folder / f"{each}.process" for each in range(RANKS) if each != rank]
        until(lambda: all(each.exists() for each in others), "all ranks have started")
        until_waiting(int(each.read_text()) for each in others)
        (folder / "acted").write_text(str(now()))
        FAULTS[row.fault]()

    is_victim = rank == VICTIMS[row.victim]
    error = ("", "")
    try:
        MOMENTS[row.moment](act if is_victim else lambda: None, folder, limits)
    except BaseException as raised:
        error = (type(raised).__name__, str(raised))
    at = now()
    if row.fault == "full disk":
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return *error, at
