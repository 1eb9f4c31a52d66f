"""How a job ends at Ctrl-C or SIGTERM: all ranks at once, with one line from one of them.

launcher ── SIGTERM ──► every rank's thread ──► tells (one rank prints) ──► exit code 143
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from commgrid.recording import recorder
from commgrid.recording.stacks import set_handler

STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def told_when_stopped(tell: Callable[[str], object]) -> Iterator[None]:
    """Within it Ctrl-C and SIGTERM end this process after `tell` was told which it was.

    A thread sees to it: Python's own handlers wait until the main thread is out of a collective,
    and so would a rank that its peers have left already. The exit code is the shell's, 128 and the
    signal's number. A signal that the process ignores, as under nohup, is ignored further on.

    Args:
        tell: what is done first, with `"SIGINT"` or `"SIGTERM"`: print a line on one rank, say.
            It runs on that thread, beside the main thread.

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
            if number[0] in before:
                recorder.end_stopped()
                tell(signal.Signals(number[0]).name)
                os._exit(128 + number[0])

    # A job in the background of a shell, or under nohup, ignores them, also from now on.
    before = {
        number: signal.signal(number, lambda *_: None)
        for number in STOPS
        if signal.getsignal(number) not in (signal.SIG_IGN, None)
    }
    descriptor = signal.set_wakeup_fd(writer.fileno())
    thread = threading.Thread(target=watch, name="told_when_stopped", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # In this order no signal is lost: until its handler is set again, the thread hears of it.
        for number, handler in before.items():
            set_handler(number, handler)
        signal.set_wakeup_fd(descriptor)
        writer.close()
        thread.join()
        reader.close()
