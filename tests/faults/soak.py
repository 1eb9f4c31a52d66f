"""A job that goes on and on: grids come and go, steps are trained, and nothing grows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import commgrid
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.failures import named_failures
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.torch_compat import world as torch_world
from tests.runtime.test_leaks import cycle, usage

Seen = tuple[int, int, float, int]
"""Open files, threads, MiB and keys of the store."""


def _usage() -> Seen:
    dist.barrier()
    found = (*usage(), torch_world.world_store().num_keys())
    dist.barrier()
    return found


def soak(cycles: int, steps: int, looks: int = 5) -> dict[str, list[Seen]]:
    """What one of four ranks uses, after warming up and then `looks` times.

    Args:
        cycles: of initialize and destroy.
        steps: of training a tiny model over tp 2 and dp 2.
    """
    dist.init_process_group("gloo")
    found: dict[str, list[Seen]] = {"cycles": [], "steps": []}
    for done in range(cycles + 10):
        if done >= 10 and (done - 10) % (cycles // looks) == 0:
            found["cycles"].append(_usage())
        cycle()
    found["cycles"].append(_usage())
    grid = commgrid.initialize(tp=2)
    model = nn.Sequential(ColumnParallelLinear(8, 16), nn.GELU(), RowParallelLinear(16, 8))
    reducer = GradientReducer(model, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-4)
    inputs = torch.ones(4, 8)
    with named_failures(grid):
        for done in range(steps + 50):
            if done >= 50 and (done - 50) % (steps // looks) == 0:
                found["steps"].append(_usage())
            model(inputs).square().mean().backward()
            reducer.finish()
            optimizer.step()
            reducer.zero_grad()
    found["steps"].append(_usage())
    commgrid.destroy()
    dist.barrier()  # the store goes with rank 0
    return found


def grown(seen: list[Seen]) -> list[str]:
    """What has grown; []: nothing."""
    files, threads, memory, keys = zip(*seen, strict=True)
    found = []
    # Rank 0 serves the store: others open a further connection when they first wait for long.
    if max(files) - files[0] > 8:
        found.append(f"files {files}")
    if max(threads) - threads[0] > 4:
        found.append(f"threads {threads}")
    if memory[-1] - memory[0] > 16:
        found.append(f"MiB {memory}")
    if keys[-1] - keys[0] > 4:
        found.append(f"keys of the store {keys}")
    return found
