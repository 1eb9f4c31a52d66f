"""Records that outlive their process: written to mapped memory, and read however it ended."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import SpecError
from commgrid.call_records import files as trace_files
from commgrid.call_records import processes, ring
from commgrid.call_records.call import Call, Group
from commgrid.call_records.ring import Contents, Ring
from commgrid.call_records.trace import Trace
from commgrid.recording import recorder
from commgrid.torch_compat import interposer as torch_calls
from tests.records import ring_of

DP = Group("dp", (1, 3), "key", "gloo")


def add(made: Ring, number: int, **given: Any) -> int:
    """A call on `DP`, with its number as its turn."""
    values: dict[str, Any] = {
        "operation": "all_reduce", "dtype": "float32", "reduction": "", "shape": (2, 3), "size": 24,
        "output": None, "peer": None, "began": 1000 + number, "turn": number, **given,
    }  # fmt: skip
    where = values.pop("where", ("a.py", 1, "f"))
    kind = made.entry("kind", *(values.pop(name) for name in ("operation", "dtype", "reduction")))
    stack = (
        made.entry("stack", (made.entry("place", *where),)) if made.entry("place", *where) else 0
    )
    group = made.entry("group", DP.name, DP.ranks, DP.key, DP.backend)
    return made.add(group, number, kind=kind, stack=stack, **values)


def read(made: Ring, last: int | None = None) -> Trace:
    return trace_files.parse([Contents(made.memory).packed(last)])[0]


def test_a_file_holds_what_the_memory_holds(tmp_path: Path) -> None:
    made = Ring(10, tmp_path / "rank_00003.ring")
    made.note("rank", 3)
    made.note("job", "a job")
    first = add(made, 0, reduction="SUM")
    made.issued(first, 2000)
    made.ended(first, 3000)
    add(made, 1, operation="all_gather", output=48)
    waiting = add(made, 2, operation="send", peer=0, turn=0, batch=7, tag=5, thread=2)
    made.issued(waiting, 2500)
    made.waits(waiting, True, 2)
    group = made.entry("group", DP.name, DP.ranks, DP.key, DP.backend)
    made.count(group, 2)
    made.count(made.entry("pair", group, "send", 0, 5), 1)
    (trace,) = trace_files.read(tmp_path)
    assert replace(trace, state="running") == read(made)
    assert (trace.rank, trace.job, trace.groups) == (3, "a job", (DP,))
    one, two, three = trace.calls
    assert (one.reduction, one.shape, one.dtype, one.bytes) == ("SUM", (2, 3), "float32", 24)
    assert (one.where, one.stack) == ("a.py:1 f", ("a.py:1 f",))
    assert one.issued is not None
    assert one.ended is not None
    after = [round((at - one.began) * 1e9) for at in (one.issued, one.ended)]
    assert after == [pytest.approx(1000, abs=600), pytest.approx(2000, abs=600)]
    assert (two.operation, two.output, two.issued, two.ended) == ("all_gather", 48, None, None)
    assert (three.peer, three.tag, three.turn, three.thread) == (1, 5, 0, 2)
    assert [call.waiting for call in trace.calls] == [False, False, True]
    assert trace.batches == {(DP, 2): 7}
    assert (trace.entered, trace.sent) == ({DP: 2}, {(DP, "send", 3, 1, 5): 1})
    assert trace.dropped == 0


def test_any_trace_comes_back_from_its_ring() -> None:
    pp = Group("pp", (1, 2), "4@1", "gloo")
    calls = (
        Call(DP, "all_reduce", shape=(4,), dtype="float32", bytes=16, number=0, turn=0, thread=1,
             where="a.py:9 f", stack=("a.py:1 <module>", "a.py:9 f"), reduction="MAX", began=1.5,
             issued=1.75, waiting=True),
        Call(pp, "recv", peer=2, tag=3, number=4, turn=2, where="?", began=2.0, issued=2.25,
             ended=2.5),
        Call(DP, "all_to_all", bytes=80, sizes=tuple(range(40)), number=1, turn=1, where="?",
             began=3.0),
        Call(DP, "broadcast", root=3, number=2, turn=2, where="?", output=8, began=4.0),
    )  # fmt: skip
    trace = Trace(
        1, calls, 2, (DP, pp), {(pp, 4): 6}, {DP: 3}, {(pp, "recv", 2, 1, 3): 3}, 8.0, "running",
        "a host", "a job", steps=((7, 1.25), (8, 2.75)), lost=True,
        over=True, earlier=2,
    )  # fmt: skip
    assert trace_files.parse([ring_of(trace)]) == [trace]
    ends = trace_files.parse([Contents(ring_of(trace)).packed(last=1)])[0]
    assert [call.operation for call in ends.calls] == ["recv", "broadcast"]
    assert (ends.entered, ends.sent, ends.dropped) == (trace.entered, trace.sent, 4)


@pytest.mark.parametrize("moved", [False, True])
def test_the_last_calls_stay(tmp_path: Path, moved: bool) -> None:
    made = Ring(3)
    for number in range(8):
        add(made, number)
    if moved:
        made = made.moved(tmp_path / "rank_00000.ring")
    for number in range(8, 10):
        add(made, number)
    made.ended(6, 9999)  # not kept any more: no other record changes
    trace = read(made)
    assert [call.number for call in trace.calls] == [7, 8, 9]
    assert [call.ended for call in trace.calls] == [None] * 3
    assert trace.dropped == 7
    assert [call.number for call in read(made, last=2).calls] == [8, 9]


def test_sizes_that_were_partly_written_over_are_nobodys() -> None:
    made = Ring(4)
    add(made, 0, operation="all_to_all", sizes=range(40))  # four rows
    assert read(made).calls[0].sizes == tuple(range(40))
    add(made, 1, operation="all_to_all", sizes=(1, 2))
    trace = read(made)
    assert [(call.number, call.sizes) for call in trace.calls] == [(1, (1, 2))]
    assert trace.dropped == 1


def test_a_call_that_was_not_issued_is_in_no_trace() -> None:
    made = Ring(4)
    made.raised(add(made, 0))
    add(made, 0)
    trace = read(made)
    assert (len(trace.calls), trace.dropped) == (1, 0)


@pytest.mark.parametrize("shape", [(), (5,), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6), (2**40,)])
def test_shapes(shape: tuple[int, ...]) -> None:
    made = Ring(2)
    add(made, 0, shape=shape)
    kept = read(made).calls[0].shape
    assert kept == (shape if len(shape) < 6 else (1, 2, 3, 4, 30))


def test_without_room_for_places_calls_are_still_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ring(2)
    add(made, 0)
    monkeypatch.setattr(ring, "_MOST_TEXT", made._used)
    add(made, 1, where=("b.py", 9, "g"))
    trace = read(made)
    assert [call.where for call in trace.calls] == ["a.py:1 f", "?"]
    assert not trace.lost


def test_a_table_that_is_full_loses_calls_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group without a number, or a call without its turn, would be taken for another."""
    made = Ring(4)
    add(made, 0)
    monkeypatch.setattr(ring, "_MOST_TABLE", made._used)
    add(made, 1, operation="a new one")
    add(made, 1)
    trace = read(made)
    assert ([call.number for call in trace.calls], trace.lost) == ([0], True)


def test_after_its_end_a_ring_changes_no_more(tmp_path: Path) -> None:
    """What a process does as it exits is not lost: it has ended."""
    made = Ring(4, tmp_path / "rank_00000.ring")
    add(made, 0)
    made.end(ring.ENDED)
    made.close()
    before = trace_files.read(tmp_path)
    assert add(made, 1, operation="a new one") == -1
    (after,) = trace_files.read(tmp_path)
    assert after == before[0]
    assert (before[0].state, before[0].lost, len(before[0].calls)) == ("ended", False, 1)


def test_groups_without_number(tmp_path: Path) -> None:
    made = Ring(4, tmp_path / "rank_00000.ring")
    for number in range(10_000):
        made.count(made.entry("group", f"a group {number}", (0, 1), f"{number}@1", "gloo"), number)
    (trace,) = trace_files.read(tmp_path)
    assert len(trace.groups) == 10_000
    assert trace.entered[Group("a group 9999", (0, 1), "9999@1")] == 9999


def test_a_full_disk_ends_the_recording_and_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a mapped page without room on the disk would be a SIGBUS."""
    made = Ring(100_000, tmp_path / "rank_00000.ring")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ring, "_allocate", full)
    made._reserved[ring._TABLE_AT] = 4096
    made._free = 2
    add(made, 0)
    add(made, 1)
    add(made, 2)
    (trace,) = trace_files.read(tmp_path)
    assert (len(trace.calls), trace.lost) == (2, True)
    with pytest.raises(OSError, match="No space left"):
        Ring(10, tmp_path / "rank_00001.ring")


def test_room_that_comes_back_names_no_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ring(4)
    add(made, 0)
    room = ring._MOST_TEXT
    monkeypatch.setattr(ring, "_MOST_TEXT", made._used)
    add(made, 1, where=("lost.py", 1, "f"))
    monkeypatch.setattr(ring, "_MOST_TEXT", room)
    add(made, 2, where=("b.py", 9, "g"))
    assert [call.where for call in read(made).calls] == ["a.py:1 f", "?", "b.py:9 g"]


def test_after_a_lost_call_none_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ring(4)
    add(made, 0)
    reserve = made._reserve
    monkeypatch.setattr(made, "_reserve", lambda part, size: part != made._rows_at)
    monkeypatch.setattr(made, "_free", 1)
    lost = add(made, 1)
    monkeypatch.setattr(made, "_reserve", reserve)
    add(made, 2)
    made.ended(lost, 777)
    trace = read(made)
    assert ([(call.number, call.ended) for call in trace.calls], trace.lost) == ([(0, None)], True)


def test_records_that_do_not_fit_on_the_disk_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Ring(10)
    add(made, 0)

    def small(file: int, at: int, size: int) -> None:
        if at > 0:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(ring, "_allocate", small)
    with pytest.raises(OSError, match="No space left"):
        made.moved(tmp_path / "rank_00000.ring")
    assert list(tmp_path.iterdir()) == []
    assert len(read(made).calls) == 1


def test_the_exit_handlers_of_a_child_leave_the_ring_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copies of its parent's. torch's destructors would wait for threads of the parent."""
    monkeypatch.setenv("COMMGRID_TRACE", str(tmp_path))
    commgrid.initialize()
    try:
        saved = recorder._end_at_exit
        atexit.unregister(saved)  # as it stands in a child, where only this is looked at
        atexit.register(saved, recorder.current())
        child = os.fork()
        if child == 0:
            before = atexit._ncallbacks()
            atexit.unregister(saved)
            os._exit(before - atexit._ncallbacks())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".ring", ".sigterm"]
    finally:
        atexit.unregister(saved)
        commgrid.trace.stop()
        commgrid.shutdown()


@pytest.mark.parametrize("cut", [0, 100, 4100, 4_000_000])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rank_00000.ring"
    add(Ring(10, path), 0)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SpecError, match=r"rank_00000\.ring: is no trace of commgrid's"):
        trace_files.read(tmp_path)


def test_what_a_program_does_at_sigterm_stays(tmp_path: Path) -> None:
    """Whether it says so before the recording or after."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\nimport commgrid\n"
        "def heard(*_): print('heard', flush=True)\n"
        "if sys.argv[1] == 'before': signal.signal(signal.SIGTERM, heard)\n"
        "commgrid.initialize()\n"
        "if sys.argv[1] == 'after': signal.signal(signal.SIGTERM, heard)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "commgrid.shutdown()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    environ = {**os.environ, "COMMGRID_TRACE": str(tmp_path / "trace")}
    for when in ("before", "after"):
        done = subprocess.run(
            [sys.executable, str(program), when], env=environ, timeout=100, capture_output=True,
            text=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "heard\nheard\n"), done.stderr


PROGRAM = """
import os, sys, torch, torch.distributed as dist
import commgrid
grid = commgrid.initialize()
for _ in range(3):
    dist.all_reduce(torch.ones(4), group=grid.get_group("dp"))
end = sys.argv[1]
if end == "abort":
    os.abort()
if end != "end":
    os.kill(os.getpid(), int(end))
commgrid.shutdown()
"""


@pytest.mark.parametrize("end", ["end", "abort", "9", "15"])
def test_a_rank_is_read_however_it_ended(tmp_path: Path, end: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = tmp_path / "trace"
    (folder).mkdir()
    (folder / "rank_00000.ring").write_text("of an earlier run")
    environ = {**os.environ, "COMMGRID_TRACE": str(folder)}
    done = subprocess.run(
        [sys.executable, str(program), end], env=environ, timeout=100, capture_output=True
    )
    assert (done.returncode == 0) == (end == "end"), done.stderr.decode()
    (trace,) = trace_files.read(folder)
    sums = [call for call in trace.calls if call.shape == (4,)]
    assert [call.where for call in sums] == ["program.py:6 <module>"] * 3
    assert all(call.ended is not None for call in sums)
    assert trace.state == {"end": "ended", "15": "stopped"}.get(end, "killed")
    left = {path.name: path.stat().st_size > 0 for path in folder.iterdir()}
    # Where its threads were at SIGTERM.
    told = {} if end == "end" else {"rank_00000.sigterm": end == "15"}
    assert left == {"rank_00000.ring": True, **told}


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environ = {**os.environ, "COMMGRID_TRACE": str(tmp_path / "trace")}
    done = subprocess.run(
        [sys.executable, str(program), "end"], env=environ, timeout=100, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.count("the trace is kept in memory only") == 1


def test_a_forked_process_leaves_its_parents_records_alone(tmp_path: Path) -> None:
    grid = commgrid.initialize(trace=True)
    own = recorder.current()
    assert own is not None
    try:
        before = own.ring.calls
        child = os.fork()
        if child == 0:
            made = torch_calls.Arguments("all_reduce", [torch.ones(4)], None, None, "SUM")
            own.begins(grid.get_group("dp"), made)
            os._exit(0 if recorder.current() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert own.ring.calls == before
        dist.all_reduce(torch.ones(4), group=grid.get_group("dp"))
        assert own.ring.calls == before + 1
    finally:
        commgrid.trace.stop()
        commgrid.shutdown()


def test_a_batch_with_one_work_ends_with_it(grid_of_one: Any) -> None:
    """As NCCL's: its messages have no work of their own."""
    own = recorder.current()
    assert own is not None
    group = grid_of_one.get_group("dp")
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    first = len(read(own.ring).calls)
    with torch_calls.batched():
        calls = [
            own.begins(group, torch_calls.Arguments(name, [torch.ones(1)], 0, None, ""))
            for name in ("send", "recv")
        ]
        for call in calls:
            own.issued(call, None)
        own.issued(calls[-1], work)
    own.waits(work)
    calls = read(own.ring).calls[first:]
    assert [(call.ended, call.waiting) for call in calls] == [(None, False), (None, True)]
    own.waited(work, False)
    calls = read(own.ring).calls[first:]
    assert [call.ended is None or call.waiting for call in calls] == [False, False]


@pytest.fixture
def grid_of_one() -> Any:
    yield commgrid.initialize(trace=True)
    commgrid.trace.stop()
    commgrid.shutdown()


def test_a_copy_is_not_taken_for_a_killed_process(tmp_path: Path) -> None:
    """Its process may have ended long ago, well."""
    made = Ring(10, tmp_path / "a" / "rank_00000.ring")
    made.note("process", 1 << 22, "1", processes.boot(), processes.space_of_pids(), "here", "0")
    add(made, 0)
    (trace,) = trace_files.read(tmp_path / "a")
    assert trace.state == "killed"
    (tmp_path / "b").mkdir()
    data = Contents((tmp_path / "a" / "rank_00000.ring").read_bytes()).packed()
    (tmp_path / "b" / "rank_00000.ring").write_bytes(data)
    assert trace_files.read(tmp_path / "b") == [replace(trace, state="running")]


def test_traces_are_saved_once_in_the_folder_of_a_running_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMGRID_TRACE", str(tmp_path))
    grid = commgrid.initialize()
    try:
        dist.broadcast(torch.ones(1), 0, group=grid.get_group("dp"))
        assert commgrid.trace.save(tmp_path) == tmp_path / "rank_00000.ring"
        dist.broadcast(torch.ones(2), 0, group=grid.get_group("dp"))
        (trace,) = trace_files.read(tmp_path)
        assert [call.shape for call in trace.calls] == [(1,), (2,)]
        assert trace.state == "running"
        commgrid.trace.save(tmp_path / "copy")
        assert len(trace_files.read(tmp_path / "copy")[0].calls) == 2
    finally:
        commgrid.trace.stop()
        commgrid.shutdown()
