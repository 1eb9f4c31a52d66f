"""Programs in which a rank decides by itself: rates, steps, noise and resets by its own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, RMSprop
from torch.optim.lr_scheduler import ReduceLROnPlateau

from commgrid.collectives import all_reduce
from tests.data_parallel.habits.sides import REFUSED, RIGHT, Side, Table

TABLE = Table()
program = TABLE.program
APART = "rank|option|lr|copies|differ"


def loss_of(side: Side, model: Any, step: int) -> Tensor:
    """The last rows of a batch have targets ten times as large in odd steps."""
    x, target = Side(None).batch(step)
    target[4:] *= 10 if step % 2 else 1
    own = slice(None) if side.plain else slice(4 * side.at("dp"), 4 * side.at("dp") + 4)
    return (model(x[own]) - target[own]).square().mean()


def mean(side: Side, loss: Tensor) -> float:
    """The loss of the whole batch."""
    return float(loss.detach() if side.plain else all_reduce(loss.detach(), "dp_cp", op="avg"))


def trained(
    side: Side, decide: Callable[[Any, Any, Tensor, int], Any], kind: Any = SGD, **options: Any
) -> Any:
    """`decide` gets model, optimizer, loss and step between finish and step, and may say no."""
    model = side.net()
    reducer = side.reducer(model, **options)
    plain = kind(model.parameters(), lr=0.02)
    optimizer = side.sharded(reducer, kind, lr=0.02) if options else plain
    for step in range(6):
        loss = loss_of(side, model, step)
        loss.backward()
        reducer.finish()
        if decide(model, optimizer, loss, step) is not False:
            optimizer.step()
        optimizer.zero_grad()
    return model


def plateau(side: Side, of: Callable[[Tensor], float], **options: Any) -> Any:
    """Halve the rate whenever a loss has not fallen."""
    found: list[ReduceLROnPlateau] = []

    def decide(model: Any, optimizer: Any, loss: Tensor, step: int) -> None:
        if not found:
            found.append(ReduceLROnPlateau(optimizer, factor=0.5, patience=0))
        found[0].step(of(loss))

    return trained(side, decide, **options)


@program(REFUSED, APART)
def a_plateau_of_each_ranks_loss(side: Side) -> Any:
    return plateau(side, lambda loss: loss.item())


@program(REFUSED, APART)
def a_plateau_of_each_ranks_loss_with_parts(side: Side) -> Any:
    return plateau(side, lambda loss: loss.item(), shard=True)


@program(RIGHT)
def a_plateau_of_the_mean_loss(side: Side) -> Any:
    return plateau(side, lambda loss: mean(side, loss), shard=True)


@program(REFUSED, APART)
def steps_skipped_by_each_ranks_loss(side: Side) -> Any:
    return trained(side, lambda m, o, loss, s: loss.item() < 30.0, Adam)


@program(RIGHT)
def steps_skipped_by_the_mean_loss(side: Side) -> Any:
    return trained(side, lambda m, o, loss, s: mean(side, loss) < 15.0, Adam)


@program(REFUSED, APART)
def norms_clipped_by_each_ranks_loss(side: Side) -> Any:
    return trained(
        side,
        lambda m, o, loss, s: clip_grad_norm_(m.parameters(), 0.1 if loss > 30 else 10.0),
    )


@program(RIGHT)
def norms_clipped_by_the_step(side: Side) -> Any:
    return trained(
        side, lambda m, o, loss, s: clip_grad_norm_(m.parameters(), 0.1 if s % 2 else 10.0), RMSprop
    )


def noisy(side: Side, seed: Callable[[int], int]) -> Any:
    """Noise on gradients, as against overfitting."""

    def decide(model: Any, optimizer: Any, loss: Tensor, step: int) -> None:
        torch.manual_seed(seed(step))
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.1)

    return trained(side, decide)


@program(REFUSED, APART)
def noise_on_gradients_by_rank(side: Side) -> Any:
    return noisy(side, lambda step: 2 * step + side.at("dp"))


@program(RIGHT)
def noise_on_gradients_by_one_seed(side: Side) -> Any:
    return noisy(side, lambda step: step)


def reset(side: Side, seed: Callable[[int], int]) -> Any:
    """A unit that is dead is drawn again, in the third step."""

    @torch.no_grad()
    def decide(model: Any, optimizer: Any, loss: Tensor, step: int) -> None:
        torch.manual_seed(seed(step))
        if step == 2:
            model[0].up.weight[3].normal_()

    return trained(side, decide, Adam)


@program(RIGHT)
def a_unit_drawn_again_by_one_seed(side: Side) -> Any:
    return reset(side, lambda step: step)


# -- no optimizer at all -------------------------------------------------------------------


def by_hand(
    side: Side, edit: Callable[[Any], Any] = lambda model: None, *, finishes: bool = True
) -> Any:
    """Weights are updated in a loop of the user's own."""
    model = side.net()
    reducer = side.reducer(model)
    for step in range(4):
        side.loss(model, *side.batch(step)).backward()
        if finishes:
            reducer.finish()
        edit(model)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
        model.zero_grad()
    return model


@program(RIGHT, ranks=4, tp=2)
def updates_by_hand(side: Side) -> Any:
    return by_hand(side)


@program(REFUSED, "finish|reduced|gradient")
def updates_by_hand_without_finish(side: Side) -> Any:
    return by_hand(side, finishes=False)


@program(REFUSED, "scale|clip_gradients|gradient", tp=2)
def norms_of_slices_clipped_and_updates_by_hand(side: Side) -> Any:
    return by_hand(side, lambda m: clip_grad_norm_(m.parameters(), 0.05))
