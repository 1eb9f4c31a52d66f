"""Parameters that are not trained in every step or on every rank, and reducers nobody keeps.

The oracle is the same program on one process with the data of all ranks, in fp64; 1e-12 is two
orders above the rounding of a mean over ranks.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commgrid import CommGridError, GridMismatchError, SpecError
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.runtime.grid import HyperCommGrid

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
KINDS = {"sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), "adam": (torch.optim.AdamW, {})}


def layers(count: int = 3) -> nn.ModuleList:
    generator = torch.Generator().manual_seed(0)
    found = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(count))
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return found


def data(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


def run(model: nn.ModuleList, used: Sequence[int], x: Tensor) -> Tensor:
    for index in used:
        x = x + model[index](x).tanh()
    return x.square().mean()


def optimizer_of(reducer: GradientReducer, name: str) -> torch.optim.Optimizer:
    if not reducer.shard:
        return plain(reducer.model, name)
    kind, options = KINDS[name]
    return ShardedOptimizer(reducer, kind, **options)


def plain(model: nn.Module, name: str) -> torch.optim.Optimizer:
    kind, options = KINDS[name]
    return kind(model.parameters(), **options)


def same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE, msg=lambda told, n=name: f"{n}: {told}")


# -- used on some ranks only ---------------------------------------------------------------


def dropped(step: int, rank: int) -> list[int]:
    """Layers that a rank uses: none is used by all ranks in all steps, one by none in some."""
    return [i for i in range(3) if (i + step + rank) % 3 and not (i == 2 and step == 1)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("shard", [False, True])
def test_layers_that_a_rank_leaves_out_count_as_zero(
    grid: HyperCommGrid, shard: bool, name: str
) -> None:
    ours, theirs = layers(), layers()
    reducer = GradientReducer(ours, shard=shard, unused="zero", bucket_bytes=1)
    optimizer, alone = optimizer_of(reducer, name), plain(theirs, name)
    for step in range(4):
        run(ours, dropped(step, grid.rank), data(step, grid.rank)).backward()
        reducer.finish()
        norm = reducer.clip_gradients(0.2)
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            (run(theirs, dropped(step, rank), data(step, rank)) / 2).backward()
        whole = nn.utils.clip_grad_norm_(theirs.parameters(), 0.2)
        torch.testing.assert_close(norm, whole, **CLOSE)
        alone.step()
        alone.zero_grad()
        same(ours, theirs)


@pytest.mark.ranks(2)
def test_a_count_weighs_what_is_used_on_some_ranks(grid: HyperCommGrid) -> None:
    """Rank 1 has 3 samples and rank 0 has 6; each meets another expert besides the first."""
    ours, theirs = layers(), layers()
    reducer = GradientReducer(ours, unused="zero")
    rows = [torch.cat([data(0, 0), data(1, 0)]), data(0, 1)]
    (3 * run(ours, [0, 1 + grid.rank], rows[grid.rank]) * len(rows[grid.rank])).backward()
    reducer.finish(count=len(rows[grid.rank]))
    for rank in range(2):
        (3 * run(theirs, [0, 1 + rank], rows[rank]) * len(rows[rank]) / 9).backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.ranks(2)
def test_layers_that_a_rank_leaves_out_are_refused_by_default(grid: HyperCommGrid) -> None:
    model = layers()
    reducer = GradientReducer(model)
    run(model, dropped(0, grid.rank), data(0, grid.rank)).backward()
    with pytest.raises(GridMismatchError, match=r"1 of the 2 ranks .*\(unused=.zero.\)"):
        reducer.finish()
    with pytest.raises(SpecError, match="unused='skip': expected one of refuse, zero"):
        GradientReducer(layers(), unused="skip")


# -- frozen in turn ------------------------------------------------------------------------


def adversaries(model: nn.ModuleDict, turn: str, x: Tensor) -> Tensor:
    """The loss of generator or discriminator, while the other one is frozen."""
    for name, part in model.items():
        part.requires_grad_(name == turn)
    made = model["generator"](x).tanh()
    if turn == "generator":
        return -model["judge"](made).mean()
    return (model["judge"](made) - model["judge"](x)).square().mean()


def pair() -> nn.ModuleDict:
    first, second, _ = layers()
    return nn.ModuleDict({"generator": first, "judge": second})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("zeroes", [False, True])
def test_one_reducer_trains_two_models_in_turn(
    grid: HyperCommGrid, shard: bool, name: str, zeroes: bool
) -> None:
    ours, theirs = pair(), pair()
    reducer = GradientReducer(ours, shard=shard, bucket_bytes=1)
    alone = {turn: plain(part, name) for turn, part in theirs.items()}
    both = optimizer_of(reducer, name) if shard else None
    own = {turn: both or plain(part, name) for turn, part in ours.items()}
    for step in range(6):
        turn = "judge" if step % 3 else "generator"
        adversaries(ours, turn, data(step, grid.rank)).backward()
        reducer.finish()
        own[turn].step()
        if zeroes:
            own[turn].zero_grad()
        for rank in range(2):
            (adversaries(theirs, turn, data(step, rank)) / 2).backward()
        alone[turn].step()
        alone[turn].zero_grad()
        same(ours, theirs)


@pytest.mark.ranks(2)
def test_frozen_on_some_ranks_is_refused(grid: HyperCommGrid) -> None:
    model = layers()
    reducer = GradientReducer(model)
    model[1].requires_grad_(grid.rank == 0)
    run(model, [0, 1, 2], data(0, grid.rank)).backward()
    with pytest.raises(GridMismatchError, match=r"^1\.bias .*: 1 of the 2 ranks"):
        reducer.finish()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("shard", [False, True])
def test_layers_unfrozen_later_keep_the_optimizers_state(
    grid: HyperCommGrid, shard: bool, name: str
) -> None:
    """One more layer in each step; in the middle the state is saved and loaded."""
    ours, theirs = layers(), layers()
    for model in (ours, theirs):
        model.requires_grad_(False)
    ours[2].weight.requires_grad_(True)
    reducer = GradientReducer(ours, shard=shard, frozen=True, bucket_bytes=1)
    optimizer, alone = optimizer_of(reducer, name), plain(theirs, name)
    for step in range(4):
        for model in (ours, theirs):
            model[max(2 - step, 0)].requires_grad_(True)
        run(ours, [0, 1, 2], data(step, grid.rank)).backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            (run(theirs, [0, 1, 2], data(step, rank)) / 2).backward()
        alone.step()
        alone.zero_grad()
        same(ours, theirs)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.ranks(2)
def test_an_unfrozen_layer_without_a_place_is_refused(grid: HyperCommGrid) -> None:
    model = layers()
    model[0].requires_grad_(False)
    reducer = GradientReducer(model)
    run(model, [0, 1, 2], data(0, grid.rank)).backward()
    reducer.finish()
    model.zero_grad()
    model[0].requires_grad_(True)
    run(model, [0, 1, 2], data(0, grid.rank)).backward()
    with pytest.raises(CommGridError, match=r"unfrozen after .* frozen=True, which takes param"):
        reducer.finish()


# -- reducers that no variable keeps -------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kept", ["model", "part"])
def test_a_step_inside_of_backward_is_refused_without_a_variable(
    grid: HyperCommGrid, kept: str
) -> None:
    part = layers(1)
    if kept == "model":
        GradientReducer(part)
    else:
        GradientReducer(nn.ModuleList([part]))  # as a model that only the reducer knows
    gc.collect()
    for parameter in part.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())
    with pytest.raises(CommGridError, match=r"step\(\) was called while .* no finish\(\)"):
        run(part, [0], data(0, grid.rank)).backward()


def train(model: nn.ModuleList, rank: int, shard: bool) -> None:
    """A function with a reducer of its own."""
    reducer = GradientReducer(model, shard=shard)
    optimizer = optimizer_of(reducer, "sgd")
    run(model, [0], data(0, rank)).backward()
    reducer.finish()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [False, True])
def test_a_function_may_train_a_model_twice(grid: HyperCommGrid, shard: bool) -> None:
    """Its second reducer ends the first, which no variable keeps any more."""
    ours, theirs = layers(1), layers(1)
    for _ in range(2):
        train(ours, grid.rank, shard)
        alone = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for rank in range(2):
            (run(theirs, [0], data(0, rank)) / 2).backward()
        alone.step()
        alone.zero_grad()
    same(ours, theirs)
    reducer = GradientReducer(ours)
    with pytest.raises(SpecError, match="has another GradientReducer already; call its close"):
        GradientReducer(ours)
    run(ours, [0], data(0, grid.rank)).backward()
    reducer.finish()


@pytest.mark.ranks(2)
def test_a_model_takes_its_reducer_with_it(grid: HyperCommGrid) -> None:
    model = layers()
    reducer = GradientReducer(model)
    view, alive = weakref.ref(reducer.slots[0].view), weakref.ref(reducer)
    written = pickle.dumps(model)
    assert b"commgrid" not in written  # so that it can be read without
    for twin in (copy.deepcopy(model), pickle.loads(written)):
        run(twin, [0], data(0, grid.rank)).backward()
        assert twin[0].weight.grad is not None
        torch.optim.SGD(twin.parameters(), lr=0.1).step()  # no reducer has it
    del reducer
    gc.collect()
    assert alive() is not None
    del model, twin
    gc.collect()
    assert alive() is None
    assert view() is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [False, True])
def test_a_closed_reducer_has_left_the_model(grid: HyperCommGrid, shard: bool) -> None:
    model = layers(1)
    train(model, grid.rank, shard)
    reducer = GradientReducer(model)
    alive = weakref.ref(reducer)
    reducer.close()
    del reducer
    gc.collect()
    assert alive() is None
    run(model, [0], data(0, 0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


# -- what a closed reducer leaves ----------------------------------------------------------


def first_gradient(model: nn.ModuleList, rank: int) -> tuple[GradientReducer, Tensor]:
    reducer = GradientReducer(model)
    run(model, [0], data(0, rank)).backward()
    reducer.finish()
    gradient = model[0].weight.grad
    assert gradient is not None
    return reducer, gradient.clone()


AFTER: dict[str, Callable[[Any, torch.optim.Optimizer, int], None]] = {
    "stepped before": lambda model, optimizer, rank: None,
    "zeroed": lambda model, optimizer, rank: optimizer.zero_grad(),
    "added to": lambda model, optimizer, rank: run(model, [0], data(1, rank)).backward(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("after", list(AFTER))
def test_the_next_reducer_sums_what_is_not_summed(grid: HyperCommGrid, after: str) -> None:
    """Reduced ones are not summed again; one that a backward has added to is this rank's."""
    model, theirs = layers(1), layers(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reducer, _ = first_gradient(model, grid.rank)
    if after == "stepped before":
        optimizer.step()
    reducer.close()
    AFTER[after](model, optimizer, grid.rank)
    again = GradientReducer(model)
    run(model, [0], data(2, grid.rank)).backward()
    again.finish()
    optimizer.step()
    for step in (0, 1, 2) if after == "added to" else (2,):
        for rank in range(2):
            (run(theirs, [0], data(step, rank)) / 2).backward()
    torch.testing.assert_close(model[0].weight.grad, theirs[0].weight.grad, **CLOSE)


@pytest.mark.ranks(2)
def test_a_step_under_the_next_reducer_uses_what_the_last_has_reduced(grid: HyperCommGrid) -> None:
    model = layers(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model[0].weight.detach().clone()
    reducer, gradient = first_gradient(model, grid.rank)
    reducer.close()
    again = GradientReducer(model)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - gradient, **CLOSE)
    again.close()


@pytest.mark.ranks(2)
def test_a_gradient_set_after_a_step_is_kept_by_backward(grid: HyperCommGrid) -> None:
    """As gradient surgery does: it is this rank's, and backward adds to it."""
    model, theirs = layers(1), layers(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reducer, _ = first_gradient(model, grid.rank)
    optimizer.step()
    model[0].weight.grad = torch.full_like(model[0].weight, float(grid.rank))
    run(model, [0], data(1, grid.rank)).backward()
    reducer.finish()
    for rank in range(2):
        (run(theirs, [0], data(1, rank)) / 2).backward()
    assert theirs[0].weight.grad is not None
    torch.testing.assert_close(model[0].weight.grad, theirs[0].weight.grad + 0.5, **CLOSE)
