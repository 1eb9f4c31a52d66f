"""Groups of parts of axes: right, or refused where whole axes are needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commgrid import SpecError
from commgrid.collectives.group_ref import GroupRef
from commgrid.data_parallel import GradientReducer, gradient_norm
from commgrid.expert import GroupedExperts
from commgrid.parameters import mark_parameters, placements
from commgrid.parameters.layout import num_distinct
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, initialize_parameters

HALVES = {"tp_halves": {"of": "tp", "split": {"tp_out": 2, "tp_in": 2}}}
DATA = {"dp_halves": {"of": "dp", "split": {"dp_out": 2, "dp_in": 2}}}


@pytest.mark.ranks(4, tp=4, groups=HALVES)
def test_the_norm_of_a_layer_over_half_of_an_axis(grid: HyperCommGrid) -> None:
    """Two slices, each on two ranks: every square counts once."""
    layer = ColumnParallelLinear(4, 8, bias=False, group="tp_in", dtype=torch.float64)
    initialize_parameters(layer, seed=0)
    layer.weight.grad = torch.full_like(layer.weight, 2.0)
    assert gradient_norm(layer).item() == pytest.approx((32 * 2.0**2) ** 0.5, rel=1e-12)


@pytest.mark.ranks(4, groups=DATA)
def test_partial_gradients_are_not_combined_with_a_part_of_an_axis(grid: HyperCommGrid) -> None:
    norm = mark_parameters(nn.LayerNorm(4), partial="dp_out")
    with pytest.raises(
        SpecError, match=r"summed over 'dp_in' and 'dp_out', of which 'dp_in' lists"
    ):
        GradientReducer(norm, group="dp_in")


@pytest.mark.ranks(4, pp=2, ep=2)
def test_slices_over_a_bare_group_count_once(grid: HyperCommGrid) -> None:
    """Experts of each ep rank, and of each stage, are distinct."""
    experts = GroupedExperts(4, 2, 4)
    for placement in placements(experts):
        bare = GroupRef(grid.get_group("edp"))
        cut = type(placement)(
            placement.name, placement.parameter, ((0, bare),), None, "expert", placement.shape
        )
        assert num_distinct(cut, grid) == bare.size * 2 * 2
