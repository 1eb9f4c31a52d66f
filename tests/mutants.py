"""Mutation runner: plants one fault at a time in a copy of the tree and runs the room's tests.

    python -m tests.mutants                     all of tests/planted.py
    python -m tests.mutants --room pipeline     one room
    python -m tests.mutants --only NAME …       some by name
    python -m tests.mutants --list              names, rooms and tests; runs nothing

A fault counts as caught if its tests pass without it and one of them fails with it. A test that
does not end in time, or that cannot be collected, catches nothing. The exit code is 1 if a fault
was missed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

# Before any run is forked, so that none has to import them: they take longer than most tests.
import pytest
import torch
import torch._dynamo

from tests.planted import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
PASSED, FAILED, INTERNAL_ERROR = 0, 1, 3  # exit codes of pytest
LEFT_BEHIND = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "runs")
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>


class Copy:
    """A copy of the tree in which faults are planted; the checkout is never touched.

    Args:
        root: where the copy lies.
        timeout: seconds until a run of pytest is ended.
    """

    def __init__(self, root: Path, timeout: float) -> None:
        self.root, self.timeout = root, timeout
        self.green: set[tuple[str, ...]] = set()
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT_BEHIND))

    def judge(self, mutant: Mutant) -> tuple[bool, str]:
        """Whether a fault is caught, and what caught it or what was the matter."""
        file = self.root / mutant.file
        sound = file.read_text()
        found = sound.count(mutant.old)
        if found != 1:
            return False, f"its text stands {found} times in {mutant.file}; expected once"
        if mutant.tests not in self.green:
            code, said = self.pytest(mutant.tests)
            if code != PASSED:
                return False, f"its tests fail without it ({_ending(code)}):\n{said}"
            self.green.add(mutant.tests)
        try:
            self._write(file, sound.replace(mutant.old, mutant.new))
            code, said = self.pytest(mutant.tests)
        finally:
            self._write(file, sound)
        if code == FAILED:
            first = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", said, re.MULTILINE)
            return True, first[1] if first else said
        return False, f"no test of it fails ({_ending(code)}):\n{said}"

    @staticmethod
    def _write(file: Path, text: str) -> None:
        """Writes a source file, and drops what was compiled of it, which may seem up to date."""
        file.write_text(text)
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()

    def pytest(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """pytest's exit code, None if it did not end in time, and the end of its output.

        All processes that the run has started have ended afterwards.
        """
        options = ["--full", "-x", "-q", "-p", "no:cacheprovider", "-n0", "--tb=short"]
        with tempfile.TemporaryFile("w+", errors="replace") as out:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                self._child([*options, *tests], out.fileno())
            ended = select.select([os.pidfd_open(child)], [], [], self.timeout)[0]
            status = os.waitpid(child, 0)[1] if ended else None
            end_children()
            out.seek(0)
            said = out.read()[-3000:]
            return None if status is None else os.waitstatus_to_exitcode(status), said

    def _child(self, arguments: Sequence[str], out: int) -> None:
        """Runs pytest as `python -m pytest` does in the copy, and ends the process."""
        code = INTERNAL_ERROR
        try:
            os.setsid()
            os.chdir(self.root)
            for stream in (1, 2):
                os.dup2(out, stream)
            os.environ["PYTHONPATH"] = str(self.root)
            sys.path[:] = [str(self.root), *(p for p in sys.path if Path(p).resolve() != ROOT)]
            for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                del sys.modules[name]
            code = int(pytest.main(list(arguments)))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _ending(code: int | None) -> str:
    return "it was still running" if code is None else f"exit code {code}"


def end_children() -> None:
    """Kill every process that descends from this one, in any session.

    A process whose parent has ended is a child of this one, which adopts orphans.
    """
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(after_name[1]) == os.getpid():
            found.append(int(path.parent.name))
    return found


def chosen(only: Sequence[str], room: str | None) -> list[Mutant]:
    """The mutants of some names and one room.

    Raises:
        SystemExit: there is none.
    """
    names = {mutant.name for mutant in MUTANTS}
    unknown = [name for name in only if name not in names]
    found = [m for m in MUTANTS if (not only or m.name in only) and room in (None, m.room)]
    if unknown or not found:
        rooms = ", ".join(sorted({mutant.room for mutant in MUTANTS}))
        raise SystemExit(f"no mutant {', '.join(unknown) or room}; see --list; rooms are {rooms}")
    return found


def main() -> int:
    """Run the command line; 1 if a fault was missed."""
    about, _, how = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m tests.mutants", description=about, epilog=how,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of these names")
    parser.add_argument("--room", help="of this room, such as pipeline")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a run of pytest")
    options = parser.parse_args()
    mutants = chosen(options.only, options.room)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.room:17} {mutant.name:50} {' '.join(mutant.tests)}")
        return 0
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
    torch.set_num_threads(1)  # a forked process hangs if this one has used several
    missed = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder, "tree"), options.timeout)
        for mutant in mutants:
            started = time.monotonic()
            caught, why = copy.judge(mutant)
            seconds = time.monotonic() - started
            print(f"{'caught' if caught else 'MISSED'} {seconds:5.0f} s  {mutant.room}: "
                  f"{mutant.name}\n                {why}", flush=True)  # fmt: skip
            missed += [] if caught else [mutant.name]
    print(f"{len(mutants) - len(missed)} of {len(mutants)} caught", *missed, sep="\n  missed ")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
