"""Calls of NCCL's that never return: the caller's error, and the end of the process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.errors import CommGridError, PeerFailedError
from commgrid.rendezvous.timeouts import Timeouts, use_timeouts
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat.bounded_calls import STUCK, _unended, bounded
from tests.flags import hear, meet, tell
from tests.nccl_stand_in import NAME, LazyGroup, install
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_nccl, "rank_device", lambda: torch.device("cpu"))


def test_a_call_that_returns_in_time() -> None:
    never = CommGridError("late")
    assert bounded(100.0, lambda: 7, lambda: "a test", lambda: never) == 7
    with pytest.raises(ValueError, match="its own"):
        bounded(100.0, lambda: _raise(ValueError("its own")), lambda: "a test", lambda: never)
    assert _unended == []


def _raise(error: Exception) -> None:
    raise error


def test_a_call_that_does_not_return_and_one_after_which_a_rank_is_gone() -> None:
    waits = threading.Event()
    with pytest.raises(CommGridError, match="too late"):
        bounded(0.1, waits.wait, lambda: "a test", lambda: CommGridError("too late"))
    with pytest.raises(PeerFailedError, match="rank 1 is gone"):
        bounded(
            3000.0, waits.wait, lambda: "a test", lambda: CommGridError("too late"),
            lambda: "rank 1 is gone",
        )  # fmt: skip
    waits.set()
    until(lambda: all(asked.is_over() for asked, _ in _unended), "both have returned")
    _unended.clear()


def ended(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


STARTS = """
    import threading, torch
    from commgrid.errors import CommGridError
    from commgrid.torch_compat import nccl
    from commgrid.torch_compat.bounded_calls import bounded
    nccl.rank_device = lambda: torch.device("cpu")
    over = threading.Event()
    try:
        bounded(0.1, over.wait, lambda: "connecting tp", lambda: CommGridError("late"))
    except CommGridError as error:
        print(error, flush=True)
"""


def test_a_process_with_a_stuck_thread_ends_with_a_status_of_its_own() -> None:
    done = ended(STARTS + "    print('the last line')")
    assert done.returncode == STUCK
    assert done.stdout == "late\nthe last line\n"
    assert "at the end of the program NCCL is still connecting tp" in done.stderr


def test_a_process_whose_call_has_returned_since_ends_as_any_other() -> None:
    done = ended(STARTS + """
    over.set()
    from commgrid.torch_compat.bounded_calls import _unended
    while not _unended[0][0].is_over(): pass
    """)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# -- a grid over a stand-in for NCCL --------------------------------------------------------------


def with_a_live_graph() -> str:
    """NCCL frees a communicator when the CUDA graphs with its calls are freed."""
    install()
    use_timeouts(Timeouts(abort=3.0))
    grid = commgrid.initialize(connect="none", backend=NAME, timeout=30.0, watch=False)
    held = grid.get_group("dp")
    free, destroy = threading.Event(), dist.destroy_process_group

    def destroys(group: dist.ProcessGroup) -> None:
        if group is held:
            free.wait()
        destroy(group)

    dist.destroy_process_group = destroys  # type: ignore[assignment]
    with pytest.raises(CommGridError) as caught:
        commgrid.destroy()
    free.set()
    until(lambda: all(asked.is_over() for asked, _ in _unended), "the graph is freed")
    meet(dist.get_rank(), 2)
    return str(caught.value)


def test_a_live_graph_is_an_error_that_says_so() -> None:
    for said in run_on_ranks(
        with_a_live_graph, 2, backend=None, launcher="torchrun", check=False, timeout=100
    ):
        assert said.startswith("communicator dp")
        assert "has not ended within 3 s" in said
        assert "free the graphs that captured calls on dp" in said


def stuck_at_start() -> str:
    """All come to the gate, and NCCL does not connect dp."""
    install()
    before = LazyGroup.connect

    def connect(group: LazyGroup) -> dist.ProcessGroup:
        made = before(group)
        if group.group_desc.split(",")[0] == "dp":
            over.wait()
        return made

    over = threading.Event()
    LazyGroup.connect = connect  # type: ignore[method-assign]
    try:
        commgrid.initialize(tp=2, backend=NAME, timeout=30.0, watch=False, startup_timeout=12.0)
    except CommGridError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        over.set()
        until(lambda: all(asked.is_over() for asked, _ in _unended), "it connects after all")
    return ""


def test_nccl_that_does_not_connect_is_told_from_ranks_that_do_not_come() -> None:
    for said in run_on_ranks(
        stuck_at_start, 4, backend=None, launcher="torchrun", check=False, timeout=100
    ):
        assert "all ranks have come, and NCCL did not connect communicator dp" in said, said
        assert "of ranks 0, 2" in said or "of ranks 1, 3" in said, said
        assert "NCCL_SOCKET_IFNAME" in said


def dies_while_connecting(rank: int) -> str:
    """Rank 1 ends within ncclCommInitRank, and rank 0's thread stays there."""
    install()
    use_timeouts(Timeouts(abort=1.0))
    grid = commgrid.initialize(connect="none", backend=NAME, timeout=300.0, watch=True)

    def connect(group: LazyGroup) -> dist.ProcessGroup:
        group.store.set("0", "id") if rank == 0 else group.store.get("0")
        tell(f"{rank} connects")
        if rank == 1:
            hear("0 connects")
            import os

            os._exit(0)
        threading.Event().wait()
        raise AssertionError

    LazyGroup.connect = connect  # type: ignore[method-assign]
    dist.all_reduce(torch.ones(1), group=grid.get_group("dp"))
    return ""


def test_a_rank_that_dies_while_nccl_connects_at_first_use() -> None:
    """Nothing ends ncclCommInitRank, so that the survivor would hang for ever."""
    from commgrid.testing import RanksFailed

    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(
            dies_while_connecting, 2, per_rank=[(0,), (1,)], backend=None, launcher="torchrun",
            check=False, timeout=100,
        )  # fmt: skip
    assert f"rank 0 (exit code {STUCK})" in str(failed.value)


def test_other_groups_are_freed_on_this_thread() -> None:
    threads: list[int] = []
    group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
    torch_groups.freed_by(lambda _: threads.append(threading.get_ident()), group)
    assert threads == [threading.get_ident()]
