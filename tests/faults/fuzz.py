"""Runs the command line on what nobody would write: a plan or a message, soon, in little memory."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from commgrid.cli.parser import parsers
from tests.faults.mutations import Mutator

MEBIBYTES = 200.0
HANG = 20  # seconds of CPU, after which a case is interrupted


class HangError(BaseException):
    """A case took longer than it may ever take."""


def fuzz(seed: int, cases: int, most: int = 20) -> list[str]:
    """Runs so many cases; what went wrong, `most` of it.

    In a process of its own: it changes limits, the folder and what starts a grid.
    """
    from commgrid import cli

    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    os.chdir(folder)
    sys.setrecursionlimit(1000)
    _keep_from_starting()
    mutator = Mutator(parsers()[1], folder, seed)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    signal.signal(signal.SIGVTALRM, _hangs)
    found: list[str] = []
    for number in range(cases):
        argv = mutator.case()
        said = _run(cli.main, argv)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if peak - used > MEBIBYTES:
            said.append(f"{peak - used:.0f} MiB more than before")
        used = max(used, peak)  # a peak is seen once
        for each in said:
            text = _file_of(argv)
            found.append(f"case {number} of seed {seed}: {_short(argv)}\n{text}\n{each}")
        if len(found) >= most:
            break
    return found


def _run(main: Any, argv: list[str]) -> list[str]:
    """Describe how a case ended wrongly."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    wrong: list[str] = []
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(argv)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        wrong.append(traceback.format_exc()[-3000:])
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if not wrong and status not in (0, 1, 2):
        wrong.append(f"exit status {status}")
    if not wrong and status and not err.getvalue().strip() and not out.getvalue().strip():
        wrong.append(f"exit status {status}, and not a word")
    if "Traceback" in err.getvalue():
        wrong.append(err.getvalue()[-2000:])
    return wrong


def _hangs(*_: object) -> None:
    raise HangError(f"more than {HANG} s of CPU")


def _keep_from_starting() -> None:
    """check and bench would start torch.distributed in each case: they get as far as that."""
    import commgrid
    from commgrid.errors import CommGridError
    from commgrid.runtime import start

    def initialize(**given: Any) -> Any:
        raise CommGridError("no grid is started here")

    commgrid.initialize = start.initialize = initialize  # type: ignore[assignment]


def _short(argv: list[str]) -> list[str]:
    return [each if len(each) < 200 else f"{each[:200]}… ({len(each)} characters)" for each in argv]


def _file_of(argv: list[str]) -> str:
    texts = []
    for each in argv:
        with contextlib.suppress(OSError, ValueError):
            if each.endswith(".yaml") and Path(each).exists():
                texts.append(repr(Path(each).read_text(errors="replace")[:600]))
    return "\n".join(texts)
