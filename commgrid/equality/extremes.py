"""Extremes of numbers over the ranks of a group, by which all ranks know that some differ."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.plain import all_reduce


def device_for(group: ProcessGroup) -> torch.device:
    """The device on which a group compares numbers: CUDA with nccl, else the CPU."""
    cuda = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def extremes(numbers: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of each number among a group's ranks; one collective.

    Args:
        numbers: (n,) or more dims, as many on every rank, on the group's device.
        group: whose ranks have them.
    """
    largest, smallest = all_reduce(torch.cat([numbers, -numbers]), group, op="max").chunk(2)
    return largest, -smallest
