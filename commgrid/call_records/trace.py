"""Traces as data: what ranks have recorded, summed up, and drawn for Perfetto.

Nothing here needs torch: traces are also read on machines without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from commgrid.call_records.call import Call, Group

State = Literal["", "running", "ended", "killed", "stopped", "silent"]
"""How a recording process stands: it runs, ended well, was killed, was told to stop by a launcher's
SIGTERM, or runs on another host and was not seen lately; "": not known."""


@dataclass(frozen=True)
class Trace:
    """The record of one rank.

    Args:
        rank: which.
        calls: in the order of issue; a call that raised before its issue is left out.
        dropped: how many earlier ones were not kept.
        groups: the communicators that the rank is a member of, as far as it has met them.
        batches: of messages that were started as one, by communicator and number: which batch.
        entered: of each communicator, how many collectives the rank had issued.
        sent: of each communicator, `send` or `recv`, source, target and tag: how many messages the
            rank had issued.
        at: when it was last seen, in seconds of the wall clock; None: unknown.
        state: of the process.
        host: where it ran; clocks of one host agree. "": not recorded.
        job: what all ranks of one job call it, and no other job; "": not recorded.
        knows_waits: whether `Call.waiting` was recorded; torch's flight recorder does not.
        steps: where training steps began: number, and seconds of the wall clock.
        lost: whether calls are missing that could not be written down, as on a full disk; what the
            rank has issued since is not known.
        over: whether the program has ended the recording (`commgrid.trace.stop`); what the rank has
            issued since is not known either.
        earlier: how many recordings this process had ended before.
        stacks: where the threads of the process are, as `faulthandler` writes it; "": not known.
    """

    rank: int
    calls: tuple[Call, ...]
    dropped: int = 0
    groups: tuple[Group, ...] = ()
    batches: Mapping[tuple[Group, int], int] = field(default_factory=dict)
    entered: Mapping[Group, int] = field(default_factory=dict)
    sent: Mapping[tuple[Group, str, int, int, int], int] = field(default_factory=dict)
    at: float | None = None
    state: State = ""
    host: str = ""
    job: str = ""
    knows_waits: bool = True
    steps: tuple[tuple[int, float], ...] = ()
    lost: bool = False
    over: bool = False
    earlier: int = 0
    stacks: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it has the rank's calls up to when it was written."""
        return not (self.lost or self.over)

    @property
    def last(self) -> float:
        """When the last of its calls ended, or was issued or begun if it has not; 0: no call."""
        return max((c.ended or c.issued or c.began for c in self.calls), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """As `commgrid trace --json` prints it and its page shows it; times are of the wall clock.

        A call names its communicator by its place in `groups`. Keys with the default of `Call`,
        which means that nothing was recorded, are left out.

        >>> dp = Group("dp", (0, 2), "1", "gloo")
        >>> found = Trace(0, (Call(dp, "barrier", turn=3),), entered={dp: 4}).as_dict()
        >>> found["groups"]
        [{'key': '1', 'name': 'dp', 'ranks': [0, 2], 'backend': 'gloo', 'entered': 4}]
        >>> found["calls"]
        [{'group': 0, 'operation': 'barrier', 'turn': 3}]
        """
        groups = list(dict.fromkeys([*self.groups, *(call.group for call in self.calls)]))
        places = {group: place for place, group in enumerate(groups)}
        return {
            "rank": self.rank,
            "state": self.state,
            "host": self.host,
            "job": self.job,
            "at": self.at,
            "dropped": self.dropped,
            "groups": [
                {"key": group.key, "name": group.name, "ranks": list(group.ranks),
                 "backend": group.backend, "entered": self.entered.get(group, 0)}
                for group in groups
            ],
            "steps": [list(step) for step in self.steps],
            "calls": [{**call.recorded(), "group": places[call.group]} for call in self.calls],
        }  # fmt: skip
