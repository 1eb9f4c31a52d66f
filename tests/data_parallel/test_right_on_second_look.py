"""Bugs found by review of the reducer, the scaler and their checks: wrong or silent results."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import commgrid
from commgrid import CheckpointError, CommGridError, GridMismatchError, SpecError, checkpoint
from commgrid.data_parallel import GradientReducer, GradScaler, ShardedOptimizer
from commgrid.parameters import mark_parameters
from commgrid.pipeline import Pipeline
from commgrid.tensor_parallel import initialize_parameters
from commgrid.testing import run_on_ranks

ONES = torch.ones(1, 2)


def two_optimizers() -> None:
    """One reducer, an optimizer for each layer, and a parameter that no reducer has."""
    commgrid.initialize()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    temperature = nn.Parameter(torch.ones(()))
    one = torch.optim.SGD(model[0].parameters(), lr=0.1)
    other = torch.optim.SGD([*model[1].parameters(), temperature], lr=0.1)
    model[1](model[0](ONES)).sum().backward()
    reducer.finish()
    expected = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(ONES).sum() * temperature).backward()
    reducer.finish()
    scaler.unscale_(one)
    scaler.unscale_(other)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    assert temperature.grad is not None
    assert temperature.grad == model(ONES).sum()


def test_a_scaler_divides_each_gradient_once() -> None:
    run_on_ranks(two_optimizers, 2)


def scaled_stages() -> float:
    """Two stages, of which the last has a loss to scale."""
    grid = commgrid.initialize(pp=2)
    torch.manual_seed(0)
    model = [nn.Linear(2, 2), nn.Linear(2, 1)][grid.get_local_rank("pp")]
    reducer = GradientReducer(model, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    pipeline = Pipeline(
        model, "gpipe", num_microbatches=1, reducer=reducer,
        loss=lambda y, target: scaler.scale((y - target).square().sum()),
    )  # fmt: skip
    pipeline.step([ONES], [torch.zeros(1, 1)])
    reducer.finish()
    scaler.unscale_(optimizer)
    norm = reducer.gradient_norm().item()
    scaler.step(optimizer)
    scaler.update()
    return norm


def test_a_scaler_serves_stages_without_a_loss() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    whole(ONES).square().sum().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()  # type: ignore[misc]
    assert run_on_ranks(scaled_stages, 2) == pytest.approx([norm, norm], rel=1e-6)


def closed() -> None:
    commgrid.initialize()
    model = nn.Linear(2, 1)
    initialize_parameters(model, seed=0)
    for kept in (False, True):
        for _ in range(2):  # close it, and make a new one
            reducer = GradientReducer(model, shard=kept)
            keeper = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.0) if kept else None
            model(ONES).sum().backward()
            reducer.finish()
            gradient = reducer.slots[0].view if kept else model.bias.grad
            assert gradient is not None
            assert gradient.abs().max() == 1.0
            reducer.close()
            assert keeper is None or model.bias.grad is None
            again = GradientReducer(model)
            if not kept:  # which it left in `.grad`
                with pytest.raises(CommGridError, match=r"reached .* no optimizer step or zero_gr"):
                    model(ONES).sum().backward()
            again.close()
            model.zero_grad()
    model.double()


def test_a_closed_reducer_leaves_no_gradient_to_be_added_to() -> None:
    run_on_ranks(closed, 1)


def late_parametrization() -> Tensor:
    """weight_norm on a norm whose gradients are partial sums, after it was marked so."""
    grid = commgrid.initialize(tp=2)
    norm = mark_parameters(nn.Linear(2, 2, bias=False), partial="tp")
    initialize_parameters(norm, seed=0)
    parametrizations.weight_norm(norm)
    reducer = GradientReducer(norm)
    (norm(ONES * (1 + grid.get_local_rank("tp")))).square().sum().backward()
    reducer.finish()
    gradient = norm.parametrizations.weight.original0.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Tensor)
    return gradient


def test_a_parametrization_inherits_what_was_said_of_its_module() -> None:
    one, other = run_on_ranks(late_parametrization, 2)
    assert torch.equal(one, other)
    assert one.any()


def without_axis_groups(broadcast: bool) -> str:
    grid = commgrid.initialize(create=["dp_cp"])
    torch.manual_seed(grid.rank)
    model = nn.Linear(2, 2)
    try:
        GradientReducer(model, broadcast=broadcast)
    except GridMismatchError as error:
        return str(error)
    return f"{model.weight.sum().item()}"


def test_copies_are_compared_over_the_group_there_is() -> None:
    for said in run_on_ranks(without_axis_groups, 2, False):
        assert "weight of shape (2, 2) differs between rank 0 and rank 1 of group 'dp_cp'" in said
    one, other = run_on_ranks(without_axis_groups, 2, True)
    assert one == other


def tied_apart(folder: str) -> str:
    grid = commgrid.initialize(pp=2, groups={"ends": {"of": "pp", "pick": ["first", "last"]}})
    torch.manual_seed(grid.rank)
    model = nn.Module()
    model.add_module("tokens", mark_parameters(nn.Embedding(3, 2), shared="ends"))
    with pytest.raises(GridMismatchError, match=r"tokens\.weight .* differs between rank 0 and ra"):
        GradientReducer(model)
    with pytest.raises(CheckpointError, match="copies='last': expected one of compare, first"):
        checkpoint.save(folder, 1, model, progress=False, copies="last")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(folder, 1, model, progress=False)
    assert checkpoint.steps(folder) == []
    checkpoint.save(folder, 2, model, progress=False, copies="first")
    return str(caught.value)


def test_tied_copies_on_other_stages_are_compared_too(tmp_path: Path) -> None:
    for said in run_on_ranks(tied_apart, 2, str(tmp_path / "runs")):
        assert "model.tokens.weight differs between rank 0 and rank 1" in said
        assert 'copies="first"' in said


def one_more(folder: str) -> str:
    """A bias that one tp rank has alone."""
    grid = commgrid.initialize(tp=2, dp=2, timeout=3600)
    model = nn.Module()
    if grid.get_local_rank("tp") == 0:
        model.add_module("extra", nn.Linear(2, 2))
        initialize_parameters(model, seed=0)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(folder, 1, model, progress=False)
    return str(caught.value)


def test_a_parameter_that_some_ranks_lack_is_named_at_once(tmp_path: Path) -> None:
    for said in run_on_ranks(one_more, 4, str(tmp_path / "runs")):
        assert "group 'tp' should have copies are not the same ones: 2 on rank 0 and 0 on" in said


def frozen_stage() -> None:
    """A stage without trained parameters in a pipeline with another that has some."""
    grid = commgrid.initialize(pp=2)
    model = nn.Linear(2, 2)
    if grid.get_local_rank("pp") == 0:
        model.requires_grad_(False)
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    y = model(ONES).sum()
    if y.requires_grad:
        y.backward()
    reducer.finish(count=3)
    assert reducer.clip_gradients(1e9) > 0


def test_a_stage_without_trained_parameters_finishes_too() -> None:
    run_on_ranks(frozen_stage, 4)


def ensemble() -> None:
    """Members of an ensemble have other weights, and mean to."""
    grid = commgrid.initialize(dp=1, order="tp-cp-ep-dp-pp-member", member=2)
    torch.manual_seed(grid.rank)
    model = nn.Linear(2, 2)
    reducer = GradientReducer(model)
    model(ONES).sum().backward()
    reducer.finish()


def test_other_members_of_an_ensemble_may_have_other_weights() -> None:
    run_on_ranks(ensemble, 2)


def forgotten() -> None:
    commgrid.initialize()
    model = nn.Linear(2, 2)
    reducer = GradientReducer(model, shard=True)
    ShardedOptimizer(reducer, torch.optim.SGD)  # freed at once, without a reference
    model(ONES).sum().backward()
    with pytest.raises(SpecError, match="there is none over this reducer"):
        reducer.finish()


def test_an_optimizer_that_nobody_keeps_is_none() -> None:
    run_on_ranks(forgotten, 1)


def not_a_number() -> list[Any]:
    commgrid.initialize()
    model = nn.Linear(2, 1, bias=False)
    reducer = GradientReducer(model)
    (model(ONES) * float("nan")).sum().backward()
    reducer.finish()
    assert reducer.clip_gradients(1.0).isnan()
    assert model.weight.grad is not None
    return [bool(model.weight.grad.isnan().all())]


def test_clipping_by_a_norm_that_is_no_number_is_the_same_on_every_device() -> None:
    assert run_on_ranks(not_a_number, 1) == [[True]]
