"""A job of real ranks, examined by every command: while it runs, after its end, and killed.

A program is a function of `Here`. Each rank runs it in its own process. In `here.now()` all ranks
pause in their own code, and the test runs the commands:

    running     commgrid diagnose TRACE · verify TRACE · dump, then diagnose · diagnose() on a rank
    killed      a copy of the folder, read after the end of all ranks
    ended       commgrid diagnose TRACE · verify TRACE

No rank waits for another in a call at that time: any wait that a command reports is an error.
Processes meet through files, without a recorded call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

import commgrid
from commgrid.cli import main
from commgrid.launching.local_ranks import Ranks
from tests.sizes import full
from tests.waiting import LOOK_SECONDS, LOOKS, sleeps, until

FOREVER = 1000.0
"""Seconds that a collective may take: longer than a test."""

LONG = 60.0
"""Seconds for which ranks of a job that was stopped may have waited for each other."""

Program = Callable[["Here"], object]


@dataclass(frozen=True)
class Story:
    """A program, and the expected result of the commands.

    Args:
        function: the program.
        size: number of ranks.
        culprits: the ranks at fault; none: it is correct.
        killed: ranks ended by a signal; the program continues without them.
        open: whether a command may answer "undecided": records are missing, or do not match calls.
        nccl: whether NCCL would run it too; NCCL has no tags and no receive from any source.
        trace: whether the job records; if not, `commgrid dump` takes torch's records.
    """

    function: Program
    size: int = 4
    culprits: tuple[int, ...] = ()
    killed: tuple[int, ...] = ()
    open: bool = False
    nccl: bool = True
    trace: bool = True


@dataclass
class Here:
    """One rank's view of the job.

    Args:
        rank, size: this rank, and the number of ranks.
        folder: for the files of all ranks.
        order: whether grids compare calls while they are issued.
    """

    rank: int
    size: int
    folder: Path
    order: bool
    looks: int = 0
    meetings: dict[str, int] = field(default_factory=dict)

    @property
    def trace(self) -> Path:
        """Folder of the records."""
        return self.folder / "trace"

    def grid(self, **how: Any) -> Any:
        """Make a grid that records, as the job does."""
        how.setdefault("timeout", FOREVER)
        return commgrid.initialize(verify="order" if self.order else None, **how)

    def meet(self, name: str, ranks: Sequence[int] | None = None) -> None:
        """Wait for other ranks, without a call that is recorded."""
        count = self.meetings[name] = self.meetings.get(name, 0) + 1
        every = range(self.size) if ranks is None else ranks
        self.mark(f"{name}.{count}")
        until(
            lambda: all(self.path(f"{name}.{count}", rank).exists() for rank in every),
            f"ranks {list(every)} come to {name}",
        )

    def mark(self, name: str) -> None:
        """Announce that this rank has reached a place."""
        self.path(name, self.rank).write_text("")

    def hear(self, name: str, rank: int) -> None:
        """Wait until a rank has reached a place."""
        until(self.path(name, rank).exists, f"rank {rank} comes to {name}")

    def path(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{rank}"

    def now(
        self, ask: int | None = None, ranks: Sequence[int] | None = None, open: bool = False
    ) -> None:
        """Pause until the commands have run.

        Args:
            ask: the rank that calls `commgrid.diagnose()` meanwhile; None: no rank.
            ranks: the pausing ranks; None: all.
            open: whether other threads wait meanwhile.
        """
        every = range(self.size) if ranks is None else ranks
        number = self.looks
        self.looks += 1
        self.meet(f"now-{number}", ranks)
        if ask is not None and full() and commgrid.trace.is_on():  # an answer takes as long
            if ask == self.rank:
                self.path("half", number).write_text(json.dumps(asked()))
                self.path("half", number).rename(self.path("said", number))
            until(self.path("said", number).exists, f"rank {ask} has asked")
        if every[0] == self.rank:
            half = self.folder / f"look-{number}.half"
            half.write_text("open" if open else "")
            half.rename(half.with_suffix(".asked"))
        until((self.folder / f"look-{number}.done").exists, "the job was looked at")

    def hangs(self) -> None:
        """Announce that this rank's next calls do not end.

        When all living ranks have announced it, the commands run, and the job is stopped.
        """
        self.mark("hangs")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def asked() -> list[dict[str, Any]]:
    """Return the causes of `commgrid.diagnose()`; a silent living rank is one too."""
    for _ in range(10):  # a rank answers once its thread has come to listen
        found = commgrid.diagnose(timeout=3.0, patience=0.0)
        if not found.missing:
            return [asdict(each) for each in found.causes]
    return [{"kind": "missing rank", "ranks": found.missing, "text": str(found)}]


def run(
    function: Program, size: int, killed: Sequence[int], folder: str, order: bool, rank: int
) -> None:
    """Run a program as one rank, up to the exit handlers of its process."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of its functions
    faulthandler.unregister(signal.SIGUSR1)  # the harness's own, in which `dump` would not write
    os.chdir(folder)  # where a rank that records in memory writes when it is asked for a dump
    here = Here(rank, size, Path(folder), order)
    os.chdir(folder)  # where a rank without a folder for its records writes them when it is asked
    here.path("pid", rank).write_text(str(os.getpid()))
    try:
        function(here)
    except SystemExit:
        raise
    except BaseException as error:
        sys.last_value = error  # set by the interpreter while exit handlers run
        raise
    here.meet("end", sorted({*range(size)} - {*killed}))  # the store of gloo is rank 0's
    commgrid.shutdown()


def said(*words: str | Path) -> tuple[int, str]:
    """Run a command; return its status and output."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        status = main([str(word) for word in words])
    return status, text.getvalue()


@dataclass(frozen=True)
class Look:
    """Output of a command.

    Args:
        command: its name, and when it ran.
        status: its exit status.
        text: all of the output.
        causes: kind and ranks of each finding of a diagnosis.
        open: whether threads waited at that time for ranks that could still come; a command may
            report these waits.
        cut: whether the ranks had not ended by themselves: their last calls may be unfinished.
    """

    command: str
    status: int
    text: str
    causes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    open: bool = False
    cut: bool = True

    def accuses(self, story: Story) -> bool:
        """Whether the command accuses a correct program.

        On a busy machine a rank may be slow. "Undecided" is allowed if the program has not ended or
        its last calls are not known.
        """
        fine = {"slow rank"}
        if self.open:
            fine.add("not entered")
        if story.open:
            fine.add("missing rank")
        if self.causes:
            return any(
                kind not in fine and not set(ranks) <= set(story.killed)
                for kind, ranks in self.causes
            )
        cannot_tell = story.open or story.killed or (self.cut and self.command.startswith("verify"))
        return self.status not in ((0, 3) if cannot_tell else (0,))


@dataclass
class Job:
    """A run of a story, and the output of the commands.

    Args:
        order: whether grids compare calls while they are issued.
        stop: signal for all ranks after the first look, as from a launcher.
        sigterm: whether all ranks get SIGTERM after the end of one, as from a launcher.
    """

    story: Story
    folder: Path
    order: bool = False
    stop: int | None = None
    sigterm: bool = False
    looks: list[Look] = field(default_factory=list)
    kept: list[tuple[Path, bool]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def trace(self) -> Path:
        return self.folder / "trace"

    @property
    def accusations(self) -> str:
        """Accusations of a correct program, shortened."""
        told: dict[str, list[str]] = {}
        for each in self.looks:
            if each.accuses(self.story):
                text = "\n".join(each.text.splitlines()[:3])
                told.setdefault(f"{each.status}: {text}", []).append(each.command)
        return "\n".join(f"{'; '.join(commands)}: {text}" for text, commands in told.items())

    def run(self) -> Ranks:
        """Run the program to its end, then the commands on its records."""
        self.folder.mkdir(exist_ok=True)
        ranks = Ranks(
            run, self.story.size, self.story.function, self.story.size, self.story.killed,
            str(self.folder), self.order, per_rank=[(rank,) for rank in range(self.story.size)],
            backend=None, launcher="torchrun",
            environ={"COMMGRID_TRACE": str(self.trace)} if self.story.trace else {},
            killable=True, timeout=100,
        )  # fmt: skip
        with ranks:
            self._attend(ranks)
            ranks.wait()
            self.errors = [each.error for each in ranks.outcomes.values() if each.error]
        if not self.story.trace:
            return ranks
        self.look("ended", self.trace, False, cut=self.stop is not None)
        for copy, is_open in self.kept:
            self.look("killed", copy, is_open)
        return ranks

    def _attend(self, ranks: Ranks) -> None:
        """Run the commands at each pause of the program, until a rank has ended."""
        asked: set[Path] = set()
        stay = set(range(self.story.size)) - set(self.story.killed)
        while ranks.living() and (stay <= set(ranks.living()) or not self.sigterm):
            for path in set(self.folder.glob("*.asked")) - asked:
                asked.add(path)
                self._look_at_running(ranks, path)
                path.with_suffix(".done").write_text("")
                if self.stop is not None:
                    _signal(ranks, self.stop)
            if self._hangs(ranks):
                if self.story.trace:
                    self.look("running", self.trace, False)
                else:
                    self._dump(ranks, self.folder / "dump", False)
                self.sigterm = True
                break
            time.sleep(0.01)  # a poll
        if self.sigterm:
            _signal(ranks, signal.SIGTERM)

    def _hangs(self, ranks: Ranks) -> bool:
        """Whether each rank has ended, or waits in the call that does not end."""
        living = ranks.living()
        marks = [self.folder / f"hangs.{rank}" for rank in living]
        if not living or not all(mark.exists() for mark in marks):
            return False
        waiting, pids = 0, [ranks.pid(rank) for rank in living]
        while waiting < LOOKS and all(_sleeps(pid) for pid in pids):
            time.sleep(LOOK_SECONDS)
            waiting += 1
        return waiting == LOOKS

    def _look_at_running(self, ranks: Ranks, asked: Path) -> None:
        is_open, own = asked.read_text() == "open", asked.with_suffix("")
        told = self.folder / f"said.{own.name.rpartition('-')[2]}"
        if told.exists():
            found = json.loads(told.read_text())
            self.looks.append(_diagnosed("commgrid.diagnose()", int(bool(found)), found, is_open))
        if self.story.trace:
            copy = own.with_suffix(".killed")
            _signal(ranks, signal.SIGSTOP)  # else the records would be of several moments
            try:
                shutil.copytree(self.trace, copy)
            finally:
                _signal(ranks, signal.SIGCONT)
            self.kept.append((copy, is_open))
            self.look("running", self.trace, is_open)
        if len(self.kept) < 2 and (full() or not self.story.trace):  # a dump waits for a second
            self._dump(ranks, own.with_suffix(".dump"), is_open)

    def _dump(self, ranks: Ranks, folder: Path, is_open: bool) -> None:
        pid = ranks.pid(ranks.living()[0])
        self.looks.append(Look("dump", *said("dump", "--pid", str(pid), "-o", folder)))
        self.look("dumped", folder, is_open)

    def look(self, when: str, folder: Path, is_open: bool, cut: bool = True) -> None:
        """Run the commands on a folder."""
        patience = LONG if self.stop is not None and when == "ended" else 0.0
        status, text = said("diagnose", folder, "--patience", f"{patience:g}", "--json")
        if status == 2:
            self.looks.append(Look(f"diagnose, {when}", status, text))
        else:
            found = json.loads(text)["causes"]
            self.looks.append(_diagnosed(f"diagnose, {when}", status, found, is_open))
        if not self.story.trace:
            return  # verify plays commgrid's records
        rules = () if self.story.nccl else ("--backend", "gloo")
        status, text = said("verify", folder, *rules)
        self.looks.append(Look(f"verify, {when}", status, text, cut=cut))


def _sleeps(pid: int) -> bool:
    """Whether all threads of a process sleep: none of them makes another wait for Python's lock."""
    return all(sleeps(pid, int(each.name)) for each in Path(f"/proc/{pid}/task").iterdir())


def _signal(ranks: Ranks, number: int) -> None:
    for rank in ranks.living():
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks.pid(rank), number)


def _diagnosed(command: str, status: int, causes: list[dict[str, Any]], is_open: bool) -> Look:
    text = "\n".join(f"{each['kind']}: {each['text']}" for each in causes)
    found = tuple((each["kind"], tuple(each["ranks"])) for each in causes)
    return Look(command, status, text, found, is_open)


Test = Callable[..., None]


def _ways(short: bool, further: Sequence[str]) -> list[Any]:
    """Ways to run a program; a short run has the first one, of some programs."""
    later = [pytest.param(way, marks=pytest.mark.full) for way in ("traced", *further)]
    return ["traced", *later[1:]] if short else later


def correct(**story: Any) -> Callable[[Program], Test]:
    """Make a test of a correct program: no command accuses it, and it runs to its end.

    Args:
        story: arguments of `Story`; `order=False`: not run with `verify="order"`; `untraced=True`:
            run without a trace too; `short=True`: part of short runs.
    """
    order = story.pop("order", True)
    further = [*(["order"] if order else []), *(["untraced"] if story.pop("untraced", 0) else [])]
    ways = _ways(story.pop("short", False), further)

    def made(function: Program) -> Test:
        @pytest.mark.parametrize("way", ways)
        def test(tmp_path: Path, way: str) -> None:
            trace, order = way != "untraced", way == "order"
            job = Job(Story(function, trace=trace, **story), tmp_path / "job", order)
            job.run().results()
            assert job.looks
            assert not job.accusations, job.accusations

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        test.__module__ = function.__module__
        return test

    return made


def wrong(
    *culprits: int, circle: bool = False, live: bool = False, verify: bool = False,
    untraced: bool = False, **story: Any,
) -> Any:  # fmt: skip
    """Make a test of a program with a bug: every diagnosis names a rank at fault first.

    Args:
        culprits: the ranks at fault; the first cause names no other rank.
        circle: whether the first cause may name other ranks of a circle with all culprits.
        live: whether `verify="order"` ends the program with an error that names a culprit.
        verify: whether `commgrid verify` finds the bug too.
        untraced: whether the bug is found in torch's records alone, too.
        story: arguments of `Story`; `short=True`: part of short runs.
    """
    further = [*(["order"] if live else []), *(["untraced"] if untraced else [])]
    ways = _ways(story.pop("short", False), further)

    def made(function: Program) -> Test:
        @pytest.mark.parametrize("way", ways)
        def test(tmp_path: Path, way: str) -> None:
            told = Story(function, trace=way != "untraced", **story)
            job = Job(told, tmp_path / "job", way == "order", sigterm=True)
            job.run()
            if way == "order":
                named = [f"rank {rank}" for rank in culprits]
                told = [each for each in job.errors if "GridMismatchError" in each]
                assert told, job.errors
                assert all(any(rank in each for rank in named) for each in told), told
                return
            for each in job.looks:
                if each.command.startswith("diagnose"):
                    assert each.causes, each
                    ranks = each.causes[0][1]
                    assert ranks, each
                    alone, all_in = {*ranks} <= {*culprits}, {*culprits} <= {*ranks}
                    assert alone or (circle and all_in), each
            judged = [each for each in job.looks if each.command == "verify, ended"]
            assert not verify or all(each.status == 1 for each in judged), judged

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        test.__module__ = function.__module__
        return test

    return made
