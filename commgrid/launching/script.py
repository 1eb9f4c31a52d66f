"""A script in this process, as `python script` would run it."""

from __future__ import annotations

import multiprocessing
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def run_script(script: Path, flags: Sequence[str]) -> None:
    """Run a script to its end.

    Args:
        script: its file.
        flags: its arguments.

    Raises:
        SystemExit: it ended with another code than 0.
    """
    sys.argv = [str(script), *flags]
    multiprocessing.set_start_method(None, force=True)  # a spawned rank has one already
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
