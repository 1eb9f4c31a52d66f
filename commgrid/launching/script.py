"""Programs run in this process: a script as `python script` would run it, and its exit code."""

from __future__ import annotations

import multiprocessing
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def run_script(script: Path, flags: Sequence[str]) -> None:
    """Run a script to its end; `sys.argv` and `sys.path` stay changed afterwards.

    Args:
        script: its file.
        flags: its arguments.

    Raises:
        SystemExit: the script's exit code is not 0.
    """
    sys.argv = [str(script), *flags]
    multiprocessing.set_start_method(None, force=True)  # a spawned rank has one already
    if not sys.flags.safe_path:  # under PYTHONSAFEPATH=1 the first entry is PYTHONPATH's
        sys.path[0] = str(script.resolve().parent)
    with may_exit():
        runpy.run_path(str(script), run_name="__main__")


@contextmanager
def may_exit() -> Iterator[None]:
    """Inside the block, `sys.exit` with None or 0 ends the block, as it ends a program."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
