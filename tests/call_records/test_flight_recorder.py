"""Dumps of torch's flight recorder made by hand: what they do not hold is held against no rank."""

from __future__ import annotations

from typing import Any

import pytest

from commgrid.call_analysis.diagnosis import diagnose
from commgrid.call_records.flight_recorder import parse

WORLD = ("0", "default_pg")


def entry(turn: int, group: tuple[str, str] = WORLD, **given: Any) -> dict[str, Any]:
    """An all-reduce of gloo's that has ended."""
    return {
        "process_group": group, "pg_id": 0, "collective_seq_id": turn, "record_id": turn - 1,
        "profiling_name": "gloo:all_reduce", "time_created_ns": 10**9 * turn, "input_sizes": [[4]],
        "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"],
        "state": "scheduled", "retired": True, "thread_id": "7", **given,
    }  # fmt: skip


def dump(*entries: dict[str, Any], **given: Any) -> dict[str, Any]:
    names = {tuple(each["process_group"]) for each in entries} | {WORLD}
    config = {name: {"name": name, "desc": desc, "ranks": "[0, 1]"} for name, desc in names}
    return {
        "version": "2.10", "pg_config": config, "entries": list(entries),
        "commgrid": {"host": "a", "at": 100.0}, **given,
    }  # fmt: skip


def accused(*dumps: dict[str, Any]) -> list[int]:
    found = diagnose(parse(list(enumerate(dumps))))
    return [rank for each in found.causes for rank in each.ranks]


OPEN = {"retired": False}
RIGHT: dict[str, tuple[dict[str, Any], ...]] = {
    "equal": (dump(entry(1), entry(2)), dump(entry(1), entry(2))),
    "one is ahead of an asynchronous call": (dump(entry(1), entry(2)), dump(entry(1))),
    "a name of a later world": (
        dump(entry(1), entry(2), entry(1, pg_id=4, record_id=2, **OPEN)),
        dump(entry(1), entry(2), entry(1, pg_id=3, record_id=2, **OPEN)),
    ),
    "gloo counts messages": (
        dump(entry(1), pg_status={"0": {"last_enqueued_collective": 1}}),
        dump(entry(1), pg_status={"0": {"last_enqueued_collective": 9}}),
    ),
    "two backends of one group": (
        dump(entry(1), entry(1, profiling_name="nccl:all_reduce", pg_id=2, record_id=0)),
        dump(entry(1), entry(1, profiling_name="nccl:all_reduce", pg_id=5, record_id=0)),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_jobs(name: str) -> None:
    assert accused(*RIGHT[name]) == []


WRONG: dict[str, tuple[int, tuple[dict[str, Any], ...]]] = {
    "it has not come": (1, (dump(entry(1), entry(2, **OPEN)), dump(entry(1)))),
    "it has made no call": (1, (dump(entry(1, **OPEN)), dump())),
    "it is in an earlier world": (
        1,
        (
            dump(entry(1), entry(2), entry(1, pg_id=4, record_id=2, **OPEN)),
            dump(entry(1), entry(2)),
        ),
    ),
    "it has not come on one of two backends": (
        1,
        (
            dump(entry(1), entry(1, profiling_name="nccl:all_reduce", state="started", **OPEN)),
            dump(entry(1)),
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_jobs(name: str) -> None:
    rank, dumps = WRONG[name]
    assert accused(*dumps) == [rank]


def living(
    rank: int, groups: dict[str, tuple[str, int]], *entries: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """A dump as `commgrid dump` makes it: ranks and number of calls of each living group."""
    config = {
        name: {"name": name, "desc": "undefined", "ranks": ranks, "issued": {"gloo": issued}}
        for name, (ranks, issued) in groups.items()
    }
    return rank, dump(*entries, pg_config=config)


def of(name: str, turn: int, pg_id: int, **given: Any) -> dict[str, Any]:
    return entry(turn, (name, "undefined"), pg_id=pg_id, record_id=0, **given)


OTHER = {"profiling_name": "gloo:broadcast"}
NOW = {**OPEN, "time_created_ns": 99_900_000_000}
ALL = ("[0, 1, 2]", 0)
WORLDS: dict[str, tuple[list[tuple[int, dict[str, Any]]], list[int]]] = {
    "other members": (
        [
            living(0, {"0": ALL}, of("1", 1, 1)),
            living(1, {"0": ALL, "1": ("[1, 2]", 1)}, of("1", 1, 1), of("1", 1, 3, **OTHER)),
            living(2, {"0": ALL, "1": ("[1, 2]", 1)}, of("1", 1, 2, **OTHER)),
        ],
        [],
    ),
    "the second one has had no call on one rank": (
        [
            living(0, {"0": ALL, "1": ("[0, 2]", 0)}, of("1", 1, 1), of("1", 2, 1)),
            living(1, {"0": ALL}, of("1", 1, 1), of("1", 2, 1)),
            living(2, {"0": ALL, "1": ("[0, 2]", 1)}, of("1", 1, 2, **OTHER)),
        ],
        [],
    ),
    "both are destroyed": (
        [
            living(0, {"0": ALL}, of("1", 1, 1)),
            living(1, {"0": ALL}, of("1", 1, 1)),
            living(2, {"0": ALL}, of("1", 1, 2, **OTHER)),
        ],
        [],
    ),
    "destroyed on one rank, and under way on another": (
        [
            living(0, {"0": ALL}, of("1", 1, 1), of("1", 2, 1)),
            living(1, {"0": ALL, "1": ("[0, 1]", 2)}, of("1", 1, 1), of("1", 2, 1, **NOW)),
            living(2, {"0": ALL}),
        ],
        [],
    ),
    "a rank has not come in the second": (
        [
            living(0, {"0": ALL, "1": ("[0, 2]", 0)}, of("1", 1, 1), of("1", 2, 1)),
            living(1, {"0": ALL}, of("1", 1, 1), of("1", 2, 1)),
            living(2, {"0": ALL, "1": ("[0, 2]", 1)}, of("1", 1, 2, **OPEN)),
        ],
        [0],
    ),
    "a rank has another call in the second": (
        [
            living(0, {"0": ALL, "1": ("[0, 2]", 1)}, of("1", 1, 1), of("1", 1, 3)),
            living(1, {"0": ALL}, of("1", 1, 1)),
            living(2, {"0": ALL, "1": ("[0, 2]", 1)}, of("1", 1, 2, **OTHER)),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_groups_of_one_name_in_worlds_one_after_another(name: str) -> None:
    dumps, ranks = WORLDS[name]
    assert sorted(rank for each in diagnose(parse(dumps)).causes for rank in each.ranks) == ranks


def test_calls_of_groups_without_names_are_not_compared() -> None:
    """As under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    named = ("", "")
    assert accused(dump(entry(1, named)), dump(entry(1, named, **OTHER))) == []


def test_a_rank_whose_buffer_does_not_reach_back_is_not_said_to_be_absent() -> None:
    late = entry(1, ("3", "dp"), pg_id=3, record_id=2, **OPEN)
    waiting = dump(entry(1), entry(2), late)
    assert 1 not in accused(waiting, dump(entry(2), entry(3), entry(4)))
    assert accused(waiting, dump(entry(1), entry(2))) == [1]
