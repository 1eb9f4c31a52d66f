"""Traces as data: what ranks have recorded, summed up, and drawn for Perfetto.

Nothing here needs torch: traces are also read on machines without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commgrid.call_records.call import Call


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
