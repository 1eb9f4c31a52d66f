"""The experts of a rank: one kernel or a loop, gradients, copies, initial weights."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import commgrid
from commgrid import SpecError
from commgrid.expert import GroupedExperts, MoELayer, SharedExpert, experts
from commgrid.parameters import placements
from commgrid.tensor_parallel import initialize_parameters
from commgrid.testing import run_on_ranks


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


def kernel(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = GroupedExperts(16, 32, 4, gated=True, activation=F.silu, dtype=dtype)
    x, weights = torch.randn(10, 16, dtype=dtype), torch.rand(10)
    upstream = torch.randn(10, 16, dtype=dtype)
    found = []
    for at_once in (False, True):
        experts.at_once = lambda *_, at_once=at_once: at_once  # type: ignore[misc]
        made.zero_grad()
        r, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = made(r, w, [3, 0, 6, 1])
        y.backward(upstream)
        found.append([y.detach(), r.grad, w.grad, *(p.grad for p in made.parameters())])
    # The same products summed in another order.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_for_all_experts_equals_the_loop(dtype: torch.dtype) -> None:
    alone(kernel, dtype)


def several_backwards() -> None:
    """Also one for the inputs alone before that for all, and for one output after the other."""
    torch.manual_seed(0)
    layer = MoELayer(4, 8, 4, 2, dtype=torch.float64)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    wanted = [x.grad.clone(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
    layer.zero_grad()
    x.grad = None
    loss = layer(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    for one, other in zip([x.grad, *(p.grad for p in layer.parameters())], wanted, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(first, wanted[0])
    y = layer(x)
    rows = [torch.autograd.grad(y[0, i], x, retain_graph=True)[0] for i in range(4)]
    fresh = [torch.autograd.grad(layer(x)[0, i], x)[0] for i in range(4)]
    assert all(torch.equal(one, other) for one, other in zip(rows, fresh, strict=True))


def test_several_backwards_through_one_graph() -> None:
    alone(several_backwards)


def gradient_edited_between_halves() -> None:
    """As a pipeline asks: for the inputs first, for the weights later."""
    torch.manual_seed(0)
    made = GroupedExperts(4, 6, 2, dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weights, dy = torch.rand(5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    inputs = [x, *made.parameters()]
    wanted = torch.autograd.grad(made(x, weights, [3, 2]), inputs, dy)
    for factor in (1, 10):
        upstream = dy.clone()
        y = made(x, weights, [3, 2])
        (dx,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
        upstream.mul_(factor)
        found = torch.autograd.grad(y, list(made.parameters()), upstream)
        assert torch.equal(dx, wanted[0])
        for one, other in zip(found, wanted[1:], strict=True):
            torch.testing.assert_close(one, factor * other, rtol=1e-14, atol=1e-14)


def test_a_gradient_edited_between_the_halves_of_a_backward_counts_as_it_is() -> None:
    alone(gradient_edited_between_halves)


def random_activation() -> None:
    """Where nothing is computed again it may draw: without gradients, and dropped of nothing."""
    experts = GroupedExperts(8, 16, 3, activation=lambda x: F.dropout(F.silu(x), 0.5))
    x, weights = torch.randn(9, 8), torch.rand(9)
    with pytest.raises(SpecError, match="the activation has drawn random numbers, and backward"):
        experts(x, weights, [4, 0, 5])
    with torch.no_grad():
        experts(x, weights, [4, 0, 5])
    other = GroupedExperts(8, 16, 3, activation=lambda x: F.dropout(F.silu(x), 0.5, training=False))
    F.dropout(other(x, weights, [4, 0, 5])).sum().backward()


def test_a_random_activation_is_refused() -> None:
    alone(random_activation)


def compiled_random_activation() -> None:
    """y is linear in both weights, so that each has ∂w · w = ∂y · y if the masks are the same."""
    warnings.simplefilter("ignore")  # torch's own, at a break in the graph
    torch.manual_seed(0)
    made = MoELayer(8, 16, 4, 2, activation=lambda x: F.dropout(x, 0.5), dtype=torch.float64)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    y = torch.compile(made, backend="aot_eager")(x)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    for weight in made.experts.parameters():
        assert weight.grad is not None
        product = (weight.grad * weight).sum()
        torch.testing.assert_close(product, (y * upstream).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.full
def test_a_compiled_random_activation_has_one_mask() -> None:
    alone(compiled_random_activation)


def refusals() -> None:
    with pytest.raises(SpecError, match="has parameters, which would get no gradients"):
        GroupedExperts(4, 8, 2, activation=torch.nn.PReLU())
    made = GroupedExperts(4, 8, 2, activation=torch.nn.GELU())
    assert {p.region for p in placements(made)} == {"expert"}
    assert sum(1 for _ in placements(made)) == 2


def test_activations_and_marks() -> None:
    alone(refusals)


def balanced() -> list[float]:
    """The bias after some steps, of tokens that differ on every rank."""
    grid = commgrid.initialize(tp=2, ep=2, etp=1)
    torch.manual_seed(0)
    layer = MoELayer(4, 8, 8, 2, bias_rate=0.1)
    torch.manual_seed(1 + grid.get_local_rank("dp"))
    for _ in range(5):
        layer(torch.randn(9, 4))
        layer.update_bias()
    assert layer.router.bias is not None
    assert layer.router.bias.any()
    layer.bfloat16()
    assert layer.router.bias.dtype == torch.float32
    return layer.router.bias.tolist()


def test_the_bias_is_the_same_on_every_rank() -> None:
    found = run_on_ranks(balanced, 4)
    assert all(bias == found[0] for bias in found)


def counted() -> None:
    layer = MoELayer(4, 8, 4, 2, bias_rate=0.1)
    x = torch.randn(6, 4, requires_grad=True)
    for reentrant in (False, True):
        layer.router.seen.zero_()
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert layer.router.seen.sum() == 12


def test_recomputed_tokens_count_once() -> None:
    alone(counted)


def padded_shares() -> None:
    """With tp but no sequence parallelism, shares of 5 tokens differ; padded ones must not."""
    commgrid.initialize(tp=2, ep=2, etp=1)
    torch.manual_seed(0)
    plain = MoELayer(4, 8, 4, 2, dtype=torch.float64)
    padded = MoELayer(4, 8, 4, 2, dtype=torch.float64, pad=True, capacity_factor=4.0)
    padded.load_state_dict(plain.state_dict())
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(padded(x), plain(x), rtol=1e-12, atol=1e-12)


def test_padding_of_unequal_shares() -> None:
    run_on_ranks(padded_shares, 2)


def autocast() -> None:
    layer = MoELayer(8, 16, 4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(6, 8))
        x = torch.randn(500, 8).bfloat16()
        alike = MoELayer(8, 16, 4, 2, activation=lambda x: F.gelu(x.float()))
        routing = layer.router(x)
        assert alike(x).dtype == torch.bfloat16
    exact = layer.router(x)  # logits are of fp32 either way
    assert torch.equal(routing.experts, exact.experts)
    assert torch.equal(routing.weights, exact.weights)
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
    here, there = (MoELayer(8, 16, 4, 2, bias_rate=0.1, device=d) for d in (None, "meta"))
    with torch.device("meta"):
        assert MoELayer(8, 16, 4, 2).experts.up.is_meta
    initialize_parameters(here, seed=3)
    initialize_parameters(there.to_empty(device="cpu"), seed=3)
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(one, other)
    assert there.router.bias is not None
    assert not there.router.bias.any()
    assert not there.router.seen.any()
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
