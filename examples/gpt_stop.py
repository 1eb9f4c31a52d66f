"""How train_gpt ends at Ctrl-C or SIGTERM: at once, with one line from one rank."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def told_when_stopped(tell: Callable[[str], object]) -> Iterator[None]:
    """Within it Ctrl-C and SIGTERM end this process after `tell` was told which it was.

    A thread sees to it: Python's own handlers wait until the main thread is out of a collective,
    and so would a rank that its peers have left already.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] in before:
                tell(signal.Signals(number[0]).name)
                os._exit(128 + number[0])

    # A job in the background of a shell, or under nohup, ignores them, and goes on doing so.
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
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()
