"""A job of real ranks, looked at by every command: while it runs, once it has ended, and killed.

A program is a function of `Here`, which each rank runs in a process of its own. Where it says
`here.now()`, all ranks stand still in their own code and the test looks:

    running     commgrid diagnose TRACE · verify TRACE · dump, then diagnose · diagnose() on a rank
    killed      the folder as it is now, read once all have ended
    ended       commgrid diagnose TRACE · verify TRACE

Nothing waits at that time, so that a wait of any length is one too many. Processes meet through
files, which no record knows of.
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
    """A program, and what is to be said of it.

    Args:
        function: it.
        size: number of ranks.
        culprits: the ranks at fault; none: it is correct.
        killed: ranks that a signal ends in a program that goes on without them.
        open: whether records are missing, or do not tell which calls belong together, so that a
            command may say so.
        nccl: whether NCCL would run it too, which knows no tags and no sources that are open.
        trace: whether the job records; else torch alone does, and `commgrid dump` asks it.
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
    """The place of a rank in a job.

    Args:
        rank, size: of the job.
        folder: where all ranks leave files.
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
        """The folder of the records."""
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
        """Say that this rank has come somewhere."""
        self.path(name, self.rank).write_text("")

    def hear(self, name: str, rank: int) -> None:
        """Wait until a rank has come somewhere."""
        until(self.path(name, rank).exists, f"rank {rank} comes to {name}")

    def path(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{rank}"

    def now(
        self, ask: int | None = None, ranks: Sequence[int] | None = None, open: bool = False
    ) -> None:
        """Stand still until the job was looked at.

        Args:
            ask: the rank that calls `commgrid.diagnose()` meanwhile; None: none does.
            ranks: that come here; None: all.
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
        """Say that this rank's next calls do not end. When all ranks have come there, or have
        ended, the job is looked at and then told to stop."""
        self.mark("hangs")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def asked() -> list[dict[str, Any]]:
    """Return what `commgrid.diagnose()` finds wrong; a living rank that is silent is that too."""
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
    except BaseException as error:
        sys.last_value = error  # as the interpreter has it while exit handlers run
        raise
    here.meet("end", sorted({*range(size)} - {*killed}))  # the store of gloo is rank 0's
    commgrid.shutdown()


def said(*words: str | Path) -> tuple[int, str]:
    """Run a command; return its status and what it says."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        status = main([str(word) for word in words])
    return status, text.getvalue()


@dataclass(frozen=True)
class Look:
    """Output of a command.

    Args:
        command: which, and when.
        status: its exit status.
        text: all of it.
        causes: kind and ranks of each finding of a diagnosis.
        open: whether threads or calls under way waited at that time for ranks that could still
            come, which a command may say.
        cut: whether the ranks had not ended by themselves, so that their last calls are half ones.
    """

    command: str
    status: int
    text: str
    causes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    open: bool = False
    cut: bool = True

    def accuses(self, story: Story) -> bool:
        """Whether it says that a correct program is wrong.

        On a busy machine a rank may be slow. A program of which the last calls are not known, or
        that has not ended, may be one that cannot be judged.
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
    """A run of a story, and what the commands have said of it.

    Args:
        order: whether grids compare calls while they are issued.
        stop: the signal that all ranks get after the first look, as from a launcher.
        sigterm: whether the ranks are told to stop when one has ended, as launchers do.
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
        """Accusations of a correct program, in short."""
        told: dict[str, list[str]] = {}
        for each in self.looks:
            if each.accuses(self.story):
                text = "\n".join(each.text.splitlines()[:3])
                told.setdefault(f"{each.status}: {text}", []).append(each.command)
        return "\n".join(f"{'; '.join(commands)}: {text}" for text, commands in told.items())

    def run(self) -> Ranks:
        """Run it to its end, and look at what it leaves."""
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
        """Look whenever the program asks to, until a rank has ended."""
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
            shutil.copytree(self.trace, copy)
            self.kept.append((copy, is_open))
            self.look("running", self.trace, is_open)
        if len(self.kept) < 2 and (full() or not self.story.trace):  # a dump waits for a second
            self._dump(ranks, own.with_suffix(".dump"), is_open)

    def _dump(self, ranks: Ranks, folder: Path, is_open: bool) -> None:
        pid = ranks.pid(ranks.living()[0])
        self.looks.append(Look("dump", *said("dump", "--pid", str(pid), "-o", folder)))
        self.look("dumped", folder, is_open)

    def look(self, when: str, folder: Path, is_open: bool, cut: bool = True) -> None:
        """Have the commands read a folder."""
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
    """Make a test of a program that no command may accuse, and that nothing may end.

    Args:
        story: of `Story`; `order=False`: it is not run with `verify="order"`; `untraced=True`: it
            is also run without a trace; `short=True`: short runs have it.
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
        culprits: the ranks that may be named; the first cause names no other.
        circle: whether it may, as one of a circle that has them all.
        live: whether `verify="order"` ends the program, with an error that names one of them.
        verify: whether `commgrid verify` sees it too.
        untraced: whether it is found without a trace too, from what torch records.
        story: of `Story`; `short=True`: short runs have it.
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
