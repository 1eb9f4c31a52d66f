"""Runs a program as its launcher would have, with an observer beside it.

torchrun … -m commgrid.audit.child FOLDER STEPS BEGINNING train.py --its --flags
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from commgrid.audit.observer import Observer


def main(argv: list[str]) -> None:
    """The program, from its first line to its end or to the last step that is looked at."""
    folder, steps, beginning, script, *flags = argv
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).resolve().parent)  # as `python script` sets it
    observer = Observer(Path(folder), int(steps), Path(beginning) if beginning else None)
    observer.start()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code in (None, 0):
            observer.finish()
        raise
    observer.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
