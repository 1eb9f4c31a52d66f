"""Traces in files: what ranks have saved in a folder, `rank_00003.json` of each, and its reading.

A folder is read whole or refused: a file that is not what it says it is, or that another job has
left there, would have one rank blamed for what it never did.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commgrid.call_records import ring
from commgrid.call_records.call import Call, Group, on_group
from commgrid.call_records.operations import TRANSFERS
from commgrid.call_records.ring import FORMAT
from commgrid.call_records.trace import Trace
from commgrid.errors import SpecError
from commgrid.layout.rank_text import describe_ranks

_OPTIONAL = (int, type(None))
KEYS: dict[str, type | tuple[type, ...]] = {
    "group": str, "number": int, "operation": str, "shape": list, "dtype": str, "bytes": int,
    "peer": _OPTIONAL, "where": str, "began": int, "issued": _OPTIONAL, "ended": _OPTIONAL,
    "turn": _OPTIONAL, "output": _OPTIONAL, "reduction": str,
}  # fmt: skip
"""The columns of a call in a file; the last ones are newer and may be absent."""

_LATER = 3
_PATTERN = "rank_*.json"
_RINGS = "rank_*.ring"
"""Files of processes that were killed."""


def has_traces(folder: Path) -> bool:
    """Whether ranks have saved traces there."""
    return os.path.isdir(folder) and bool(paths(folder))


def paths(folder: Path) -> list[Path]:
    """The files of traces in a folder."""
    return sorted([*folder.glob(_PATTERN), *folder.glob(_RINGS)])


def read(folder: Path) -> list[Trace]:
    """The traces that ranks have saved in a folder, by rank.

    Raises:
        SpecError: there is none, a file is something else, or they are of two jobs.
    """
    if not has_traces(folder):
        raise SpecError(
            f"{folder}: {_what_is_there(folder)}; expected the folder that COMMGRID_TRACE or "
            f"commgrid.trace.save was given{_folders_within(folder)}"
        )
    traces = [trace for _, trace, _ in _by_rank(folder)]
    _check_one_job(folder, traces)
    return traces


def held_in(folder: Path) -> list[dict[str, Any]]:
    """The contents of the files that `read` parses, by rank."""
    return [held for _, _, held in _by_rank(folder)]


def _by_rank(folder: Path) -> list[tuple[Path, Trace, dict[str, Any]]]:
    found: dict[int, tuple[Path, Trace, dict[str, Any]]] = {}
    for path in paths(folder):
        held = _load(path)
        trace = _parsed(path, held)
        before = found.get(trace.rank)
        if before is not None and not _is_earlier(before[:2], (path, trace)):
            raise SpecError(
                f"{path}: holds rank {trace.rank}, as {before[0].name} does; remove one of them"
            )
        found[trace.rank] = path, trace, held
    return [each for _, each in sorted(found.items())]


def _is_earlier(one: tuple[Path, Trace], other: tuple[Path, Trace]) -> bool:
    """Whether a process has saved a file, and gone on with its ring."""
    return (
        one[0].with_suffix(".ring") == other[0]
        and one[1].job == other[1].job
        and one[1].calls == other[1].calls[: len(one[1].calls)]
    )


def _what_is_there(folder: Path) -> str:
    if os.path.isdir(folder):  # unlike pathlib's, of any name
        return f"has no {_PATTERN}"
    return "is a file" if os.path.exists(folder) else "there is no such folder"


def _folders_within(folder: Path) -> str:
    """Where one step further down traces are."""
    if not os.path.isdir(folder):
        near = folder.parent
        return f", such as {near}" if os.path.isfile(folder) and has_traces(near) else ""
    near = next((each for each in sorted(folder.iterdir()) if has_traces(each)), folder)
    return f", such as {near}" if near is not folder else ""


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


def _load(path: Path) -> Any:
    """The contents of a file, not yet checked.

    Raises:
        SpecError: it cannot be read, or is something else.
    """
    try:
        if path.suffix == ".ring":
            held = ring.load(path)
            # A launcher ends what is left of a job by SIGTERM.
            told = path.with_suffix(".sigterm")
            is_ended = told.exists() and told.stat().st_size > 0
            return {**held, "cut": not held["over"] and not is_ended}
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text"
        raise SpecError(f"{path}: cannot be read: {why or error}") from error
    except ValueError as error:
        raise _no_trace(path, error) from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"{path}: is no whole trace of commgrid's; it was cut off, or is something else "
            f"({error}); copy it again, or take it out of the folder"
        ) from error


def _parsed(path: Path, found: Any) -> Trace:
    """A trace from the contents of its file.

    Raises:
        SpecError: it is something else.
    """
    written = found.get("format") if isinstance(found, dict) else None
    if isinstance(written, int) and written != FORMAT:
        raise SpecError(
            f"{path}: format {written}, this version reads {FORMAT}; read it with the version of "
            "commgrid that has written it"
        )
    try:
        if written is None:
            raise TypeError("no format")
        return parse(found)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _no_trace(path, error) from error


def _no_trace(path: Path, error: Exception) -> SpecError:
    return SpecError(
        f"{path}: is no trace of commgrid's ({type(error).__name__}: {error}); take it out of the "
        "folder"
    )


def parse(found: Mapping[str, Any]) -> Trace:
    """A trace from the contents of a file.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is something else.
    """
    offset = found["wall"] - found["monotonic"] / 1e9
    waits = found.get("waits")
    members = {str(name): _whole(ranks) for name, ranks in found["members"].items()}
    groups: dict[str, Group] = {}
    return Trace(
        rank=_whole([found["rank"]])[0],
        calls=tuple(_call(each, offset, members, groups) for each in found["calls"]),
        dropped=int(found["dropped"]),
        members=members,
        batches={
            (group, number): batch
            for batch, (group, first, last) in enumerate(found.get("batches", ()))
            for number in range(first, last + 1)
        },
        at=float(found["wall"]),
        over=bool(found.get("over", False)),
        cut=bool(found.get("cut", False)),
        waits=tuple((group, int(number)) for group, number in waits) if waits is not None else None,
        entered={group: int(count) for group, count in found.get("entered", {}).items()},
        since={group: at / 1e9 + offset for group, at in found.get("since", {}).items()},
        job=str(found.get("job", "")),
    )


def _whole(numbers: Sequence[Any]) -> tuple[int, ...]:
    """Ranks or sizes."""
    if not all(isinstance(each, int) and each >= 0 for each in numbers):
        raise ValueError(f"{numbers} are no whole numbers from 0")
    return tuple(numbers)


def _call(
    row: Sequence[Any],
    offset: float,
    members: Mapping[str, tuple[int, ...]],
    groups: dict[str, Group],
) -> Call:
    held = dict(zip(KEYS, row, strict=not len(KEYS) - _LATER <= len(row) <= len(KEYS)))
    for key, kind in KEYS.items():
        if key in held and not isinstance(held[key], kind):
            raise TypeError(f"{key} of a call is {held[key]!r}")
    for key in ("began", "issued", "ended"):
        if held[key] is not None:
            held[key] = held[key] / 1e9 + offset
    name = held["group"]
    group = groups.setdefault(name, Group(name, members.get(name, ())))
    side = "peer" if held["operation"] in TRANSFERS else "root"
    rank = on_group(name, group.ranks, held.pop("peer"))
    return Call(**{**held, "group": group, "shape": _whole(held["shape"]), side: rank})
