"""A thread that takes the processor time that nobody else wants, for as long as that is enough.

    saver    lists what is to be done    waits        waits           the rest itself
               │                           ▲            ▲                ▲
    hand       └─► checksum of 4 MiB ──────┘  writes ───┘    in a hurry, or after 30 s

Two things are kept apart here. Reading and writing the numbers takes time and no lock of Python's;
the hand does it, and any thread that wakes up has its core at once. What Python does between is
short, and is done at the saver's priority, which is training's: a thread that holds Python's lock
and is not given a core holds up the training loop, however important that is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar, cast

PATIENCE_SECONDS = 30.0
"""For how long a save yields to whatever else there is to do; then it takes its share."""

_NICE = 19  # the least

T = TypeVar("T")
_Job = Callable[[], Any]


class Hand:
    """Does what one other thread gives it, one after the other.

    Args:
        name: the thread's.
        patience: seconds after which jobs are done by who gives them.
    """

    def __init__(self, name: str, patience: float = PATIENCE_SECONDS) -> None:
        self._patience, self._until = patience, 0.0
        self._hurried = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        """Begins; on a thread of the program's, as none can be started at its end."""
        self._until = time.monotonic() + self._patience
        self._thread.start()

    def do(self, job: Callable[[], T]) -> T:
        """What a job returns or raises. It is short, and spends its time outside of Python."""
        if self.is_hurried:
            return job()
        self._jobs.put(job)
        answer, error = self._answers.get()
        if error is not None:
            raise error
        return cast(T, answer)

    @property
    def is_hurried(self) -> bool:
        """Whether somebody waits, the program has ended, or patience has."""
        return (
            self._hurried
            or time.monotonic() > self._until
            or not threading.main_thread().is_alive()
        )

    def hurry(self) -> None:
        """Somebody waits for what is under way; on any thread."""
        self._hurried = True

    def end(self) -> None:
        """There is nothing more to do; waits until it has ended."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        _take_what_is_left()
        while (job := self._jobs.get()) is not None:
            try:
                self._answers.put((job(), None))
            except BaseException as error:
                self._answers.put((None, error))
            del job


def _take_what_is_left() -> None:
    """Gives this thread the processor time that others leave, where a thread has a priority."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # where the system forbids it, saving matters more
            os.setpriority(os.PRIO_PROCESS, thread, _NICE)
            # Beside a nice thread one that wakes up waits for the end of its turn, of 1 to 3 ms.
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
