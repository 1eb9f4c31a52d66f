"""torch's optimizers and loss scaler over slices: right, or refused on every rank.

With a GradientReducer and without one, as with one data-parallel rank, DDP or FSDP2.
"""

from __future__ import annotations

import gc
import io
import warnings

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import commgrid
from commgrid import ShapeError, SpecError
from commgrid.data_parallel import GradientReducer, GradScaler
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear, initialize_parameters

with warnings.catch_warnings():  # torch 2.13 warns about its own use of torch.jit.script
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


def model_of() -> nn.Module:
    model = nn.Sequential(
        ColumnParallelLinear(4, 8, bias=False), RowParallelLinear(8, 4, bias=False)
    )
    initialize_parameters(model, seed=0)
    return model


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("reduced", [False, True])
def test_muon_over_slices(reduced: bool) -> None:
    model = model_of()
    reducer = GradientReducer(model) if reduced else None
    model(torch.ones(1, 4)).square().sum().backward()
    if reducer is not None:
        reducer.finish()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    with pytest.raises(SpecError, match=r"Muon does not update .*weight of shape \(4, 4\) is a sl"):
        optimizer.step()


class MuonWithAuxAdam(torch.optim.SGD):
    """Named as the well-known one, with its key of groups."""


class CAME(torch.optim.SGD):
    """Named as an optimizer that factors whole matrices."""


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("reduced", [False, True])
def test_slices_in_the_element_wise_groups_of_muon(reduced: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), model_of())
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model) if reduced else None
    model(torch.ones(1, 4)).square().sum().backward()
    if reducer is not None:
        reducer.finish()
    whole = {"params": list(model[0].parameters()), "use_muon": True}
    slices = {"params": list(model[1].parameters()), "use_muon": False}
    MuonWithAuxAdam([whole, slices], lr=0.1).step()
    by_state = MuonWithAuxAdam(model.parameters(), lr=0.1)
    for group in (whole, slices):
        for parameter in group["params"]:
            by_state.state[parameter]["use_muon"] = group["use_muon"]
    by_state.step()
    swapped = MuonWithAuxAdam([{**whole, "use_muon": False}, {**slices, "use_muon": True}], lr=0.1)
    for wrong in (swapped, CAME(model.parameters(), lr=0.1)):
        model(torch.ones(1, 4)).square().sum().backward()
        if reducer is not None:
            reducer.finish()
        with pytest.raises(SpecError, match=r"(MuonWithAuxAdam|CAME) does not update elements one"):
            wrong.step()
        for parameter in model.parameters():
            parameter.grad = None


@pytest.mark.ranks(4, tp=2)
@pytest.mark.parametrize("reduced", [False, True])
def test_zero_without_a_group(grid: HyperCommGrid, reduced: bool) -> None:
    """It takes all ranks, and each sends its slices to those that have other ones."""
    model = model_of()
    reducer = GradientReducer(model) if reduced else None
    everyone = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    copies = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, process_group=grid.get_group("dp"), lr=0.5
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    if reducer is not None:
        reducer.finish()
    with pytest.raises(
        SpecError, match=r"ZeroRedundancyOptimizer over ranks 0-3 .* ranks [02]-[13], which have"
    ):
        everyone.step()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    copies.step()
    for parameter, was, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), was - 0.5 * gradient)


@pytest.mark.ranks(2, pp=2)
def test_zero_over_stages(grid: HyperCommGrid) -> None:
    model = nn.Linear(2, 2)
    reducer = GradientReducer(model, broadcast=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    reducer.finish()
    with pytest.raises(SpecError, match=r"ranks 0-1, which have other parameters along pp"):
        optimizer.step()


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("reduced", [False, True])
def test_torchs_loss_scaler_over_slices(reduced: bool) -> None:
    """One rank would skip a step that the others take; disabled, it decides nothing."""
    model = model_of()
    reducer = GradientReducer(model) if reduced else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=2.0)
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        if reducer is not None:
            reducer.finish()
        if enabled:
            with pytest.raises(SpecError, match=r"torch\.amp\.GradScaler decides .*weight of shap"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        optimizer.zero_grad()


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_torchs_loss_scaler_is_refused_on_the_rank_that_would_skip_too(
    grid: HyperCommGrid, reduced: bool, unscales: bool
) -> None:
    model = model_of()
    reducer = GradientReducer(model) if reduced else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    if reducer is not None:
        reducer.finish()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(float("inf") if grid.rank == 0 else 1.0)
    with pytest.raises(SpecError, match=r"torch\.amp\.GradScaler decides .*weight of shap"):
        scaler.unscale_(optimizer) if unscales else scaler.step(optimizer)


@pytest.mark.ranks(2, pp=2)
def test_torchs_loss_scaler_over_stages(grid: HyperCommGrid) -> None:
    """Refused where a reducer knows that stages are parts of one model; commgrid's is right."""
    model = nn.Linear(4, 4)
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    ours = GradScaler("cpu", init_scale=2.0)
    for each in (ours, scaler):
        each.scale(model(torch.ones(1, 4)).sum()).backward()
        reducer.finish()
        if each is scaler:
            with pytest.raises(SpecError, match=r"GradScaler decides .* differs along pp"):
                each.step(optimizer)
        else:
            each.step(optimizer)
            each.update()
        optimizer.zero_grad()


@pytest.mark.ranks(2, tp=2)
def test_a_model_saved_beside_a_reducer_is_checked_without_one() -> None:
    model = model_of()
    reducer = GradientReducer(model)
    data = io.BytesIO()
    torch.save(model, data)
    reducer.close()
    data.seek(0)
    loaded = torch.load(data, weights_only=False)
    loaded(torch.ones(1, 4)).sum().backward()
    with pytest.raises(SpecError, match="Muon does not update"):
        torch.optim.Muon(loaded.parameters(), lr=0.1).step()


@pytest.mark.ranks(2, tp=2)
def test_an_optimizer_is_checked_again_when_its_reducer_is_closed() -> None:
    model = model_of()
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    model(torch.ones(1, 4)).square().sum().backward()
    reducer.finish()
    optimizer.step()
    optimizer.zero_grad()
    reducer.close()
    scaler.scale(model(torch.ones(1, 4)).square().sum()).backward()
    with pytest.raises(SpecError, match=r"GradScaler decides by one rank's gradients"):
        scaler.step(optimizer)


@pytest.mark.ranks(2, tp=2)
def test_a_loss_scaler_of_ones_own_may_agree_over_ranks() -> None:
    class Agreeing(torch.amp.GradScaler):
        pass

    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = Agreeing("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)


@pytest.mark.ranks(2, tp=2)
def test_hooks_of_optimizers_go_with_the_last_sliced_layer(grid: HyperCommGrid) -> None:
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    model = model_of()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before + 1
    del model
    gc.collect()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before
    assert commgrid.get_grid() is grid


@pytest.mark.ranks(2, tp=2)
def test_a_layer_in_a_grid_with_another_order_of_ranks(grid: HyperCommGrid) -> None:
    layer = ColumnParallelLinear(4, 4, bias=False)
    initialize_parameters(layer, seed=0)
    y = layer(torch.ones(1, 4))
    commgrid.destroy()
    again = commgrid.initialize(tp=2)  # its group is found again
    torch.testing.assert_close(layer(torch.ones(1, 4)), y)
    assert again.is_member("tp")
    commgrid.destroy()
    commgrid.initialize(tp=2, ranks=[1, 0])
    told = r"ColumnParallelLinear\(4, 4\): made at place [01] of group 'tp' of ranks \[0, 1\]"
    with pytest.raises(ShapeError, match=told):
        layer(torch.ones(1, 4))
