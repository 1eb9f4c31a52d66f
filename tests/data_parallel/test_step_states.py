"""The states of a step: effects of backward, finish, zero_grad and an optimizer's step on `.grad`.

Each case is one rank's inputs in fp64 and a weight of 4 numbers; the oracle is the mean over ranks
of torch's gradient on each rank alone. 1e-12: two orders above the rounding of such a mean.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import (
    CommGridError,
    GridDestroyedError,
    GridMismatchError,
    ShapeError,
    SpecError,
)
from commgrid.data_parallel import GradientReducer, ShardedOptimizer, gradient_norm
from commgrid.expert import MoELayer
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear, initialize_parameters

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def model_of() -> nn.Module:
    model = nn.Linear(4, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.5)
    return model


def data(rank: int, microbatch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, rank: int, microbatch: int = 0) -> Tensor:
    return model(data(rank, microbatch)).square().mean()


def mean_gradient(*microbatches: int, edit: Callable[[Tensor], Tensor] = lambda g: g) -> Tensor:
    """Of 2 ranks' summed microbatches, at the initial weight; `edit` is applied on each rank."""
    found = []
    for rank in range(2):
        model = model_of()
        for microbatch in microbatches or (0,):
            loss_of(model, rank, microbatch).backward()
        found.append(edit(grad_of(model)))
    return torch.stack(found).mean(0)


def grad_of(model: nn.Module) -> Tensor:
    gradient = model.weight.grad
    assert isinstance(gradient, Tensor)
    return gradient


def same(model: nn.Module, expected: Tensor) -> None:
    torch.testing.assert_close(grad_of(model), expected, **CLOSE)


@pytest.mark.ranks(2)
def test_hooks_of_a_weight_are_seen(grid: HyperCommGrid) -> None:
    """A tensor hook changes the gradient, a post-accumulate hook reads and changes it."""
    model = model_of()
    reducer = GradientReducer(model)
    seen: list[Tensor] = []

    def after(weight: Tensor) -> None:
        assert weight.grad is not None
        seen.append(weight.grad.clone())
        weight.grad.mul_(2.0)

    model.weight.register_hook(lambda gradient: 3.0 * gradient)
    model.weight.register_post_accumulate_grad_hook(after)
    loss_of(model, grid.rank).backward()
    reducer.finish()
    same(model, 6.0 * mean_gradient())
    torch.testing.assert_close(seen[0] * 2.0, grad_of_alone(grid.rank) * 6.0, **CLOSE)


def grad_of_alone(rank: int) -> Tensor:
    model = model_of()
    loss_of(model, rank).backward()
    return grad_of(model)


@pytest.mark.ranks(2, tp=2)
def test_hooks_of_sliced_weights_are_seen() -> None:
    """Layers over a group give autograd real gradients, with and without a reducer."""
    column = ColumnParallelLinear(4, 8, bias=False, dtype=torch.float64)
    row = RowParallelLinear(8, 4, bias=False, dtype=torch.float64)
    model = nn.Sequential(column, row)
    initialize_parameters(model, seed=0)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    reducer = GradientReducer(model)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 2.0 * gradient)
    model(x).square().sum().backward()
    reducer.finish()
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, 2.0 * expected, **CLOSE)


@pytest.mark.ranks(2)
def test_zero_grad_drops_what_no_sync_gathered(grid: HyperCommGrid) -> None:
    for to_none in (True, False):
        model = model_of()
        reducer = GradientReducer(model)
        with reducer.no_sync():
            (1000.0 * loss_of(model, grid.rank)).backward()
        model.zero_grad(set_to_none=to_none)
        loss_of(model, grid.rank, 1).backward()
        reducer.finish()
        same(model, mean_gradient(1))


@pytest.mark.ranks(2)
def test_edits_between_microbatches_count(grid: HyperCommGrid) -> None:
    """In place, by assignment, and a gradient that was put there without a backward."""
    for assigned in (False, True):
        model = model_of()
        reducer = GradientReducer(model)
        with reducer.no_sync():
            loss_of(model, grid.rank).backward()
        if assigned:
            model.weight.grad = grad_of(model) * 2.0
        else:
            grad_of(model).mul_(2.0)
        loss_of(model, grid.rank, 1).backward()
        reducer.finish()
        same(model, 2.0 * mean_gradient(0) + mean_gradient(1))
        model.zero_grad()
        model.weight.grad = torch.full_like(model.weight, float(grid.rank))
        reducer.finish()
        same(model, torch.full((1, 4), 0.5, dtype=torch.float64))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [False, True])
def test_finish_twice_changes_nothing(grid: HyperCommGrid, shard: bool) -> None:
    model = model_of()
    reducer = GradientReducer(model, shard=shard)
    optimizer: Any = (
        ShardedOptimizer(reducer, torch.optim.SGD, lr=1.0)
        if shard
        else torch.optim.SGD(model.parameters(), lr=1.0)
    )
    loss_of(model, grid.rank).backward()
    reducer.finish()
    norm = reducer.gradient_norm().item()
    reducer.finish()
    assert reducer.gradient_norm().item() == pytest.approx(norm, rel=1e-12)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), 0.5 - mean_gradient(), **CLOSE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [False, True])
def test_finish_for_each_microbatch_is_refused(grid: HyperCommGrid, shard: bool) -> None:
    model = model_of()
    reducer = GradientReducer(model, shard=shard)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=1.0)
    loss_of(model, grid.rank).backward()
    reducer.finish()
    with pytest.raises(CommGridError, match=r"reached weight of shape \(1, 4\) whose gradient fin"):
        loss_of(model, grid.rank, 1).backward()
    optimizer.zero_grad()
    loss_of(model, grid.rank, 1).backward()
    reducer.finish()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), 0.5 - mean_gradient(1), **CLOSE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["plain", "sharded", "closure", "fused"])
def test_a_step_without_finish_is_refused(grid: HyperCommGrid, kind: str) -> None:
    """Also where the closure leaves finish out, and by an optimizer inside of backward."""
    model = model_of()
    reducer = GradientReducer(model, shard=kind == "sharded")
    optimizer: Any = (
        ShardedOptimizer(reducer, torch.optim.SGD, lr=1.0)
        if kind == "sharded"
        else torch.optim.SGD(model.parameters(), lr=1.0)
    )

    def closure() -> Tensor:
        loss = loss_of(model, grid.rank)
        loss.backward()
        return loss

    if kind == "fused":
        model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    def step() -> None:
        if kind == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    with pytest.raises(CommGridError, match=r"step\(\) was called while weight of shape \(1, 4\) "):
        step()
    assert model.weight.detach().eq(0.5).all()
    reducer.zero_grad()


@pytest.mark.ranks(2)
def test_a_closure_that_finishes_is_right(grid: HyperCommGrid) -> None:
    """LBFGS calls it several times, with gradients of the call before."""
    model, whole = model_of(), model_of()
    reducer = GradientReducer(model)
    ours = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    alone = torch.optim.LBFGS(whole.parameters(), lr=0.1, max_iter=3)

    def closure() -> float:
        ours.zero_grad()
        loss_of(model, grid.rank).backward()
        reducer.finish()
        losses = torch.stack([loss_of(model, rank).detach() for rank in range(2)])
        return losses.mean().item()

    def of_all() -> Tensor:
        alone.zero_grad()
        loss = (loss_of(whole, 0) + loss_of(whole, 1)) / 2
        loss.backward()
        return loss

    for _ in range(2):
        ours.step(closure)
        alone.step(of_all)  # type: ignore[arg-type]
    torch.testing.assert_close(model.weight, whole.weight, rtol=1e-9, atol=1e-9)  # line searches


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit", ["clip", "unscale", "zero_grad", "none"])
def test_an_edit_before_finish_that_would_be_lost_is_refused(
    grid: HyperCommGrid, edit: str
) -> None:
    """Backward has sent the gradient already; within no_sync it has not, and the edit counts."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for sent in (True, False):
        reducer = GradientReducer(model)
        with nullcontext() if sent else reducer.no_sync():
            (scaler.scale(loss_of(model, grid.rank))).backward()
        edits: dict[str, Callable[[], object]] = {
            "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
            "unscale": lambda scaler=scaler: scaler.unscale_(optimizer),
            "zero_grad": lambda: optimizer.zero_grad(set_to_none=False),
            "none": optimizer.zero_grad,
        }
        if not sent:
            edits[edit]()
        elif edit == "none":  # which cannot be seen before
            edits[edit]()
            with pytest.raises(CommGridError, match=r".grad of weight .* was set after backward"):
                reducer.finish()
        else:
            with pytest.raises(CommGridError, match="that backward has begun to sum with other"):
                edits[edit]()
        if sent:
            reducer.zero_grad()
        else:
            reducer.finish()
            if edit == "clip":
                assert grad_of(model).norm() <= 0.1 + 1e-12
            elif edit == "unscale":
                same(model, mean_gradient())
            elif edit == "zero_grad":
                same(model, torch.zeros(1, 4, dtype=torch.float64))
            else:
                assert model.weight.grad is None
        reducer.close()
        model.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)


@pytest.mark.ranks(2)
def test_two_optimizers_share_a_model(grid: HyperCommGrid) -> None:
    """One has no zero_grad, one skips steps, and a third of the parameters is in neither."""
    names = ("one", "two", "none")
    model = nn.ModuleDict({name: model_of() for name in names})
    reducer = GradientReducer(model)
    first = torch.optim.AdamW(model["one"].parameters(), lr=0.1)
    second = torch.optim.SGD(model["two"].parameters(), lr=0.1)
    for step in range(4):
        sum(loss_of(model[name], grid.rank, step) for name in names).backward()  # type: ignore[union-attr]
        reducer.finish()
        if step == 0:
            for name in names:
                same(model[name], mean_gradient(0))
        same(model["none"], mean_gradient(step))
        first.step()
        if step % 2:
            second.step()
        second.zero_grad()
    assert reducer.gradient_norm() > 0
    weights = [p.detach().clone() for p in model.parameters()]
    other = torch.stack(weights)
    torch.distributed.broadcast(other, 0)
    assert torch.equal(other, torch.stack(weights))


@pytest.mark.ranks(2)
def test_a_scaler_that_skips_a_step(grid: HyperCommGrid) -> None:
    """torch's own, over copies: both ranks see the same infinity after finish."""
    model = model_of()
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(2):
        loss = loss_of(model, grid.rank)
        scaler.scale(loss * float("inf") if step == 0 and grid.rank == 0 else loss).backward()
        reducer.finish()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step == 1)
    torch.testing.assert_close(model.weight.detach(), 0.5 - mean_gradient(), **CLOSE)


@pytest.mark.ranks(2)
def test_a_gradient_is_looked_at_without_a_step(grid: HyperCommGrid) -> None:
    """autograd.grad leaves `.grad` alone; a probe ends with zero_grad, of either kind."""
    model = model_of()
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for to_none in (True, False):
        (asked,) = torch.autograd.grad(loss_of(model, grid.rank), [model.weight])
        torch.testing.assert_close(asked, grad_of_alone(grid.rank), **CLOSE)
        loss_of(model, grid.rank).backward()
        reducer.finish()
        assert gradient_norm(model).item() == pytest.approx(mean_gradient().norm().item())
        optimizer.zero_grad(set_to_none=to_none)
    loss_of(model, grid.rank, 1).backward()
    reducer.finish()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), 0.5 - mean_gradient(1), **CLOSE)


@pytest.mark.ranks(2)
def test_backward_keeps_what_autograd_promises(grid: HyperCommGrid) -> None:
    """Anomaly mode, retained graphs, and a penalty on the gradients that `.grad` has."""
    model = model_of()
    reducer = GradientReducer(model)
    with torch.autograd.set_detect_anomaly(True, check_nan=True), reducer.no_sync():
        loss = loss_of(model, grid.rank)
        loss.backward(retain_graph=True)
        loss.backward()
    same(model, 2.0 * grad_of_alone(grid.rank))
    model.zero_grad()
    with pytest.warns(UserWarning, match="create_graph=True"), reducer.no_sync():
        loss_of(model, grid.rank).backward(create_graph=True)
    grad_of(model).square().sum().backward()
    reducer.finish()
    expected = []
    for rank in range(2):
        alone = model_of()
        (gradient,) = torch.autograd.grad(loss_of(alone, rank), alone.weight, create_graph=True)
        (penalty,) = torch.autograd.grad(gradient.square().sum(), alone.weight)
        expected.append(gradient.detach() + penalty)
    same(model, torch.stack(expected).mean(0))


@pytest.mark.ranks(2)
def test_a_count_on_some_ranks_alone_is_refused(grid: HyperCommGrid) -> None:
    model = model_of()
    reducer = GradientReducer(model)
    loss_of(model, grid.rank).backward()
    with pytest.raises(
        GridMismatchError, match=r"1 of the 2 ranks of group 'dp_cp' .* gave a coun"
    ):
        reducer.finish(*([3] if grid.rank else []))


@pytest.mark.ranks(2, tp=2)
def test_not_finite_is_raised_on_all_ranks_whatever_else_is_wrong(grid: HyperCommGrid) -> None:
    """One rank has replaced a parameter since, and has another error to raise."""
    layer = ColumnParallelLinear(4, 4, bias=False)
    reducer = GradientReducer(layer, not_finite="raise")
    layer(torch.full((1, 4), float("inf"))).sum().backward()
    if grid.rank == 0:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    with pytest.raises(CommGridError, match="replaced" if grid.rank == 0 else "infinite or NaN"):
        reducer.finish()


@pytest.mark.ranks(2)
def test_weights_set_in_place_stay_set(grid: HyperCommGrid) -> None:
    """bf16 weights have fp32 copies, which follow."""
    model = model_of().bfloat16()
    reducer = GradientReducer(model)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.0)
    for value in (2.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.eq(value).all()


@pytest.mark.ranks(2)
def test_bf16_gradients_are_summed_in_fp32(grid: HyperCommGrid) -> None:
    """256 microbatches of 1 and 1/256 each: in bf16 the sum would stop at 256."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    reducer = GradientReducer(model)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.0)
    with reducer.no_sync():
        for value in [1.0, 2.0**-8] * 256:
            model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    reducer.finish()
    assert grad_of(model).dtype == torch.float32
    assert grad_of(model).item() == 257.0
    optimizer.step()


@pytest.mark.ranks(2, tp=2)
def test_another_ranks_optimizer_state_is_refused(grid: HyperCommGrid) -> None:
    layer = ColumnParallelLinear(4, 4, bias=False)
    optimizer = ShardedOptimizer(GradientReducer(layer), torch.optim.Adam, lr=0.1)
    states: list[Any] = [None, None]
    torch.distributed.all_gather_object(states, optimizer.state_dict())
    optimizer.load_state_dict(states[grid.rank])
    with pytest.raises(
        ShapeError, match=r"saved at \{.*'tp': . *.*\} of its grid and is loaded at"
    ):
        optimizer.load_state_dict(states[1 - grid.rank])


@pytest.mark.ranks(2)
def test_the_state_of_another_optimizer_is_refused_on_all_ranks(grid: HyperCommGrid) -> None:
    model = nn.Linear(64, 4).double()
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.5)
    optimizer = ShardedOptimizer(GradientReducer(model, shard=True), torch.optim.Adam, lr=0.1)
    state = (
        optimizer.state_dict() if grid.rank else torch.optim.Adam(model.parameters()).state_dict()
    )
    with pytest.raises(ShapeError, match=r"has 'state', 'param_groups' and is not of a Sharded"):
        optimizer.load_state_dict(state)


@pytest.mark.ranks(2, ep=2)
def test_ranks_of_other_experts_share_the_state_of_a_model_without(grid: HyperCommGrid) -> None:
    optimizer = ShardedOptimizer(GradientReducer(model_of()), torch.optim.Adam, lr=0.1)
    states: list[Any] = [None, None]
    torch.distributed.all_gather_object(states, optimizer.state_dict())
    optimizer.load_state_dict(states[1 - grid.rank])


@pytest.mark.ranks(2)
def test_one_ranks_optimizer_state_on_all_is_refused_on_all(grid: HyperCommGrid) -> None:
    model = nn.Linear(64, 4).double()
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.5)
    optimizer = ShardedOptimizer(GradientReducer(model, shard=True), torch.optim.Adam, lr=0.1)
    states: list[Any] = [None, None]
    torch.distributed.all_gather_object(states, optimizer.state_dict())
    with pytest.raises(ShapeError, match="this optimizer state was saved "):
        optimizer.load_state_dict(states[0])
    optimizer.load_state_dict(states[grid.rank])


@pytest.mark.ranks(2, tp=2)
def test_a_reducer_on_another_grid_than_the_layers_is_refused(grid: HyperCommGrid) -> None:
    layer = ColumnParallelLinear(4, 4, bias=False)
    other = commgrid.initialize(name="other")
    with pytest.raises(
        SpecError, match=r"weight of shape .* is cut or summed over .* grid 'other'"
    ):
        GradientReducer(layer, grid=other)
    commgrid.destroy("other")


@pytest.mark.ranks(2)
def test_towers_that_run_in_another_order_on_each_rank(grid: HyperCommGrid) -> None:
    """Two reducers over one group send in one order, for either order of backwards."""
    towers = [model_of(), nn.Linear(4, 1, bias=False).double()]
    nn.init.constant_(towers[1].weight, 0.5)
    reducers = [GradientReducer(tower) for tower in towers]
    for i in (0, 1) if grid.rank == 0 else (1, 0):
        loss_of(towers[i], grid.rank, i).backward()
    for reducer in reducers:
        reducer.finish()
    same(towers[0], mean_gradient(0))
    same(towers[1], mean_gradient(1))


@pytest.mark.ranks(2, tp=2)
def test_modules_may_name_the_group_of_a_shared_weight_differently(grid: HyperCommGrid) -> None:
    first = ColumnParallelLinear(4, 4, bias=False, group="tp").double()
    other = ColumnParallelLinear(4, 4, bias=False, group="cp_tp").double()
    other.weight = first.weight
    model = nn.Sequential(first, other)
    initialize_parameters(first, seed=0)
    full = nn.Linear(4, 4, bias=False).double()
    nn.init.constant_(full.weight, 0.5)
    with torch.no_grad():
        first.weight.fill_(0.5)
    reducer = GradientReducer(model)
    x = data(0)
    (first(x).square().sum() + other(x).sum()).backward()
    reducer.finish()
    (full(x).square().sum() + full(x).sum()).backward()
    torch.testing.assert_close(grad_of(first), grad_of(full).chunk(2)[grid.rank], **CLOSE)


@pytest.mark.ranks(2, tp=2)
def test_an_optimizer_of_whole_matrices_over_slices_is_refused() -> None:
    """Muon takes whole matrices beside an AdamW for the slices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), ColumnParallelLinear(4, 4, bias=False))
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    wrong = torch.optim.Muon(model.parameters(), lr=0.1)
    muon = torch.optim.Muon(model[0].parameters(), lr=0.1)
    adamw = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).square().sum().backward()
        reducer.finish()
        with pytest.raises(SpecError, match=r"Muon does not update .* 1\.weight of shape \(2, 4\)"):
            wrong.step()
        muon.step()
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()


@pytest.mark.ranks(2, tp=2)
def test_one_ranks_state_dict_on_all_ranks_is_refused(grid: HyperCommGrid) -> None:
    layer = ColumnParallelLinear(4, 4)
    states: list[Any] = [None, None]
    torch.distributed.all_gather_object(states, layer.state_dict())
    if grid.rank == 1:
        told = r"of this state_dict is slice 0 of 2 along dim 0, and this rank has slice 1 of group"
        with pytest.raises(SpecError, match=told):
            layer.load_state_dict(states[0])
    layer.load_state_dict(dict(states[0]))  # without the record of its slices
    with pytest.raises(
        GridMismatchError, match=r"(weight|bias) .* the same numbers on all of ranks"
    ):
        GradientReducer(layer)
    layer.load_state_dict(states[grid.rank])
    GradientReducer(layer).close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [False, True])
def test_zeroed_gradients_are_zeros_to_the_step(grid: HyperCommGrid, shard: bool) -> None:
    """zero_grad(set_to_none=False) after finish, also where each rank has a part of them."""
    model = model_of()
    reducer = GradientReducer(model, shard=shard)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=1.0)
    loss_of(model, grid.rank).backward()
    reducer.finish()
    model.zero_grad(set_to_none=False)
    assert reducer.gradient_norm() == 0
    optimizer.step()
    assert model.weight.detach().eq(0.5).all()
    loss_of(model, grid.rank).backward()
    reducer.finish()
    model.zero_grad(set_to_none=False)
    loss_of(model, grid.rank, 1).backward()
    reducer.finish()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), 0.5 - mean_gradient(1), **CLOSE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [False, True])
def test_a_gradient_that_was_set_and_not_reduced_is_refused(
    grid: HyperCommGrid, shard: bool
) -> None:
    """As torch.autograd.grad leaves it to the user to set; finish() sums it like any other."""
    model = model_of()
    reducer = GradientReducer(model, shard=shard)
    optimizer: torch.optim.Optimizer = (
        ShardedOptimizer(reducer, torch.optim.SGD, lr=1.0)
        if shard
        else torch.optim.SGD(model.parameters(), lr=1.0)
    )
    for finished in (False, True):
        (gradient,) = torch.autograd.grad(loss_of(model, grid.rank), [model.weight])
        model.weight.grad = gradient
        if finished:
            reducer.finish()
            optimizer.step()
            torch.testing.assert_close(model.weight.detach(), 0.5 - mean_gradient(), **CLOSE)
            model.weight.grad = gradient  # beside the one that was used
        with pytest.raises(CommGridError, match=r"weight of shape \(1, 4\)"):
            optimizer.step()
        model.weight.grad = None


@pytest.mark.ranks(2)
def test_a_gradient_set_after_finish_is_used_or_refused(grid: HyperCommGrid) -> None:
    for shard in (False, True):
        model = model_of()
        reducer = GradientReducer(model, shard=shard)
        optimizer: torch.optim.Optimizer = (
            ShardedOptimizer(reducer, torch.optim.SGD, lr=1.0)
            if shard
            else torch.optim.SGD(model.parameters(), lr=1.0)
        )
        loss_of(model, grid.rank).backward()
        reducer.finish()
        model.weight.grad = torch.ones(1, 4, dtype=torch.float64)
        if shard:
            with pytest.raises(CommGridError, match="which a ShardedOptimizer does not read"):
                optimizer.step()
        else:
            optimizer.step()
            torch.testing.assert_close(model.weight.detach(), torch.full((1, 4), -0.5).double())
        reducer.close()


@pytest.mark.ranks([1, 2])
def test_a_gradient_put_back_after_it_was_sent_is_refused(grid: HyperCommGrid) -> None:
    model = model_of()
    taken = []

    def take(parameter: Tensor) -> None:
        taken.append(parameter.grad)
        parameter.grad = None

    model.weight.register_post_accumulate_grad_hook(take)
    reducer = GradientReducer(model)
    loss_of(model, grid.rank).backward()
    model.weight.grad = taken[0]
    with pytest.raises(CommGridError, match=r"\.grad of weight of shape \(1, 4\) was set after"):
        reducer.finish()


@pytest.mark.ranks(2)
def test_clipping_before_finish_is_refused(grid: HyperCommGrid) -> None:
    model = model_of()
    reducer = GradientReducer(model)
    with reducer.no_sync():
        loss_of(model, grid.rank).backward()
    with pytest.raises(CommGridError, match=r"clip_gradients\(\) was called while weight of shape"):
        reducer.clip_gradients(1.0)
    reducer.finish()
    reducer.clip_gradients(1e9)
    same(model, mean_gradient())


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("group", ["tp", "dp_cp_tp"])
def test_a_sum_over_ranks_with_other_slices_is_refused(group: str) -> None:
    model = ColumnParallelLinear(4, 4, bias=False)
    with pytest.raises(SpecError, match=r"of weight of shape \(2, 4\) would be summed over group"):
        GradientReducer(model, group)


@pytest.mark.ranks(2, cp=2)
def test_a_reducer_that_leaves_cp_out_is_refused(grid: HyperCommGrid) -> None:
    model = model_of()
    reducer = GradientReducer(model, "dp")
    loss_of(model, grid.rank).backward()
    with pytest.raises(GridMismatchError, match="different gradients on the ranks of group 'cp'"):
        reducer.finish()


@pytest.mark.ranks(2)
def test_a_reducer_kept_over_a_new_grid_is_refused(grid: HyperCommGrid) -> None:
    model = model_of()
    reducer = GradientReducer(model)
    commgrid.destroy()
    commgrid.initialize()
    with reducer.no_sync():
        loss_of(model, grid.rank).backward()
    with pytest.raises(GridDestroyedError, match="of this GradientReducer was destroyed"):
        reducer.finish()
    reducer.close()
    GradientReducer(model).finish()
    same(model, mean_gradient())


@pytest.mark.ranks(2, ep=2)
@pytest.mark.parametrize("option", ["top_k", "aux_loss", "capacity_factor", "activation"])
def test_other_options_on_each_rank_are_refused(grid: HyperCommGrid, option: str) -> None:
    values: dict[str, list[Any]] = {
        "top_k": [1, 2], "aux_loss": [0.0, 0.1], "capacity_factor": [None, 2.0],
        "activation": [nn.functional.silu, nn.functional.relu],
    }  # fmt: skip
    given: dict[str, Any] = {"top_k": 2, option: values[option][grid.rank]}
    model = nn.Sequential(MoELayer(4, 8, 4, given.pop("top_k"), **given))
    initialize_parameters(model, seed=0)
    told = rf"^0\.\w+\.{option} is .* on rank 0 and .* on rank 1; give the layers of one model"
    with pytest.raises(GridMismatchError, match=told):
        GradientReducer(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [False, True])
def test_fp16_sums_do_not_overflow(grid: HyperCommGrid, shard: bool) -> None:
    """The average of two gradients of 40,000 is in fp16's range, and their sum is not."""
    model = nn.Linear(2, 1, bias=False)
    reducer = GradientReducer(model, dtype=torch.float16, shard=shard)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=1.0)
    for count, expected in ((None, -40_000.0), (4, -10_000.0)):
        nn.init.zeros_(model.weight)
        optimizer.reload()
        model(torch.full((1, 2), 40_000.0)).sum().backward()
        reducer.finish(count)
        optimizer.step()
        assert model.weight.tolist() == [[expected] * 2]


@pytest.mark.ranks(2)
def test_a_gradient_made_between_two_reducers_is_not_reduced(grid: HyperCommGrid) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reducer = GradientReducer(model)
    loss_of(model, grid.rank).backward()
    reducer.finish()
    reducer.close()
    model.zero_grad()
    loss_of(model, grid.rank).backward()  # of this rank alone
    again = GradientReducer(model)
    with pytest.raises(CommGridError, match="has a gradient that no finish"):
        optimizer.step()
    again.finish()
    same(model, mean_gradient())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [False, True])
def test_a_closed_reducer_leaves_gradients_of_the_weights_dtype(
    grid: HyperCommGrid, shard: bool
) -> None:
    model = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    reducer = GradientReducer(model, shard=shard)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=1.0)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    reducer.finish()
    optimizer.step()
    optimizer.zero_grad()
    reducer.close()
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert grad_of(model).dtype == torch.bfloat16
    torch.optim.SGD(model.parameters(), lr=1.0).step()
