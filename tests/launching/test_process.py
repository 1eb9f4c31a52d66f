"""Ranks are forked: what their parent has left behind is none of their business."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commgrid.testing import Ranks, RanksFailed, run_on_ranks
from tests.waiting import until, until_waiting


def collects() -> bool:
    return gc.collect() >= 0


def parent_with_garbage() -> list[bool]:
    """Is itself a forked rank, so that nobody else has its process group."""
    gc.disable()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=group)
    cycle = [group]
    cycle.append(cycle)
    dist.destroy_process_group()
    del group, cycle
    return run_on_ranks(collects, 2, backend=None, timeout=300)


def test_a_rank_does_not_collect_its_parents_process_groups() -> None:
    """Seen as a rank that hung at whatever point its garbage collector ran: it waited for the
    threads of a group that a doctest had made in the parent."""
    assert run_on_ranks(parent_with_garbage, 1, backend=None) == [[True, True]]


def returns_at_once(folder: str, dies: bool) -> None:
    said = Path(folder) / "first"
    if dist.get_rank() == 0:
        said.write_text(str(os.getpid()))
        return
    until(lambda: said.exists() and said.read_text(), "rank 0 returns")
    until_waiting([int(said.read_text())])
    if dies:
        os._exit(0)
    os.kill(int(said.read_text()), 0)  # an error where the process has ended and was waited for


def test_a_rank_that_has_returned_stays_until_the_others_have(tmp_path: Path) -> None:
    """Seen as "Connection closed by peer" on a rank that gloo was still connecting."""
    run_on_ranks(returns_at_once, 2, str(tmp_path), False)


def test_a_rank_that_has_returned_does_not_wait_for_one_that_died(tmp_path: Path) -> None:
    """Nor until the limit of time, which the whole run may not take."""
    with pytest.raises(RanksFailed, match="1 of 2 ranks failed\n--- rank 1"):
        run_on_ranks(returns_at_once, 2, str(tmp_path), True, timeout=3600)


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (0, 0), (False, 0), (3, 3), (True, 1), ("no data", 1)]
)
def test_a_program_ends_with_the_code_that_python_gives(
    code: object, status: int, tmp_path: Path
) -> None:
    with Ranks(sys.exit, 1, code, backend=None, output=tmp_path) as ranks:
        (outcome,) = ranks.wait().values()
        assert bool(ranks.failures()) == bool(status)
    assert outcome.exitcode == status
    assert ("SystemExit" in outcome.printed) == bool(status)


@pytest.mark.parametrize("code", [None, 0])
def test_a_tested_function_may_not_leave_by_sys_exit(code: object) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 \(exit code 0\)"):
        run_on_ranks(sys.exit, 1, code, backend=None)
