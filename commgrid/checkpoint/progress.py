"""How far saving or loading has got, on one line of stderr, or in a log now and then."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 10.0


class ProgressLine:
    """Writes how many bytes are done.

    Args:
        what: is done, such as `saving step 20`.
        stream: a terminal's line is written over; elsewhere a line is added every ten seconds.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what, self._stream = what, stream or sys.stderr
        self._live = self._stream.isatty()
        self._started = time.monotonic()
        self._next = self._started + (_TERMINAL_SECONDS if self._live else _LOG_SECONDS)

    def __call__(self, done: int, total: int) -> None:
        """Called as often as one likes."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_TERMINAL_SECONDS if self._live else _LOG_SECONDS)
        self._write(f"{self._what}: {size(done)} of this rank's {size(total)}")

    def _write(self, text: str, last: bool = False) -> None:
        ends = "\n" if last or not self._live else ""
        self._stream.write(f"\r\x1b[K{text}{ends}" if self._live else f"{text}{ends}")
        self._stream.flush()

    def finish(self, text: str) -> None:
        """The last word, with the seconds it took."""
        self._write(f"{text} in {time.monotonic() - self._started:.1f} s", last=True)


def size(count: int) -> str:
    """Bytes in words.

    >>> size(999), size(1_500_000), size(26_400_000_000)
    ('999 bytes', '1.5 MB', '26.4 GB')
    """
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
