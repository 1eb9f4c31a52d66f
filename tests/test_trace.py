"""Every collective under its name, with its place and its time, in all code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import CommGridError, SpecError
from commgrid.call_records import files as trace_files
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace
from commgrid.cli import main
from commgrid.collectives import all_reduce
from commgrid.recording.recorder import asked_by_environment
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import interposer as torch_calls
from tests.records import save


def methods() -> tuple[dict[str, Any], dict[str, Any]]:
    """torch's as they are now: other tests of this process may have had some mended for good."""
    return dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))


def all_calls(folder: str) -> list[tuple[Any, ...]]:
    """One of each of torch's collectives, with its expected record."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of them
    before = methods()
    grid = commgrid.initialize(tp=2, trace=True)
    group, other = grid.get_group("tp"), 1 - grid.get_local_rank("tp")
    peer = grid.get_ranks("tp")[other]
    first = grid.get_ranks("tp")[0]
    x, two, both = torch.ones(2, 3), [torch.ones(2, 3)] * 2, torch.ones(4, 3)
    nothing: list[tuple[str, tuple[int, ...], int]] = []
    expected = nothing

    def asks(operation: str, shape: tuple[int, ...], numbers: int) -> None:
        expected.append((operation, shape, 4 * numbers))

    commgrid.trace.stop()
    commgrid.trace.start()  # without what starting the grid has issued
    dist.all_reduce(x, group=group), asks("all_reduce", (2, 3), 6)
    dist.broadcast(x, first, group=group), asks("broadcast", (2, 3), 6)
    dist.reduce(x, first, group=group), asks("reduce", (2, 3), 6)
    dist.all_gather([torch.empty(2, 3) for _ in two], x, group=group)
    asks("all_gather", (2, 3), 6)
    dist.all_gather_into_tensor(both, x, group=group), asks("all_gather", (2, 3), 6)
    dist.reduce_scatter_tensor(x, both, group=group), asks("reduce_scatter", (4, 3), 12)
    dist.all_to_all_single(torch.empty(4, 3), both, group=group), asks("all_to_all", (4, 3), 12)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait(), asks("all_reduce", (2, 3), 6)
    if other:
        dist.send(x, peer, group=group), asks("send", (2, 3), 6)
        dist.recv(x, peer, group=group), asks("recv", (2, 3), 6)
    else:
        dist.recv(x, peer, group=group), asks("recv", (2, 3), 6)
        dist.send(x, peer, group=group), asks("send", (2, 3), 6)
    dist.barrier(group=group), asks("barrier", (), 0)
    all_reduce(x, "dp"), asks("all_reduce", (2, 3), 6)
    commgrid.trace.stop()
    dist.all_reduce(x, group=group)  # not any more
    found = commgrid.trace.recorded()
    commgrid.trace.save(folder)
    calls = [call for call in found.calls if call.bytes or call.operation == "barrier"]
    assert [(call.operation, call.shape, call.bytes) for call in calls] == expected
    assert {call.dtype for call in calls} == {"float32", ""}
    assert [call.group.name for call in calls] == ["tp"] * (len(calls) - 1) + ["dp"]
    assert all("test_trace.py:" in call.where and "all_calls" in call.where for call in calls)
    own = [call for call in calls if call.group.name == "tp"]
    assert [call.number - own[0].number for call in own] == list(range(len(own)))
    assert all(call.ended is not None and call.began <= call.issued <= call.ended for call in calls)
    assert {call.peer for call in calls if call.operation in ("send", "recv")} == {peer}
    assert {tuple(grid.get_ranks("tp"))} == {g.ranks for g in found.groups if g.name == "tp"}
    commgrid.shutdown()
    assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == before
    return [(c.group.name, c.number, c.operation, c.where) for c in found.calls]


def test_each_of_torchs_collectives_is_seen_by_name(tmp_path: Path) -> None:
    ranks = run_on_ranks(all_calls, 4, str(tmp_path), backend=None, launcher="torchrun")
    read = trace_files.read(tmp_path)
    assert [trace.rank for trace in read] == [0, 1, 2, 3]
    for held, trace in zip(ranks, read, strict=True):
        assert [(c.group.name, c.number, c.operation, c.where) for c in trace.calls] == held


def late(folder: str) -> tuple[Any, ...]:
    """Rank 1 does not come."""
    grid = commgrid.initialize(tp=2, timeout=2.0, trace=True)
    all_reduce(torch.ones(2), "tp")
    if grid.rank == 0:
        with pytest.raises((RuntimeError, commgrid.PeerTimeoutError)):
            dist.all_reduce(torch.ones(5), group=grid.get_group("tp"))
    last = commgrid.trace.recorded().calls[-1]
    return last.shape, last.ended


def test_a_call_that_never_returns_is_the_last_and_has_no_end(tmp_path: Path) -> None:
    """A failed wait has an end too. Only its record matters here."""
    # The ranks still record.
    first, other = run_on_ranks(
        late, 2, str(tmp_path), backend=None, launcher="torchrun", check=False
    )
    assert first[0] == (5,)
    assert other[0] == (2,)


@pytest.fixture
def grid() -> Any:
    yield commgrid.initialize()
    commgrid.trace.stop()
    commgrid.shutdown()


def test_pythons_own_lines_are_not_the_programs(grid: Any) -> None:
    commgrid.trace.start()
    thread = threading.Thread(target=dist.broadcast, args=(torch.ones(1), 0, grid.get_group("dp")))
    thread.start()
    thread.join()
    assert commgrid.trace.recorded().calls[-1].where == "?"  # and not threading.py


def test_only_the_last_calls_are_kept(grid: Any) -> None:
    commgrid.trace.start(capacity=3)
    group = grid.get_group("dp")
    for size in range(1, 6):
        dist.broadcast(torch.ones(size), 0, group)
    found = commgrid.trace.recorded()
    assert [call.shape for call in found.calls] == [(3,), (4,), (5,)]
    assert (found.dropped, found.calls[0].number) == (2, 2)


def test_starting_again_forgets_and_two_starts_are_one(grid: Any) -> None:
    group = grid.get_group("dp")
    commgrid.trace.start()
    commgrid.trace.start()
    dist.broadcast(torch.ones(1), 0, group)
    assert len(commgrid.trace.recorded().calls) == 1
    commgrid.trace.stop()
    assert not commgrid.trace.is_on()
    assert len(commgrid.trace.recorded().calls) == 1  # until the next start
    commgrid.trace.start()
    assert commgrid.trace.recorded().calls == ()


def test_a_new_grid_counts_its_calls_from_the_start() -> None:
    """Ranks have issued other numbers of calls on the last one, which has failed, of that name."""
    try:
        for calls in (2, 1):
            grid = commgrid.initialize(trace=True)
            for _ in range(calls):
                dist.broadcast(torch.ones(1), 0, grid.get_group("dp"))
            commgrid.shutdown()
        calls_of_all = commgrid.trace.recorded().calls
        found = [call for call in calls_of_all if call.operation == "broadcast"]
        assert [(call.number, call.turn) for call in found] == [(0, 0), (1, 1), (0, 0)]
    finally:
        commgrid.trace.stop()


def test_a_listener_that_raises_keeps_the_call_from_being_made(grid: Any) -> None:
    class Refuses:
        def begins(self, *_: Any) -> None:
            raise CommGridError("no")

        def issued(self, *_: Any) -> None: ...
        def waits(self, *_: Any) -> None: ...
        def waited(self, *_: Any) -> None: ...

    listener = Refuses()
    torch_calls.listen(listener)
    try:
        with pytest.raises(CommGridError, match="no"):
            dist.broadcast(torch.ones(1), 0, grid.get_group("dp"))
    finally:
        torch_calls.stop(listener)
    dist.broadcast(torch.ones(1), 0, grid.get_group("dp"))


def test_what_others_put_around_it_stays_and_nothing_is_recorded_twice(grid: Any) -> None:
    """As a mend of an all-to-all does, that is put in place while a trace is on."""
    group, seen = grid.get_group("dp"), []
    plain = methods()[0]["broadcast"]
    commgrid.trace.start()
    ours = dist.ProcessGroup.broadcast

    def around(group: Any, *args: Any) -> Any:
        seen.append("around")
        return ours(group, *args)

    dist.ProcessGroup.broadcast = around  # type: ignore[method-assign]
    try:
        dist.broadcast(torch.ones(1), 0, group)
        commgrid.trace.stop()
        dist.broadcast(torch.ones(1), 0, group)
        commgrid.trace.start()
        dist.broadcast(torch.ones(1), 0, group)
        assert len(commgrid.trace.recorded().calls) == 1
        assert seen == ["around"] * 3
    finally:
        dist.ProcessGroup.broadcast = ours  # type: ignore[method-assign]
        commgrid.trace.stop()
    assert vars(dist.ProcessGroup)["broadcast"] is plain


def test_a_batch_that_has_one_work_is_over_when_that_is(
    grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's: calls of a batch return nothing to wait for, the batch one work for all."""
    group = grid.get_group("dp")
    (work,) = [dist.broadcast(torch.ones(1), 0, group, async_op=True)]
    monkeypatch.setattr(dist.ProcessGroup, "send", lambda *_: None)
    monkeypatch.setattr(dist.ProcessGroup, "_end_coalescing", lambda *_: work)
    commgrid.trace.start()
    try:
        with torch_calls.batched():
            for _ in range(2):
                assert dist.ProcessGroup.send(group, [torch.ones(1)], 0, 0) is None
            assert dist.ProcessGroup._end_coalescing(group, torch.device("cpu")) is work
        assert [call.ended for call in commgrid.trace.recorded().calls[-2:]] == [None, None]
        work.wait()
        assert None not in [call.ended for call in commgrid.trace.recorded().calls[-2:]]
    finally:
        commgrid.trace.stop()


def test_nothing_recorded_is_said() -> None:
    from commgrid import trace

    trace._kept.clear()
    with pytest.raises(CommGridError, match=r"nothing was recorded; .*COMMGRID_TRACE"):
        commgrid.trace.summary()


PROGRAM = """
import torch, commgrid
grid = commgrid.initialize()
for _ in range(3):
    torch.distributed.broadcast(torch.ones(4), 0, grid.get_group("dp"))
commgrid.shutdown()
"""


@pytest.mark.parametrize("capacity", [0, -1, "5", 2.0, True])
def test_a_trace_of_no_calls_is_refused(capacity: Any) -> None:
    with pytest.raises(SpecError, match=r"^capacity=.*: expected a number of calls, from 1$"):
        commgrid.trace.start(capacity=capacity)
    assert not commgrid.trace.is_on()


def test_a_trace_may_keep_one_call_alone() -> None:
    commgrid.trace.start(capacity=1)
    grid = commgrid.initialize()
    for _ in range(2):
        dist.broadcast(torch.ones(4), 0, grid.get_group("dp"))
    commgrid.trace.stop()
    commgrid.shutdown()
    assert len(commgrid.trace.recorded().calls) == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, (False, None)) for value in (None, "", " ", "0", "false", "no", "FALSE", "Off")),
        *((value, (True, None)) for value in ("1", "true", "True", " yes", "on")),
        *((value, (True, Path(value))) for value in ("./on", "2", "runs/false")),
    ],
)
def test_the_environment_may_say_yes_and_no_in_words(
    value: str | None, expected: tuple[bool, Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("COMMGRID_TRACE", raising=False)
    else:
        monkeypatch.setenv("COMMGRID_TRACE", value)
    assert asked_by_environment() == expected


@pytest.mark.parametrize("value", ["folder", "1", "0", "", "false"])
def test_the_environment_begins_it_and_saves_at_the_end(value: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "trace"
    environ = {**os.environ, "COMMGRID_TRACE": str(folder) if value == "folder" else value}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environ, check=True, timeout=120)
    if value != "folder":
        assert not list(tmp_path.iterdir())
        return
    trace = trace_files.read(folder)[0]
    assert [call.operation for call in trace.calls] == ["broadcast"] * 3
    assert [call.where for call in trace.calls] == ["<string>:5 <module>"] * 3


TP, DP = Group("tp", (0, 1), "tp@1"), Group("dp,dp_cp", (0, 1), "dp@1")


def made(group: Group, operation: str, *times: float | None, **given: Any) -> Call:
    """A call; times in milliseconds."""
    began, issued, ended = (None if each is None else 100.0 + each / 1e3 for each in times)
    given = {"shape": (4,), "dtype": "float32", "bytes": 16, "where": "a.py:1 f", **given}
    return Call(group, operation, began=began or 0.0, issued=issued, ended=ended, **given)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rank 0 waits 6 ms for rank 1, which does not issue the last call."""
    send: Any = {"shape": (2,), "dtype": "int64", "peer": 1, "where": "a.py:2 f"}
    return save(
        tmp_path / "trace",
        Trace(0, (
            made(TP, "all_reduce", 0.0, 0.1, 8.0), made(TP, "all_reduce", 8.0, 8.1, 9.0),
            made(TP, "send", 9.0, None, None, **send),
            made(DP, "all_gather", 9.5, 9.6, 10.0, shape=(8,), bytes=32, where="a.py:3 f"),
        ), at=100.0),
        Trace(1, (
            made(TP, "all_reduce", 6.0, 6.1, 8.0), made(TP, "all_reduce", 8.0, 8.1, 9.0),
        ), at=100.0),
    )  # fmt: skip


def test_the_table_has_the_rank_that_spent_most(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 ranks, 6 calls"
    assert [line.split() for line in lines[2:]] == [
        ["group", "operation", "calls", "bytes", "seconds", "share", "where"],
        ["tp", "all_reduce", "2", "32", "0.0090", "90.0%", "a.py:1", "f"],
        ["dp", "+1", "all_gather", "1", "32", "0.0005", "5.0%", "a.py:3", "f"],
        ["tp", "send", "1", "16", "0.0000", "0.0%", "a.py:2", "f"],
    ]
    assert main(["trace", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert (rows[0]["group"], rows[0]["seconds"]) == ("tp", pytest.approx(0.009, rel=1e-6))


def test_perfettos_file_has_a_process_a_rank_and_a_row_a_group(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert main(["trace", str(folder), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    events = json.loads(out.read_text())["traceEvents"]
    named = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named == {
        (0, None): "rank 0", (0, 0): "tp", (0, 1): "dp,dp_cp", (1, None): "rank 1", (1, 0): "tp",
    }  # fmt: skip
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"]) for e in spans] == [
        (0, 0, "all_reduce 0"), (0, 0, "all_reduce 1"), (0, 0, "send 2"), (0, 1, "all_gather 0"),
        (1, 0, "all_reduce 0"), (1, 0, "all_reduce 1"),
    ]  # fmt: skip
    times = [(round(e["ts"]), round(e["dur"])) for e in spans]
    assert times == [(0, 8000), (8000, 1000), (9000, 1000), (9500, 500), (6000, 2000), (8000, 1000)]
    assert [e["args"].get("unfinished") for e in spans] == [None, None, True, None, None, None]
    assert spans[2]["args"]["peer"] == 1


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no rank_\*\.ring; expected the folder"):
        trace_files.read(tmp_path)
    for text in (b"", b"[]", b"commgrid ring 2\n", b"commgrid ring 2\n" + bytes(5000)):
        (tmp_path / "rank_00000.ring").write_bytes(text)
        with pytest.raises(SpecError, match="is no trace of commgrid's"):
            trace_files.read(tmp_path)
