"""Dumps of torch's own flight recorder, read as traces; no code of theirs is run.

    commgrid dump                       each rank of this host writes its own
    TORCH_NCCL_DUMP_ON_TIMEOUT=1        torch writes one of each rank as a call times out

It also has what never comes through Python: DistributedDataParallel's collectives, DTensor's, those
of compiled code. torch keeps the last 2,000 calls of each backend (`TORCH_FR_BUFFER_SIZE`). Of gloo
it keeps no messages.

Format: `torch/csrc/distributed/c10d/FlightRecorderDetail.hpp`, versions 2.x: a pickle of plain
values, or JSON. Times are seconds of the wall clock.
"""

from __future__ import annotations

import ast
import io
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from commgrid.call_records.call import Call, Group, on_group
from commgrid.call_records.operations import named
from commgrid.call_records.trace import Trace
from commgrid.errors import SpecError

_RANK = re.compile(r"(\d+)(\.\w+)?$")
_TRANSFER = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_DTYPES = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2), "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2),
    "Char": ("int8", 1), "Byte": ("uint8", 1), "Bool": ("bool", 1),
}  # fmt: skip


class _Plain(pickle.Unpickler):
    """Takes numbers, texts, lists and dicts, and nothing that would run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it would load {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside")


def in_folder(folder: Path) -> list[Path]:
    """The dumps in a folder: files whose names end in a rank."""
    return sorted(
        path for path in folder.iterdir()
        if path.is_file() and path.stem[-1:].isdecimal() and path.suffix in ("", ".json", ".pickle")
    )  # fmt: skip


def read(paths: Sequence[Path]) -> list[Trace]:
    """The dumps of all ranks, whose number ends each file's name: `nccl_trace_rank_3`.

    A rank may have one of each backend.

    Raises:
        SpecError: one is something else, or would run code.
    """
    return parse([_load(path) for path in paths])


def _load(path: Path) -> tuple[int, Mapping[str, Any]]:
    found = _RANK.search(path.name)
    if found is None:
        raise SpecError(f"{path}: a flight recorder's dump ends in its rank, as nccl_trace_rank_3")
    try:
        data = path.read_bytes()
        held = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        parse([(0, held)])  # an error is this file's
        return int(found[1]), held
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # what unpickling garbage raises is any error
        raise SpecError(
            f"{path}: is no dump of torch's flight recorder ({type(error).__name__}: {error})"
        ) from error


def parse(dumps: Sequence[tuple[int, Mapping[str, Any]]]) -> list[Trace]:
    """Traces from the dumps of all ranks, of which each has one or more.

    A dump may hold unfinished calls only. The number of calls that a rank has issued on any
    other group is in its `pg_status`; entries of other ranks tell which group that is.
    """
    names: dict[str, str] = {}
    for _, held in dumps:
        for entry in held.get("entries") or []:
            names[str(entry["pg_id"])] = str(entry["process_group"][0])
    found: dict[int, list[Trace]] = {}
    for rank, held in dumps:
        found.setdefault(rank, []).append(_Dump(rank, held, names).trace())
    return [_together(found[rank]) for rank in sorted(found)]


def _together(parts: Sequence[Trace]) -> Trace:
    """The dumps of one rank's backends as one record."""
    if len(parts) == 1:
        return parts[0]
    calls = sorted((call for part in parts for call in part.calls), key=lambda call: call.began)
    return replace(
        parts[0],
        calls=tuple(calls),
        dropped=sum(part.dropped for part in parts),
        groups=tuple(dict.fromkeys(group for part in parts for group in part.groups)),
        entered={group: count for part in parts for group, count in part.entered.items()},
        at=max((part.at for part in parts if part.at is not None), default=None),
        state=max(part.state for part in parts),
        host=max(part.host for part in parts),
    )


class _Dump:
    """One rank's dump.

    Args:
        rank: whose.
        held: its contents.
        names: torch's name of a group by its id in `pg_status`, from the dumps of all ranks.
    """

    def __init__(self, rank: int, held: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._rank, self._held, self._names = rank, held, names
        self._entries = held.get("entries") or []
        self._described = _described(held["pg_config"])
        kinds = {str(entry["profiling_name"]).partition(":")[0] for entry in self._entries}
        self._backend = kinds.pop() if len(kinds) == 1 else ""
        # A name that is used again is another communicator, which has another id.
        self._ids: dict[str, list[int]] = {}
        for entry in self._entries:
            ids = self._ids.setdefault(str(entry["process_group"][0]), [])
            if entry["pg_id"] not in ids:
                ids.append(entry["pg_id"])

    def trace(self) -> Trace:
        """Its record."""
        calls: list[Call] = []
        pairs: dict[tuple[Group, str, int | None], int] = {}
        numbers: dict[Group, int] = {}
        entered = self._entered()
        for entry in self._entries:
            call = self._call(entry)
            if call is None:
                continue
            if call.is_transfer:
                if call.ended is not None:
                    continue  # torch does not count between two ranks; what is under way is matched
                of = (call.group, call.operation, call.peer)
                turn = pairs[of] = pairs.get(of, -1) + 1
            else:
                turn = int(entry["collective_seq_id"])
                entered[call.group] = max(entered.get(call.group, 0), turn + 1)
            number = numbers[call.group] = numbers.get(call.group, -1) + 1
            calls.append(replace(call, number=number, turn=turn))
        about = self._held.get("commgrid", {})
        return Trace(
            rank=self._rank,
            calls=tuple(calls),
            dropped=self._dropped,
            groups=tuple(dict.fromkeys([*entered, *self._living()])),
            entered=entered,
            at=about.get("at"),
            state="running" if about else "",
            host=str(about.get("host", "")),
            knows_waits=False,
        )

    @property
    def _dropped(self) -> int:
        return min((int(entry.get("record_id", 0)) for entry in self._entries), default=0)

    def _living(self) -> list[Group]:
        return [self._group(name, self._ids.get(name, [0])[-1]) for name in self._described]

    def _entered(self) -> dict[Group, int]:
        """The collectives of each living group so far; of those that the entries do not tell, too.

        gloo's status counts messages as well, and is of no use.
        """
        status = self._held.get("pg_status", {}) if self._backend != "gloo" else {}
        ids = {self._names.get(str(key), ""): each for key, each in status.items()}
        found: dict[Group, int] = {}
        for group, name in zip(self._living(), self._described, strict=True):
            if name in ids:
                found[group] = int(ids[name]["last_enqueued_collective"]) + 1
            elif not self._dropped and self._backend == "gloo" and name not in self._ids:
                found[group] = 0
        return found

    def _group(self, name: str, number: int) -> Group:
        ids = self._ids.get(name, [number])
        desc, ranks = self._described.get(name, ("", ()))
        label = _label(name, desc, self._described)
        return Group(label, ranks, f"{name}@{ids.index(number) + 1}", self._backend)

    def _call(self, entry: Mapping[str, Any]) -> Call | None:
        """An entry, without its place among others; None for what only holds others together."""
        backend, _, what = str(entry["profiling_name"]).partition(":")
        transfer = _TRANSFER.match(what)
        if what == "coalesced":
            return None
        group = self._group(str(entry["process_group"][0]), entry["pg_id"])
        shapes, dtypes = entry["input_sizes"], entry["input_dtypes"]
        if transfer is not None and transfer[1] == "recv":
            shapes, dtypes = entry["output_sizes"], entry["output_dtypes"]
        dtype, size = _DTYPES.get(dtypes[0], (str(dtypes[0]), 1)) if dtypes else ("", 1)
        began = entry["time_created_ns"] / 1e9
        ended = entry.get("time_discovered_completed_ns")
        over = entry["state"] == "completed" or (backend == "gloo" and entry.get("retired"))
        stack = _places(entry.get("frames", []))
        peer = int(transfer[3]) if transfer is not None else None
        return Call(
            group=group,
            operation=transfer[1] if transfer is not None else named(what),
            shape=tuple(shapes[0]) if shapes else (),
            dtype=dtype,
            bytes=sum(math.prod(each) for each in shapes) * size,
            output=sum(math.prod(each) for each in entry["output_sizes"]) * size,
            peer=on_group(group.name, group.ranks, peer),
            where=stack[-1] if stack else "?",
            began=began,
            issued=began,
            ended=(ended / 1e9 if ended else began) if over else None,
            thread=int(entry.get("thread_id") or 0),
            stack=stack,
        )


def _described(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By torch's name of a group, its description and ranks; those of gloo's are not known."""
    found = {}
    for name, held in config.items():
        ranks = held["ranks"]
        listed = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks
        if listed or name:
            found[str(name) or "0"] = str(held.get("desc", "")), tuple(int(r) for r in listed)
    return found


def _label(name: str, desc: str, groups: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """A group's name for messages: its description, if no other group of the rank has it."""
    if name.startswith("commgrid/"):
        _, owner, _, first, *_ = name.split("/")
        return first if owner == "default" else f"{owner}:{first}"
    if desc in ("", "undefined"):
        return "WORLD" if name == "0" else name
    if desc == "default_pg":
        return "WORLD"
    alike = [other for other, (described, _) in groups.items() if described == desc]
    return desc if len(alike) < 2 else f"{desc} {name}"


def _places(frames: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The places outside torch and commgrid, from the outermost to the innermost."""
    return tuple(
        f"{Path(str(frame['filename'])).name}:{frame['line']} {frame['name']}"
        for frame in reversed(frames)
        if not re.search(r"/(torch|commgrid)/|^<|\?\?", str(frame["filename"]))
    )
