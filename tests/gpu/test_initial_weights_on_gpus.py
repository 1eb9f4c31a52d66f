"""The same bits are drawn for a CPU and for a GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid.expert import GroupedExperts
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_parameters,
)
from commgrid.tensor_parallel.init import Init, draw
from tests.gpu.on_gpus import on_gpus

INITS: list[Init] = [
    nn.init.normal_, partial(nn.init.uniform_, a=2.0, b=5.0), nn.init.kaiming_uniform_,
    partial(nn.init.trunc_normal_, a=-0.5, b=1.0), partial(nn.init.constant_, val=0.1),
]  # fmt: skip
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("init", INITS, ids=lambda init: getattr(init, "func", init).__name__)
def test_every_bit(init: Init, dtype: torch.dtype) -> None:
    group: Any = SimpleNamespace(rank=1, size=3)
    for full, dim, shape in (
        ((600, 400), 0, (200, 400)), ((600, 400), 1, (600, 134)), ((9, 33, 7), 0, (3, 33, 7))
    ):  # fmt: skip
        both = [torch.empty(shape, dtype=dtype, device=device) for device in ("cpu", "cuda")]
        for target in both:
            torch.manual_seed(5)
            draw(target, full, init, dim, group)
        assert torch.equal(both[0], both[1].cpu()), (full, dim)


def layers() -> int:
    """How many parameters were compared."""
    grid = commgrid.initialize(tp=2, ep=2, etp=1)
    compared = 0
    for dtype in (torch.float32, torch.bfloat16):
        models = []
        for device in ("cpu", "cuda"):
            models.append(torch.nn.Sequential(
                VocabParallelEmbedding(13, 16, device=device, dtype=dtype),
                ColumnParallelLinear(16, 32, device=device, dtype=dtype),
                RowParallelLinear(32, 16, device=device, dtype=dtype),
                GroupedExperts(16, 32, 4, gated=True, device=device, dtype=dtype),
            ))  # fmt: skip
            initialize_parameters(models[-1], seed=1)
        for name, parameter in models[0].named_parameters():
            other = models[1].get_parameter(name)
            assert other.is_cuda
            assert torch.equal(parameter, other.cpu()), (grid.rank, name)
            compared += 1
    return compared


def test_layers() -> None:
    assert on_gpus(layers, 2) == [14] * 2
