"""One of several grids as the default one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import commgrid
from commgrid import GridNotInitializedError, HyperCommGrid
from commgrid.collectives import all_reduce
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import run_on_ranks


def mlp() -> nn.Sequential:
    return nn.Sequential(ColumnParallelLinear(8, 8), RowParallelLinear(8, 8))


def two_grids() -> None:
    whole = commgrid.initialize(tp=4)
    halves = commgrid.initialize(tp=2, name="halves")
    x = torch.ones(1)
    with commgrid.use_grid(halves) as used:
        assert used is halves
        assert commgrid.get_grid() is halves
        assert commgrid.get_grid("default") is whole
        assert commgrid.get_group("tp") is halves.get_group("tp")
        assert commgrid.get_group("tp", grid="default") is whole.get_group("tp")
        assert commgrid.size("tp") == 2
        assert commgrid.get_ranks("tp") == halves.get_ranks("tp")
        assert commgrid.get_local_rank("tp") == halves.get_local_rank("tp")
        assert all_reduce(x, "tp").item() == 2
        with commgrid.use_grid("default"):
            assert commgrid.get_grid() is whole
        assert commgrid.get_grid() is halves
        model = mlp()
    assert commgrid.get_grid() is whole
    assert all_reduce(x, "tp").item() == 4
    assert model[0].weight.shape == (4, 8)
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    model(rows).sum().backward()  # outside of it, on the grid that it was made for
    assert mlp()[0].weight.shape == (2, 8)

    with pytest.raises(KeyError, match="left"), commgrid.use_grid(halves):
        raise KeyError("left by an error")
    assert commgrid.get_grid() is whole

    with commgrid.use_grid("halves"):
        commgrid.destroy("halves")
        assert not commgrid.is_initialized()
        assert commgrid.is_initialized("default")
        with pytest.raises(GridNotInitializedError, match="there is no grid 'halves'"):
            commgrid.get_group("tp")


def test_names_mean_the_grid_that_is_used() -> None:
    run_on_ranks(two_grids, 4)


def not_registered() -> None:
    grid = commgrid.initialize()
    own = HyperCommGrid(grid.spec, name="own")
    with pytest.raises(GridNotInitializedError, match="there is no grid 'own'"):
        commgrid.use_grid(own).__enter__()
    like_it = HyperCommGrid(grid.spec, name="default")
    with pytest.raises(GridNotInitializedError, match="give a grid of commgrid"):
        commgrid.use_grid(like_it).__enter__()
    own.destroy()
    like_it.destroy()


def test_a_grid_that_is_not_registered_is_refused() -> None:
    run_on_ranks(not_registered, 1)
