"""Layers whose backward adds weight gradients to the reducer's buffer.

The oracle is the same layer with a hook on each weight: autograd then has the gradient and adds it.
One microbatch gives the same bits, as a sum that begins with zeros has no other order; several are
added up in another order and agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commgrid import CommGridError
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.data_parallel.slot import Slot
from commgrid.expert import GroupedExperts, MoELayer
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear, initialize_parameters

WIDTH = 8
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@contextmanager
def opened() -> Iterator[list[str]]:
    """Names of the weights whose buffers a backward writes to within the block."""
    names: list[str] = []
    before = Slot.open

    def seen(self: Slot) -> Tensor | None:
        into = before(self)
        if into is not None:
            names.append(self.placement.name)
        return into

    Slot.open = seen  # type: ignore[method-assign]
    try:
        yield names
    finally:
        Slot.open = before  # type: ignore[method-assign]


def block(dtype: torch.dtype, sequence_parallel: bool = False) -> nn.Module:
    options: dict[str, Any] = {"dtype": dtype, "sequence_parallel": sequence_parallel}
    model = nn.Sequential(
        ColumnParallelLinear(WIDTH, 2 * WIDTH, **options),
        nn.Tanh(),
        RowParallelLinear(2 * WIDTH, WIDTH, **options),
    )
    initialize_parameters(model, seed=0)
    return model


def experts(dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(MoELayer(WIDTH, 2 * WIDTH, 4, 2)).to(dtype)
    initialize_parameters(model, seed=0)
    return model


def data(microbatch: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(6, 2, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def hooked(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: None)
    return model


def gradients(model: nn.Module, num: int, dtype: torch.dtype, shard: bool = False) -> list[Tensor]:
    """Of `num` microbatches, summed over ranks and, with more than one, added up."""
    reducer = GradientReducer(model, shard=shard)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    for step in range(2):
        for i in range(num):
            with reducer.no_sync() if i < num - 1 else nullcontext():
                model(data(2 * step + i, dtype)).float().square().mean().backward()
        reducer.finish()
        found = [piece.gradient.clone() for piece in reducer.pieces]
        optimizer.step()
    reducer.close()
    return found


def same(one: list[Tensor], other: list[Tensor], num: int, dtype: torch.dtype) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours.dtype == theirs.dtype
        if num == 1:
            assert torch.equal(ours, theirs)
        else:
            close = ROUNDING[dtype]
            torch.testing.assert_close(
                ours, theirs, rtol=close, atol=close * float(ours.abs().max())
            )


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("num", [1, 2])
def test_sliced_layers_add_to_the_buffer(
    sequence_parallel: bool, dtype: torch.dtype, num: int
) -> None:
    with opened() as names:
        ours = gradients(block(dtype, sequence_parallel), num, dtype)
    assert names == ["2.weight", "0.weight"] * 2 * num
    with opened() as names:
        theirs = gradients(hooked(block(dtype, sequence_parallel)), num, dtype)
    assert not names
    same(ours, theirs, num, dtype)


@pytest.mark.ranks(2, ep=2)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("num", [1, 2])
def test_experts_add_to_the_buffer(dtype: torch.dtype, shard: bool, num: int) -> None:
    with opened() as names:
        ours = gradients(experts(dtype), num, dtype, shard)
    assert len(names) == 4 * num
    same(ours, gradients(hooked(experts(dtype)), num, dtype, shard), num, dtype)


# -- ways to reach a weight ----------------------------------------------------------------


class Uses(nn.Module):
    """A layer whose weight is used twice by the layer and once past it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ColumnParallelLinear(
            WIDTH, WIDTH, bias=False, gather_output=True, dtype=torch.float64
        )
        initialize_parameters(self, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.layer.weight
        return torch.cat([self.layer(self.layer(x)), 3 * F.linear(x, weight)], -1)


def plainly(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def twice(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def recomputed(model: nn.Module, x: Tensor) -> None:
    y: Any = checkpoint(model, x, use_reentrant=False)
    y.square().sum().backward()


def offloaded(model: nn.Module, x: Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).square().sum()
    loss.backward()


def watched(model: nn.Module, x: Tensor) -> None:
    with torch.autograd.set_detect_anomaly(True):
        plainly(model, x)


def asked(model: nn.Module, x: Tensor) -> None:
    """The gradient by itself first, which leaves `.grad` alone."""
    weights = list(model.parameters())
    loss = model(x).square().sum()
    found = torch.autograd.grad(loss, weights, retain_graph=True)
    assert all(weight.grad is None for weight in weights)
    loss.backward()
    for weight, gradient in zip(weights, found, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-12, atol=1e-12)


def of_some(model: nn.Module, x: Tensor) -> None:
    """Each weight's by a backward of its own."""
    for weight in model.parameters():
        model(x).square().sum().backward(inputs=[weight])


def set_before(model: nn.Module, x: Tensor) -> None:
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    plainly(model, x)


def seen_late(model: nn.Module, x: Tensor) -> None:
    """A hook that doubles the gradient once it is there, and one over several gradients."""
    counted: list[int] = []

    def twofold(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)

    weights = list(model.parameters())
    handles = [weight.register_post_accumulate_grad_hook(twofold) for weight in weights]
    handles.append(
        torch.autograd.graph.register_multi_grad_hook(
            weights, lambda found: counted.append(sum(each is not None for each in found))
        )
    )
    plainly(model, x)
    for handle in handles:
        handle.remove()
    assert counted == [len(weights)]


WAYS = [plainly, twice, recomputed, offloaded, watched, asked, of_some, set_before, seen_late]


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
@pytest.mark.parametrize("kind", ["block", "uses"])
def test_all_ways_to_a_gradient_find_all_of_it(
    kind: str, way: Callable[[nn.Module, Tensor], None]
) -> None:
    """Against the same model without a reducer, which has nothing to sum over one data rank."""
    x = data(0, torch.float64)
    models = [Uses() if kind == "uses" else block(torch.float64) for _ in range(2)]
    way(models[1], x)
    reducer = GradientReducer(models[0])
    with reducer.no_sync():
        way(models[0], x)
    reducer.finish()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    reducer.close()


@pytest.mark.ranks(2, tp=2)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_with_a_graph_is_autograds() -> None:
    """A penalty on it is then refused, as without a reducer, and never loses this part."""
    found: list[list[Tensor]] = []
    for reduced in (True, False):
        model = block(torch.float64)
        reducer = GradientReducer(model) if reduced else None
        with reducer.no_sync() if reducer is not None else nullcontext(), opened() as names:
            model(data(0, torch.float64)).square().sum().backward(create_graph=True)
            assert not names
            made = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([gradient.detach().clone() for gradient in made])
            with pytest.raises(CommGridError, match="was differentiated again"):
                torch.stack([gradient.square().sum() for gradient in made]).sum().backward()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, tp=2)
def test_frozen_weights_are_left_alone() -> None:
    model = block(torch.float64)
    reducer = GradientReducer(model)
    model[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
    with opened() as names:
        plainly(model, data(0, torch.float64))
    assert names == ["2.weight"]
    reducer.finish()
    assert model[0].weight.grad is None  # type: ignore[index,union-attr]


@pytest.mark.ranks(2, tp=2)
def test_autocast_adds_in_the_dtype_of_the_product() -> None:
    found = []
    for watch in (False, True):
        model = block(torch.float32)
        reducer = GradientReducer(hooked(model) if watch else model)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(data(0, torch.float32))
        y.float().square().sum().backward()
        reducer.finish()
        found.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


@pytest.mark.ranks(2, ep=2)
def test_an_expert_that_got_no_row_has_a_gradient_of_zeros() -> None:
    model = GroupedExperts(WIDTH, WIDTH, 6).double()
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    x, weights = data(0, torch.float64).view(-1, WIDTH), torch.ones(12, dtype=torch.float64)
    for _ in range(2):
        reducer.zero_grad()
        model(x, weights, [8, 0, 4]).square().sum().backward()
        reducer.finish()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad[0].any()
            assert not parameter.grad[1].any()


@pytest.mark.ranks(2, tp=2)
def test_compiled_layers_leave_it_to_autograd() -> None:
    found = []
    for compiled in (True, False):
        model = block(torch.float64)
        reducer = GradientReducer(model)
        run: Any = torch.compile(model, backend="aot_eager") if compiled else model
        for step in range(2):
            plainly(run, data(step, torch.float64))
            reducer.finish()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
    for i in range(2):
        for ours, theirs in zip(found[i], found[2 + i], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
