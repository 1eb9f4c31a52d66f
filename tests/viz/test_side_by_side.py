"""Calls of ranks side by side, seconds by step, and the contents of records as data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace
from commgrid.cli import main
from commgrid.viz.side_by_side import side_by_side, steps_table, waited_in_steps
from tests.docs import pages
from tests.records import save

DP = Group("dp", (0, 2), "1", "gloo"), Group("dp", (1, 3), "1", "gloo")
TP = Group("tp,cp", (0, 1), "2", "gloo"), Group("tp,cp", (2, 3), "2", "gloo")


def reduced(group: Group, turn: int, began: float, **more: Any) -> Call:
    """An all-reduce that ends at 10 after its begin, unless it is said otherwise."""
    values = {"issued": began, "ended": began + 10.0, "where": "a.py:1 f", **more}
    return Call(group, "all_reduce", shape=(2,), dtype="float32", turn=turn, began=began, **values)


def traces() -> list[Trace]:
    """Two calls on dp, of which rank 3 makes one, and a message from 0 to 1 on tp."""
    found = []
    for rank in range(4):
        dp, tp = DP[rank % 2], TP[rank // 2]
        calls = [reduced(dp, turn, 20.0 * turn + rank) for turn in range(1 if rank == 3 else 2)]
        if rank == 1:
            calls[1] = replace(calls[1], ended=None, waiting=True)
        if rank < 2:
            kind = "recv" if rank else "send"
            calls.append(Call(tp, kind, 1 - rank, turn=0, tag=5, where="b.py:2 g", began=50.0))
        found.append(
            Trace(rank, tuple(calls), groups=(dp, tp), entered={dp: 2 - (rank == 3)}, host="a",
                  steps=((7, 0.0), (8, 20.0)))
        )  # fmt: skip
    return found


def cells(text: str) -> list[list[str]]:
    return [re.split(" {2,}", line) for line in text.splitlines()]


def test_a_row_is_a_turn_and_a_column_a_rank() -> None:
    lines = cells(side_by_side(traces()))
    assert lines == [
        ["call", "rank 0", "rank 1", "rank 2", "rank 3"],
        ["dp 0 all_reduce of float32 [2]", *["a.py:1 f"] * 4],
        ["dp 1 all_reduce of float32 [2]", "a.py:1 f", "a.py:1 f (waits)", "a.py:1 f",
         "not entered"],
        ["tp +1 0>1 tag 5 0", "send b.py:2 g (no end)", "recv b.py:2 g (no end)"],
    ]  # fmt: skip
    assert len(side_by_side(traces(), last=1).splitlines()) == 2
    assert side_by_side([]) == "nothing was recorded"


def test_calls_that_differ_are_told_apart() -> None:
    """Also two communicators of one name, and a call that the ring has not kept."""
    other = reduced(DP[0], 0, 1.0, reduction="MAX")
    late = replace(DP[0], key="3")
    found = [
        Trace(0, (reduced(DP[0], 0, 0.0), reduced(late, 0, 5.0)), entered={DP[0]: 1, late: 1}),
        Trace(2, (other, reduced(DP[0], 7, 9.0)), groups=(late,), entered={DP[0]: 8}),
    ]
    first, second, third = side_by_side(found).splitlines()[1:]
    assert first.startswith("dp 0 ")
    assert "(MAX)" in first
    assert second.startswith("dp 0 all_reduce of float32 [2]")
    assert second.endswith("not entered")
    assert third.split("  ")[0] == "dp 7 all_reduce of float32 [2]"
    assert "not entered" in third
    (kept,) = side_by_side(
        [found[0], Trace(2, (), dropped=9, groups=(DP[0],), entered={DP[0]: 8})]
    ).splitlines()[1:2]
    assert kept.endswith("not kept")


def test_seconds_waited_are_until_the_last_rank_of_the_host_comes() -> None:
    found = waited_in_steps(traces())
    assert found == {
        7: {0: 2.0, 1: 2.0, 2: 0.0, 3: 0.0},
        8: {0: 2.0, 1: 0.0, 2: 0.0, 3: 0.0},
    }
    apart = [replace(trace, host=f"{trace.rank}") for trace in traces()]
    assert all(s == 0.0 for each in waited_in_steps(apart).values() for s in each.values())
    assert cells(steps_table(found))[1] == ["7", "2.0000", "2.0000", "0.0000", "0.0000"]
    assert "commgrid.trace.step" in steps_table({})


def test_the_page_of_steps(tmp_path: Path) -> None:
    """The rank that is late once is the one that waits least, there alone."""
    page = pages.DOCS / "debugging.md"
    pages.save_files(page, tmp_path)
    steps = next(each for each in pages.blocks(page, "bash") if "steps.py" in each.text)
    shown = next(each for each in pages.blocks(page, "text") if "steps" in each.comment)
    said, errors = pages.in_shell(steps.text, tmp_path)
    found, printed = cells(said.strip()), cells(shown.text.strip())
    assert [row[0] for row in found] == [row[0] for row in printed], said + errors
    for number in (1, 2, 3):
        seconds, on_page = ([float(cell) for cell in rows[number][1:]] for rows in (found, printed))
        assert [each > 0.2 for each in seconds] == [each > 0.2 for each in on_page]


def test_the_contents_are_all_that_was_recorded() -> None:
    """Read back, they give the calls again."""
    for trace in traces():
        held = json.loads(json.dumps(trace.as_dict()))
        groups = [
            Group(g["name"], tuple(g["ranks"]), g["key"], g["backend"]) for g in held["groups"]
        ]
        calls = [
            Call(**{**each, "group": groups[each["group"]], "shape": tuple(each.get("shape", ()))})
            for each in held["calls"]
        ]
        assert tuple(calls) == trace.calls
        assert {g: n["entered"] for g, n in zip(groups, held["groups"], strict=True)} == {
            group: trace.entered.get(group, 0) for group in groups
        }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for trace in traces():
        save(tmp_path, trace)
    return tmp_path


def test_the_command_chooses_ranks_and_a_group(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(folder), "--ranks", "0-1", "--group", "cp", "--last", "3"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["call", "rank", "0", "rank", "1"]
    assert row.startswith("tp +1 0>1 tag 5 0")
    assert main(["trace", str(folder), "--steps"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[0] == "8"
    assert main(["trace", str(folder), "--json", "--ranks", "3", "--group", "dp"]) == 0
    (trace,) = json.loads(capsys.readouterr().out)["traces"]
    assert (trace["rank"], len(trace["calls"])) == (3, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--ranks 7", "--ranks 7: {} has records of ranks 0-3"),
        ("--group pp", "--group pp: no call is on it; those recorded are on cp, dp, tp"),
        ("--steps --last 3", "--last not allowed with argument --steps"),
        ("-o a.html --steps", "--steps not allowed with argument -o/--output"),
    ],
)
def test_flags_that_do_not_fit(
    folder: Path, flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(folder), *flags.split()]) == 2
    assert said.format(folder) in capsys.readouterr().err
