"""Session of two ranks: what a program does with a grid's groups, one check after the other."""

from __future__ import annotations

import shutil
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid import HyperCommGrid
from commgrid.collectives import all_reduce, all_to_all
from commgrid.context_parallel import SequenceSharding, attention
from commgrid.pipeline import Pipeline
from tests.gpu.on_gpus import Where
from tests.gpu.session import on_two_ranks

TOLERANCE = 1e-5  # fp32; sums over ranks have another order


@pytest.mark.alone
@on_two_ranks
def test_memory_of_a_communicator(where: Where) -> str:
    commgrid.initialize(tp=2, create=["tp"], connect="all")
    all_reduce(where.ones(), "tp")
    commgrid.destroy()
    where.wait()
    before = where.memory()
    names = ["tp", "dp_tp", "pp_tp"]
    grid = commgrid.initialize(tp=2, create=names, connect="all")
    for name in names:
        all_reduce(where.ones(2**20), name)
    where.wait()
    made = sum(len(each.ranks) > 1 for each in grid.communicators)
    # The ranks of a GPU share its counter.
    sharing = 1.0 if where.emulated else max(1.0, 2 / torch.cuda.device_count())
    each = (where.memory() - before) / made / sharing
    assert made == len(names)
    assert each < 700, f"{each:.0f} MiB each: more than was ever reported"
    return f"{each:.1f} MiB each, of {made}"


@pytest.mark.alone
@on_two_ranks
def test_500_all_to_alls_of_unequal_sizes_take_no_memory(where: Where) -> str:
    grid = commgrid.initialize(tp=2)
    repeats, me, before = 500, grid.get_local_rank("tp"), 0.0
    for number in range(repeats):
        sizes = [[1 + (number + a + 2 * b) % 5 for b in range(2)] for a in range(2)]
        send, receive = sizes[me], [sizes[other][me] for other in range(2)]
        rows = torch.full((sum(send), 2), float(me), device=where.device)
        got = all_to_all(rows, "tp", send=send, receive=receive)
        if number % 100 == 0:
            assert got[:, 0].tolist() == [0.0] * receive[0] + [1.0] * receive[1]
        if number == repeats // 2:
            where.wait()
            before = where.memory()
    where.wait()
    grown = where.memory() - before
    assert grown < 64, f"{grown:.0f} MiB more after half of {repeats} exchanges"
    return f"{grown:.0f} MiB more in the second half"


@on_two_ranks
def test_a_dtensor_goes_from_rows_to_columns(where: Where) -> str:
    mesh = commgrid.initialize(tp=2).device_mesh("tp")
    whole = torch.arange(64.0, device=where.device).reshape(8, 8)
    moved = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    assert torch.equal(moved.to_local(), whole.chunk(2, 1)[mesh.get_local_rank()])
    return ""


def suspended_between(grid: HyperCommGrid, step: Any) -> None:
    """Take a step three times, with a suspension after each, and compare what they return."""
    found = []
    for _ in range(3):
        found.append(step())
        grid.suspend()
        grid.resume()
    assert all(torch.equal(one, other) for one, other in pairwise(found)), found


@on_two_ranks
def test_suspend_after_a_pipelines_step(where: Where) -> str:
    grid = commgrid.initialize(pp=2)
    torch.manual_seed(0)
    stage = nn.Linear(8, 8, device=where.device)
    pipeline = Pipeline(stage, "1f1b", num_microbatches=2, loss=nn.functional.mse_loss)
    batch = list(torch.randn(2, 4, 8, device=where.device))

    def step() -> Tensor:
        losses = pipeline.step(batch, targets=batch)
        return torch.zeros(2) if losses is None else losses.detach().cpu()

    suspended_between(grid, step)
    return ""


def exchanged(where: Where, name: str) -> Tensor:
    """Exchange tensors between the two ranks of a group, as one coalesced batch."""
    grid = commgrid.get_grid()
    peer = grid.get_ranks(name)[1 - grid.get_local_rank(name)]
    mine, theirs = where.ones() * grid.rank, where.ones() * -1
    both = [
        dist.P2POp(op, x, peer, grid.get_group(name))
        for op, x in ((dist.isend, mine), (dist.irecv, theirs))
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert theirs.tolist() == [float(peer)] * 4
    return theirs.cpu()


@on_two_ranks
def test_suspend_after_a_coalesced_batch(where: Where) -> str:
    grid = commgrid.initialize(pp=2)
    suspended_between(grid, lambda: exchanged(where, "pp"))
    return ""


@on_two_ranks
def test_suspend_after_ring_attention(where: Where) -> str:
    grid = commgrid.initialize(cp=2)
    sharding = SequenceSharding.zigzag(64, 2)
    torch.manual_seed(0)
    whole_q, whole_k, whole_v = (torch.randn(1, 4, 64, 16).to(where.device) for _ in range(3))
    q, k, v = (sharding.shard(x, dim=2).requires_grad_() for x in (whole_q, whole_k, whole_v))
    expected = nn.functional.scaled_dot_product_attention(whole_q, whole_k, whole_v, is_causal=True)

    def step() -> Tensor:
        out = attention(q, k, v, sharding=sharding, way="ring")
        torch.testing.assert_close(out, sharding.shard(expected, dim=2), rtol=2e-3, atol=2e-3)
        return torch.autograd.grad(out.sum(), k)[0].cpu()

    suspended_between(grid, step)
    return ""


@on_two_ranks
def test_batched_and_unbatched_sends(where: Where) -> str:
    """On groups that nothing has connected, in turns."""
    for first in ("batched", "unbatched"):
        grid = commgrid.initialize(tp=2, connect="none")
        group, (low, high) = grid.get_group("tp"), grid.get_ranks("tp")
        if first == "batched":
            exchanged(where, "tp")
        for sender, receiver in ((low, high), (high, low)):
            x = where.ones() * (7 + grid.rank)
            if grid.rank == sender:
                dist.send(x, receiver, group=group)
            else:
                dist.recv(x, sender, group=group)
            assert x.tolist() == [7.0 + sender] * 4
        exchanged(where, "tp")
        assert all_reduce(where.ones(), "tp").tolist() == [2.0] * 4
        commgrid.destroy()
    return ""


@on_two_ranks
def test_ddp_on_a_group_that_is_not_connected(where: Where) -> str:
    grid = commgrid.initialize(dp=2, connect="none")
    torch.manual_seed(grid.rank)  # DDP sends rank 0's weights
    model = DistributedDataParallel(
        nn.Linear(4, 4, device=where.device), process_group=grid.get_group("dp"),
        device_ids=None if where.emulated else [torch.cuda.current_device()],
    )  # fmt: skip
    for _ in range(3):
        model(where.ones(8).reshape(2, 4) * grid.rank).sum().backward()
        gradient = model.module.weight.grad
        assert gradient is not None
        assert gradient.tolist() == [[1.0] * 4] * 4  # the mean of 0 and 2
        model.zero_grad()
    return ""


@on_two_ranks
def test_fsdp2_with_tensor_parallel_layers(where: Where) -> str:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for tp in (2, 1):
        grid = commgrid.initialize(tp=tp, dp_shard=2 // tp)
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(where.device)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(where.device)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, grid.device_mesh("tp"), plan)
        fully_shard(model, mesh=grid.device_mesh("dp_shard"))
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(where.device)
        mine = batch.chunk(2 // tp)[grid.get_local_rank("dp_shard")]
        model(mine).square().mean().backward()
        whole(batch).square().mean().backward()
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            gradient: Any = ours.grad
            torch.testing.assert_close(gradient.full_tensor(), theirs.grad)
        del model
        commgrid.destroy()
    return ""


@on_two_ranks
def test_compiled_functional_collectives(where: Where) -> str:
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("needs a C compiler, which torch.compile calls")
    from torch.distributed import _functional_collectives as functional

    group = commgrid.initialize(tp=2, connect="none").get_group("tp")

    def summed(x: Tensor) -> Tensor:
        found: Tensor = functional.all_reduce(x, "sum", group)
        return found

    compiled = torch.compile(summed, fullgraph=True)
    for count in (4, 8):
        assert compiled(where.ones(count)).tolist() == [2.0] * count
    torch.compiler.reset()
    return ""


@on_two_ranks
def test_graph_capture(where: Where) -> str:
    if where.emulated:
        pytest.skip("needs CUDA: the CPU has no graphs")
    x, group = where.ones(), commgrid.initialize(tp=2).get_group("tp")
    dist.all_reduce(x, group=group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x, group=group)
    x.fill_(1.0)
    for _ in range(3):
        graph.replay()
    where.wait()
    assert x.tolist() == [8.0] * 4
    return "replayed three times"


@on_two_ranks
def test_8_bytes_on_tp_and_world_in_turns(where: Where) -> str:
    grid = commgrid.initialize(tp=2)
    number = torch.ones(1, dtype=torch.float64, device=where.device)
    groups = {"tp": grid.get_group("tp"), "WORLD": dist.group.WORLD}
    took = dict.fromkeys(groups, 0.0)
    for counted in (20, 200):
        for name, group in groups.items():
            where.wait()
            started = time.perf_counter()
            for _ in range(counted):
                dist.all_reduce(number.fill_(1.0), group=group)
            where.wait()
            took[name] = (time.perf_counter() - started) / counted * 1e6
    for _ in range(200):
        for group in groups.values():
            dist.all_reduce(number.fill_(1.0), group=group)
    assert number.item() == 2.0
    return ", ".join(f"{name} {microseconds:.1f} us" for name, microseconds in took.items())


@on_two_ranks
def test_a_stage_later_than_startup_timeout(where: Where) -> str:
    """Rank 0 comes late to the first call, and nothing fails."""
    startup = where.of(6.0, 2.0)
    grid = commgrid.initialize(pp=2, connect="none", startup_timeout=startup, timeout=60.0)
    if grid.rank == 0:
        time.sleep(1.5 * startup)
    assert all_reduce(where.ones(), "pp").tolist() == [2.0] * 4
    return f"{1.5 * startup:g} s late"
