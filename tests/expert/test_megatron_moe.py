"""The layer against megatron-core's own, with the same weights on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import commgrid
from commgrid.expert import MoELayer, follow_loss_scale
from commgrid.testing import run_on_ranks
from tests import megatron_moe, peers  # noqa: F401  (imports megatron with its warnings off)
from tests.sizes import some

# Megatron takes the softmax of the chosen logits in fp32: 2^-24 of weights up to 1 and outputs and
# gradients of some units.
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "gated, aux loss": (
        {"gated": True, "activation": F.silu, "aux_loss": 0.1, "softmax_over": "all"},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1,
         "moe_router_pre_softmax": True},
    ),
    "sigmoid, shared expert": (
        {"score": "sigmoid", "scale": 2.5, "shared_ffn_hidden": 12, "shared_scaled": True},
        {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5,
         "moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True},
    ),
    "capacity": (
        {"capacity_factor": 1.0, "top_k": 1, "softmax_over": "all"},
        {"moe_expert_capacity_factor": 1.0, "moe_router_pre_softmax": True},
    ),
    "padded": (
        {"capacity_factor": 1.0, "pad": True, "softmax_over": "all"},
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True,
         "moe_router_pre_softmax": True},
    ),
}  # fmt: skip


def compare(sizes: dict[str, int], which: str) -> None:
    grid = commgrid.initialize(**sizes)
    megatron_moe.prepare(grid)
    mine, given = OPTIONS[which]
    torch.manual_seed(0)
    ours = MoELayer(
        8, 12, num_experts=8, dtype=torch.float64, sequence_parallel=True,
        **{"top_k": 2, **mine},
    )  # fmt: skip
    theirs = megatron_moe.layer(grid, ours, **{"moe_router_load_balancing_type": "none", **given})
    torch.manual_seed(1 + grid.rank)
    x = torch.randn(6, 2, 8, dtype=torch.float64)
    upstream = torch.randn_like(x)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1, (y2, _) = ours(x1), theirs(x2)
    torch.testing.assert_close(y1, y2, **CLOSE)
    y1.backward(upstream)
    y2.backward(upstream)
    torch.testing.assert_close(x1.grad, x2.grad, **CLOSE)
    wanted = [weight.grad for _, weight in megatron_moe.pairs(ours, theirs)]
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    for (gradient, _), other in zip(megatron_moe.pairs(ours, theirs), wanted, strict=True):
        torch.testing.assert_close(gradient, other.view(gradient.shape), **CLOSE)
    commgrid.destroy()


def every_option(sizes: list[dict[str, int]]) -> None:
    for one in sizes:
        for which in OPTIONS:
            try:
                compare(one, which)
            except AssertionError as error:
                raise AssertionError(f"{one}, {which}: {error}") from error


@pytest.mark.full("1")
@pytest.mark.parametrize("tp", [1, 2])
def test_as_megatrons_layer(tp: int) -> None:
    sizes = [{"ep": ep, "etp": etp, "tp": tp} for ep, etp in ((1, 1), (2, 1), (4, 1), (2, 2))]
    # Megatron, or its stand-ins for CUDA, change torch and the environment.
    run_on_ranks(every_option, 4, some(sizes[::-1], 1), check=False)


def scaled() -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    grid = commgrid.initialize(tp=2, cp=2, ep=2, etp=1)
    megatron_moe.prepare(grid)
    torch.manual_seed(0)
    ours = MoELayer(
        8, 12, 8, 2, dtype=torch.float64, softmax_over="all", aux_loss=0.3, z_loss=0.2,
        sequence_parallel=True,
    )  # fmt: skip
    theirs = megatron_moe.layer(
        grid, ours, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.3,
        moe_z_loss_coeff=0.2, moe_router_pre_softmax=True,
    )  # fmt: skip
    scale = 65536
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(2.0 * scale))  # times cp, as its schedules do
    torch.manual_seed(1 + grid.rank)
    x = torch.randn(6, 2, 8, dtype=torch.float64)
    (follow_loss_scale(ours(x).square().mean(), ours) * scale).backward()
    (theirs(x)[0].square().mean() * scale).backward()
    mine, other = ours.router.weight.grad, theirs.router.weight.grad
    assert mine is not None
    torch.testing.assert_close(mine / scale, other / scale, **CLOSE)


def test_losses_of_tp_and_cp_are_scaled_as_megatrons_auto_scaler_scales_them() -> None:
    run_on_ranks(scaled, 4, check=False)
