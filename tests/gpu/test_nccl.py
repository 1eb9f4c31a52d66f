"""Grids over NCCL: on as many GPUs as there are, several ranks a GPU where ranks outnumber them."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import HyperCommGrid
from tests.examples.curves import run
from tests.examples.test_train_gpt import SMALL
from tests.gpu.on_gpus import on_gpus, programs_on_gpus

MIB = 2**20


def check_sums(grid: HyperCommGrid) -> None:
    for communicator in grid.communicators:
        tensor = torch.tensor([2.0**grid.rank], device="cuda")
        dist.all_reduce(tensor, group=communicator.group)
        assert tensor.item() == sum(2.0**rank for rank in communicator.ranks)


def created() -> list[tuple[str, int, bool]]:
    grid = commgrid.initialize(tp=2, pp=2)
    connected = [(c.names[0], len(c.ranks), c.connected) for c in grid.communicators]
    check_sums(grid)
    grid.check()
    assert all(c.connected for c in grid.communicators if len(c.ranks) > 1)
    return connected


def test_what_connect_names_is_connected_and_the_rest_is_not() -> None:
    for bound in (False, True):
        for connected in on_gpus(created, 4, bound=bound):
            for name, size, is_connected in connected:
                assert is_connected == (name in ("tp", "pp") and size > 1), (bound, name)


def memory() -> dict[str, float]:
    """MiB of device memory that each step takes, from the driver's own count."""

    def used() -> float:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / MIB

    torch.ones(1, device="cuda")
    dist.all_reduce(torch.ones(1, device="cuda"))
    dist.barrier(device_ids=[torch.cuda.current_device()])
    start = used()
    grid = commgrid.initialize(tp=1, create=["cp", "pp"], connect="all")
    alone = used()
    assert {c.connected for c in grid.communicators} == {False}
    return {"groups of one": alone - start}


@pytest.mark.alone
def test_a_group_of_one_costs_no_device_memory() -> None:
    for found in on_gpus(memory, 2):
        assert found["groups of one"] < 1.0


def options() -> int:
    groups = {
        "dp": {"timeout": 77, "nccl": {"max_ctas": 4, "is_high_priority_stream": True}},
        "ag": {"of": "dp", "own": True},
    }
    grid = commgrid.initialize(groups=groups, timeout=timedelta(seconds=91))
    for name, seconds, ctas in (("dp", 77, 4), ("ag", 77, 4), ("dp_tp", 91, None)):
        made = grid.get_group(name)._get_backend(torch.device("cuda")).options
        assert made._timeout == timedelta(seconds=seconds)
        if ctas is not None:
            assert made.config.max_ctas == ctas
            assert made.is_high_priority_stream
    check_sums(grid)
    return len(grid.communicators)


def test_options_and_timeouts_reach_nccl() -> None:
    # dp, ag, the 7 combinations with dp, and the one of size 1
    assert on_gpus(options, 2) == [10, 10]


def trained(path: str, rank: int) -> None:
    run([*SMALL, "--tp", "2", "--steps", "20", "--dtype", "bf16", "--metrics", path])


def test_train_gpt_in_bf16(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    programs_on_gpus(trained, 4, str(path))
    losses = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5


def over_gloo() -> set[str]:
    """Where NCCL cannot have several ranks on one GPU, gloo carries CUDA tensors."""
    grid = commgrid.initialize(tp=2, backend="gloo", name="gloo")
    check_sums(grid)
    return {communicator.backend for communicator in grid.communicators}


def test_cuda_tensors_over_gloo() -> None:
    assert on_gpus(over_gloo, 4) == [{"gloo"}] * 4


def repeated() -> float:
    before = None
    for done in range(10):
        check_sums(commgrid.initialize(tp=2, connect="all"))
        commgrid.destroy()
        if done == 2:
            torch.cuda.synchronize()
            before = torch.cuda.mem_get_info()[0]
    torch.cuda.synchronize()
    assert before is not None
    return (before - torch.cuda.mem_get_info()[0]) / MIB


@pytest.mark.alone
def test_destroy_gives_device_memory_back() -> None:
    # All ranks share the counter where they share the GPU; a communicator is hundreds of MiB.
    for leaked in on_gpus(repeated, 2, timeout=120):
        assert leaked < 100


def every_collective(device: str) -> None:
    """torch's own collectives, each as the first of its kind, on every group that connected."""
    grid = commgrid.initialize(tp=2, pp=2)
    for name in ("tp", "pp"):
        group, own, ranks = grid.get_group(name), grid.get_local_rank(name), grid.get_ranks(name)
        other = 1 - own
        x = torch.tensor([1.0 + own, 10.0 + own], device=device)
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        assert y.tolist() == ([1.0, 2.0] if own == 0 else [10.0, 11.0])
        parts = [torch.empty(1, device=device) for _ in range(2)]
        dist.all_to_all(parts, list(x.split(1)), group=group)
        assert torch.cat(parts).tolist() == y.tolist()
        dist.all_to_all_single(y, x, [1, 1], [1, 1], group=group)
        assert y.tolist() == torch.cat(parts).tolist()
        pair = [torch.empty_like(x) for _ in range(2)] if own == 0 else None
        dist.gather(x, pair, dst=ranks[0], group=group)
        if pair is not None:
            assert torch.stack(pair).tolist() == [[1.0, 10.0], [2.0, 11.0]]
        dist.scatter(y, pair, src=ranks[0], group=group)
        assert y.tolist() == x.tolist()
        first, then = (dist.send, dist.recv) if own == 0 else (dist.recv, dist.send)
        first(x if own == 0 else y, ranks[other], group=group)
        then(y if own == 0 else x, ranks[other], group=group)
        assert y.tolist() == [1.0 + other, 10.0 + other]
        dist.broadcast(y, ranks[0], group=group)
        dist.reduce(y, ranks[0], group=group)
        dist.barrier(group=group)
    commgrid.shutdown()


def test_torchs_own_collectives() -> None:
    on_gpus(every_collective, 4, "cuda")
