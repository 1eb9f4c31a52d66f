"""The model that `transfer.py` moves: MLPs with norms, and the numbers it holds."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import commgrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.transfer.cuts import Cut

WIDTH = 512
CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # over tp; the rest is whole


class Layer(nn.Module):
    """An MLP with its norm."""

    def __init__(self, grid: commgrid.HyperCommGrid) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, grid=grid)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, grid=grid)


def shapes_of(layers: int) -> dict[str, tuple[int, ...]]:
    """Every full parameter of the model."""
    parts = {
        "norm.weight": (WIDTH,), "norm.bias": (WIDTH,),
        "up.weight": (4 * WIDTH, WIDTH), "up.bias": (4 * WIDTH,),
        "down.weight": (WIDTH, 4 * WIDTH), "down.bias": (WIDTH,),
    }  # fmt: skip
    return {f"layers.{i}.{part}": shape for i in range(layers) for part, shape in parts.items()}


def full_of(name: str, shape: tuple[int, ...]) -> Tensor:
    """What a full parameter is: numbers that tell element and name."""
    start = zlib.crc32(name.encode()) % 4093
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).view(shape)


def part_of(name: str, full: Tensor, grid: commgrid.HyperCommGrid) -> Tensor:
    """A rank's slice of a full parameter."""
    dim = CUT.get(name.split(".", 2)[2])
    if dim is None:
        return full
    size = full.shape[dim] // grid.size("tp")
    return full.narrow(dim, grid.get_local_rank("tp") * size, size)


def stage_of(name: str, layers: int, grid: commgrid.HyperCommGrid) -> int:
    return int(name.split(".")[1]) * grid.size("pp") // layers


def build(cut: Cut, grid: commgrid.HyperCommGrid, layers: int) -> nn.Module:
    """This rank's part of the model, filled."""
    model = nn.Module()
    own = [i for i in range(layers) if i * grid.size("pp") // layers == grid.get_local_rank("pp")]
    model.layers = nn.ModuleDict({str(i): Layer(grid) for i in own})
    if cut.way == "fsdp":
        for layer in (*model.layers.values(), model):
            fully_shard(layer, mesh=grid.device_mesh("dp"))
    shapes = shapes_of(layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part: Any = part_of(name, full_of(name, shapes[name]), grid)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                part = distribute_tensor(part, mesh, placements, src_data_rank=None)
            parameter.copy_(part)
    return model
