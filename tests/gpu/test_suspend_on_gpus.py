"""Suspending over NCCL: memory goes and comes back, and the torch groups stay."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid import CommGridError, GroupSuspendedError, PeerFailedError
from commgrid.torch_compat import nccl as torch_nccl
from tests.gpu.on_gpus import on_gpus
from tests.gpu.test_nccl import check_sums

MIB = 2**20


def used() -> float:
    """MiB of device memory, by the driver's own count."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def cycles() -> dict[str, list[float]]:
    grid = commgrid.initialize(tp=2, connect="all", create=["tp", "dp", "dp_tp"])
    itself = torch_nccl.can_suspend()
    kept = {c.names[0]: c.group for c in grid.communicators}
    for communicator in grid.communicators:  # so that NCCL has allocated what it will
        dist.all_reduce(torch.zeros(2**22, device="cuda"), group=communicator.group)
    seen: dict[str, list[float]] = {"up": [], "down": []}
    for _ in range(10):
        dist.barrier(device_ids=[torch.cuda.current_device()])
        seen["up"].append(used())
        grid.suspend()
        dist.barrier(device_ids=[torch.cuda.current_device()])
        seen["down"].append(used())
        for communicator in grid.communicators:
            assert communicator.state == "suspended"
            with pytest.raises(GroupSuspendedError):
                dist.all_reduce(torch.ones(1, device="cuda"), group=communicator.group)
            if itself and len(communicator.ranks) > 1:
                assert communicator.memory is not None
                assert communicator.memory["suspended"] == 1
        grid.resume()
        check_sums(grid)
        for name, group in kept.items():
            assert (grid.get_group(name) is group) == itself
            tensor = torch.ones(1, device="cuda")
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == group.size()
    grid.check()
    return seen


@pytest.mark.alone
def test_memory_goes_down_and_comes_back() -> None:
    for seen in on_gpus(cycles, 2):
        for up, down in zip(seen["up"][1:], seen["down"][1:], strict=True):
            assert down < up - 1
        assert seen["up"][-1] - seen["up"][1] < 64
        assert seen["down"][-1] - seen["down"][1] < 64


def busy() -> None:
    grid = commgrid.initialize(tp=2, connect="all")
    group = grid.get_group("tp")
    tensor = torch.ones(1, device="cuda")
    work = None
    if grid.rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        with pytest.raises(CommGridError, match="on rank 0 work is under way"):
            grid.suspend()
    else:
        with pytest.raises(PeerFailedError, match="rank 0 failed"):
            grid.suspend()
        work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.wait()
    assert tensor.item() == 2
    # What is queued on the device is waited for.
    for _ in range(50):
        dist.all_reduce(torch.ones(2**22, device="cuda"), group=group)
    grid.suspend()
    grid.resume()
    check_sums(grid)


def test_work_under_way_is_named() -> None:
    on_gpus(busy, 2)


def with_ddp() -> None:
    grid = commgrid.initialize(dp=2, tp=1)
    model = DistributedDataParallel(
        nn.Linear(4, 4).cuda(), process_group=grid.get_group("dp"),
        device_ids=[torch.cuda.current_device()],
    )  # fmt: skip
    for _ in range(3):
        model(torch.full((2, 4), float(grid.rank), device="cuda")).sum().backward()
        expected = torch.full((4, 4), 1.0, device="cuda")  # the mean of 0 and 2
        torch.testing.assert_close(model.module.weight.grad, expected)
        model.zero_grad()
        grid.suspend()
        grid.resume()


def test_ddp_goes_on_where_nccl_suspends_itself() -> None:
    if not torch_nccl.can_suspend():
        pytest.skip("needs torch 2.12 and NCCL 2.29.7, which suspend a communicator themselves")
    on_gpus(with_ddp, 2)


def with_a_graph(call: str) -> str:
    """The error of a grid's call while a graph lives that has captured a collective on tp."""
    grid = commgrid.initialize(tp=2, connect="all", create=["tp"])
    x, group = torch.ones(4, device="cuda"), grid.get_group("tp")
    dist.all_reduce(x, group=group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x, group=group)
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(CommGridError) as refused:
        getattr(grid, call)()
    graph.reset()
    commgrid.destroy()
    return str(refused.value)


@pytest.mark.parametrize("call", ["destroy", "suspend"])
def test_a_live_graph_is_an_error_that_names_its_group(call: str) -> None:
    """NCCL waits for the graph to be freed, from 2.26 on for ever."""
    for said in on_gpus(with_a_graph, 2, call):
        assert "graph" in said
        assert re.search(r"\btp\b", said), said


def ended() -> None:
    for _ in range(3):
        grid = commgrid.initialize(tp=2, connect="all")
        check_sums(grid)
        grid.suspend()
        commgrid.destroy()


def test_a_grid_ends_while_it_is_suspended() -> None:
    on_gpus(ended, 2)
