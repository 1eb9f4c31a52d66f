"""Correct programs that look odd: none is accused by a diagnosis, none is ended by the live check.

Each is a function of a grid of four ranks, `tp=2`. All run in one job, traced and with
`verify="order"`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commgrid
from commgrid.call_analysis import diagnosis
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


@program
def waits_in_reverse(grid: Any) -> None:
    works = [
        dist.all_reduce(torch.ones(2), group=grid.get_group(name), async_op=True)
        for name in ("tp", "dp", "dp_tp")
    ]
    for work in works[::-1] if grid.rank % 2 else works:
        work.wait()


@program
def a_wait_in_another_thread(grid: Any) -> None:
    work = dist.all_reduce(torch.ones(2), group=everyone(grid), async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()


@program
def a_call_that_nobody_waits_for(grid: Any) -> None:
    x = torch.ones(2)
    kept = dist.all_reduce(x, group=everyone(grid), async_op=True)
    dist.all_reduce(torch.ones(2), group=everyone(grid))
    assert kept.is_completed()


@program
def sends_that_are_waited_for_late(grid: Any) -> None:
    right, left = (grid.rank + 1) % 4, (grid.rank - 1) % 4
    sending = [dist.isend(torch.full((2,), float(i)), right, everyone(grid)) for i in range(4)]
    for i in range(4):
        x = torch.empty(2)
        dist.recv(x, left, everyone(grid))
        assert x.tolist() == [float(i)] * 2
    for work in sending:
        work.wait()


@program
def receives_from_anybody(grid: Any) -> None:
    if grid.rank == 0:
        x, seen = torch.empty(1), set()
        for _ in range(3):
            seen.add(dist.recv(x, None, everyone(grid)))
        assert seen == {1, 2, 3}
    else:
        dist.send(torch.ones(1), 0, everyone(grid))


@program
def receives_in_another_order_than_sends(grid: Any) -> None:
    """Between different pairs: rank 0 takes rank 2's first."""
    if grid.rank == 0:
        for source in (2, 1, 3):
            dist.recv(torch.empty(2), source, everyone(grid))
    else:
        dist.send(torch.ones(2), 0, everyone(grid))


@program
def objects_between_two(grid: Any) -> None:
    told: list[Any] = [{"weights": "x" * 1000}] if grid.rank == 1 else [None]
    if grid.rank == 1:
        dist.send_object_list(told, 3, everyone(grid))
    elif grid.rank == 3:
        dist.recv_object_list(told, 1, everyone(grid))
    assert grid.rank not in (1, 3) or len(told[0]["weights"]) == 1000


@program
def objects_gathered_and_scattered(grid: Any) -> None:
    for root in (0, 3):
        found: list[Any] | None = [None] * 4 if grid.rank == root else None
        dist.gather_object("x" * grid.rank, found, root, everyone(grid))
        mine: list[Any] = [None]
        given = [{"r": i} for i in range(4)] if grid.rank == root else None
        dist.scatter_object_list(mine, given, root, everyone(grid))
        assert mine == [{"r": grid.rank}]


@program
def reduce_scatters_of_lists(grid: Any) -> None:
    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.full((2,), float(i)) for i in range(4)], group=everyone(grid))
    assert out.tolist() == [4.0 * grid.rank] * 2


@program
def all_to_alls_of_lists(grid: Any) -> None:
    given = [torch.full((2,), float(grid.rank)) for _ in range(4)]
    got = [torch.empty(2) for _ in range(4)]
    dist.all_to_all(got, given, group=everyone(grid))
    assert [float(each[0]) for each in got] == [0.0, 1.0, 2.0, 3.0]


@program
def nothing_at_all(grid: Any) -> None:
    """Empty tensors, such as an expert without tokens, and scalars."""
    dist.all_reduce(torch.empty(0), group=everyone(grid))
    x = torch.tensor(1.0)
    dist.all_reduce(x, group=everyone(grid))
    assert float(x) == 4.0


@program
def types_that_change(grid: Any) -> None:
    for dtype in (torch.float64, torch.int32, torch.bfloat16, torch.uint8):
        dist.all_reduce(torch.ones(3, dtype=dtype), group=everyone(grid))


@program
def reductions_that_change(grid: Any) -> None:
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.SUM):
        dist.all_reduce(torch.ones(3), op, group=everyone(grid))


@program
def one_line_for_many_groups(grid: Any) -> None:
    for _ in range(3):
        for name in ("tp", "dp", "dp_tp"):
            dist.all_reduce(torch.ones(3), group=grid.get_group(name))


@program
def a_group_of_one(grid: Any) -> None:
    alone = [dist.new_group([rank]) for rank in range(4)][grid.rank]
    for _ in range(grid.rank):
        dist.all_reduce(torch.ones(1), group=alone)


@program
def groups_of_the_programs_own(grid: Any) -> None:
    """Two with the same ranks, and one with only three."""
    first, second = dist.new_group(), dist.new_group()
    three = dist.new_group([0, 1, 3])
    dist.all_reduce(torch.ones(2), group=second)
    dist.all_reduce(torch.ones(3), group=first)
    if grid.rank != 2:
        dist.all_reduce(torch.ones(4), group=three)


@program
def accumulation(grid: Any) -> None:
    for micro in range(6):
        if micro % 3 == 2:
            dist.all_reduce(torch.ones(4), group=grid.get_group("dp"))


@program
def an_agreed_early_stop(grid: Any) -> None:
    for step in range(10):
        stop = torch.tensor(float(grid.rank == 2 and step == 3))
        dist.all_reduce(stop, dist.ReduceOp.MAX, group=everyone(grid))
        if stop:
            break
        dist.all_reduce(torch.ones(2), group=grid.get_group("tp"))


@program
def a_rank_that_evaluates(grid: Any) -> None:
    """Its own work takes no part in others' calls."""
    if grid.rank == 0:
        nn.Linear(64, 64)(torch.ones(8, 64)).sum().backward()
    dist.barrier(group=everyone(grid))


@program
def barriers_of_parts(grid: Any) -> None:
    for _ in range(3 if 0 in grid.get_ranks("tp") else 1):
        dist.barrier(group=grid.get_group("tp"))


@program
def calls_in_backward(grid: Any) -> None:
    """On autograd's thread, by hooks of parameters."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    works: list[Any] = []
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: works.append(dist.all_reduce(p.grad, group=everyone(grid), async_op=True))
        )
    layers(torch.ones(2, 4)).sum().backward()
    for work in works:
        work.wait()


@program
def two_threads(grid: Any) -> None:
    """Each with a group of its own, at its own pace."""

    def reduces(name: str, count: int) -> None:
        for _ in range(count):
            dist.all_reduce(torch.ones(2), group=grid.get_group(name))

    threads = [threading.Thread(target=reduces, args=each) for each in (("tp", 30), ("dp", 10))]
    for thread in threads if grid.rank % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()


@program
def ddp_that_leaves_parameters_out(grid: Any) -> None:
    """Other ranks use other parts of the model."""
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor, which: int) -> Tensor:
            found: Tensor = self.layers[which](x)
            return found

    model = nn.parallel.DistributedDataParallel(
        Chooses(), process_group=everyone(grid), find_unused_parameters=True
    )
    for step in range(2):
        model(torch.ones(1, 2), (grid.rank + step) % 2).sum().backward()


@program
def ddp_without_synchronisation(grid: Any) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=everyone(grid))
    for _ in range(1 + grid.rank):
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()


@program
def zero_of_torchs_own(grid: Any) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    optimizer = ZeroRedundancyOptimizer(
        layers.parameters(), torch.optim.SGD, process_group=everyone(grid), lr=0.1
    )
    for _ in range(2):
        layers(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@program
def local_sgd(grid: Any) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()  # it averages parameters that have a gradient
    averager = PeriodicModelAverager(period=2, process_group=everyone(grid))
    for _ in range(4):
        averager.average_parameters(model.parameters())


@program
def torchs_own_pipelining(grid: Any) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    group = grid.get_group("tp")
    stage = PipelineStage(
        nn.Linear(4, 4), grid.get_local_rank("tp"), 2, torch.device("cpu"), group=group
    )
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).sum())
    if stage.is_first:
        schedule.step(torch.ones(8, 4))
    else:
        schedule.step(target=torch.ones(8, 4))


@program
def collectives_by_name(grid: Any) -> None:
    from commgrid.collectives import all_gather, all_reduce, reduce_scatter

    x = torch.ones(4, 2)
    all_reduce(x, "dp_tp")
    all_gather(x, "tp", dim=1)
    reduce_scatter(x, "dp", dim=0)


def run(folder: Path) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of its functions
    grid = commgrid.initialize(tp=2, verify="order", trace=True, timeout=60)
    for each in PROGRAMS:
        try:
            each(grid)
        except BaseException as error:
            error.add_note(f"in {each.__name__}")
            raise
        # The store of groups that connect later is rank 0's.
        dist.barrier(group=everyone(grid))
    commgrid.trace.save(folder)
    commgrid.trace.stop()
    commgrid.shutdown()


def test_there_are_forty() -> None:
    assert len(PROGRAMS) >= 40


@pytest.mark.full
def test_no_correct_program_is_accused(tmp_path: Path) -> None:
    run_on_ranks(run, 4, tmp_path, backend=None, launcher="torchrun", timeout=200)
    found = diagnosis.diagnose(diagnosis.read(tmp_path), patience=30.0)
    # On a busy machine a rank may be late time and again.
    assert {each.kind for each in found.causes} <= {"slow rank"}, str(found)
    assert not found.missing
