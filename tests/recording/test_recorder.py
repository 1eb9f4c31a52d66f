"""Failures of ranks whose calls are recorded or compared: who is named, in which operation."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import CommGridError
from commgrid.call_records import files as trace_files
from commgrid.call_records import processes
from commgrid.cli import main
from commgrid.failures import named_failures
from commgrid.recording import recorder
from commgrid.recording.places import whereabouts
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import interposer as torch_calls
from tests.flags import meet
from tests.killing import KILLED, kill_me, run_killable
from tests.waiting import until


def refused(how: dict[str, Any]) -> str:
    """The operation of a call that torch refuses, where commgrid hears of the call first."""
    is_suspended = how.pop("suspended", False)
    grid = commgrid.initialize(**how)
    if is_suspended:
        grid.suspend(["dp"])
        grid.resume(["dp"])
    with pytest.raises(RuntimeError) as raised:
        dist.all_gather([torch.empty(3)] * 2, torch.ones(2), group=grid.get_group("dp"))
    where = whereabouts(raised.value)
    assert where is not None
    commgrid.shutdown()
    return where.operation


@pytest.mark.parametrize(
    "how",
    [{"trace": True}, {"verify": "order"}, {"suspended": True}],
    ids=["trace", "verify", "suspended"],
)
def test_an_error_names_the_operation_and_not_the_listener(how: dict[str, Any]) -> None:
    assert run_on_ranks(refused, 2, how, check=False) == ["all_gather"] * 2


def dies_before_its_first_call(grid_has: dict[str, Any]) -> str:
    grid = commgrid.initialize(verify="order", **grid_has)
    if grid.rank == 1:
        kill_me()
    try:
        with named_failures():
            dist.all_reduce(torch.ones(1), group=grid.get_group("dp"))
    except CommGridError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    "grid_has", [{"timeout": 3}, {"timeout": 60, "watch": True}], ids=["timeout", "watch"]
)
def test_order_is_not_compared_with_a_dead_rank_for_ever(grid_has: dict[str, Any]) -> None:
    """Rank 2 waited for the words of rank 1, which it had never been connected to."""
    first, gone, last = run_killable(dies_before_its_first_call, 3, grid_has)
    assert gone == KILLED
    for said in (first, last):
        assert said.startswith("Peer"), said
        assert "rank 1" in said.partition(":")[2].partition(":")[0], said


def test_a_programs_own_dump_of_stacks_is_kept() -> None:
    """`signal.getsignal` does not know of handlers in C."""
    faulthandler.unregister(signal.SIGUSR1)
    assert not processes.is_caught(os.getpid())
    faulthandler.register(signal.SIGUSR1)
    try:
        assert processes.is_caught(os.getpid())
    finally:
        faulthandler.unregister(signal.SIGUSR1)


def many_files(folder: str) -> list[str]:
    """A rank with over 1,024 open files is sent the signal for its stacks."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    faulthandler.unregister(signal.SIGUSR1)
    os.environ["COMMGRID_TRACE"] = folder
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1500)]
    commgrid.initialize(trace=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    until(Path(folder, "rank_00000.stacks").exists, "the stacks")
    commgrid.shutdown()
    for each in files:
        os.close(each)
    return sorted(Path(each).suffix for each in os.listdir(folder))


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000, reason="needs 1,500 open files"
)
def test_a_rank_with_many_open_files_answers(tmp_path: Path) -> None:
    (found,) = run_on_ranks(many_files, 1, str(tmp_path), check=False)
    assert ".stacks" in found


def raises_and_repeats() -> bytes:
    """Rank 0 makes calls that torch refuses, and then the right ones."""
    grid = commgrid.initialize(trace=True)
    group, x = grid.get_group("dp"), torch.ones(2)
    wrong: list[Callable[[], object]] = [
        lambda: dist.all_gather([torch.empty(3)] * 2, x, group=group),
        lambda: group.allreduce([torch.ones(2), torch.ones(2, dtype=torch.int32)]),
        lambda: dist.all_reduce(x.to_sparse(), op=dist.ReduceOp.BAND, group=group),
    ]
    dist.all_reduce(x, group=group)
    for each in wrong if grid.rank == 0 else ():
        with suppress(RuntimeError, ValueError):
            each()
    for _ in range(2):
        dist.all_reduce(x, group=group)
    if grid.rank:
        dist.recv(x, 0, group=group)
    else:
        dist.send(x, 1, group=group)
    own = recorder.current()
    assert own is not None
    commgrid.trace.stop()
    commgrid.shutdown()
    return own.contents()


def test_a_call_that_torch_refuses_takes_no_turn() -> None:
    traces = trace_files.parse(
        run_on_ranks(raises_and_repeats, 2, backend=None, launcher="torchrun")
    )
    for trace in traces:
        sums = [call for call in trace.calls if call.operation == "all_reduce"]
        assert [call.turn for call in sums] == [0, 1, 2]
        assert [call.number for call in trace.calls] == list(range(4))
        assert all(call.ended for call in trace.calls)
        assert [*trace.entered.values()] == [3]
    assert [[*trace.sent.values()] for trace in traces] == [[1], [1]]


def refused_within_another() -> list[tuple[int | None, bool]]:
    """A listener raises after the recorder was told: the call is not made."""
    grid = commgrid.initialize(trace=True)
    own: Any = recorder.current()
    group = grid.get_group("dp")
    made = torch_calls.Arguments("all_reduce", [torch.ones(1)], None, None, "SUM")
    for error in (ValueError("no"), TypeError("no"), commgrid.PeerTimeoutError("late")):
        call = own.begins(group, made)
        try:
            raise error
        except (ValueError, TypeError, commgrid.PeerTimeoutError):
            own.failed(call)
    found = [(c.turn, c.waiting) for c in trace_files.parse([own.contents()])[0].calls]
    dist.broadcast(torch.ones(1), 0, group=group)
    commgrid.trace.stop()
    (trace,) = trace_files.parse([own.contents()])
    commgrid.shutdown()
    return [*found, *((call.turn, call.waiting) for call in trace.calls)]


def test_a_call_that_failed_because_of_a_peer_stays() -> None:
    """Its peers may wait in it; as NCCL's first call, which connects. Its own rank may go on."""
    (found,) = run_on_ranks(refused_within_another, 1, backend=None, launcher="torchrun")
    assert found == [(0, True), (0, False), (1, False)]


def times_out() -> tuple[bytes, bool]:
    grid = commgrid.initialize(timeout=1.0, trace=True)
    if grid.rank == 0:
        work = dist.all_reduce(torch.ones(2), group=grid.get_group("dp"), async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError):
            work.wait()
    own = recorder.current()
    assert own is not None
    commgrid.trace.stop()
    return own.contents(), grid.rank == 0


def test_a_call_whose_wait_has_failed_stays_and_waits() -> None:
    found = run_on_ranks(times_out, 2, backend=None, launcher="torchrun", check=False)
    for data, is_first in found:
        (trace,) = trace_files.parse([data])
        said = [(call.turn, call.issued is not None, call.ended, call.waiting)
                for call in trace.calls]  # fmt: skip
        assert said == ([(0, True, None, True)] if is_first else [])


def on_threads() -> bytes:
    """Two threads a rank, each waits on its own group for a moment."""
    grid = commgrid.initialize(trace=True)
    groups = [grid.get_group("dp"), dist.new_group([0, 1])]
    begun = threading.Barrier(2)

    def calls(group: dist.ProcessGroup) -> None:
        begun.wait()
        dist.all_reduce(torch.ones(2), group=group)

    threads = [threading.Thread(target=calls, args=(group,)) for group in groups]
    if grid.rank:
        meet(1, 2)
    for each in threads:
        each.start()
    own: Any = recorder.current()
    if not grid.rank:
        until(lambda: sum(c.waiting for c in trace_files.parse([own.contents()])[0].calls) == 2,
              "both threads")  # fmt: skip
        waits = own.contents()
        meet(0, 2)
    for each in threads:
        each.join()
    commgrid.trace.stop()
    commgrid.shutdown()
    return own.contents() if grid.rank else waits


def test_each_thread_has_its_own_wait() -> None:
    data = run_on_ranks(on_threads, 2, backend=None, launcher="torchrun", check=False)
    waits, ended = trace_files.parse(data)
    mine = [call for call in waits.calls if call.waiting]
    assert len({call.thread for call in mine}) == len({call.group for call in mine}) == 2
    assert not any(call.waiting for call in ended.calls)


def test_steps_are_noted() -> None:
    (trace,) = trace_files.parse(run_on_ranks(steps, 1, backend=None, launcher="torchrun"))
    assert [number for number, _ in trace.steps] == [7, 8]
    (first, at), (_, after) = trace.steps
    (call,) = [call for call in trace.calls if call.shape == (5,)]
    assert first == 7
    assert at < call.began < after


def steps() -> bytes:
    grid = commgrid.initialize(trace=True)
    own = recorder.current()
    assert own is not None
    own.step(7)
    dist.broadcast(torch.ones(5), 0, group=grid.get_group("dp"))
    own.step(8)
    commgrid.trace.stop()
    commgrid.shutdown()
    return own.contents()


def stops(folder: str, who: str) -> None:
    """Records in files, up to a place in the program that is or is not the same on all ranks."""
    os.environ["COMMGRID_TRACE"] = folder
    grid = commgrid.initialize(dp=2)
    for step in range(6):
        dist.all_reduce(torch.ones(1), group=grid.get_group("dp"))
        if step == 2 and (who == "all" or grid.rank == 1):
            commgrid.trace.stop()
        if step == 2 and who == "one starts again":
            commgrid.initialize(name="further", dp=2)  # begins to record
    dist.barrier()
    recorder._end_at_exit(recorder._in_file[0])
    commgrid.trace.stop()
    commgrid.shutdown()


@pytest.mark.parametrize(("who", "status"), [("all", 0), ("one", 3), ("one starts again", 3)])
def test_a_rank_that_stopped_recording_is_not_accused(
    tmp_path: Path, who: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run_on_ranks(stops, 2, str(tmp_path), who, backend=None, launcher="torchrun", check=False)
    assert main(["verify", str(tmp_path)]) == status, capsys.readouterr().out
    assert main(["diagnose", str(tmp_path)]) == status, capsys.readouterr().out
