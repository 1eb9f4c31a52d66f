"""Ranks as processes of this machine: started together, watched, and ended together.

Ranks are forked from a process that has imported torch, which takes a fraction of the time that
spawning takes. CUDA does not survive a fork, so ranks that use it are spawned.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from commgrid.launching.leftovers import kinds_of
from commgrid.launching.process import FAILED, Task, free_port, launcher_variables, run_rank

TIMEOUT = 240.0
GRACE = 30.0
"""Seconds that the other ranks have to end by themselves after one has failed."""
_LINES = 12


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not end in time. The message has each one's traceback."""


@dataclass(frozen=True)
class Outcome:
    """End of one rank.

    Args:
        rank: which.
        returned: whether the function returned.
        value: its result.
        error: traceback of its exception.
        exitcode: of the process; negative: the signal that ended it.
        late: whether it had to be killed.
        stacks: of its threads when it was killed.
        printed: all that it printed, if that went to a file.
    """

    rank: int
    returned: bool = False
    value: Any = None
    error: str = ""
    exitcode: int | None = None
    late: bool = False
    stacks: str = ""
    printed: str = ""

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended the process, unless this harness sent it."""
        if self.late or self.exitcode is None or self.exitcode >= 0:
            return None
        return signal.Signals(-self.exitcode)

    @property
    def end(self) -> str:
        """The exit code or the signal, in words."""
        return f"signal {self.signal.name}" if self.signal else f"exit code {self.exitcode}"

    @property
    def last_lines(self) -> str:
        """The last lines that it printed, and the innermost calls of its thread, indented."""
        said = [line for line in self.printed.splitlines() if line.strip()][-_LINES:]
        stack = self.stacks[max(self.stacks.find("Current thread"), 0) :].splitlines()[:_LINES]
        return "".join(f"\n    {line}" for line in [*said, *stack])

    def __str__(self) -> str:
        end = self.end.replace("signal ", "ended by ")
        if self.late:
            end = "killed, since it had not ended"
        return f"--- rank {self.rank} ({end})\n{self.printed or self.error}{self.stacks}"


class Ranks:
    """Processes that each run a function as one rank.

    As a context manager it starts them and ends all that are left::

        with Ranks(train, 4, backend=None, launcher="torchrun") as ranks:
            os.kill(ranks.pid(3), signal.SIGKILL)
            ranks.wait()
        print(ranks.outcomes[0].error)

    Args:
        function: takes `args`, and after them the rank's entry of `per_rank`.
        world_size: number of ranks.
        backend: WORLD is started with it, over a file; None: not started. "nccl" gives each rank
            the device of its number.
        launcher: "torchrun" or "slurm" sets the variables that these set, with a free port.
        per_rank: further arguments, by rank.
        environ: further variables, or a function that returns those of a rank, such as
            `lambda rank: {"NCCL_HOSTID": f"rank{rank}"}`. They are no leftovers.
        absent: ranks that are never started.
        at_once: ranks that run at a time, where none waits for another; None: all.
        output: a folder; the function is then a program. It prints to `output_00003.txt` there, it
            may end by `sys.exit` or `os._exit`, and once a rank fails the others are killed.
        timeout: seconds until all are killed, in `wait`.
        method: "fork", or "spawn" where the function uses CUDA.
        killable: whether a rank that a signal ends is no failure; the others run on, and end as
            programs do, with their exit handlers.
        check: whether grids that a rank leaves are ended, and other leftovers are an error; by
            default unless `killable` or `output`.
        leftovers: kinds of leftovers that are no error, of `commgrid.launching.leftovers.KINDS`,
            or "ignore". By default process groups, which end with the program.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        backend: str | None = "gloo",
        launcher: str | None = None,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        environ: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
        absent: Collection[int] = (),
        at_once: int | None = None,
        output: Path | None = None,
        timeout: float = TIMEOUT,
        method: str = "fork",
        killable: bool = False,
        check: bool | None = None,
        leftovers: str | Sequence[str] = ("groups",),
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; expected at least 1")
        if per_rank is not None and len(per_rank) != world_size:
            raise ValueError(f"per_rank has {len(per_rank)} entries for {world_size} ranks")
        checked = not killable and output is None if check is None else check
        ignored = kinds_of(leftovers)
        self.world_size, self.timeout, self.killable = world_size, timeout, killable
        self._are_programs = output is not None
        self._at_once = at_once or world_size
        self.outcomes: dict[int, Outcome] = {}
        """By rank, in the order in which they ended."""
        self._context: Any = multiprocessing.get_context(method)
        self._processes: dict[int, BaseProcess] = {}
        port = free_port()
        variables = environ if callable(environ) else lambda rank: environ or {}
        present = [rank for rank in range(world_size) if rank not in absent]
        launched = {rank: launcher_variables(launcher, rank, world_size, port) for rank in present}
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._tasks = {
            rank: Task(
                function=function,
                args=(*args, *(per_rank[rank] if per_rank is not None else ())),
                rank=rank,
                world_size=world_size,
                started=len(present),
                folder=self._folder.name,
                backend=backend,
                environ={**launched[rank], **variables(rank)},
                leftovers=ignored if checked else None,
                exits=killable or output is not None,
                output=None if output is None else output / f"output_{rank:05}.txt",
                parent=os.getpid(),
            )
            for rank in present
        }

    def start(self) -> Ranks:
        """Start all processes."""
        import torch.distributed  # noqa: F401 -- once here, and not once in each forked rank

        self._start_more()
        return self

    def _start_more(self) -> None:
        waiting = [task for rank, task in self._tasks.items() if rank not in self._processes]
        running = len(self._processes) - len(self.outcomes)
        for task in waiting[: self._at_once - running]:
            process = self._context.Process(target=run_rank, args=(task,), daemon=False)
            _start(process)
            self._processes[task.rank] = process

    def pid(self, rank: int) -> int:
        """Process id of a rank."""
        pid = self._processes[rank].pid
        assert pid is not None  # it was started
        return pid

    def living(self) -> list[int]:
        """Ranks whose processes have not ended."""
        self._look()
        if not self.failures():
            self._start_more()
        return [rank for rank in self._processes if rank not in self.outcomes]

    def wait(self) -> dict[int, Outcome]:
        """Wait until all have ended, and return their outcomes in the order of their ends.

        After `timeout` all are killed; after the first failure, in `GRACE` seconds, or programs at
        once.
        """
        until = time.monotonic() + self.timeout
        failed = False
        while (living := self.living()) and time.monotonic() < until:
            if not failed and self.failures():
                failed = True
                (Path(self._folder.name) / FAILED).touch()
                until = min(until, time.monotonic() + (0.0 if self._are_programs else GRACE))
            # Briefly: a process that a rank has started keeps the rank's sentinel open.
            wait_for_any([self._processes[rank].sentinel for rank in living], timeout=0.05)
        self.end()
        return self.outcomes

    def results(self) -> list[Any]:
        """Wait, and return each rank's result by rank; None for absent ranks.

        Of a rank that a signal ended, if that is allowed, the `signal.Signals`.

        Raises:
            RanksFailed: with the traceback of every rank that failed, the first failure first.
        """
        outcomes = self.wait()
        if failures := self.failures():
            head = f"{len(failures)} of {len(outcomes)} ranks failed"
            if any(outcome.late for outcome in failures):
                head += f" (timeout {self.timeout:g} s)"
            raise RanksFailed("\n".join([head, *map(str, failures)]))
        values: list[Any] = [None] * self.world_size
        for rank, outcome in outcomes.items():
            values[rank] = outcome.value if outcome.returned else outcome.signal
        return values

    def failures(self) -> list[Outcome]:
        """Outcomes of the ranks that have failed so far, the first failure first."""
        return [outcome for outcome in self.outcomes.values() if self._failed(outcome)]

    def end(self) -> None:
        """Kill ranks that have not ended, with processes they started; they print stacks first."""
        self._look()
        late = [rank for rank in self._processes if rank not in self.outcomes]
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(rank), signal.SIGCONT)
                os.kill(self.pid(rank), signal.SIGUSR1)
        if late:
            time.sleep(0.3)  # a rank cannot say when it has written its stacks
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid(rank), signal.SIGKILL)
            self._processes[rank].kill()  # if it has not yet led its session
            self._processes[rank].join()
            self.outcomes[rank] = self._outcome(rank, late=True)

    def close(self) -> None:
        """Kill what has not ended, and remove the files of the run. Can be called twice."""
        self.end()
        self._folder.cleanup()

    def _look(self) -> None:
        ended = [
            self._outcome(rank, late=False)
            for rank, process in self._processes.items()
            if rank not in self.outcomes and not process.is_alive()
        ]
        for outcome in sorted(ended, key=self._time_of_result):
            self.outcomes[outcome.rank] = outcome

    def _time_of_result(self, outcome: Outcome) -> float:
        """Of ranks that are found ended at once, the first to write its result failed first."""
        result = self._tasks[outcome.rank].path("result")
        return result.stat().st_mtime if result.exists() else 0.0

    def _outcome(self, rank: int, late: bool) -> Outcome:
        task, exitcode = self._tasks[rank], self._processes[rank].exitcode
        result, stacks = task.path("result"), task.path("stacks")
        output = task.output
        printed = output.read_text(errors="replace") if output and output.exists() else ""
        returned, value = pickle.loads(result.read_bytes()) if result.exists() else (False, "")
        said = stacks.read_text() if stacks.exists() else ""
        return Outcome(
            rank,
            returned=returned,
            value=value if returned else None,
            error="" if returned else value,
            exitcode=exitcode,
            late=late,
            # without what its parent was doing when it forked the rank
            stacks=re.sub(r"(, line \d+ in run_rank\n)(  File .*\n)*", r"\1", said),
            printed=printed,
        )

    def _failed(self, outcome: Outcome) -> bool:
        if self.killable and outcome.signal is not None:
            return False
        has_returned = outcome.returned or self._are_programs
        return outcome.late or not has_returned or outcome.exitcode != 0

    def __enter__(self) -> Ranks:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, **how: Any
) -> list[Any]:
    """Call `function(*args)` on every rank and return each rank's result, by rank.

    Args:
        function, world_size, args, how: of `Ranks`.

    Raises:
        RanksFailed: with the traceback of every rank that did not return.

    Example:
        >>> run_on_ranks(pow, 2, 3, per_rank=[(1,), (2,)], backend=None)
        [3, 9]
    """
    with Ranks(function, world_size, *args, **how) as ranks:
        return ranks.results()


def _start(process: BaseProcess) -> None:
    """Start a process; one that is forked leaves the parent's objects to the parent.

    A child that collects a process group which its parent has dropped would wait for that group's
    threads, which a forked process does not have.
    """
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
            process.start()
    finally:
        gc.unfreeze()
