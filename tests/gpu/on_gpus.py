"""Spawned ranks over NCCL, on as many GPUs as there are, several ranks a GPU if need be."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import commgrid
from commgrid.testing import run_on_ranks


def on_gpus(
    function: Any, world: int, *args: Any, bound: bool = False, timeout: float = 240
) -> list[Any]:
    """Calls `function(*args)` on ranks with a device and a NCCL_HOSTID each.

    Args:
        function, args: as `run_on_ranks` takes them.
        world: how many ranks.
        bound: whether WORLD is bound to its device, so that NCCL connects at once.
        timeout: seconds until all ranks are killed.
    """
    ranks = [(rank,) for rank in range(world)]
    return run_on_ranks(
        _with_world, world, function, bound, args, per_rank=ranks, backend=None,
        launcher="torchrun", method="spawn", timeout=timeout,
    )  # fmt: skip


def _with_world(function: Any, bound: bool, args: tuple[Any, ...], rank: int) -> Any:
    take_device(rank)
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device if bound else None)
    found = function(*args)
    commgrid.shutdown()
    return found


def take_device(rank: int) -> None:
    """A GPU for this rank; NCCL takes ranks of one GPU for ranks of different hosts."""
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(rank % torch.cuda.device_count())
