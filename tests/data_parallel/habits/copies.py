"""Programs over data-parallel ranks: copies, half precision, options, steps and states."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from commgrid.collectives import all_gather
from commgrid.data_parallel import GradientReducer
from tests.data_parallel.habits.sides import (
    EITHER,
    OUT,
    REFUSED,
    RIGHT,
    WIDTH,
    Side,
    Table,
)

TABLE = Table()
program = TABLE.program


class Lion(torch.optim.Optimizer):
    """Signs of a momentum, as a user writes it."""

    def __init__(self, params: Any, lr: float = 0.01, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(torch.tanh(100 * (0.9 * m + 0.1 * p.grad)) * group["lr"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Groups by module type: no decay of norms and biases."""
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.3}, {"params": []}]
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            plain = name == "bias" or isinstance(module, nn.LayerNorm)
            groups[plain]["params"].append(p)
    groups[1]["weight_decay"] = 0.0
    return groups


# -- copies: dp 2 --------------------------------------------------------------------------


@program(RIGHT)
def infinite_norm_of_copies(side: Side) -> Any:
    model = side.net()
    optimizer = Adagrad(model.parameters(), lr=0.1)

    def clip(step: int) -> None:
        clip_grad_norm_(model.parameters(), 0.01, norm_type=math.inf)

    side.train(model, side.reducer(model), optimizer, clip)
    return model


@program(RIGHT)
def clamped_by_value_with_lion(side: Side) -> Any:
    model = side.net()
    optimizer = Lion(model.parameters(), decay=0.1)
    side.train(
        model, side.reducer(model), optimizer, lambda _: clip_grad_value_(model.parameters(), 0.01)
    )
    return model


@program(RIGHT)
def accumulated_means_in_parts_with_lion(side: Side) -> Any:
    model = side.net()
    reducer = side.reducer(model, shard=True)
    optimizer = side.sharded(reducer, Lion, element_wise=True, decay=0.1)
    for step in range(4):
        with reducer.no_sync():
            (side.loss(model, *side.batch(2 * step)) / 2).backward()
        (side.loss(model, *side.batch(2 * step + 1)) / 2).backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(RIGHT)
def counted_rows_of_other_lengths(side: Side) -> Any:
    model = side.net()
    reducer, optimizer = side.reducer(model), SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, target = Side(None).batch(step)
        cut = slice(None) if side.plain else [slice(0, 3), slice(3, None)][side.at("dp")]
        (model(x[cut]) - target[cut]).square().sum().backward()
        reducer.finish(count=len(x[cut]))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


@program(RIGHT)
def hooks_on_gradients(side: Side) -> Any:
    model = side.net()
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: g * (0.5 if "block0" in name else 1.0))
    side.train(model, side.reducer(model), Adam(model.parameters(), lr=0.01))
    return model


def unkept(side: Side, model: nn.Module) -> None:
    """A function that makes a reducer, and returns nothing."""
    if not side.plain:
        GradientReducer(model)


@program(REFUSED, "finish")
def optimizer_in_hooks_of_an_unkept_reducer(side: Side) -> Any:
    model = side.net()
    unkept(side, model)
    own = {p: RMSprop([p], lr=0.01) for p in model.parameters()}

    def update(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for step in range(3):
        side.loss(model, *side.batch(step)).backward()
    return model


@program(REFUSED, "finish")
def an_unkept_reducer_and_no_finish(side: Side) -> Any:
    model = side.net()
    unkept(side, model)
    side.train(model, None, Adagrad(model.parameters(), lr=0.1))
    return model


class Normed(nn.Module):
    """A batch norm before a head."""

    def __init__(self, side: Side, kind: Any) -> None:
        super().__init__()
        self.norm1, self.head = kind, nn.Linear(WIDTH, OUT, dtype=side.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm1(x)))


@program(EITHER, "norm1|buffer|[Rr]unning|BatchNorm")
def batch_norm_of_parts(side: Side) -> Any:
    """Right here: all ranks evaluate alike, though not as with one batch."""
    model = side.fill(Normed(side, nn.BatchNorm1d(WIDTH, momentum=0.3, dtype=side.dtype)))
    reducer = side.reducer(model, shard=True)
    side.train(model, reducer, side.sharded(reducer, SGD, lr=0.1), steps=4)
    with torch.no_grad():
        seen = model.eval()(Side(None).batch(9)[0]).sum().view(1)
    every = seen if side.plain else all_gather(seen, "dp_cp")
    return nn.Module(), (every - every[0]).abs().max() + 1.0


@program(RIGHT)
def batch_norm_with_frozen_statistics(side: Side) -> Any:
    norm = nn.BatchNorm1d(WIDTH, dtype=side.dtype)
    model = side.fill(Normed(side, norm)).train()
    norm.eval()
    side.train(model, side.reducer(model), SGD(model.parameters(), lr=0.1))
    return model


@program(RIGHT, tp=2)
def batch_norm_of_one_batch_on_both_slices(side: Side) -> Any:
    model = nn.Sequential(side.column(WIDTH, 4), nn.Tanh(), side.row(4, WIDTH))
    model.append(nn.BatchNorm1d(WIDTH, dtype=side.dtype)).append(nn.Linear(WIDTH, OUT).double())
    side.train(side.fill(model), side.reducer(model), SGD(model.parameters(), lr=0.1))
    return model


@program(RIGHT)
def a_layer_frozen_in_turn(side: Side) -> Any:
    model = side.net()
    reducer, optimizer = side.reducer(model), Adam(model.parameters(), lr=0.01)
    for step in range(5):
        model[0].requires_grad_(step % 2 == 0)
        model[1].requires_grad_(step % 2 == 1)
        side.loss(model, *side.batch(step)).backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(REFUSED, "block0|frozen|requires_grad")
def a_layer_frozen_on_one_rank(side: Side) -> Any:
    model = side.net()
    reducer, optimizer = side.reducer(model), Adam(model.parameters(), lr=0.01)
    for step in range(4):
        model[0].requires_grad_(side.at("dp") != 1 or step < 2)
        side.loss(model, *side.batch(step)).backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


def dropping(side: Side, seeds: Callable[[int, int], int], **options: Any) -> Any:
    """LayerDrop: a step leaves out one of two blocks; which one, a seed by step and rank says."""
    model = side.net()
    reducer, optimizer = side.reducer(model, **options), Adagrad(model.parameters(), lr=0.1)
    for step in range(4):
        ranks = range(2) if side.plain else [side.at("dp")]
        for rank in ranks:
            generator = torch.Generator().manual_seed(seeds(step, rank))
            left = int(torch.rand((), generator=generator) < 0.5)
            x, target = (t.chunk(2)[rank] for t in Side(None).batch(step))
            loss = (model[2](model[left](x)) - target).square().mean()
            (loss / len(ranks)).backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(RIGHT)
def layers_dropped_alike(side: Side) -> Any:
    return dropping(side, lambda step, rank: step)


@program(RIGHT)
def layers_dropped_by_rank_as_zero(side: Side) -> Any:
    return dropping(side, lambda step, rank: 10 * step + rank, **_unused(side))


@program(REFUSED, "block")
def layers_dropped_by_rank(side: Side) -> Any:
    return dropping(side, lambda step, rank: 10 * step + rank)


def _unused(side: Side) -> dict[str, Any]:
    return {} if side.plain else {"unused": "zero"}


# -- weights in half precision, in parts ---------------------------------------------------


def half(side: Side, kind: Any, between: Callable[[nn.Module, int], None], **options: Any) -> Any:
    """A weight of ones whose gradient is 1; each step moves it by less than bf16 can tell."""
    model = nn.Linear(WIDTH, 1, bias=False, dtype=side.dtype if side.plain else torch.bfloat16)
    nn.init.ones_(model.weight)
    reducer = side.reducer(model, shard=True)
    optimizer = side.sharded(reducer, kind, lr=1e-3, **options)
    for step in range(40):
        model(torch.ones(1, WIDTH, dtype=model.weight.dtype)).sum().backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            between(model, step)
    return model


@program(RIGHT, tolerance=0.004)  # a bf16 number has 8 bits
def half_weights_within_a_norm_that_they_have(side: Side) -> Any:
    return half(side, RMSprop, lambda m, _: m.weight.renorm_(2, 0, 100.0), alpha=0.0)


@program(RIGHT, tolerance=0.004)
def half_averages_swapped_in_and_back(side: Side) -> Any:
    def swap(model: nn.Module, step: int) -> None:
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: p * 0.5 for name, p in kept.items()})
        model.load_state_dict(kept)

    return half(side, SGD, swap, momentum=0.5)


@program(RIGHT, tolerance=0.004)
def half_weights_halved(side: Side) -> Any:
    """Really changed: the fp32 copy follows."""
    return half(side, SGD, lambda m, step: m.weight.mul_(0.5 if step == 20 else 1.0))


# -- options, steps, states ----------------------------------------------------------------


@program(RIGHT, tp=2)
def named_parameters_in_decay_groups(side: Side) -> Any:
    model = side.net()
    reducer = side.reducer(model, shard=True)
    norms = [(n, p) for n, p in model.named_parameters() if "norm" in n]
    others = [(n, p) for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": others, "weight_decay": 0.3}, {"params": norms, "weight_decay": 0.0}]
    side.train(model, reducer, side.sharded(reducer, AdamW, groups, lr=0.01))
    return model


@program(RIGHT, tp=2)
def decay_by_module_type_and_a_scheduler(side: Side) -> Any:
    model = side.net()
    optimizer = AdamW(decayed(model), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    side.train(model, side.reducer(model), optimizer, after=lambda _: schedule.step())
    return model


@program(RIGHT)
def closures_that_finish(side: Side) -> Any:
    model = side.net()
    reducer = side.reducer(model, shard=True)
    optimizer = side.sharded(reducer, SGD, lr=0.1, momentum=0.9)
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = side.loss(model, *side.batch(step))
            loss.backward()
            reducer.finish()
            return loss.item()

        optimizer.step(closure)
    return model


@program(RIGHT)
def a_body_unfrozen_with_its_moments(side: Side) -> Any:
    """The head alone for two steps, then all: Adam's moments of the head are kept."""
    model = side.net()
    model[:2].requires_grad_(False)
    reducer = side.reducer(model, shard=True, frozen=True)
    optimizer = side.sharded(reducer, AdamW, lr=0.02)
    side.train(model, reducer, optimizer, steps=2)
    model.requires_grad_(True)
    side.train(model, reducer, optimizer, steps=3)
    return model


@program(EITHER, "frozen|requires_grad|reducer|block")
def a_body_unfrozen_under_one_reducer(side: Side) -> Any:
    model = side.net()
    model[:2].requires_grad_(False)
    reducer, optimizer = side.reducer(model), Adam(model.parameters(), lr=0.01)
    side.train(model, reducer, optimizer, steps=2)
    model.requires_grad_(True)
    side.train(model, reducer, optimizer, steps=3)
    return model


@program(RIGHT)
def two_reducers_in_one_step(side: Side) -> Any:
    model = side.net()
    parts = [model[:1], model[1:]]
    both = [side.reducer(part) for part in parts]
    optimizer = Adam(model.parameters(), lr=0.01)
    for step in range(3):
        side.loss(model, *side.batch(step)).backward()
        for reducer in both:
            reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(RIGHT)
def one_rank_evaluates_between_steps(side: Side) -> Any:
    model = side.net(drop=0.0)
    reducer = side.reducer(model, shard=True)

    def evaluate(step: int) -> None:
        if side.at("dp") == 0:
            with torch.no_grad():
                model.eval()(Side(None).batch(50)[0])
            model.train()

    side.train(model, reducer, side.sharded(reducer, Adam, lr=0.01), after=evaluate)
    return model


@program(REFUSED, "state|rank", tp=2)
def an_optimizer_state_of_another_slice(side: Side) -> Any:
    model = side.net()
    reducer = side.reducer(model, shard=True)
    optimizer = side.sharded(reducer, SGD, lr=0.1, momentum=0.9)
    side.train(model, reducer, optimizer, steps=2)
    if not side.plain:
        states: list[Any] = [copy.deepcopy(optimizer.state_dict())]
        torch.distributed.broadcast_object_list(states, src=0)
        optimizer.load_state_dict(states[0])
    side.train(model, reducer, optimizer, steps=2)
    return model


@program(RIGHT, tp=2)
def each_slices_own_state_is_loaded(side: Side) -> Any:
    model = side.net()
    reducer = side.reducer(model, shard=True)
    optimizer = side.sharded(reducer, SGD, lr=0.1, momentum=0.9)
    side.train(model, reducer, optimizer, steps=2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    side.train(model, reducer, optimizer, steps=2)
    return model
