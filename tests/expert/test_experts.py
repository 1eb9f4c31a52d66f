"""The experts of a rank: one kernel or a loop, gradients, copies, initial weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import commgrid
from commgrid.expert import GroupedExperts, MoELayer, SharedExpert, experts
from commgrid.tensor_parallel import initialize_parameters
from tests.ranks import run_on_ranks


def alone(function: Any, *args: Any) -> Any:
    """On one rank, in a grid that has experts."""

    def on_a_rank() -> Any:
        commgrid.initialize(ep=1, etp=1)
        return function(*args)

    return run_on_ranks(on_a_rank, 1)[0]


def gradients(gated: bool) -> None:
    torch.manual_seed(0)
    activation = F.silu if gated else F.gelu
    made = GroupedExperts(3, 4, 3, gated=gated, activation=activation, dtype=torch.float64)
    up, down = made.up.detach().clone(), made.down.detach().clone()
    x = torch.randn(5, 3, dtype=torch.float64)
    weights = torch.rand(5, dtype=torch.float64)

    def compute(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        given = {"up": up, "down": down}
        y: Tensor = torch.func.functional_call(made, given, (x, weights, [2, 0, 3]))
        return y

    inputs = [one.requires_grad_() for one in (x, weights, up, down)]
    assert torch.autograd.gradcheck(compute, inputs)


@pytest.mark.parametrize("gated", [False, True])
def test_gradients(gated: bool) -> None:
    alone(gradients, gated)


def kernel(dtype: torch.dtype, main_grad: bool) -> None:
    torch.manual_seed(0)
    made = GroupedExperts(16, 32, 4, gated=True, activation=F.silu, dtype=dtype)
    x, weights = torch.randn(10, 16, dtype=dtype), torch.rand(10)
    upstream = torch.randn(10, 16, dtype=dtype)
    found = []
    for at_once in (False, True):
        experts.at_once = lambda *_, at_once=at_once: at_once  # type: ignore[misc]
        made.zero_grad()
        for parameter in made.parameters():
            if main_grad:
                parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        r, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = made(r, w, [3, 0, 6, 1])
        y.backward(upstream)
        kept = [p.main_grad if main_grad else p.grad for p in made.parameters()]  # type: ignore[attr-defined]
        found.append([y.detach(), r.grad, w.grad, *kept])
    # The same products summed in another order.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_for_all_experts_equals_the_loop(dtype: torch.dtype, main_grad: bool) -> None:
    alone(kernel, dtype, main_grad)


def autocast() -> None:
    layer = MoELayer(8, 16, 4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(6, 8))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {torch.float32}


def test_autocast() -> None:
    alone(autocast)


def copies() -> None:
    torch.manual_seed(0)
    layer = MoELayer(8, 16, 4, 2, shared_ffn_hidden=8, shared_scaled=True)
    x = torch.randn(6, 8)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    stored = io.BytesIO()
    torch.save(layer, stored)
    commgrid.destroy()
    commgrid.initialize(ep=1, etp=1)
    stored.seek(0)
    again = torch.load(stored, weights_only=False)
    assert torch.equal(again(x), expected)
    assert set(layer.state_dict()) == {
        "router.weight", "experts.up", "experts.down",
        "shared.up", "shared.down", "shared.scale",
    }  # fmt: skip


def test_a_layer_copies_and_pickles() -> None:
    alone(copies)


def from_meta() -> None:
    here, there = MoELayer(8, 16, 4, 2), MoELayer(8, 16, 4, 2, device="meta")
    initialize_parameters(here, seed=3)
    initialize_parameters(there.to_empty(device="cpu"), seed=3)
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(one, other)
    up = here.experts.up
    assert not torch.equal(up[0], up[1])
    assert up.abs().max() <= 8**-0.5
    assert up.std().item() == pytest.approx(8**-0.5 / 3**0.5, rel=0.1)


def test_weights_are_drawn_alike_from_meta() -> None:
    alone(from_meta)


def shared(sequence_parallel: bool) -> None:
    """Against the same expert on one rank."""
    grid = commgrid.initialize(tp=2)
    torch.manual_seed(0)
    made = SharedExpert(
        4, 6, gated=True, activation=F.silu, scaled=True, sequence_parallel=sequence_parallel,
        dtype=torch.float64,
    )  # fmt: skip
    torch.manual_seed(1)
    up, gate, down, scale, x = (
        torch.randn(*shape, dtype=torch.float64)
        for shape in ((6, 4), (6, 4), (4, 6), (1, 4), (6, 4))
    )
    me = grid.get_local_rank("tp")
    with torch.no_grad():
        made.up.copy_(up.chunk(2)[me])
        made.gate.copy_(gate.chunk(2)[me])  # type: ignore[union-attr]
        made.down.copy_(down.chunk(2, 1)[me])
        made.scale.copy_(scale)  # type: ignore[union-attr]
    expected = (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t() * torch.sigmoid(x @ scale.t())
    mine = x.chunk(2)[me] if sequence_parallel else x
    found = made(mine)
    wanted = expected.chunk(2)[me] if sequence_parallel else expected
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_shared_expert(sequence_parallel: bool) -> None:
    run_on_ranks(shared, 2, sequence_parallel)
