"""Contents of records as plain values: what `commgrid trace --json` prints and its page shows."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace


def as_dict(trace: Trace) -> dict[str, Any]:
    """A record of one rank; times are seconds of the wall clock.

    A call names its communicator by its place in `groups`. Keys with the default of `Call`, which
    means that nothing was recorded, are left out.

    >>> dp = Group("dp", (0, 2), "1", "gloo")
    >>> found = as_dict(Trace(0, (Call(dp, "barrier", turn=3),), entered={dp: 4}))
    >>> found["groups"]
    [{'key': '1', 'name': 'dp', 'ranks': [0, 2], 'backend': 'gloo', 'entered': 4}]
    >>> found["calls"]
    [{'group': 0, 'operation': 'barrier', 'turn': 3}]
    """
    groups = list(dict.fromkeys([*trace.groups, *(call.group for call in trace.calls)]))
    places = {group: place for place, group in enumerate(groups)}
    return {
        "rank": trace.rank,
        "state": trace.state,
        "host": trace.host,
        "job": trace.job,
        "at": trace.at,
        "dropped": trace.dropped,
        "groups": [
            {"key": group.key, "name": group.name, "ranks": list(group.ranks),
             "backend": group.backend, "entered": trace.entered.get(group, 0)}
            for group in groups
        ],
        "steps": [list(step) for step in trace.steps],
        "calls": [_call(call, places) for call in trace.calls],
    }  # fmt: skip


def _call(call: Call, places: dict[Group, int]) -> dict[str, Any]:
    held = {each.name: (getattr(call, each.name), each.default) for each in fields(call)}
    kept = {name: value for name, (value, default) in held.items() if value != default}
    return {**kept, "group": places[call.group]}
