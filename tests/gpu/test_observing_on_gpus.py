"""Benches, traces and saves in the background over NCCL."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commgrid
from commgrid import bench as benches
from commgrid import checkpoint
from commgrid.checkpoint import background
from commgrid.cost_model.collective import COLLECTIVES, bus_bandwidth
from tests.benchmarks.fit_cluster import fit
from tests.gpu.on_gpus import on_gpus


def measured(device: str) -> list[tuple[Any, ...]]:
    """Each collective on each communicator, and a cluster fitted to it."""
    grid = commgrid.initialize(tp=2, backend="nccl" if device == "cuda" else "gloo")
    cluster = benches.find_cluster(grid)
    assert cluster.device.flops > 1e9
    sizes = (1 << 12, 1 << 16)
    effort = benches.Effort(iters=3, warmup=1, repeats=3, seconds=0.2)
    rows = benches.bench(grid, sizes=sizes, cluster=cluster, effort=effort)
    names = {row.group for row in rows}
    assert {"tp", "dp"} < names
    assert len(names) == 3  # and all of them
    assert len(rows) == 3 * len(COLLECTIVES) * len(sizes)
    for row in rows:
        assert 0 < row.least <= row.seconds <= row.most < 10
        assert row.bus_bandwidth == bus_bandwidth(row.collective, row.size, row.ranks, row.seconds)
    fitted = fit(rows, cluster)
    assert all(math.isfinite(level.bandwidth) for level in fitted.levels[:1])
    return [(row.group, row.collective, row.size, row.seconds) for row in rows]


def test_the_bench_measures_every_communicator_over_nccl() -> None:
    first, *others = on_gpus(measured, 4, "cuda")
    assert all(other == first for other in others)  # the slowest rank's time, told to all


def traced(device: str) -> list[tuple[Any, ...]]:
    grid = commgrid.initialize(tp=2)
    x = torch.ones(8, device=device)
    dist.all_reduce(x, group=grid.get_group("tp"))  # NCCL connects
    commgrid.trace.start()
    work = dist.all_reduce(x, group=grid.get_group("tp"), async_op=True)
    assert work is not None
    work.wait()
    dist.all_gather([torch.empty_like(x) for _ in range(2)], x, group=grid.get_group("dp"))
    peer = grid.get_ranks("tp")[1 - grid.get_local_rank("tp")]
    ends = dist.isend, dist.irecv
    other = torch.empty_like(x)
    both = [
        dist.P2POp(op, tensor, peer, grid.get_group("tp"))
        for op, tensor in zip(ends, (x, other), strict=True)
    ]
    for each in dist.batch_isend_irecv(both):
        each.wait()
    commgrid.trace.stop()
    found = commgrid.trace.recorded().calls
    assert all("test_observing_on_gpus.py" in call.where for call in found)
    return [(call.group.name, call.operation, call.bytes) for call in found]


def test_calls_over_nccl_are_recorded_by_name() -> None:
    for found in on_gpus(traced, 4, "cuda"):
        assert found == [
            ("tp", "all_reduce", 32), ("dp", "all_gather", 32), ("tp", "send", 32),
            ("tp", "recv", 32),
        ]  # fmt: skip


def saved(device: str, folder: str) -> bool:
    """What is loaded is the state of the call, and its copies lie in pinned memory."""
    grid = commgrid.initialize()
    torch.manual_seed(0)
    model = nn.Linear(512, 512, device=device)
    before = model.weight.detach().clone()
    staged, stage = [], background.stage

    def kept(*given: Any) -> Any:
        staged.append(stage(*given))
        return staged[-1]

    from commgrid.checkpoint import saving

    saving.stage = kept  # type: ignore[assignment]
    checkpoint.save(folder, 1, model, background=True, progress=False)
    with torch.no_grad():
        model.weight.fill_(3.0)
    pinned = all(each.is_pinned() for each in background.tensors_of(staged[0]))
    checkpoint.wait()
    checkpoint.load(folder, model, progress=False)
    assert torch.equal(model.weight, before)
    assert grid.world_size == 4
    return pinned


def test_a_save_in_the_background_copies_to_pinned_memory(tmp_path: Path) -> None:
    assert on_gpus(saved, 4, "cuda", str(tmp_path)) == [True] * 4
