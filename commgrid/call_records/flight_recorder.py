"""Dumps of torch's own flight recorder, read as traces; no code of theirs is run.

    TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1     torch writes one of each rank

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


def read(paths: Sequence[Path]) -> list[Trace]:
    """The dumps of all ranks, whose number ends each file's name: `nccl_trace_rank_3`.

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
    """Traces from the dumps of all ranks.

    A dump may hold unfinished calls only. The number of calls that a rank has issued on any
    other group is in its `pg_status`; entries of other ranks tell which group that is.
    """
    ids: dict[str, str] = {}
    for _, held in dumps:
        for entry in held.get("entries") or []:
            ids[str(entry["process_group"][1])] = str(entry["pg_id"])
    return [_trace(rank, held, ids) for rank, held in sorted(dumps, key=lambda each: each[0])]


def _trace(rank: int, held: Mapping[str, Any], ids: Mapping[str, str]) -> Trace:
    groups = _groups(held["pg_config"])
    calls: list[Call] = []
    numbers: dict[str, int] = {}
    pairs: dict[tuple[str, str, int | None], int] = {}
    entered: dict[str, int] = {}
    status = {str(key): value for key, value in held.get("pg_status", {}).items()}
    entries = held.get("entries") or []
    for entry in entries:
        call = _call(entry, groups)
        if call is None:
            continue
        at = status.get(str(entry["pg_id"]))
        if call.is_transfer:
            if call.ended is not None:
                continue  # torch does not count between two ranks; what is under way is matched
            of = (call.group.name, call.operation, call.peer)
            turn = pairs[of] = pairs.get(of, -1) + 1
        else:
            turn = int(entry["collective_seq_id"])
            last = int(at["last_enqueued_collective"]) if at else turn
            entered[call.group.name] = max(entered.get(call.group.name, 0), turn + 1, last + 1)
        number = numbers[call.group.name] = numbers.get(call.group.name, -1) + 1
        calls.append(replace(call, number=number, turn=turn))
    labels = {name: _label(name, desc, groups) for name, (desc, _) in groups.items()}
    for name, (desc, _) in groups.items():
        at = status.get(ids.get(desc, ""))
        if at is not None:
            entered.setdefault(labels[name], int(at["last_enqueued_collective"]) + 1)
    return Trace(
        rank, tuple(calls), 0, {labels[name]: ranks for name, (_, ranks) in groups.items()},
        entered=entered, on_device=any("nccl" in str(e["profiling_name"]) for e in entries),
    )  # fmt: skip


def _groups(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By torch's name of a group, its description and ranks."""
    found = {}
    for name, held in config.items():
        ranks = held["ranks"]
        listed = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks
        found[str(name)] = (str(held.get("desc", "")), tuple(int(rank) for rank in listed))
    return found


def _label(name: str, desc: str, groups: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """A group's name for messages: its description, if no other group of the rank has it."""
    if name.startswith("commgrid/"):
        _, owner, _, first, *_ = name.split("/")
        return first if owner == "default" else f"{owner}:{first}"
    if desc in ("", "undefined"):
        return "WORLD" if name in ("", "0") else name
    if desc == "default_pg":
        return "WORLD"
    alike = [other for other, (described, _) in groups.items() if described == desc]
    return desc if len(alike) < 2 else f"{desc} {name}"


def _call(entry: Mapping[str, Any], groups: Mapping[str, tuple[str, Any]]) -> Call | None:
    """An entry, without its place among others; None for what only holds others together."""
    backend, _, what = str(entry["profiling_name"]).partition(":")
    transfer = _TRANSFER.match(what)
    if what == "coalesced":
        return None
    name, desc = (str(each) for each in entry["process_group"])
    if name not in groups and desc == "default_pg":
        name = ""
    shapes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    if transfer is not None and transfer[1] == "recv":
        shapes, dtypes = entry["output_sizes"], entry["output_dtypes"]
    dtype, size = _DTYPES.get(dtypes[0], (str(dtypes[0]), 1)) if dtypes else ("", 1)
    began = entry["time_created_ns"] / 1e9
    ended = entry.get("time_discovered_completed_ns")
    over = entry["state"] == "completed" or (backend == "gloo" and entry.get("retired"))
    label, (_, ranks) = _label(name, desc, groups), groups.get(name, ("", ()))
    return Call(
        group=Group(label, ranks),
        operation=transfer[1] if transfer is not None else named(what),
        shape=tuple(shapes[0]) if shapes else (),
        dtype=dtype,
        bytes=sum(math.prod(each) for each in shapes) * size,
        output=sum(math.prod(each) for each in entry["output_sizes"]) * size,
        peer=on_group(label, ranks, int(transfer[3])) if transfer is not None else None,
        where=_where(entry.get("frames", [])),
        began=began,
        issued=began,
        ended=(ended / 1e9 if ended else began) if over else None,
    )


def _where(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost place outside torch and commgrid."""
    for frame in frames:
        file = str(frame["filename"])
        if not re.search(r"/(torch|commgrid)/|^<|\?\?", file):
            return f"{Path(file).name}:{frame['line']} {frame['name']}"
    return "?"
