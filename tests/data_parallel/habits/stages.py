"""Programs over pipeline stages and cut sequences."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from commgrid.context_parallel import SequenceSharding, attention
from commgrid.data_parallel import GradScaler
from commgrid.parameters import mark_parameters
from tests.data_parallel.habits.sides import (
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


def staged(
    side: Side, edit: Callable[[nn.Module], Any], kind: Any = SGD, chunks: int = 1, **options: Any
) -> Any:
    """Stages whose gradients a user changes between finish and step."""
    model = side.stages(side.layers(3), chunks)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    optimizer = kind(model.parameters(), lr=0.02)
    side.train_stages(model, optimizer, edit=lambda _: edit(model), schedule=schedule, **options)
    return model


# -- stages --------------------------------------------------------------------------------


@program(REFUSED, CLIPPING, pp=2)
def each_stages_infinite_norm(side: Side) -> Any:
    return staged(side, lambda m: clip_grad_norm_(m.parameters(), 1e-3, norm_type=math.inf))


@program(REFUSED, CLIPPING, pp=2, dp=2, ranks=4)
def each_stages_norm_with_copies(side: Side) -> Any:
    return staged(side, lambda m: clip_grad_norm_(m.parameters(), 0.05), Adagrad, steps=5)


@program(RIGHT, pp=2)
def each_blocks_norm(side: Side) -> Any:
    """Each block is clipped by its own norm, on the unsharded model too."""

    def clip(model: nn.Module) -> None:
        blocks: dict[str, list[nn.Parameter]] = {}
        for name, p in model.named_parameters():
            block = [part for part in name.split(".") if part.startswith("block")]
            blocks.setdefault(block[0] if block else name, []).append(p)
        for parameters in blocks.values():
            clip_grad_norm_(parameters, 0.05)

    return staged(side, clip, chunks=2)


@program(RIGHT, pp=2)
def each_stages_values_clamped(side: Side) -> Any:
    return staged(side, lambda m: clip_grad_value_(m.parameters(), 1e-3), RMSprop)


@program(RIGHT, pp=2)
def a_slower_rate_on_the_first_stage(side: Side) -> Any:
    """The first two layers' gradients are halved in every step: a rate, not a norm."""

    def slow(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if name.startswith(("block0", "block1")) and p.grad is not None:
                p.grad.mul_(0.5)

    return staged(side, slow)


@program(RIGHT, pp=2)
def the_norm_of_all_stages_clipped(side: Side) -> Any:
    model = side.stages(side.layers(3), 2)
    reducer = side.reducer(model, shard=True)
    side.train_stages(
        model, side.sharded(reducer, AdamW, lr=0.01), reducer=reducer, schedule="interleaved",
        edit=lambda _: reducer.clip_gradients(0.05),
    )  # fmt: skip
    return model


@program(RIGHT, pp=2)
def a_frozen_first_stage_and_the_lasts_norm(side: Side) -> Any:
    """The last stage has all trained parameters, so its norm is the model's."""
    layers = side.layers(3)
    for name in ("block0", "block1"):
        layers[name].requires_grad_(False)
    model = side.stages(layers)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = SGD(trained or [nn.Parameter(torch.zeros(1))], lr=0.1)
    side.train_stages(model, optimizer, edit=lambda _: clip_grad_norm_(trained, 0.05))
    return model


@program(RIGHT, pp=2)
def norms_that_no_stage_reaches(side: Side) -> Any:
    return staged(side, lambda m: clip_grad_norm_(m.parameters(), 1e6), Adam)


@program(REFUSED, "count|divid", pp=2)
def stages_that_count_other_things(side: Side) -> Any:
    return staged(side, lambda _: None, count=lambda pipeline: 2 if pipeline.is_last else 16)


@program(REFUSED, "count|divid", pp=2, dp=2, ranks=4)
def no_count_on_the_last_stage(side: Side) -> Any:
    return staged(side, lambda _: None, count=lambda p: None if p.is_last else 2)


@program(RIGHT, pp=2)
def counts_as_tensors_on_both_stages(side: Side) -> Any:
    return staged(side, lambda _: None, Adam, count=lambda _: torch.tensor(2))


class Embed(nn.Module):
    """A table of tokens that the head shares."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Head(Embed):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(x), self.weight)


def tied(side: Side, groups: Callable[[Any], Any], kind: Any = AdamW, **options: Any) -> Any:
    """A table on the first stage, tied to the head on the last one."""
    start = torch.linspace(0, 9, 12 * WIDTH, dtype=side.dtype).sin().view(12, WIDTH)
    layers: OrderedDict[str, nn.Module] = OrderedDict(embed=Embed(start.clone()))
    layers["block0"] = side.layers(1)["block0"]
    layers["head"] = Head(start.clone())
    if side.plain:
        layers["head"].weight = layers["embed"].weight
        model: Any = nn.Sequential(layers)
        side.fill(layers["block0"])
    else:
        own = [("embed", "block0"), ("head",)][side.at("pp")]
        for name in ("embed", "head"):
            mark_parameters(layers[name], shared="ends")
        model = nn.Sequential(OrderedDict((name, layers[name]) for name in own))
        if "block0" in own:
            side.fill(layers["block0"])
    optimizer, reducer = kind(groups(model), **options), side.reducer(model)
    pipeline = side.pipeline(model, "gpipe", 2, reducer, F.cross_entropy)
    for step in range(5):
        tokens = (torch.arange(8) * (step + 1)) % 12
        pipeline.step(tokens.chunk(2), ((tokens + 1) % 12).chunk(2))
        reducer.finish(count=2)
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(model, "head") and not side.plain:
        model = nn.Sequential(OrderedDict(embed=model.head))
    return model


def of_tables(model: nn.Module, **first: Any) -> list[dict[str, Any]]:
    """A group of the tables and one of the rest, where it exists."""
    tables = [p for n, p in model.named_parameters() if n.startswith(("embed", "head"))]
    rest = [p for n, p in model.named_parameters() if not n.startswith(("embed", "head"))]
    return [{"params": tables, **first}, *([{"params": rest}] if rest else [])]


ENDS: dict[str, Any] = {"pp": 2, "groups": {"ends": {"of": "pp", "pick": ["first", "last"]}}}
OPTIONS = "embed|head|weight|option|lr|momentum"


@program(REFUSED, OPTIONS, **ENDS)
def a_slower_rate_of_the_table_alone(side: Side) -> Any:
    """A rate for embeddings by their name; the head's copy has the other rate."""

    def groups(model: nn.Module) -> Any:
        tables = [p for n, p in model.named_parameters() if n.startswith("embed")]
        rest = [p for n, p in model.named_parameters() if not n.startswith("embed")]
        both = [{"params": tables, "lr": 0.01}, {"params": rest, "lr": 0.1}]
        return [group for group in both if group["params"]]

    return tied(side, groups, SGD, lr=0.1)


@program(REFUSED, OPTIONS, **ENDS)
def momentum_of_the_last_stage_alone(side: Side) -> Any:
    momentum = 0.9 if side.at("pp") == 1 else 0.0
    return tied(side, lambda m: m.parameters(), SGD, lr=0.05, momentum=momentum)


@program(RIGHT, **ENDS)
def names_and_orders_of_groups_differ(side: Side) -> Any:
    """Keys that no optimizer reads, in groups of other numbers."""

    def groups(model: nn.Module) -> Any:
        listed = of_tables(model, weight_decay=0.1, name=f"tables {side.at('pp')}")
        return listed[::-1] if side.at("pp") == 0 else listed

    return tied(side, groups, AdamW, lr=0.01)


@program(RIGHT, **ENDS)
def other_options_of_parameters_that_no_stage_shares(side: Side) -> Any:
    return tied(side, lambda m: of_tables(m, lr=0.2), Adagrad, lr=0.05)


@program(RIGHT, pp=2, tolerance=1e-4)  # fp32
def our_scaler_with_an_overflow_on_the_first_stage(side: Side) -> Any:
    side.dtype = torch.float32
    model = side.stages(side.layers(3))
    kind = torch.amp.GradScaler if side.plain else GradScaler
    scaler, reducer = kind("cpu", init_scale=256.0), side.reducer(model)
    optimizer, now = SGD(model.parameters(), lr=0.02), [0]

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return scaler.scale(F.mse_loss(y, target))

    if side.at("pp") == 0:
        model[0].up.weight.register_hook(lambda g: g * (math.inf if now[0] == 1 else 1.0))
    pipeline = side.pipeline(model, "1f1b", 2, reducer, loss)
    for step in range(4):
        now[0] = step
        x, target = side.batch(step)
        pipeline.step(x.chunk(2), target.chunk(2))
        reducer.finish(count=2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


@program(RIGHT, pp=2)
def averages_of_stages_swapped_in_and_back(side: Side) -> Any:
    model = side.stages(side.layers(3))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    reducer = side.reducer(model, shard=True)
    optimizer = side.sharded(reducer, AdamW, lr=0.02)

    def swap(_: int) -> None:
        average.update_parameters(model)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        model.load_state_dict(kept)

    side.train_stages(model, optimizer, edit=swap, reducer=reducer)
    return average.module


# -- sequences -----------------------------------------------------------------------------


class Attends(nn.Module):
    """Causal attention of two heads, and a head; x is (positions of this rank, WIDTH)."""

    def __init__(self, side: Side, sharding: Any, way: str) -> None:
        super().__init__()
        self.side, self.sharding, self.way = side, sharding, way
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=side.dtype)
        self.head = nn.Linear(WIDTH, OUT, dtype=side.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, len(x), 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        if self.side.plain:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = attention(q, k, v, sharding=self.sharding, way=self.way)
        return self.head(y.transpose(1, 2).reshape(len(x), WIDTH))


def attended(
    side: Side, way: str, kind: str, seed: Callable[[int], int] = lambda step: step
) -> Any:
    """A sequence of 16 positions over cp 2, drawn by a seed for each step."""
    sharding = getattr(SequenceSharding, kind)(16, 2)
    model = side.fill(Attends(side, sharding, way))
    reducer, optimizer = side.reducer(model), SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(4):
        batch = dict(zip("xt", Side(None).batch(seed(step), 16), strict=True))
        batch = batch if side.plain else sharding.shard(batch)
        side.loss(model, batch["x"], batch["t"]).backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(RIGHT, cp=2)
def one_batch_in_a_ring(side: Side) -> Any:
    return attended(side, "ring", "zigzag")


@program(RIGHT, cp=2)
def one_batch_by_heads(side: Side) -> Any:
    return attended(side, "ulysses", "contiguous")


@program(REFUSED, "differ|batch|values", cp=2)
def another_batch_on_each_rank_of_a_ring(side: Side) -> Any:
    return attended(side, "ring", "zigzag", lambda step: 7 * step + side.at("cp"))


@program(REFUSED, "differ|batch|values", cp=2)
def another_batch_by_heads_from_the_third_step_on(side: Side) -> Any:
    return attended(side, "ulysses", "contiguous", lambda s: s + (s > 1) * 9 * side.at("cp"))


@program(REFUSED, "differ|batch|values", cp=2)
def another_batch_gathered_on_one_rank(side: Side) -> Any:
    return attended(side, "allgather", "contiguous", lambda s: s + 9 * side.at("cp"))
