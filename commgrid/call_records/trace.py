"""Traces as data: what ranks have recorded, summed up, and drawn for Perfetto.

Nothing here needs torch: traces are also read on machines without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from commgrid.call_records.call import Call, Group

State = Literal["", "running", "ended", "killed", "stopped", "silent"]
"""How a recording process stands: it runs, ended well, was killed, was told to stop by a launcher's
SIGTERM, or runs on another host and was not seen lately; "": not known."""


@dataclass(frozen=True)
class Trace:
    """The record of one rank.

    Args:
        rank: which.
        calls: in the order in which it issued them.
        dropped: how many earlier ones were not kept.
        members: of each group, the ranks.
        batches: of messages that were started as one, by group and number: which batch.
        at: when it was written, in seconds of the wall clock; None: unknown.
        over: whether the process was ending.
        cut: whether its process was killed or aborted, and not by a launcher's SIGTERM.
        waits: the calls, by group and number, that a thread was in the middle of waiting for, or
            that a wait had failed for; None: not recorded.
        entered: of each group, how many collectives the rank had issued.
        since: of each group, when its present communicator came, in seconds of the wall clock:
            calls before belong to another one.
        on_device: whether calls run in order on a device, which `ended` then is about.
        job: what all ranks of one job call it, and no other job; "": not recorded.
        state: of the process.
        host: where it ran; clocks of one host agree. "": not recorded.
        groups: the communicators that the rank is a member of, as far as it has met them.
        sent: of each communicator, `send` or `recv`, source, target and tag, how many messages the
            rank had issued.
        steps: where training steps began: number, and seconds of the wall clock.
        stacks: where the threads of the process are, as `faulthandler` writes it; "": not known.
    """

    rank: int
    calls: tuple[Call, ...]
    dropped: int
    members: dict[str, tuple[int, ...]]
    batches: dict[tuple[str, int], int] = field(default_factory=dict)
    at: float | None = None
    over: bool = False
    cut: bool = False
    waits: tuple[tuple[str, int], ...] | None = None
    entered: Mapping[str, int] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)
    on_device: bool = False
    job: str = ""
    state: State = ""
    host: str = ""
    groups: tuple[Group, ...] = ()
    sent: Mapping[tuple[Group, str, int, int, int], int] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = ()
    stacks: str = ""
