"""Dumps of torch's own flight recorder, read as traces; no code of theirs is run.

    commgrid dump                       each rank of this host writes its own
    TORCH_NCCL_DUMP_ON_TIMEOUT=1        torch writes one of each rank as a call times out

It also has what never comes through Python: DistributedDataParallel's collectives, DTensor's, those
of compiled code. torch keeps the last 2,000 calls of each backend (`TORCH_FR_BUFFER_SIZE`). Of gloo
it keeps no messages.

A world that is started again gives its groups the names of an earlier one's. A dump of `commgrid
dump` has the number of calls of each living group, which tells whether the last calls under a name
are that group's. Other calls are not compared.

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

    Raises:
        SpecError: one is something else, or would run code.
    """
    return parse([_load(path) for path in paths])


def _load(path: Path) -> tuple[int, Mapping[str, Any]]:
    found = _RANK.search(path.name)
    if found is None:
        raise SpecError(
            f"{path}: a flight recorder's dump ends in its rank; rename it, as nccl_trace_rank_3"
        )
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
    other group of NCCL's is in its `pg_status`; entries of other ranks tell which group that is.
    """
    names: dict[str, str] = {}
    kinds: dict[str, set[str]] = {}
    for _, held in dumps:
        for entry in held.get("entries") or []:
            name, kind = str(entry["process_group"][0]), _backend(entry)
            kinds.setdefault(name, set()).add(kind)
            if kind != "gloo":  # whose status counts messages as well
                names[str(entry["pg_id"])] = name
    made = [_Dump(rank, held, names, kinds) for rank, held in dumps]
    most: dict[Group, int] = {}
    for each in made:
        for group, count in each.entered.items():
            most[group] = max(count, most.get(group, 0))
    return [each.trace(most) for each in sorted(made, key=lambda each: each.rank)]


def _backend(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[0]


class _Dump:
    """One rank's dump.

    Args:
        rank: whose.
        held: its contents.
        names: torch's name of a group by its id in `pg_status`, from the dumps of all ranks.
        kinds: by torch's name of a group, the backends that its calls are on.
    """

    def __init__(
        self,
        rank: int,
        held: Mapping[str, Any],
        names: Mapping[str, str],
        kinds: Mapping[str, set[str]],
    ) -> None:
        self.rank, self._held = rank, held
        self._entries = held.get("entries") or []
        self._described = _described(held["pg_config"])
        # Of living groups, by backend, how many calls they have had; None: not in this dump.
        self._issued: dict[str, Mapping[str, int]] | None = {
            str(name): group["issued"]
            for name, group in held["pg_config"].items() if "issued" in group
        } or None  # fmt: skip
        self._dropped = min((int(e.get("record_id", 0)) for e in self._entries), default=0)
        # A name that is used again is another communicator, which has another id; here with the
        # turn of its last collective.
        self._ids: dict[tuple[str, str], dict[int, int]] = {}
        for entry in self._entries:
            ids = self._ids.setdefault((str(entry["process_group"][0]), _backend(entry)), {})
            ids[entry["pg_id"]] = int(entry["collective_seq_id"])
        self._living = {
            self._group(name, kind): (name, kind)
            for name in self._issued or self._described for kind in sorted(kinds.get(name, {""}))
        }  # fmt: skip
        self._calls = self._numbered()
        self.entered = self._counts(names)

    def trace(self, most: Mapping[Group, int]) -> Trace:
        """Its record.

        Args:
            most: collectives that any rank has issued, by group. A rank whose dump does not reach
                back so far is taken to have issued as many.
        """
        about = self._held.get("commgrid", {})
        lost = [group for group in most if self._dropped and self.rank in group.ranks]
        groups = dict.fromkeys([*self.entered, *self._living, *lost])
        return Trace(
            rank=self.rank,
            calls=tuple(self._calls),
            dropped=self._dropped,
            groups=tuple(groups),
            entered={group: self.entered.get(group, most.get(group, 0)) for group in groups},
            at=about.get("at"),
            state="running" if about else "",
            host=str(about.get("host", "")),
            knows_waits=False,
        )

    def _numbered(self) -> list[Call]:
        """The calls with their places among others."""
        calls: list[Call] = []
        pairs: dict[tuple[Group, str, int | None], int] = {}
        numbers: dict[Group, int] = {}
        for entry in self._entries:
            call = self._call(entry)
            # torch does not count between two ranks; what is under way is matched.
            if call is None or (call.is_transfer and call.ended is not None):
                continue
            turn = int(entry["collective_seq_id"])
            if call.is_transfer:
                of = (call.group, call.operation, call.peer)
                turn = pairs[of] = pairs.get(of, -1) + 1
            number = numbers[call.group] = numbers.get(call.group, -1) + 1
            calls.append(replace(call, number=number, turn=turn))
        return calls

    def _counts(self, names: Mapping[str, str]) -> dict[Group, int]:
        """The collectives issued on each group so far, where that is known."""
        found = {} if self._dropped else dict.fromkeys(self._living, 0)
        status = self._held.get("pg_status", {})
        last = {names[str(key)]: each for key, each in status.items() if str(key) in names}
        for group, (name, kind) in self._living.items():
            if kind != "gloo" and self._issued is not None:
                found[group] = self._issued[name].get(kind, -1) + 1
            elif kind != "gloo" and name in last:
                found[group] = int(last[name]["last_enqueued_collective"]) + 1
        for call in self._calls:
            if not call.is_transfer and call.group.key:
                found[call.group] = max(found.get(call.group, 0), (call.turn or 0) + 1)
        if self._issued is not None:
            for (name, kind), ids in self._ids.items():
                if name and name not in self._issued:  # others may have calls there under way
                    found[self._group(name, kind)] = [*ids.values()][-1] + 1
        return found

    def _group(self, name: str, kind: str, number: int | None = None) -> Group:
        """A communicator by torch's name and id; without an id the last one of its name.

        It has no key if nothing tells it from others of its name.
        """
        ids = self._ids.get((name, kind), {0: 0})
        desc, ranks = self._described.get(name, ("", ()))
        label = _label(name, desc, self._described)
        place = len(ids) if number is None else [*ids].index(number) + 1
        if self._issued is None:
            return Group(label, ranks, f"{name}@{place}/{kind}" if name else "", kind)
        issued = self._issued.get(name, {}).get(kind, -1)
        if number is not None and (place < len(ids) or ids[number] > issued):
            return Group(label, (), "", kind)
        return Group(label, ranks if name in self._issued else (), f"{name}@/{kind}", kind)

    def _call(self, entry: Mapping[str, Any]) -> Call | None:
        """An entry, without its place among others; None for what only holds others together."""
        backend, _, what = str(entry["profiling_name"]).partition(":")
        transfer = _TRANSFER.match(what)
        if what == "coalesced":
            return None
        group = self._group(str(entry["process_group"][0]), backend, entry["pg_id"])
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
