"""Walk of a call: the functions of ours that it enters, as `sys.setprofile` sees them.

Code without a name of its own is not counted: comprehensions, which Python 3.12 does not call,
lambdas, and the bodies of modules and classes.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import commgrid

OURS = str(Path(commgrid.__file__).parent)


@contextmanager
def walked(seen: Counter[str]) -> Iterator[None]:
    """Within it, count the calls of our functions on this thread by file and name."""

    def entered(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_NEWLOCALS and code.co_name[0] != "<"
        if event == "call" and is_function and code.co_filename.startswith(OURS):
            seen[f"{Path(code.co_filename).relative_to(OURS)} {code.co_qualname}"] += 1

    sys.setprofile(entered)
    try:
        yield
    finally:
        sys.setprofile(None)


def report(what: str, seen: Counter[str]) -> int:
    """Print a walk by file; return how many functions it has."""
    by_file: dict[str, list[str]] = {}
    for name in sorted(seen):
        file, _, function = name.partition(" ")
        by_file.setdefault(file, []).append(function)
    print(f"\n{len(seen)} functions, {seen.total()} calls: {what}")
    print(
        "\n".join(f"{len(names):3} {file}: {', '.join(names)}" for file, names in by_file.items())
    )
    return len(seen)
