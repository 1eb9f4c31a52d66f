"""`verify="order"` over NCCL: what members issue otherwise is an error on all, before it hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import GridMismatchError
from tests.flags import meet
from tests.gpu.on_gpus import programs_on_gpus


def shaped(grid: Any) -> None:
    """Another size on one rank, which NCCL does not see."""
    numbers = 8 if grid.rank == 1 else 4
    dist.all_reduce(torch.ones(numbers, device="cuda"), group=grid.get_group("dp_tp"))
    torch.cuda.synchronize()


def alike(grid: Any) -> None:
    for name in ("tp", "dp", "dp_tp"):
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x, group=grid.get_group(name))
        assert x.tolist() == [float(grid.size(name))] * 4
    peer = grid.get_ranks("tp")[1 - grid.get_local_rank("tp")]
    both = [
        dist.P2POp(op, torch.ones(4, device="cuda"), peer, grid.get_group("tp"))
        for op in (dist.isend, dist.irecv)
    ]
    for each in dist.batch_isend_irecv(both):
        each.wait()
    torch.cuda.synchronize()


CASES = {"shaped": shaped, "alike": alike}


def checked(case: str, rank: int) -> str:
    grid = commgrid.initialize(tp=2, share="all", verify="order", timeout=60)
    said = ""
    try:
        CASES[case](grid)
    except GridMismatchError as error:
        said = str(error)
    meet(rank, 4)
    grid.abort()  # what NCCL has under way does not end by itself
    return said


@pytest.mark.parametrize("case", CASES)
def test_what_members_issue_is_compared(case: str) -> None:
    found = programs_on_gpus(checked, 4, case)
    if case == "alike":
        assert found == [""] * 4
        return
    for said in found:
        assert "test_order_on_gpus.py" in said, found
