"""A step uses one communicator for each set of ranks, in all that commgrid issues by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.collectives.common_group import common_group
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.expert import MoELayer
from commgrid.parameters import mark_parameters
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    initialize_parameters,
)
from commgrid.testing import run_on_ranks

LAYOUTS: list[dict[str, int]] = [
    {},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2},
    {"tp": 2, "cp": 2},
    {"tp": 2, "pp": 2},
    {"cp": 2, "pp": 2},
    {"tp": 2, "cp": 2, "pp": 2},
    {"ep": 2},
    {"ep": 2, "etp": 1, "tp": 2},
    {"ep": 4, "tp": 2, "pp": 2, "etp": 1},
    {"ep": 2, "cp": 2, "pp": 2},
]
BY_LAYERS = {"tp", "ep"}  # whose groups programs name themselves


def name(layout: dict[str, int]) -> str:
    return "_".join(f"{axis}{size}" for axis, size in layout.items()) or "dp"


class Block(nn.Module):
    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        self.norm = mark_parameters(nn.LayerNorm(8), partial="tp")
        self.column = ColumnParallelLinear(8, 16, sequence_parallel=True)
        self.row = RowParallelLinear(16, 8, sequence_parallel=True)
        self.moe = MoELayer(8, 16, 4, 2, sequence_parallel=True) if experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.row(self.column(self.norm(x)))
        return x if self.moe is None else x + self.moe(x)


def used(layout: dict[str, int], shard: bool, folder: str) -> dict[str, tuple[int, ...]]:
    """Names of the communicators that two steps and a save issue calls on, with their ranks."""
    grid = commgrid.initialize(**layout, trace=True)
    stage = f"stage{grid.get_local_rank('pp')}"  # names of the whole model
    model = nn.ModuleDict({stage: Block(experts="ep" in layout)})
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model, shard=shard, not_finite="skip")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if shard:
        optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    for step in range(2):
        torch.manual_seed(grid.rank + step)
        model[stage](torch.randn(4, 2, 8)).square().sum().backward()
        reducer.finish()
        reducer.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(folder, 1, model)
    traced = commgrid.trace.recorded()
    commgrid.trace.stop()
    commgrid.shutdown()
    groups = {call.group for call in traced.calls}
    return {group.name: group.ranks for group in groups if len(group.ranks) > 1}


@pytest.mark.full("pp*", "cp*", "tp2-*", "tp2_cp*", "ep2-*", "ep2_cp*", "ep4*")
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_a_step_uses_one_communicator_for_each_set_of_ranks(
    layout: dict[str, int], shard: bool, tmp_path: Path
) -> None:
    if "pp" in layout and not shard:
        pytest.skip("as with shard=True")
    for found in run_on_ranks(used, 8, layout, shard, str(tmp_path)):
        own = {name: ranks for name, ranks in found.items() if name not in BY_LAYERS}
        assert len(set(own.values())) == len(own), found


@pytest.mark.ranks(4, tp=2)
def test_the_group_that_was_named_goes_first(grid: commgrid.HyperCommGrid) -> None:
    data = grid.get_group("dp")
    assert common_group(data, grid) is grid.get_group("dp_cp")
    assert common_group(data, grid, ("dp", "edp")) is data
    assert common_group(grid.get_group("dp_tp"), grid) is grid.get_group("dp_cp_tp")
    tensor = grid.get_group("tp")
    assert common_group(tensor, grid) is tensor


@pytest.mark.ranks(2, groups={"dp": {"timeout": 60.0}})
def test_groups_with_options_of_their_own_stay(grid: commgrid.HyperCommGrid) -> None:
    data = grid.get_group("dp")
    assert common_group(data, grid) is data


@pytest.mark.ranks(2, tp=2, etp=1)
def test_a_layers_group_with_the_same_ranks_is_not_taken(grid: commgrid.HyperCommGrid) -> None:
    """Layers on tp issue collectives in backward, beside the sums over edp."""
    experts = grid.get_group("edp")
    assert grid.get_ranks("edp") == grid.get_ranks("tp")
    assert common_group(experts, grid) is experts


@pytest.mark.ranks(2, pp=2, groups={"ends": {"of": "pp", "pick": ["first", "last"]}})
def test_a_picked_group_is_not_taken(grid: commgrid.HyperCommGrid) -> None:
    stages = grid.get_group("pp")
    assert common_group(stages, grid) is stages
    assert common_group(stages, grid, ("pp", "edp")) is stages
    assert common_group(grid.get_group("ends"), grid) is grid.get_group("ends")
