"""Correct programs that look odd: none is accused by a diagnosis, none is ended by the live check.

Each is a function of a grid of four ranks, `tp=2`, and runs traced and with `verify="order"`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commgrid
from commgrid.observe import diagnosis
from commgrid.testing import run_on_ranks

Program = Callable[[Any], object]
PROGRAMS: list[Program] = []


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


def everyone(grid: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup = grid.get_group("dp_tp")
    return group


@program
def owners_that_rotate(grid: Any) -> None:
    """As distributed Muon and ZeRO-1: the owner updates a parameter and sends it to the others."""
    parameters = [torch.full((4,), float(number)) for number in range(8)]
    for step in range(3):
        for number, parameter in enumerate(parameters):
            owner = (number + step) % 4
            if grid.rank == owner:
                parameter += 1
                dist.broadcast(parameter, owner, everyone(grid))
            else:
                dist.broadcast(parameter, owner, everyone(grid))
    assert [float(each[0]) for each in parameters] == [3.0 + number for number in range(8)]


@program
def roots_that_rotate(grid: Any) -> None:
    for root in (0, 1, 2, 3, 0, 2):
        x = torch.ones(2)
        if grid.rank == root:
            dist.reduce(x, root, group=everyone(grid))
            assert x.tolist() == [4.0, 4.0]
        else:
            dist.reduce(x, root, group=everyone(grid))
        parts = [torch.full((1,), float(i)) for i in range(4)] if grid.rank == root else None
        mine = torch.empty(1)
        dist.scatter(mine, parts, root, group=everyone(grid))
        assert float(mine) == grid.rank


@program
def lines_that_alternate(grid: Any) -> None:
    for step in range(6):
        x = torch.ones(4)
        if (grid.rank + step) % 2:
            work = dist.all_reduce(x, group=everyone(grid), async_op=True)
        else:
            work = dist.all_reduce(x, group=everyone(grid), async_op=True)
        assert work is not None
        work.wait()
        assert x.tolist() == [4.0] * 4


@program
def many_at_once_from_lines_that_alternate(grid: Any) -> None:
    works: list[Any] = []
    for step in range(6):
        if (grid.rank + step) % 2:
            works.append(dist.all_reduce(torch.ones(4), group=everyone(grid), async_op=True))
        else:
            works.append(dist.all_reduce(torch.ones(4), group=everyone(grid), async_op=True))
    for work in works:
        work.wait()


@program
def uneven_all_to_alls(grid: Any) -> None:
    for turn in range(3):
        counts = [[(i + j + turn) % 3 for j in range(4)] for i in range(4)]
        mine, theirs = counts[grid.rank], [row[grid.rank] for row in counts]
        out = torch.empty(sum(theirs))
        dist.all_to_all_single(out, torch.ones(sum(mine)), theirs, mine, group=everyone(grid))


@program
def objects_of_other_sizes(grid: Any) -> None:
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, "x" * grid.rank, group=everyone(grid))
    assert found == ["", "x", "xx", "xxx"]
    told = [{"step": 3} if grid.rank == 1 else None]
    dist.broadcast_object_list(told, 1, group=everyone(grid))
    assert told == [{"step": 3}]


@program
def ranks_outside_of_a_group(grid: Any) -> None:
    """Only one of the tp groups does something, which takes a while."""
    if 0 in grid.get_ranks("tp"):
        for _ in range(50):
            dist.all_reduce(torch.ones(2), group=grid.get_group("tp"))
    dist.all_reduce(torch.ones(2), group=everyone(grid))


@program
def other_orders_of_independent_groups(grid: Any) -> None:
    works = []
    for name in ("tp", "dp") if grid.rank % 3 else ("dp", "tp"):
        work = dist.all_reduce(torch.ones(2), group=grid.get_group(name), async_op=True)
        works.append(work)
    for work in works:
        assert work is not None
        work.wait()


@program
def functional_collectives(grid: Any) -> None:
    from torch.distributed import _functional_collectives as functional

    x: Tensor = functional.all_reduce(torch.ones(3), "sum", everyone(grid)) + 0
    assert x.tolist() == [4.0] * 3


@program
def dtensors(grid: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(16.0).view(4, 4)
    cut = distribute_tensor(whole, grid.device_mesh("tp"), [Shard(0)])
    assert torch.equal(cut.redistribute(placements=[Replicate()]).to_local(), whole)
    assert float((cut @ cut).sum().full_tensor()) == float((whole @ whole).sum())


@program
def ddp_with_uneven_batches(grid: Any) -> None:
    """DDP's `join`, in which ranks that are done shadow the others' collectives."""
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=everyone(grid))
    with Join([model]):
        for _ in range(2 + grid.rank):
            model(torch.ones(1, 2)).sum().backward()


@program
def fsdp(grid: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=grid.device_mesh("dp"))
    fully_shard(model, mesh=grid.device_mesh("dp"))
    model(torch.ones(1, 4)).sum().backward()


@program
def a_slow_start(grid: Any) -> None:
    """One rank reads data before its first call; the others wait for less than diagnoses count."""
    if grid.rank == 2:
        sum(range(2_000_000))
    dist.barrier(group=everyone(grid))


@program
def transfers_between_changing_pairs(grid: Any) -> None:
    for shift in (1, 2, 3):
        x, y = torch.full((2,), float(grid.rank)), torch.empty(2)
        ops = [
            dist.P2POp(dist.isend, x, (grid.rank + shift) % 4, everyone(grid)),
            dist.P2POp(dist.irecv, y, (grid.rank - shift) % 4, everyone(grid)),
        ]
        for work in dist.batch_isend_irecv(ops if grid.rank % 2 else ops[::-1]):
            work.wait()
        assert y.tolist() == [float((grid.rank - shift) % 4)] * 2


def run(index: int, folder: Path) -> None:
    grid = commgrid.initialize(tp=2, verify="order", trace=True, timeout=60)
    PROGRAMS[index](grid)
    dist.barrier(group=everyone(grid))  # the store of groups that connect later is rank 0's
    commgrid.trace.save(folder)
    commgrid.trace.stop()
    commgrid.shutdown()


@pytest.mark.full("*")
@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=[each.__name__ for each in PROGRAMS])
def test_no_correct_program_is_accused(index: int, tmp_path: Path) -> None:
    run_on_ranks(run, 4, index, tmp_path, backend=None, launcher="torchrun")
    found = diagnosis.diagnose(diagnosis.read(tmp_path), patience=30.0)
    assert not found, str(found)
    assert not found.missing
