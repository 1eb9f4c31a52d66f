"""Partial gradients without a reducer, and gradients that FSDP2 has sharded."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import commgrid
from commgrid.data_parallel import (
    GradientReducer,
    clip_gradients,
    gradient_norm,
    reduce_partial_gradients,
)
from commgrid.expert import GroupedExperts
from commgrid.parameters import Distinct, layout_of, mark_parameters, placements
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import run_on_ranks


def model_of(*, sharded: bool, grid: commgrid.HyperCommGrid) -> nn.Sequential:
    """A norm whose gradients are partial over tp, one in another precision, and a layer's, which
    are equal."""
    torch.manual_seed(0)
    norms = nn.LayerNorm(6, dtype=torch.float64), nn.LayerNorm(4, dtype=torch.float32)
    for norm in norms:
        mark_parameters(norm, partial="tp")
    model = nn.Sequential(*norms, nn.Linear(6, 5, dtype=torch.float64))
    if sharded:
        for layer in model:
            fully_shard(layer, mesh=grid.device_mesh("dp"))
    return model


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def summed(sharded: bool) -> tuple[list[bool], float, float]:
    """Gradients of rank + 1 everywhere: which are right, their norm, and the norm once clipped."""
    grid = commgrid.initialize(tp=2, dp=2)
    model = model_of(sharded=sharded, grid=grid)
    tp = grid.get_local_rank("tp")
    for index, parameter in enumerate(model.parameters()):
        # Equal on all ranks of dp; of the last two, which are not partial, also on those of tp.
        parameter.grad = torch.full_like(parameter, 1.0 + (tp if index < 4 else 0))
    reduce_partial_gradients(model)
    right = [
        bool((local(p.grad) == (3.0 if index < 4 else 1.0)).all())
        for index, p in enumerate(model.parameters())
    ]
    norm = gradient_norm(model).item()
    assert clip_gradients(model, 2.0).item() == norm
    clipped = gradient_norm(model).item()
    commgrid.shutdown()
    return right, norm, clipped


@pytest.mark.parametrize("sharded", [False, True])
def test_sums_over_tp_and_norms_of_the_whole(sharded: bool) -> None:
    """On 2 ranks of dp FSDP cuts 5 rows into 3 and 2; the norm is that of the full gradients."""
    expected = (2 * (6 + 4) * 9.0 + (5 * 6 + 5) * 1.0) ** 0.5
    for right, norm, clipped in run_on_ranks(summed, 4, sharded, backend=None, launcher="torchrun"):
        assert right == [True] * 6
        assert norm == pytest.approx(expected, rel=1e-6)  # one layer's are in fp32
        assert clipped == pytest.approx(2.0, rel=1e-6)


def refused() -> list[str]:
    grid = commgrid.initialize(tp=2)
    told = []
    with pytest.raises(commgrid.SpecError) as error:
        GradientReducer(model_of(sharded=True, grid=grid))
    told.append(str(error.value))
    model = model_of(sharded=False, grid=grid)
    reducer = GradientReducer(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(commgrid.CommGridError) as other:
        reduce_partial_gradients(model)
    told.append(str(other.value))
    reducer.close()
    commgrid.shutdown()
    return told


def test_what_reduces_already_is_left_alone() -> None:
    for sharded, reduced in run_on_ranks(refused, 2, backend=None, launcher="torchrun"):
        assert "is a DTensor, whose gradients FSDP2 averages itself" in sharded
        assert "its GradientReducer has added it up over 'tp' (2 ranks) already" in reduced


def ensembles() -> list[float]:
    """Two models along an axis of the user's own, with gradients of 1 and of 3."""
    grid = commgrid.initialize(tp=2, member=2, order="tp-member-dp")
    layer = ColumnParallelLinear(4, 4, bias=False, dtype=torch.float64)
    member = grid.get_local_rank("member")
    torch.manual_seed(member)
    nn.init.constant_(layer.weight, float(member))
    reducer = GradientReducer(layer)
    layer(torch.full((1, 4), 1.0 + 2.0 * member, dtype=torch.float64)).sum().backward()
    reducer.finish()
    found = [reducer.gradient_norm().item(), gradient_norm(layer).item()]
    commgrid.shutdown()
    return [*found, 4.0 * (1.0 + 2.0 * member)]


def test_norms_are_of_one_member_of_an_ensemble() -> None:
    """A weight of 16 equal gradients g has the norm 4 g."""
    for one, other, expected in run_on_ranks(ensembles, 4):
        assert one == pytest.approx(expected, rel=1e-12)
        assert other == pytest.approx(expected, rel=1e-12)


@pytest.mark.ranks(2)
def test_a_partial_dtensor_gradient_is_summed_for_the_norm(grid: commgrid.HyperCommGrid) -> None:
    """Of 3 and 4 on two ranks the gradient is 7, not what 3 and 4 have as shards, 5."""
    mesh = grid.device_mesh("dp")
    weight = nn.Parameter(distribute_tensor(torch.zeros(1, 1), mesh, [Replicate()]))
    layer = nn.Module()
    layer.weight = weight
    local = torch.full((1, 1), 3.0 + grid.rank)
    weight.grad = DTensor.from_local(local, mesh, [Partial()])
    assert gradient_norm(layer).item() == pytest.approx(7.0, rel=1e-6)


@pytest.mark.ranks(8, tp=2, pp=2, ep=2, etp=2)
def test_a_layout_says_where_slices_copies_and_others_are(grid: commgrid.HyperCommGrid) -> None:
    layer = RowParallelLinear(4, 4, sequence_parallel=True)
    experts = GroupedExperts(4, 8, 2)
    norm = mark_parameters(nn.LayerNorm(4), partial="tp")
    model = nn.ModuleDict({"layer": layer, "experts": experts, "norm": norm})
    layouts = {p.name: layout_of(p, grid) for p in placements(model)}
    weight, bias, scale = (layouts[n] for n in ("layer.weight", "layer.bias", "norm.weight"))
    assert weight.weight["tp"] == Shard(1)
    assert isinstance(weight.weight["pp"], Distinct)
    assert weight.copied_axes == tuple(a for a in weight.weight if a not in ("tp", "pp"))
    assert weight.num_distinct == 4
    for partial in (bias, scale):
        assert partial.weight["tp"] == Replicate()
        assert partial.grad["tp"] == Partial()
        assert partial.num_distinct == 2
    expert = layouts["experts.up"]
    assert expert.weight["ep"] == Shard(0)
    assert expert.shape[0] == 2
    assert "tp" not in expert.weight
    assert expert.num_distinct == 8
