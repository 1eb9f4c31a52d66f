"""All durations of rendezvous and failure detection, each with the reason for its size.

They are one frozen value of a process, which `commgrid.initialize(timeouts=…)` or the environment
variable COMMGRID_TIMEOUTS sets, the latter as text: `settle=3 silent=120`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest

VARIABLE = "COMMGRID_TIMEOUTS"


@dataclass(frozen=True)
class Timeouts:
    """Durations in seconds, the same on all ranks.

    These durations are for the protocols within. The limits of a start and of a collective are the
    arguments `startup_timeout` and `timeout` of `initialize`.

    Args:
        poll: the first pause between two looks at something that is waited for. Pauses grow, unless
            the wait is short.
        moment: for what is under way to be done: ranks that start together meet, this host makes
            or refuses a connection, torch notes the end of a collective. Milliseconds, but for a
            busy machine; what takes longer is waited for in another way.
        answer: a store's answer to one operation, at least, however little time is left. A server
            of 16,384 ranks has a queue of some seconds when all of them ask at once. Also another
            rank's answer on a link of a watched grid.
        margin: kept back from a deadline, in which one rank finds the absent ones for all. To read
            the bitmaps of 16,384 ranks takes 0.2 s.
        lease: for an elected rank to write its decision, before another rank is elected. Longer
            than `answer`, since the elected rank waits for its operations that long.
        unseen: a wait, before a rank publishes where it waits. Most waits are shorter, and cost no
            operation then.
        leave: for others to write or read the cause of a failure, before this rank raises it.
            They do so at once, unless their processes have ended. Also for them to read it, before
            the rank that serves the store raises it.
        settle: for the last living rank to report after a failure. Closed connections tell it, one
            rank after the other, which takes milliseconds; a busy machine takes longer.
        arrive: for living ranks to report after a connection was lost. All learn of it at once, and
            only a busy rank is late.
        exit: for the other processes to end, or shut down, before the process that serves the
            store. They may still read from it; longer than exit handlers of a process take.
        seen: for a watch to say whose process has ended, after a collective lost its connection. It
            learns of it by a connection of its own, and asks that rank's host once more.
        beat: between two signs of life on a link of a watched grid, at most; a quarter of the
            time until a rank counts as stopped, if that is less.
        silent: without a sign of life until a watched rank counts as stopped, at most; less if the
            grid's `timeout` is less. The thread that sends them needs the interpreter's lock,
            which something else in the process may hold for a while.
        connect: for a further connection to the store, or one to a standby store, at least. All
            ranks may connect at once, and the server may look up the name of each client's host,
            which takes a name server's own timeout of 5 s.
        abort: to abort the communicators of a failed grid. NCCL waits for its kernels, and frees
            the memory of all communicators when the last of them is aborted.
        device: for a device to run what is queued, before communicators are suspended.
    """

    poll: float = 0.001
    moment: float = 0.2
    answer: float = 5.0
    margin: float = 1.0
    lease: float = 10.0
    unseen: float = 1.0
    leave: float = 2.0
    settle: float = 1.0
    arrive: float = 10.0
    exit: float = 5.0
    seen: float = 2.0
    beat: float = 1.0
    silent: float = 60.0
    connect: float = 10.0
    abort: float = 20.0
    device: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) not in (int, float) or not 0 < value < 1e9:
                raise SpecError(
                    f"timeouts.{field.name}={value!r}: expected seconds above 0, below 1e9"
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Timeouts:
        """Return the durations, with the changes of COMMGRID_TIMEOUTS.

        Args:
            environ: None: this process's environment.

        Raises:
            SpecError: no such duration, or no number of seconds.

        Example:
            >>> Timeouts.from_environment({"COMMGRID_TIMEOUTS": "settle=3 silent=120"}).silent
            120.0
        """
        text = (os.environ if environ is None else environ).get(VARIABLE, "")
        known = [field.name for field in fields(cls)]
        changes = {}
        for part in text.replace(",", " ").split():
            name, _, value = part.partition("=")
            if name not in known:
                raise SpecError(
                    f"environment: {VARIABLE}: {name!r} is no duration; expected one of "
                    f"{', '.join(known)}{nearest(name, known)}"
                )
            try:
                changes[name] = float(value)
            except ValueError:
                raise SpecError(
                    f"environment: {VARIABLE}: {name}={value!r} is no number of seconds; "
                    f"expected such as {name}=3"
                ) from None
        return replace(cls(), **changes)

    def margin_of(self, left: float) -> float:
        """Return the margin of a wait: less than `margin` where little time is left."""
        return min(self.margin, left / 4)


_chosen: Timeouts | None = None


def timeouts() -> Timeouts:
    """Return the durations of this process.

    Raises:
        SpecError: COMMGRID_TIMEOUTS is wrong.
    """
    if _chosen is None:
        use_timeouts(Timeouts.from_environment())
    assert _chosen is not None
    return _chosen


def use_timeouts(chosen: Timeouts | None) -> None:
    """Set the durations of this process; None: those of the environment again."""
    global _chosen
    _chosen = chosen


Seconds = float | timedelta


def as_seconds(key: str, value: Seconds) -> float:
    """A duration given as seconds or timedelta, in seconds.

    Raises:
        SpecError: not above 0, endless, or no duration.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if type(seconds) not in (int, float) or not 0 < seconds < 1e9:
        raise SpecError(f"{key}={value!r}: expected seconds above 0, or a timedelta")
    return float(seconds)
