"""Programs over slices of weights: tensor and sequence parallelism, scalers, ensembles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, RMSprop
from torch.utils.checkpoint import checkpoint

from commgrid.collectives import gather_from_group, scatter_to_group
from commgrid.data_parallel import GradScaler
from commgrid.parameters import mark_parameters
from commgrid.tensor_parallel import VocabParallelEmbedding, VocabParallelHead
from tests.data_parallel.habits.sides import OUT, REFUSED, RIGHT, WIDTH, Side, Table

TABLE = Table()
program = TABLE.program
CLIPPING = "scale|clip_gradients|gradient"


def edited(side: Side, edit: Callable[[nn.Module], Any], kind: Any = SGD, **options: Any) -> Any:
    """A model whose gradients a user changes between finish and step."""
    model = side.net(**options)
    optimizer = kind(model.parameters(), lr=0.1)
    side.train(model, side.reducer(model), optimizer, lambda _: edit(model))
    return model


# -- gradients changed by hand -------------------------------------------------------------


def matrices(model: nn.Module) -> list[Tensor]:
    """The weights of all blocks, which are cut."""
    return [p for name, p in model.named_parameters() if p.dim() == 2 and "head" not in name]


@program(REFUSED, CLIPPING, tp=2)
def infinite_norm_of_slices(side: Side) -> Any:
    return edited(side, lambda m: clip_grad_norm_(matrices(m), 0.001, norm_type=math.inf))


@program(RIGHT, tp=2)
def infinite_norm_that_a_copy_has(side: Side) -> Any:
    """The largest number is one of the head's, of which both ranks have a copy."""
    return edited(side, lambda m: clip_grad_norm_(m.parameters(), 0.02, norm_type=math.inf))


@program(REFUSED, CLIPPING, tp=2)
def each_blocks_norm_clipped(side: Side) -> Any:
    def clip(model: nn.Module) -> None:
        for block in model:  # type: ignore[attr-defined]
            clip_grad_norm_(block.parameters(), 0.05)

    return edited(side, clip, Adagrad)


@program(REFUSED, CLIPPING, tp=2)
def each_gradient_by_its_own_norm(side: Side) -> Any:
    def normalize(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(p.grad.norm())

    return edited(side, normalize)


@program(REFUSED, CLIPPING, tp=2, dp=2, ranks=4)
def norms_clipped_from_the_third_step_on(side: Side) -> Any:
    steps: list[int] = []

    def clip(model: nn.Module) -> None:
        steps.append(1)
        if len(steps) > 2:
            clip_grad_norm_(model[0].parameters(), 0.05)  # type: ignore[index]

    model = side.net()
    side.train(model, side.reducer(model), SGD(model.parameters(), lr=0.1), lambda _: clip(model),
               steps=8)  # fmt: skip
    return model


@program(RIGHT, tp=2)
def the_norm_of_copies_alone_clipped(side: Side) -> Any:
    return edited(side, lambda m: clip_grad_norm_(m.head.parameters(), 0.05), RMSprop)


@program(RIGHT, tp=2)
def a_rate_for_each_layer(side: Side) -> Any:
    def slow(model: nn.Module) -> None:
        for depth, layer in enumerate(model):  # type: ignore[arg-type]
            for p in layer.parameters():
                p.grad.mul_(0.5 ** (2 - depth))

    return edited(side, slow)


@program(RIGHT, tp=2)
def the_signs_of_gradients(side: Side) -> Any:
    def signs(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.clamp_(-1e-3, 1e-3)

    return edited(side, signs, Adagrad)


@program(RIGHT, tp=2)
def the_norm_of_the_whole_clipped(side: Side) -> Any:
    model = side.net()
    reducer = side.reducer(model, shard=True)
    side.train(
        model, reducer, side.sharded(reducer, Adagrad, lr=0.1),
        lambda _: reducer.clip_gradients(0.1),
    )  # fmt: skip
    return model


class Words(nn.Module):
    """A table of tokens, tied to the head, over vocabularies of 12."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(12, WIDTH, dtype=side.dtype)
        self.head: Any = nn.Linear(WIDTH, 12, bias=False, dtype=side.dtype)
        if side.plain:
            self.head.weight = self.embed.weight
        else:
            self.embed = VocabParallelEmbedding(12, WIDTH, dtype=side.dtype)
            self.head = VocabParallelHead(WIDTH, 12, weight=self.embed.weight, dtype=side.dtype)
        self.plain = side.plain

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross entropy of telling each token's successor in the alphabet."""
        logits = self.head(torch.tanh(self.embed(tokens)))
        if not self.plain:
            logits = gather_from_group(logits, "tp")
        return F.cross_entropy(logits, (tokens + 1) % 12)

    @torch.no_grad()
    def scale_rows(self, tokens: range, factor: float) -> None:
        """Multiply the gradient's rows of some tokens, wherever they are."""
        gradient = self.embed.weight.grad
        first = 0 if self.plain else self.embed.group.rank * len(gradient)
        for row in range(len(gradient)):
            if first + row in tokens:
                gradient[row] *= factor


def of_words(side: Side, tokens: range, factor: float, kind: Any = SGD) -> Any:
    model = side.fill(Words(side))
    optimizer, reducer = kind(model.parameters(), lr=0.5), side.reducer(model)
    for step in range(4):
        model((torch.arange(9) * (step + 2)) % 12).backward()
        reducer.finish()
        model.scale_rows(tokens, factor)
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(RIGHT, tp=2)
def new_tokens_rows_alone_trained(side: Side) -> Any:
    """The old vocabulary is all of the first slice."""
    return of_words(side, range(6), 0.0)


@program(RIGHT, tp=2)
def old_tokens_rows_slowed(side: Side) -> Any:
    """All of the first slice and of nothing else, by one factor: a rate, not a clipped norm."""
    return of_words(side, range(6), 0.25, Adagrad)


@program(RIGHT, tp=2)
def some_rows_of_one_slice_slowed(side: Side) -> Any:
    return of_words(side, range(8, 12), 0.5)


# -- initial weights -----------------------------------------------------------------------


def drawn_again(side: Side, seed: int | None, init: Callable[[Tensor], Any]) -> Any:
    """A second init of the projections; the plain side draws what both slices have drawn."""
    model = side.net()
    torch.manual_seed(0 if seed is None else seed + side.at("tp"))
    for name, p in model.named_parameters():
        if not name.endswith("down.weight"):
            continue
        if side.plain and seed is not None:
            halves = []
            for slice_ in range(2):
                torch.manual_seed(seed + slice_)
                halves.append(init(p.detach()[:, :WIDTH].clone()))
            p.data.copy_(torch.cat(halves, 1))
        else:
            torch.manual_seed(0 if seed is None else seed + side.at("tp"))
            init(p.data)
    side.train(model, side.reducer(model), Adam(model.parameters(), lr=0.01))
    return model


@program(REFUSED, "down.weight", tp=2)
def projections_drawn_again_by_one_seed(side: Side) -> Any:
    return drawn_again(side, None, lambda p: nn.init.trunc_normal_(p, std=0.1))


@program(RIGHT, tp=2)
def projections_drawn_again_by_slice(side: Side) -> Any:
    return drawn_again(side, 7, lambda p: nn.init.uniform_(p, -0.1, 0.1))


@program(RIGHT, tp=2)
def projections_of_zeros(side: Side) -> Any:
    return drawn_again(side, None, nn.init.zeros_)


@program(RIGHT, tp=2)
def widened_by_copies_of_rows(side: Side) -> Any:
    """Net2Net: units repeat within a slice, and so slices are equal."""
    model = side.net()
    small = torch.linspace(-1, 1, 4 * WIDTH, dtype=side.dtype).sin().view(4, WIDTH)
    with torch.no_grad():
        for block in model[:2]:
            block.up.weight.copy_(small.repeat(len(block.up.weight) // 4, 1))
            block.up.bias.zero_()
    side.train(model, side.reducer(model), SGD(model.parameters(), lr=0.1))
    return model


@program(REFUSED, "block1", tp=2)
def a_blocks_weights_broadcast_over_all_ranks(side: Side) -> Any:
    model = side.net()
    for p in () if side.plain else model[1].parameters():
        torch.distributed.broadcast(p.data, 0)
    side.train(model, side.reducer(model), SGD(model.parameters(), lr=0.1))
    return model


# -- inputs --------------------------------------------------------------------------------


def noisy(side: Side, seed: Callable[[int], int], steps: int) -> Any:
    """Dropout between the blocks, by a seed for each step."""
    model = side.net(drop=0.3)
    reducer, optimizer = side.reducer(model), SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(seed(step))
        side.loss(model, *side.batch(step)).backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(RIGHT, tp=2)
def dropout_by_one_seed(side: Side) -> Any:
    return noisy(side, lambda step: step, 4)


@program(REFUSED, "different|values|input|weights", tp=2)
def dropout_by_rank_from_step_25_on(side: Side) -> Any:
    return noisy(side, lambda step: 2 * step + (step >= 25) * side.at("tp"), 150)


@program(REFUSED, "different|values|input|weights", tp=2)
def targets_that_differ_from_step_30_on(side: Side) -> Any:
    """The layers' inputs are equal; the losses differ."""
    model = side.net()
    reducer, optimizer = side.reducer(model), SGD(model.parameters(), lr=0.01)
    for step in range(150):
        x, target = side.batch(step)
        target = target.flip(0) if step >= 30 and side.at("tp") else target
        side.loss(model, x, target).backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


# -- sequence parallelism ------------------------------------------------------------------


class Marked(nn.Module):
    """A scale and a shift of each token, over a slice of the sequence, before a block."""

    def __init__(self, side: Side, marks: bool, cuts: bool) -> None:
        super().__init__()
        self.side, self.cuts = side, cuts and not side.plain
        self.norm1 = nn.LayerNorm(WIDTH, dtype=side.dtype)
        self.net = nn.Sequential(side.layers(1, sequence=cuts))
        if marks and not side.plain:
            mark_parameters(self.norm1, partial="tp")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(scatter_to_group(x, "tp", dim=0) if self.cuts else x)
        x = self.net[0](x)
        return self.net[1](gather_from_group(x, "tp", dim=0) if self.cuts else x)


def marked(side: Side, marks: bool, cuts: bool, zeros: bool = False) -> Any:
    model = side.fill(Marked(side, marks, cuts))
    if zeros:
        nn.init.zeros_(model.net.head.weight)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    side.train(model, side.reducer(model), optimizer, steps=5)
    return model


@program(RIGHT, tp=2)
def partial_norms_of_a_cut_sequence(side: Side) -> Any:
    return marked(side, True, True)


@program(RIGHT, tp=2)
def partial_norms_behind_zeros(side: Side) -> Any:
    """In the first step their gradients are equal on all ranks: zeros."""
    return marked(side, True, True, zeros=True)


@program(REFUSED, "norm1|partial", tp=2)
def partial_norms_of_a_whole_sequence(side: Side) -> Any:
    return marked(side, True, False)


@program(REFUSED, "norm1|partial", tp=2)
def norms_of_a_cut_sequence_without_a_mark(side: Side) -> Any:
    return marked(side, False, True)


class Shift(nn.Module):
    """A bias of each token in a slice of the sequence, whose gradient counts tokens."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side, self.bias = side, nn.Parameter(torch.zeros(WIDTH, dtype=side.dtype))
        if not side.plain:
            mark_parameters(self, partial="tp")

    def forward(self, x: Tensor) -> Tensor:
        if self.side.plain:
            return x + self.bias
        return gather_from_group(scatter_to_group(x, "tp", dim=0) + self.bias, "tp", dim=0)


@program(RIGHT, tp=2)
def a_partial_bias_with_equal_parts(side: Side) -> Any:
    """Each rank's part is the number of its tokens: equal in every bit, and yet half of it."""
    model = side.fill(nn.Sequential(Shift(side), side.column(WIDTH, 4), side.row(4, OUT)))
    reducer, optimizer = side.reducer(model), SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        model(torch.ones(6, WIDTH, dtype=side.dtype)).sum().backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


# -- scalers, blocks, members --------------------------------------------------------------


def scaled(side: Side, scaler: Any, kind: Any, overflows: Callable[[int], bool]) -> Any:
    """fp32; in some steps a gradient overflows."""
    side.dtype = torch.float32
    model = side.net()
    reducer, optimizer = side.reducer(model), kind(model.parameters(), lr=0.01)
    for step in range(4):
        factor = math.inf if overflows(step) else 1.0
        hook = model[0].up.weight.register_hook(lambda g, factor=factor: g * factor)
        scaler.scale(side.loss(model, *side.batch(step))).backward()
        hook.remove()
        reducer.finish()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


@program(REFUSED, "GradScaler", tp=2)
def torchs_scaler_over_slices(side: Side) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return scaled(side, scaler, RMSprop, lambda step: step == 2 and side.at("tp") == 0)


@program(RIGHT, tp=2, tolerance=1e-4)  # fp32
def our_scaler_over_slices(side: Side) -> Any:
    kind = torch.amp.GradScaler if side.plain else GradScaler
    scaler = kind("cpu", init_scale=1024.0)
    return scaled(side, scaler, RMSprop, lambda step: step == 2 and side.at("tp") == 0)


@program(RIGHT, tolerance=1e-4)  # fp32
def torchs_scaler_over_copies(side: Side) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return scaled(side, scaler, RMSprop, lambda step: step == 2 and side.at("dp") == 0)


@program(RIGHT, tp=2)
def recomputed_and_compiled_blocks(side: Side) -> Any:
    model = side.net()
    compiled = torch.compile(model[0], backend="eager")
    reducer, optimizer = side.reducer(model), Adam(model.parameters(), lr=0.01)
    for step in range(3):
        x, target = side.batch(step)
        y = checkpoint(model[1], compiled(x), use_reentrant=False)
        (model[2](y) - target).square().mean().backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(RIGHT, tp=2, tolerance=0.02)  # bf16 products have 8 bits
def autocast_to_half(side: Side) -> Any:
    model = side.net() if side.plain else None
    if model is None:
        side.dtype = torch.float32
        model = side.net()
    reducer, optimizer = side.reducer(model), SGD(model.parameters(), lr=0.01)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=not side.plain):
            loss = side.loss(model, *side.batch(step))
        loss.backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(RIGHT, ranks=2, dp=1, member=2, order="tp-cp-ep-dp-pp-member")
def members_with_norms_and_rates_of_their_own(side: Side) -> Any:
    """An ensemble, of which each clips by its norm and has its rate; one is compared."""
    member = side.at("member") if not side.plain else 1
    model = side.net()
    with torch.no_grad():
        model.head.weight.mul_(1 + member)
    optimizer = Adagrad(model.parameters(), lr=0.05 * (1 + member))
    side.train(
        model, side.reducer(model), optimizer, lambda _: clip_grad_norm_(model.parameters(), 0.1)
    )
    return (model if member else nn.Module()), 1.0
