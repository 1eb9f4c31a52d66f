"""Turns of tests that several processes run on one GPU: some have to be alone."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Wait while another process's test is to be alone; if this one is, until all others end.

    It holds the first lock while it waits, so that no other test begins meanwhile. Ranks that a
    test forks inherit neither.

    Args:
        folder: of the locks, the same for all processes.
        alone: whether no other test may run.
    """
    folder.mkdir(exist_ok=True)
    with open(folder / "first", "a+") as first, open(folder / "held", "a+") as held:
        fcntl.lockf(first, fcntl.LOCK_EX)
        fcntl.lockf(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.lockf(first, fcntl.LOCK_UN)
        yield
