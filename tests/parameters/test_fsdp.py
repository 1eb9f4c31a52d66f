"""FSDP2 over the wrong ranks, or with another divisor for experts, against the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import commgrid
from commgrid import GridMismatchError, SpecError
from commgrid.data_parallel import clip_gradients, gradient_norm
from commgrid.expert import MoELayer
from commgrid.parameters import mark_parameters, placements
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear, initialize_parameters
from commgrid.torch_compat.dtensor import gradient_divisors
from tests.expert.dense import Case, mixture

# Sums of some 100 products of numbers around 1, in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        exact = {"dtype": torch.float64}
        self.inner = nn.Linear(4, 4, **exact)
        self.up, self.down = ColumnParallelLinear(4, 8, **exact), RowParallelLinear(8, 4, **exact)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.inner(x))))
        return y


def block() -> Block:
    made = Block()
    torch.manual_seed(0)
    nn.init.normal_(made.inner.weight)
    nn.init.normal_(made.inner.bias)
    initialize_parameters(made, seed=0)
    return made


def data(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


# -- ranks that hold other slices --------------------------------------------------------


def by_layer(model: nn.Module) -> None:
    for layer in model.children():
        fully_shard(layer)


def hybrid(model: nn.Module) -> None:
    fully_shard(model, mesh=commgrid.get_grid().device_mesh("dp", "tp"))


def copied_over_tp(model: nn.Module) -> None:
    fully_shard(model, mesh=commgrid.get_grid().device_mesh("tp", "dp"))


@pytest.mark.ranks(4, tp=2)
@pytest.mark.parametrize("shard", [fully_shard, by_layer, hybrid, copied_over_tp])
def test_fsdp_over_ranks_with_other_slices_is_refused(shard: Callable[[nn.Module], Any]) -> None:
    """When it is applied, so that a model for evaluation is refused too."""
    told = r"fully_shard over ranks 0-3 .*Linear.weight .* have different slices"
    with pytest.raises(SpecError, match=told):
        shard(block())


@pytest.mark.ranks(2, ep=2)
def test_fsdp_of_experts_over_all_data_is_refused(grid: HyperCommGrid) -> None:
    layer = MoELayer(4, 8, 4, 2)
    with pytest.raises(SpecError, match=r"GroupedExperts.up .* cut along dim 0 over 'ep'"):
        fully_shard(layer, mesh=grid.device_mesh("dp_cp"))


@pytest.mark.ranks(4, tp=2)
def test_fsdp_over_the_ranks_with_copies(grid: HyperCommGrid) -> None:
    alone, model = block(), block()
    fully_shard(model, mesh=grid.device_mesh("dp_cp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    own = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for _ in range(2):
        model(data(grid.get_local_rank("dp"))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.stack([alone(data(rank)).square().mean() for rank in range(2)]).mean().backward()
        own.step()
        own.zero_grad()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(one), full(other), **CLOSE)


# -- the divisor of experts' gradients ---------------------------------------------------


KINDS = {
    "fp32": (torch.float32, MixedPrecisionPolicy()),
    "bf16": (torch.bfloat16, MixedPrecisionPolicy()),
    "fp64": (torch.float64, MixedPrecisionPolicy()),
    "fp32 computed in bf16": (torch.float32, MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fp32 summed in fp64": (torch.float32, MixedPrecisionPolicy(reduce_dtype=torch.float64)),
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [None, 1.0, 2.0, 4.0])
def test_the_divisor_is_torchs(grid: HyperCommGrid, kind: str, factor: float | None) -> None:
    """Measured: every rank's gradient is 1, so their sum is the number of ranks."""
    dtype, mixed = KINDS[kind]
    for forced in (False, True):
        if factor not in (None, float(grid.world_size)) and grid.world_size > 1:
            forced = True  # gloo multiplies no factor into a sum
        layer: Any = nn.Linear(1, 2, bias=False, dtype=dtype)
        fully_shard(layer, mesh=grid.device_mesh("dp"), mp_policy=mixed)
        if factor is not None:
            layer.set_gradient_divide_factor(factor)
        layer.set_force_sum_reduction_for_comms(forced)
        assert gradient_divisors(layer) == {}
        layer(torch.ones(1, 1, dtype=dtype)).sum().backward()
        found = full(layer.weight.grad)
        assert gradient_divisors(layer) == {layer: grid.world_size / found[0].item()}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.moe = MoELayer(4, 6, 4, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(self.inner(x))
        return y


def experts() -> Experts:
    made = Experts()
    torch.manual_seed(0)
    nn.init.normal_(made.inner.weight)
    initialize_parameters(made.moe, seed=0)
    return made


def sharded_experts(grid: HyperCommGrid) -> Experts:
    """As docs/meshes.md shards them."""
    model = experts()
    fully_shard(model.moe.experts, mesh=grid.device_mesh("edp"))
    return fully_shard(model, mesh=grid.device_mesh("dp_cp"))


def expected(grid: HyperCommGrid) -> dict[str, Tensor]:
    """This rank's slices of the gradients of the mean over all ranks' data, without the layer."""
    model = experts()
    whole: dict[str, Tensor] = {}
    for p in placements(model):
        tensor = p.parameter.detach()
        for dim, group in p.shards:
            parts = [torch.empty_like(tensor) for _ in range(group.size)]
            dist.all_gather(parts, tensor.contiguous(), group=group.group)
            tensor = torch.cat(parts, dim)
        whole[p.name.removeprefix("moe.")] = tensor.clone().requires_grad_()
    losses = [
        mixture(data(rank) @ whole["inner.weight"].t(), whole, Case(num_experts=4)).square().mean()
        for rank in range(grid.world_size)
    ]
    found = torch.autograd.grad(torch.stack(losses).mean(), list(whole.values()))
    gradients = dict(zip(whole, found, strict=True))
    for p in placements(model):
        for dim, group in p.shards:
            name = p.name.removeprefix("moe.")
            gradients[name] = gradients[name].chunk(group.size, dim)[group.rank]
    return gradients


def one_each(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [parameter]} for parameter in model.parameters()]  # meshes differ


@pytest.mark.ranks([2, 4], ep=2)
@pytest.mark.parametrize("factor", [None, "of the ranks"])
def test_experts_averaged_over_fewer_ranks_are_refused(
    grid: HyperCommGrid, factor: str | None
) -> None:
    """Over one rank in fp64 torch divides twice by the factor that would be right."""
    model = sharded_experts(grid)
    if factor is not None:
        model.moe.experts.set_gradient_divide_factor(float(grid.world_size))  # type: ignore[operator]
        if grid.world_size == 4:
            model.moe.experts.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(one_each(model), lr=0.1)
    model(data(grid.rank)).square().mean().backward()
    if factor is not None and grid.world_size == 4:
        for name, gradient in expected(grid).items():
            own = dict(model.named_parameters())[name if "inner" in name else f"moe.{name}"].grad
            torch.testing.assert_close(full(own), gradient, **CLOSE)
        clip_gradients(model, 1.0)
        optimizer.step()
        return
    told = r"FSDP2 divides the gradients of FSDPGroupedExperts by [124] and those of the rest of"
    for look in (optimizer.step, lambda: gradient_norm(model), lambda: clip_gradients(model, 1.0)):
        with pytest.raises(SpecError, match=told):
            look()


@pytest.mark.ranks([2, 4], ep=2)
def test_experts_whose_sums_are_divided_by_the_loss(grid: HyperCommGrid) -> None:
    """The way out that the error names, on one rank of edp and on two."""
    model = sharded_experts(grid)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    (model(data(grid.rank)).square().mean() / grid.size("dp_cp")).backward()
    found = {name.removeprefix("moe."): p.grad for name, p in model.named_parameters()}
    for name, gradient in expected(grid).items():
        torch.testing.assert_close(full(found[name]), gradient, **CLOSE)
    clip_gradients(model, 1.0)
    torch.optim.AdamW(one_each(model), lr=0.1).step()


@pytest.mark.ranks(2, ep=2)
def test_experts_of_ones_own_are_looked_at_by_the_norm(grid: HyperCommGrid) -> None:
    model = nn.Sequential(nn.Linear(4, 4), mark_parameters(nn.Linear(4, 4), region="expert"))
    fully_shard(model[1], mesh=grid.device_mesh("edp"))
    fully_shard(model, mesh=grid.device_mesh("dp_cp"))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(SpecError, match="FSDP2 divides the gradients of FSDPLinear by 1"):
        gradient_norm(model)
    model[1].requires_grad_(False)
    gradient_norm(model)


# -- copies over which nothing is summed -------------------------------------------------


def parted(grid: HyperCommGrid, *axes: str, ignored: bool = False) -> nn.Module:
    """After a backward, with other data on each rank of dp and cp."""
    model = block()
    left_out = set(model.inner.parameters()) if ignored else None
    fully_shard(model, mesh=grid.device_mesh(*axes), ignored_params=left_out)
    model(data(grid.get_local_rank("dp_cp"))).square().mean().backward()
    return model


@pytest.mark.ranks(4, dp_replicate=2, dp_shard=2)
def test_gradients_that_nothing_sums_are_refused(grid: HyperCommGrid) -> None:
    """A mesh of one rank, half of the ranks, and parameters that FSDP2 was to ignore."""
    for axes, ignored in ((("cp",), False), (("dp_shard",), False), (("dp_cp",), True)):
        told = r"the gradient of inner.weight .* differs between .* nothing has summed over them"
        with pytest.raises(GridMismatchError, match=told):
            clip_gradients(parted(grid, *axes, ignored=ignored), 1.0)


@pytest.mark.ranks(4, dp_replicate=2, dp_shard=2)
def test_gradients_that_are_summed_pass(grid: HyperCommGrid) -> None:
    """By HSDP, or by hand over the ranks that the mesh lacks; the norm is the unsharded model's."""
    alone = copy.deepcopy(block())
    torch.stack([alone(data(rank)).square().mean() for rank in range(4)]).mean().backward()
    squares = [full(parameter.grad).square().sum() for parameter in alone.parameters()]
    wanted = torch.stack(squares).sum().sqrt()
    for axes, by_hand in (
        (("dp_cp",), None), (("dp_replicate", "dp_shard"), None), (("cp",), "dp_cp"),
        (("dp_shard",), "dp_replicate"),
    ):  # fmt: skip
        model = parted(grid, *axes)
        for parameter in model.parameters() if by_hand else ():
            gradient = parameter.grad.to_local()  # type: ignore[union-attr]
            dist.all_reduce(gradient, group=grid.get_group(str(by_hand)))
            gradient.div_(grid.size(str(by_hand)))
        torch.testing.assert_close(gradient_norm(model), wanted, **CLOSE)
