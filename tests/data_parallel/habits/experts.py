"""Programs over experts, and over torch's own data parallelism: FSDP2, HSDP, DDP."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from commgrid.data_parallel import GradScaler, clip_gradients
from commgrid.expert import follow_loss_scale
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
CLIPPING = "scale|clip_gradients|gradient"


# -- experts -------------------------------------------------------------------------------


def routed(
    side: Side, kind: Any = SGD, start: Callable[[Any], Any] | None = None, **options: Any
) -> tuple[Any, Any, Any]:
    model = side.fill(
        nn.Sequential(
            OrderedDict(moe=side.moe(**options), head=nn.Linear(WIDTH, OUT, dtype=side.dtype))
        )
    )
    if start is not None:
        start(model.moe.experts)
    return model, side.reducer(model), kind(model.parameters(), lr=0.1)


@program(REFUSED, "experts", ep=2)
def experts_drawn_again_by_one_seed(side: Side) -> Any:
    def start(experts: Any) -> None:
        torch.manual_seed(3)
        nn.init.xavier_uniform_(experts.down)

    model, reducer, optimizer = routed(side, Adagrad, start)
    side.train(model, reducer, optimizer)
    return model


@program(RIGHT, ep=2)
def experts_upcycled_from_one(side: Side) -> Any:
    @torch.no_grad()
    def start(experts: Any) -> None:
        for name in ("up", "down"):
            weight = getattr(experts, name)
            one = torch.linspace(-3, 3, weight[0].numel(), dtype=side.dtype).cos()
            weight.copy_(one.view_as(weight[0]).expand_as(weight))

    model, reducer, optimizer = routed(side, SGD, start)
    side.train(model, reducer, optimizer)
    return model


@program(REFUSED, CLIPPING, ep=2)
def the_norm_of_each_ranks_experts(side: Side) -> Any:
    model, reducer, optimizer = routed(side)
    side.train(
        model, reducer, optimizer, lambda _: clip_grad_norm_(model.moe.experts.parameters(), 1e-3)
    )
    return model


def cut(side: Side) -> Any:
    """ZeRO-1 and the norm of the whole, over experts that are cut or lie beside slices."""
    layers = OrderedDict(moe=side.moe(), head=nn.Linear(WIDTH, OUT, dtype=side.dtype))
    model = side.fill(nn.Sequential(layers))
    reducer = side.reducer(model, shard=True)
    optimizer = side.sharded(reducer, SGD, lr=0.1, momentum=0.9)
    side.train(model, reducer, optimizer, lambda _: reducer.clip_gradients(0.05))
    return model


@program(RIGHT, ranks=4, ep=2, etp=2)
def experts_cut_and_clipped(side: Side) -> Any:
    return cut(side)


@program(RIGHT, ranks=4, ep=2, tp=2, etp=1)
def experts_beside_slices_and_clipped(side: Side) -> Any:
    return cut(side)


def accumulated(side: Side, count: int, follows: bool, scaler: Any = None) -> Any:
    """A router's z-loss, and a loss divided by the number of microbatches."""
    model, reducer, optimizer = routed(side, z_loss=0.5)
    for step in range(3):
        for i in range(count):
            loss = side.loss(model, *side.batch(10 * step + i)) / (1 if follows else count)
            if follows and not side.plain:
                loss = follow_loss_scale(loss, model)
            loss = loss / (count if follows else 1)
            if i + 1 < count:
                with reducer.no_sync():
                    (loss if scaler is None else scaler.scale(loss)).backward()
            else:
                (loss if scaler is None else scaler.scale(loss)).backward()
        reducer.finish()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return model


ROUTER = "[Rr]outer|z_loss|GradScaler"


@program(EITHER, ROUTER, ep=2)
def a_routers_loss_in_four_parts(side: Side) -> Any:
    return accumulated(side, 4, follows=False)


@program(RIGHT, ep=2)
def a_routers_loss_that_follows_in_four_parts(side: Side) -> Any:
    return accumulated(side, 4, follows=True)


@program(EITHER, ROUTER, ep=2)
def a_routers_loss_under_our_scaler(side: Side) -> Any:
    scaler = None if side.plain else GradScaler("cpu", init_scale=4096.0)
    return accumulated(side, 1, follows=False, scaler=scaler)


@program(RIGHT, ep=2)
def a_routers_loss_in_one_part(side: Side) -> Any:
    return accumulated(side, 1, follows=False)


@program(EITHER, ROUTER, ep=2)
def a_routers_loss_under_torchs_scaler(side: Side) -> Any:
    scaler = None if side.plain else torch.amp.GradScaler("cpu", init_scale=4096.0)
    return accumulated(side, 1, follows=False, scaler=scaler)


# -- FSDP2 and DDP -------------------------------------------------------------------------


def wrapped(
    side: Side, mesh: Callable[[], Any], kind: Any = SGD, clips: bool = True, inside: bool = True
) -> Any:
    """FSDP2 over a mesh, of each layer and then the rest, or of all at once."""
    model = side.net()
    if not side.plain:
        for layer in [*(model if inside else ()), model]:
            fully_shard(layer, mesh=mesh())

    def clip(_: int) -> None:
        if clips and side.plain:
            clip_grad_norm_(model.parameters(), 0.1)
        elif clips:
            clip_gradients(model, 0.1)

    side.train(model, None, kind(model.parameters(), lr=0.05), clip)
    return model


@program(REFUSED, "slice|mesh|FSDP", tp=2)
def fsdp_over_the_slices(side: Side) -> Any:
    return wrapped(side, lambda: side.grid.device_mesh("tp"), Adagrad, clips=False)


@program(REFUSED, "slice|mesh|FSDP", ranks=4, tp=2)
def hsdp_over_the_slices(side: Side) -> Any:
    return wrapped(side, lambda: side.grid.device_mesh("dp", "tp"), AdamW, clips=False)


@program(REFUSED, "slice|mesh|FSDP", tp=2)
def fsdp_of_all_at_once_over_the_slices(side: Side) -> Any:
    return wrapped(side, lambda: side.grid.device_mesh("tp"), SGD, clips=False, inside=False)


@program(RIGHT, ranks=4, tp=2)
def fsdp_beside_the_slices(side: Side) -> Any:
    return wrapped(side, lambda: side.grid.device_mesh("dp_cp"))


@program(RIGHT, ranks=4, dp_replicate=2, dp_shard=2)
def hsdp_clipped(side: Side) -> Any:
    def batch(step: int) -> Any:
        rows = Side(None).batch(step)
        return rows if side.plain else [t.chunk(4)[side.grid.rank] for t in rows]

    side.batch = lambda step, *_: batch(step)  # type: ignore[method-assign,assignment]
    return wrapped(side, lambda: side.grid.device_mesh("dp_replicate", "dp_shard"), Adam)


@program(REFUSED, "mesh|replica|copies|FSDP")
def fsdp_over_one_rank_of_two(side: Side) -> Any:
    return wrapped(side, lambda: side.grid.device_mesh("tp"), RMSprop)


@program(RIGHT)
def ddp_without_sync_and_clipped_by_torch(side: Side) -> Any:
    model = side.net()
    wrapped_ = model if side.plain else DistributedDataParallel(model)
    optimizer = Adam(model.parameters(), lr=0.01)
    for step in range(3):
        if side.plain:
            (side.loss(wrapped_, *side.batch(2 * step)) / 2).backward()
        else:
            with wrapped_.no_sync():
                (side.loss(wrapped_, *side.batch(2 * step)) / 2).backward()
        (side.loss(wrapped_, *side.batch(2 * step + 1)) / 2).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model


def edp(side: Side, factor: float | None) -> Any:
    """Experts over edp and the rest over dp, by FSDP2."""
    model, _, optimizer = routed(side, SGD) if side.plain else (None, None, None)
    if model is None:
        model = side.fill(
            nn.Sequential(OrderedDict(moe=side.moe(), head=nn.Linear(WIDTH, OUT, dtype=side.dtype)))
        )
        part = fully_shard(model.moe.experts, mesh=side.grid.device_mesh("edp"))
        if factor is not None:
            part.set_gradient_divide_factor(factor)
        fully_shard(model, mesh=side.grid.device_mesh("dp_cp"))
        optimizer = SGD(model.parameters(), lr=0.1)
    side.train(model, None, optimizer)
    return model


@program(EITHER, "expert|divide", ranks=4, ep=2)
def experts_in_fsdp_over_edp(side: Side) -> Any:
    return edp(side, None)


@program(EITHER, "expert|divide", ep=2)
def experts_in_fsdp_over_an_edp_of_one(side: Side) -> Any:
    return edp(side, None)


@program(RIGHT, ranks=4, ep=2)
def experts_in_fsdp_divided_by_all_data_ranks(side: Side) -> Any:
    return edp(side, 4.0)


@program(RIGHT, ep=1, etp=1)
def experts_in_fsdp_without_a_warning(side: Side) -> Any:
    layers = OrderedDict(moe=side.moe(), head=nn.Linear(WIDTH, OUT, dtype=side.dtype))
    model = side.fill(nn.Sequential(layers))
    for part in [] if side.plain else [model.moe, model]:
        fully_shard(part, mesh=side.grid.device_mesh("dp_cp"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "FSDP2-wrapped module .* view")
        side.train(model, None, SGD(model.parameters(), lr=0.1))
    return model


@program(RIGHT)
def fsdp_accumulated_without_sync(side: Side) -> Any:
    model = side.net()
    if not side.plain:
        model = fully_shard(model, mesh=side.grid.device_mesh("dp_cp"))
    optimizer = RMSprop(model.parameters(), lr=0.01)
    for step in range(3):
        for i in range(2):
            if not side.plain:
                model.set_requires_gradient_sync(i == 1)
            (side.loss(model, *side.batch(2 * step + i)) / 2).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model
