"""Files of traces that were made by hand, as ranks write them."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import Any

from commgrid.call_records import ring
from commgrid.call_records.call import Call, Group
from commgrid.call_records.ring import Contents, Ring
from commgrid.call_records.trace import Trace


def ring_of(trace: Trace, state: int = ring.COPIED, process: tuple[Any, ...] = ()) -> bytes:
    """The ring of a trace.

    Args:
        trace: its calls count their turns and numbers themselves where they have none.
        state: of `commgrid.call_records.ring`; a copy's process ran when it was made.
        process: pid, its start, the host's start, its space of pids; else none is named.
    """
    made = Ring(max(1, sum(1 + len(call.sizes) for call in trace.calls) + len(trace.steps)))
    made.note("rank", trace.rank)
    if trace.earlier:
        made.note("earlier", trace.earlier)
    if trace.job:
        made.note("job", trace.job)
    if process or trace.host:
        made.note("process", *(process or (0, "", "", "")), trace.host, "0")
    known = [*trace.groups, *(call.group for call in trace.calls), *trace.entered]
    groups = {group: made.entry("group", *_fields(group)) for group in known}
    for group, count in trace.entered.items():
        made.count(groups[group], count)
    for (group, operation, source, target, tag), count in trace.sent.items():
        other = target if operation == "send" else source
        made.count(made.entry("pair", groups[group], operation, _place(group, other), tag), count)
    for number, began in trace.steps:
        made.step(number, round(began * 1e9))
    numbers: Counter[Any] = Counter()
    for call in trace.calls:
        _add(made, call, groups[call.group], trace.batches, numbers)
    made.calls += trace.dropped
    struct.pack_into("<QQ", made.memory, ring._TOTALS, made.rows, made.calls)
    at = trace.at or 0.0
    marks = (state, trace.lost, trace.over)
    struct.pack_into("<BBB5xdQ", made.memory, ring._STATE, *marks, at, round(at * 1e9))
    found = bytearray(Contents(made.memory).packed())
    found[ring._STATE] = state
    return bytes(found)


def _add(made: Ring, call: Call, group: int, batches: Any, numbers: Counter[Any]) -> None:
    kind = made.entry("kind", call.operation, call.dtype, call.reduction)
    of = (group, call.operation, call.peer, call.tag) if call.is_transfer else (group,)
    turn = numbers[of] if call.turn is None else call.turn
    number = numbers[group, ""] if call.number is None else call.number
    numbers[of] += 1
    numbers[group, ""] += 1
    places = call.stack or ((call.where,) if call.where not in ("", "?") else ())
    stack = made.entry("stack", tuple(made.entry("place", *_split(each)) for each in places))
    other = call.peer if call.is_transfer else call.root
    row = made.add(
        group, number, kind, call.shape, call.bytes, call.output, _place(call.group, other),
        stack if places else 0, round(call.began * 1e9), turn,
        batches.get((call.group, number), 0), call.tag, call.thread, call.sizes,
    )  # fmt: skip
    if call.issued is not None:
        made.issued(row, round(call.issued * 1e9))
    if call.ended is not None:
        made.ended(row, round(call.ended * 1e9))
    if call.waiting:
        made.waits(row, True, call.thread)


def _fields(group: Group) -> tuple[str, tuple[int, ...], str, str]:
    return group.name, group.ranks, group.key, group.backend


def _place(group: Group, rank: int | None) -> int | None:
    """A rank's place in a group; without known ranks the rank itself."""
    return rank if rank is None or not group.ranks else group.ranks.index(rank)


def _split(where: str) -> tuple[str, int, str]:
    """File, line and function: those of `a.py:1 f`."""
    file, _, rest = where.partition(":")
    line, _, function = rest.partition(" ")
    return file, int(line), function


def save(folder: Path, *traces: Trace, **given: Any) -> Path:
    """Write the rings of traces into a folder, which is made if need be; return it.

    Args:
        folder: where.
        traces: of one rank each.
        given: as `ring_of` takes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        path = folder / f"rank_{trace.rank:05}.ring"
        path.write_bytes(ring_of(trace, **given))
    return folder
