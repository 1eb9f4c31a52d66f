"""Signal handler: end a rank on Ctrl-C or SIGTERM.

launcher ── SIGTERM ──► every rank's thread ──► tells (one rank prints) ──► exit code 143
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from commgrid.recording import recorder
from commgrid.recording.stacks import set_handler

STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def told_when_stopped(tell: Callable[[str], object]) -> Iterator[None]:
    """Inside the block, SIGINT and SIGTERM call `tell(name)` and exit with 128 + the signal number.

    No effect outside the main thread; ignored signals stay ignored. A thread waits for the signal:
    Python's own handlers would wait until the main thread is out of a collective.

    Args:
        tell: called on that thread with `"SIGINT"` or `"SIGTERM"`, for example to print a line on
            one rank. If it raises, its traceback is printed and the process ends all the same.

    Example:
        >>> import commgrid
        >>> from commgrid.failures import told_when_stopped
        >>> grid = commgrid.initialize()
        >>> def tell(signal_name):
        ...     if grid.rank == 0:
        ...         print(f"stopped by {signal_name}", flush=True)
        >>> with told_when_stopped(tell):
        ...     pass  # the training loop
        >>> commgrid.shutdown()
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] not in STOPS:
                continue
            try:
                recorder.end_stopped()
                tell(signal.Signals(number[0]).name)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(128 + number[0])

    thread = threading.Thread(target=watch, name="told_when_stopped", daemon=True)
    thread.start()
    before = {}
    # The thread hears of a signal from before the handlers do nothing until after they are gone.
    descriptor = signal.set_wakeup_fd(writer.fileno())
    try:
        for number in STOPS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, lambda *_: None)
        yield
    finally:
        for number, handler in before.items():
            set_handler(number, handler)
        signal.set_wakeup_fd(descriptor)
        writer.close()
        thread.join()
        reader.close()
