"""Records that outlive their process: written to mapped memory, and read however it ended."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import SpecError
from commgrid.call_records import files as trace_files
from commgrid.call_records import ring
from commgrid.call_records.ring import Ring
from commgrid.recording import recorder
from commgrid.torch_compat import interposer as torch_calls


def add(made: Ring, number: int, group: str = "dp", **given: Any) -> int:
    values: dict[str, Any] = {
        "operation": "all_reduce", "shape": (2, 3), "dtype": "float32", "size": 24, "output": None,
        "peer": None, "where": made.text("a.py:1 f"), "began": 1000 + number, "turn": number,
        "batch": 0, **given,
    }  # fmt: skip
    return made.add(made.group(group), number, **values)


def test_a_file_holds_what_the_memory_holds(tmp_path: Path) -> None:
    made = Ring(10, tmp_path / "rank_00003.ring")
    made.note("rank", 3)
    made.note("members", "dp", [1, 3])
    made.note("job", "a job")
    first = add(made, 0, reduction="SUM")
    made.issued(first, 2000)
    made.ended(first, 3000)
    add(made, 1, operation="all_gather", output=48)
    waiting = add(made, 2, operation="send", peer=0, turn=0, batch=7)
    made.issued(waiting, 2500)
    made.waits(waiting, True)
    made.entered(made.group("dp"), 2)
    held = ring.load(tmp_path / "rank_00003.ring")
    assert held == {**made.as_dict(), "wall": held["wall"], "monotonic": held["monotonic"]}
    assert (held["rank"], held["job"], held["members"]) == (3, "a job", {"dp": [1, 3]})
    what = [[2, 3], "float32", 24]
    assert held["calls"] == [
        ["dp", 0, "all_reduce", *what, None, "a.py:1 f", 1000, 2000, 3000, 0, None, "SUM"],
        ["dp", 1, "all_gather", *what, None, "a.py:1 f", 1001, None, None, 1, 48, ""],
        ["dp", 2, "send", *what, 0, "a.py:1 f", 1002, 2500, None, 0, None, ""],
    ]
    assert (held["waits"], held["batches"]) == ([["dp", 2]], [["dp", 2, 2]])
    assert (held["entered"], held["dropped"], held["over"]) == ({"dp": 2}, 0, False)
    trace_files.parse(held)


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
    held = made.as_dict()
    assert [call[1] for call in held["calls"]] == [7, 8, 9]
    assert [call[10] for call in held["calls"]] == [None] * 3
    assert held["dropped"] == 7
    assert [call[1] for call in made.as_dict(last=2)["calls"]] == [8, 9]


def test_what_came_before_a_new_communicator_is_not_its_own() -> None:
    made = Ring(10)
    made.waits(add(made, 0, operation="send", peer=0, batch=1), True)
    made.note("since", "dp", 5000)
    add(made, 0, began=6000, operation="send", peer=0)
    held = made.as_dict()
    assert (held["waits"], held["batches"], held["since"]) == ([], [], {"dp": 5000})


@pytest.mark.parametrize("shape", [(), (5,), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6), (2**40,)])
def test_shapes(shape: tuple[int, ...]) -> None:
    made = Ring(2)
    add(made, 0, shape=shape)
    kept = made.as_dict()["calls"][0][3]
    assert kept == list(shape) if len(shape) < 6 else [1, 2, 3, 4, 30]


def test_without_room_for_texts_calls_are_still_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ring(2)
    add(made, 0)
    monkeypatch.setattr(ring, "_MOST_TEXT", made._used)
    add(made, 1, where=made.text("b.py:9 g"))
    assert [call[7] for call in made.as_dict()["calls"]] == ["a.py:1 f", "?"]


def test_a_full_disk_ends_the_recording_and_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a mapped page without room on the disk would be a SIGBUS."""
    made = Ring(100_000, tmp_path / "rank_00000.ring")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ring, "_allocate", full)
    made._reserved[ring._RECORDS_AT] = ring._RECORD.size
    add(made, 0)
    add(made, 1)
    assert len(made.as_dict()["calls"]) == 1
    with pytest.raises(OSError, match="No space left"):
        Ring(10, tmp_path / "rank_00001.ring")


def test_room_that_comes_back_names_no_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ring(4)
    add(made, 0)
    room = ring._MOST_TEXT
    monkeypatch.setattr(ring, "_MOST_TEXT", made._used)
    add(made, 1, where=made.text("lost.py:1 f"))
    monkeypatch.setattr(ring, "_MOST_TEXT", room)
    add(made, 2, where=made.text("b.py:9 g"))
    assert [call[7] for call in made.as_dict()["calls"]] == ["a.py:1 f", "?", "b.py:9 g"]


def test_a_call_without_room_changes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ring(4)
    monkeypatch.setattr(made, "_reserve", lambda part, size: part != ring._RECORDS_AT)
    lost = add(made, 0)
    monkeypatch.undo()
    add(made, 1)
    made.ended(lost, 777)
    assert [call[10] for call in made.as_dict()["calls"]] == [None]


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
    assert len(made.as_dict()["calls"]) == 1


def test_the_exit_handlers_of_a_child_leave_the_ring_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copies of its parent's. torch's destructors would wait for threads of the parent."""
    monkeypatch.setenv("COMMGRID_TRACE", str(tmp_path))
    commgrid.initialize()
    try:
        saved = recorder._save_at_exit
        atexit.unregister(saved)  # as it stands in a child, where only this is looked at
        atexit.register(saved, recorder.current(), tmp_path)
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


@pytest.mark.parametrize("cut", [0, 100, 5000, 4_000_000])
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
    (folder / "rank_00000.json").write_text("of an earlier run")
    environ = {**os.environ, "COMMGRID_TRACE": str(folder)}
    done = subprocess.run(
        [sys.executable, str(program), end], env=environ, timeout=100, capture_output=True
    )
    assert (done.returncode == 0) == (end == "end"), done.stderr.decode()
    (trace,) = trace_files.read(folder)
    sums = [call for call in trace.calls if call.shape == (4,)]
    assert [call.where for call in sums] == ["program.py:6 <module>"] * 3
    assert all(call.ended is not None for call in sums)
    assert (trace.over, trace.cut) == (end == "end", end in ("9", "abort"))
    left = {path.name: path.stat().st_size > 0 for path in folder.iterdir()}
    if end == "end":
        assert left == {"rank_00000.json": True}
    else:
        # Where its threads were at SIGTERM.
        assert left == {"rank_00000.ring": True, "rank_00000.sigterm": end == "15"}


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
        before = own.ring.total
        child = os.fork()
        if child == 0:
            made = torch_calls.Arguments("all_reduce", [torch.ones(4)], None, None, "SUM")
            own.begins(grid.get_group("dp"), made)
            os._exit(0 if recorder.current() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert own.ring.total == before
        dist.all_reduce(torch.ones(4), group=grid.get_group("dp"))
        assert own.ring.total == before + 1
    finally:
        commgrid.trace.stop()
        commgrid.shutdown()


def test_a_batch_with_one_work_ends_with_it(grid_of_one: Any) -> None:
    """As NCCL's: its messages have no work of their own."""
    own = recorder.current()
    assert own is not None
    group = grid_of_one.get_group("dp")
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    first = len(own.as_dict()["calls"])
    with torch_calls.batched():
        calls = [
            own.begins(group, torch_calls.Arguments(name, [torch.ones(1)], 0, None, ""))
            for name in ("send", "recv")
        ]
        for call in calls:
            own.issued(call, None)
        own.issued(calls[-1], work)
    own.waits(work)
    assert [row[10] for row in own.as_dict()["calls"][first:]] == [None, None]
    assert own.as_dict()["waits"]
    own.waited(work, False)
    assert all(row[10] for row in own.as_dict()["calls"][first:])


@pytest.fixture
def grid_of_one() -> Any:
    yield commgrid.initialize(trace=True)
    commgrid.trace.stop()
    commgrid.shutdown()


def test_a_saved_file_and_the_ring_of_the_same_process_are_one_trace(tmp_path: Path) -> None:
    made = Ring(10, tmp_path / "rank_00000.ring")
    made.note("job", "a")
    add(made, 0)
    (tmp_path / "rank_00000.json").write_text(json.dumps(made.as_dict()))
    add(made, 1)
    (trace,) = trace_files.read(tmp_path)
    assert len(trace.calls) == 2
    made.note("job", "another")
    with pytest.raises(SpecError, match=r"holds rank 0, as rank_00000\.json does"):
        trace_files.read(tmp_path)
