"""The same bits are drawn on a CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch

import commgrid
from commgrid.expert import GroupedExperts
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_parameters,
)
from commgrid.tensor_parallel.counter_rng import Law, Normal, Uniform
from commgrid.tensor_parallel.slices import fill
from tests.gpu.on_gpus import on_gpus

LAWS = [Normal(0, 1), Normal(0.1, 0.02), Uniform(-0.3, 0.3), Uniform(2, 5), Normal(0, 1, -0.5, 1)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_every_bit(law: Law, dtype: torch.dtype) -> None:
    for full, starts, shape in (
        ((2048, 1024), (0, 0), (2048, 1024)), ((2**21, 2**20), (2**20, 77), (301, 1001)),
        ((9, 33, 7), (3, 11, 2), (5, 20, 3)),
    ):  # fmt: skip
        for chunk in (None, 2**14):
            both = [torch.empty(shape, dtype=dtype, device=device) for device in ("cpu", "cuda")]
            for target in both:
                fill(target, full, starts, law, 5, chunk)
            assert torch.equal(both[0], both[1].cpu()), (full, chunk)


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
