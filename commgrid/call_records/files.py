"""Traces in files: what ranks have saved in a folder, `rank_00003.ring` of each, and its reading.

A folder is read whole or refused: a file that is not what it says it is, or that another job has
left there, would have one rank blamed for what it never did.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from commgrid.call_records import ring
from commgrid.call_records.call import Call, Group, on_group
from commgrid.call_records.operations import TRANSFERS
from commgrid.call_records.processes import boot, space_of_pids, started
from commgrid.call_records.ring import FORMAT, Contents
from commgrid.call_records.trace import State, Trace
from commgrid.errors import SpecError
from commgrid.layout.rank_text import describe_ranks

SEEN = 5.0
"""Seconds after which a process of another host that has written nothing is "silent"."""

_RINGS = "rank_*.ring"
_EARLIER = "rank_*.json"
_STATES: dict[int, State] = {
    ring.ALIVE: "running", ring.COPIED: "running", ring.ENDED: "ended", ring.STOPPED: "stopped",
}  # fmt: skip


def has_traces(folder: Path) -> bool:
    """Whether ranks have saved traces there."""
    return os.path.isdir(folder) and bool(paths(folder))


def paths(folder: Path) -> list[Path]:
    """The files of traces in a folder; those of earlier versions, if there are no others."""
    return sorted(folder.glob(_RINGS)) or sorted(
        path for path in folder.glob(_EARLIER) if path.read_bytes()[:9] == b'{"format"'
    )


def read(folder: Path) -> list[Trace]:
    """The traces that ranks have saved in a folder, by rank, and how their processes stand now.

    Raises:
        SpecError: there is none, a file is something else, or they are of two jobs.
    """
    if not has_traces(folder):
        raise SpecError(_no_traces(folder))
    held = {path: _load(path) for path in paths(folder)}
    lengths = _lengths(held.values())
    found: dict[int, tuple[Path, Trace]] = {}
    for path, contents in held.items():
        try:
            trace = _trace(contents, lengths)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _no_trace(path, error) from error
        if trace.rank in found:
            raise SpecError(
                f"{path}: holds rank {trace.rank}, as {found[trace.rank][0].name} does; remove one "
                "of them"
            )
        found[trace.rank] = path, trace
    now = max(time.time(), *(trace.at or 0.0 for _, trace in found.values()))
    traces = [
        replace(trace, state=_state(path, held[path], trace, now))
        for _, (path, trace) in sorted(found.items())
    ]
    _check_one_job(folder, traces)
    return _comparable(traces)


def _state(path: Path, contents: Contents, trace: Trace, now: float) -> State:
    """How the process of a ring stands."""
    if contents.state == ring.COPIED:
        return "running"
    if contents.state == ring.ALIVE:
        pid, start, its_boot, space = (*contents.noted("process"), 0, "", "", "")[:4]
        if not start:
            return ""
        if (its_boot, space) != (boot(), space_of_pids()):
            return "silent" if (trace.at or 0.0) < now - SEEN else "running"
        if started(pid) == start:
            return "running"
    # A launcher ends what is left of a job by SIGTERM.
    told = path.with_suffix(".sigterm")
    if told.exists() and told.stat().st_size > 0:
        return "stopped"
    return "killed" if contents.state == ring.ALIVE else trace.state


def _no_traces(folder: Path) -> str:
    """What is there, and where near it traces are."""
    what, near = "there is no such folder", list[Path]()
    if os.path.isdir(folder):  # unlike pathlib's, of any name
        what, near = f"has no {_RINGS}", sorted(folder.iterdir())
    elif os.path.exists(folder):
        what, near = "is a file", [folder.parent]
    such_as = next((f", such as {each}" for each in near if has_traces(each)), "")
    return (
        f"{folder}: {what}; expected the folder that COMMGRID_TRACE or commgrid.trace.save was "
        f"given{such_as}"
    )


def _check_one_job(folder: Path, traces: Sequence[Trace]) -> None:
    """Refuses what an earlier run has left beside the traces of a later one."""
    jobs: dict[str, list[Trace]] = {}
    for trace in traces:
        if trace.job:
            jobs.setdefault(trace.job, []).append(trace)
    if len(jobs) < 2:
        return
    told = [
        f"{describe_ranks(sorted(trace.rank for trace in own))} of "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(max(t.at or 0 for t in own)))}"
        for own in sorted(jobs.values(), key=lambda own: -max(trace.at or 0 for trace in own))
    ]
    raise SpecError(
        f"{folder}: holds traces of {len(jobs)} jobs, {', '.join(told)}; keep the files of one, "
        "and give each run a folder of its own"
    )


def _load(path: Path) -> Contents:
    """The contents of a file.

    Raises:
        SpecError: it cannot be read, is something else, or of another version.
    """
    try:
        data = path.read_bytes()
        earlier = 1 if path.suffix == ".json" else ring.format_of(data)
        if earlier not in (None, FORMAT):
            raise SpecError(
                f"{path}: format {earlier}, this version reads {FORMAT}; read it with the version "
                f"of commgrid that has written it{' (0.2.0 or earlier)' if earlier == 1 else ''}"
            )
        found = Contents(data)
        len(found.entries)  # which are read when they are asked for
        return found
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError) as error:
        if isinstance(error, SpecError):
            raise
        raise _no_trace(path, error) from error


def _no_trace(path: Path, error: Exception) -> SpecError:
    return SpecError(
        f"{path}: is no trace of commgrid's ({type(error).__name__}: {error}); take it out of the "
        "folder"
    )


def parse(rings: Iterable[bytes]) -> list[Trace]:
    """Traces from rings, one of each rank, as their processes were when they gave them.

    Args:
        rings: as `Contents.packed` returns them.

    Raises:
        LookupError, TypeError, ValueError: one is something else.
    """
    held = [Contents(each) for each in rings]
    lengths = _lengths(held)
    return _comparable([_trace(each, lengths) for each in held])


def _comparable(traces: list[Trace]) -> list[Trace]:
    """Leave out the calls of ranks that have begun to record again, and others have not.

    Turns are counted from the beginning of a recording, on communicators that are older too.
    """
    counts = Counter(trace.earlier for trace in traces)
    usual = max(counts, key=lambda each: counts[each], default=0)
    return [
        trace if trace.earlier == usual
        else replace(trace, calls=(), batches={}, entered={}, sent={}, over=True)
        for trace in traces
    ]  # fmt: skip


def _lengths(held: Iterable[Contents]) -> dict[str, int]:
    """By a file's last name, how many of its last parts tell it from the others of a process."""
    found: dict[str, int] = {}
    for contents in held:
        files: dict[str, set[tuple[str, ...]]] = {}
        for _, (what, *values) in contents.entries:
            if what == "place":
                parts = tuple(values[0].split("/"))
                files.setdefault(parts[-1], set()).add(parts)
        for name, of_name in files.items():
            length = 1
            while len({parts[-length:] for parts in of_name}) < len(of_name):
                length += 1
            found[name] = max(found.get(name, 1), length)
    return found


def _trace(held: Contents, lengths: Mapping[str, int]) -> Trace:
    """A trace from a ring."""
    (rank,) = _whole(held.noted("rank") or [0])
    host = str((*held.noted("process"), *[""] * 5)[4])
    groups: dict[int, Group] = {}
    kinds: dict[int, Sequence[str]] = {}
    texts: dict[int, str] = {}
    stacks: dict[int, tuple[str, ...]] = {}
    entered: dict[Group, int] = {}
    sent: dict[tuple[Group, str, int, int, int], int] = {}
    for number, (count, (what, *values)) in enumerate(held.entries):
        if what == "group":
            name, ranks, key, backend = values
            groups[number] = group = Group(name, _whole(ranks), key, backend)
            if count:
                entered[group] = count
        elif what == "pair":
            group, (operation, peer, tag) = groups[values[0]], values[1:]
            other = on_group(group.name, group.ranks, peer)
            if other is not None and count:
                ends = (rank, other) if operation == "send" else (other, rank)
                sent[group, operation, *ends, tag] = count
        elif what == "place":
            file, line, function = values
            parts = file.split("/")
            texts[number] = f"{'/'.join(parts[-lengths[parts[-1]] :])}:{line} {function}"
        elif what == "stack":
            stacks[number] = tuple(texts[place] for place in values[0])
        elif what == "kind":
            kinds[number] = values
    rows, steps = held.unpacked()
    offset = held.wall - held.monotonic / 1e9
    calls = [(row, _call(row, groups, kinds, stacks, offset)) for row in rows]
    times = (t for _, call in calls for t in (call.began, call.issued, call.ended) if t is not None)
    return Trace(
        rank=rank,
        calls=tuple(call for row, call in calls if not row[16] & ring.RAISED),
        dropped=held.calls - len(calls),
        groups=tuple(groups.values()),
        batches={
            (call.group, call.number or 0): row[12]
            for row, call in calls
            if row[12] and not row[16] & ring.RAISED
        },
        entered=entered,
        sent=sent,
        at=max((held.wall, *times)),
        state=_STATES[held.state],
        host=host,
        job=str((held.noted("job") or [""])[0]),
        steps=tuple((number, when / 1e9 + offset) for number, when in steps),
        lost=held.lost,
        over=held.over,
        earlier=int((held.noted("earlier") or [0])[0]),
    )


def _whole(numbers: Sequence[object]) -> tuple[int, ...]:
    """Ranks or sizes."""
    if not all(isinstance(each, int) and each >= 0 for each in numbers):
        raise ValueError(f"{numbers} are no whole numbers from 0")
    return tuple(numbers)  # type: ignore[arg-type]


def _call(
    row: Sequence[int],
    groups: Mapping[int, Group],
    kinds: Mapping[int, Sequence[str]],
    stacks: Mapping[int, tuple[str, ...]],
    offset: float,
) -> Call:
    _, began, issued, ended, size, output, tag, of, kind, stack, number, turn = row[:12]
    peer, dimensions, marks, thread = row[14:18]
    operation, dtype, reduction = kinds[kind]
    places, group = stacks.get(stack, ()), groups[of]
    side = "peer" if operation in TRANSFERS else "root"
    other = on_group(group.name, group.ranks, None if peer < 0 else peer)
    return Call(
        group=group,
        operation=operation,
        shape=tuple(row[18 : 18 + dimensions]),
        dtype=dtype,
        bytes=size,
        tag=tag,
        number=number,
        where=places[-1] if places else "?",
        output=output if marks & ring.KNOWN_OUTPUT else None,
        reduction=reduction,
        turn=turn,
        began=began / 1e9 + offset,
        issued=issued / 1e9 + offset if issued else None,
        ended=ended / 1e9 + offset if ended else None,
        thread=thread,
        waiting=bool(marks & ring.WAITED and not ended),
        stack=places,
        sizes=tuple(row[-1]),  # type: ignore[arg-type]
        **{side: other},
    )
