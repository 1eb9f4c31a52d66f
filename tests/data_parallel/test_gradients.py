"""Averaged gradients and their norm against one process that sees all the data."""

import torch
from torch import nn

import commgrid
from commgrid.data_parallel import average_gradients, gradient_norm
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    initialize_parameters,
)
from tests.ranks import run_on_ranks


def gradients(tp: int, bucket_bytes: int) -> tuple[float, list[torch.Tensor]]:
    grid = commgrid.initialize(tp=tp)
    model = nn.Sequential(
        nn.Linear(8, 8, dtype=torch.float64),
        ColumnParallelLinear(8, 16, dtype=torch.float64),
        RowParallelLinear(16, 8, dtype=torch.float64),
    )
    initialize_parameters(model, seed=3)
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mine = data.chunk(grid.size("dp"))[grid.get_local_rank("dp")]
    model(mine).square().mean().backward()
    model[0].bias.grad = None  # a parameter without a gradient is passed over
    average_gradients(model.parameters(), bucket_bytes=bucket_bytes)
    replicated = [p.grad for p in model[0].parameters() if p.grad is not None]
    return float(gradient_norm(model)), replicated


def test_average_and_norm_do_not_depend_on_the_grid() -> None:
    norm, reference = run_on_ranks(gradients, 1, 1, 2**20)[0]
    for world, tp in ((2, 1), (4, 2), (8, 2), (8, 4)):
        for bucket_bytes in (1, 600, 2**20):  # one gradient at a time, a few, all
            for ours, found in run_on_ranks(gradients, world, tp, bucket_bytes):
                # fp64, sums of a few hundred terms in another order.
                assert abs(ours - norm) <= 1e-12 * norm
                torch.testing.assert_close(found, reference, rtol=1e-11, atol=1e-13)


def test_without_gradients_the_norm_is_zero() -> None:
    def none() -> None:
        commgrid.initialize()
        assert gradient_norm(nn.Linear(2, 2)) == 0

    run_on_ranks(none, 1, init=None)
