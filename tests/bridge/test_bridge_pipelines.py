"""The stages of two grids in one schedule: gradients of one process, and everyone ends."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commgrid
from commgrid.bridge import Bridge, split_schedule
from commgrid.pipeline import Pipeline, make_schedule
from commgrid.pipeline_schedules.messages import Exchange, programs
from commgrid.pipeline_schedules.schedule import Backward, BackwardInput, Forward, Schedule
from commgrid.testing import run_on_ranks
from tests.bridge.test_bridge import BOUND, INNER, WIDTH, Mlp, drawn, off

MICROBATCHES, ROWS = 6, 3  # of a microbatch: 2 on the encoder's first data rank, 1 on its second


def weights() -> dict[str, Tensor]:
    shapes = {"e1": (INNER, WIDTH), "e2": (WIDTH, INNER), "l1": (INNER, WIDTH),
              "l2": (WIDTH, INNER), "head": (WIDTH, WIDTH)}  # fmt: skip
    return {
        name: (drawn(seed, *shape) / 3).requires_grad_()
        for seed, (name, shape) in enumerate(shapes.items())
    }


def batches() -> tuple[Tensor, Tensor]:
    return drawn(10, MICROBATCHES, ROWS, WIDTH), drawn(11, MICROBATCHES, ROWS, WIDTH)


def alone() -> tuple[dict[str, Tensor], list[float]]:
    """Gradients and losses of one process."""
    w, (images, wanted) = weights(), batches()
    hidden = torch.tanh(images @ w["e1"].T) @ w["e2"].T
    out = torch.tanh(hidden @ w["l1"].T) @ w["l2"].T
    losses = (torch.sin(out @ w["head"].T) * wanted).sum((1, 2))
    losses.sum().backward()
    return {name: weight.grad for name, weight in w.items()}, losses.tolist()


class Stage(nn.Module):
    """A linear layer of given weights, before it a tanh and after it a bridge, or neither."""

    def __init__(self, weight: Tensor, bridge: Bridge | None = None) -> None:
        super().__init__()
        self.weight, self.bridge = nn.Parameter(weight.detach().clone()), bridge

    def forward(self, x: Tensor) -> Any:
        if self.bridge is None:
            return x @ self.weight.T
        return self.bridge(torch.tanh(x) @ self.weight.T)


class Crossed(nn.Module):
    """A model whose input comes over a bridge."""

    def __init__(self, bridge: Bridge, model: nn.Module) -> None:
        super().__init__()
        self.bridge, self.model = bridge, model

    def forward(self, _: Tensor) -> Any:
        return self.model(self.bridge(None))


def train(name: str) -> dict[str, Any]:
    """An encoder with pp 2 and dp 2, a decoder with pp 2 and tp 2; what a rank has at the end."""
    rank, w, (images, wanted) = dist.get_rank(), weights(), batches()
    encoder = decoder = None
    if rank < 4:
        encoder = commgrid.initialize(name="encoder", ranks=range(4), pp=2, timeout=30)
    else:
        decoder = commgrid.initialize(name="decoder", ranks=range(4, 8), pp=2, tp=2, timeout=30)
    bridge = Bridge(encoder, decoder, timeout=30)
    parts = split_schedule(make_schedule(name, 4, MICROBATCHES), 2, 2)
    how: dict[str, Any] = {"num_microbatches": MICROBATCHES}
    found: dict[str, Any] = {}
    if encoder is not None:
        at = encoder.coordinate
        last = at["pp"] == 1
        stage = Stage(w["e2"], bridge) if last else Stage(w["e1"])
        mine = [rows.tensor_split(2)[at["dp"]] for rows in images]
        Pipeline(stage, parts[0], grid=encoder, **how).step(mine)
        dist.all_reduce(stage.weight.grad, group=encoder.get_group("dp"))
        found["e2" if last else "e1"] = stage.weight.grad
    else:
        assert decoder is not None
        last = decoder.coordinate["pp"] == 1
        mlp = Mlp(decoder, w["l1"], w["l2"], False)
        stage = Stage(w["head"]) if last else Crossed(bridge, mlp)
        pipeline = Pipeline(
            stage, parts[1], grid=decoder, loss=lambda y, t: (torch.sin(y) * t).sum(), **how
        )
        losses = pipeline.step(list(images), list(wanted))
        if last:
            found["head"], found["losses"] = stage.weight.grad, losses.tolist()
        else:
            found["l1"], found["l2"] = mlp.up.weight.grad, mlp.down.weight.grad
    bridge.destroy()
    return found


@pytest.mark.full("zb-h1", "gpipe")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_two_pipelines_in_one_schedule_equal_one_process(name: str) -> None:
    gradients, losses = alone()
    seen = dict.fromkeys(gradients, 0)
    for rank, found in enumerate(run_on_ranks(train, 8, name)):
        if "losses" in found:
            assert found.pop("losses") == pytest.approx(losses, rel=BOUND)
        for weight, gradient in found.items():
            expected = gradients[weight]
            if weight in ("l1", "l2"):
                expected = expected.chunk(2, 0 if weight == "l1" else 1)[rank % 2]
            assert off(gradient, expected) <= BOUND, (rank, weight)
            seen[weight] += 1
    assert seen == {"e1": 2, "e2": 2, "l1": 2, "l2": 2, "head": 2}


def stuck(parts: tuple[Schedule, ...]) -> bool:
    """Whether stages wait for ever that wait in every exchange until it is complete, and at a
    border for the other side's computation of the same microbatch."""
    todo = [list(program) for part in parts for program in programs(part)]
    firsts = list(accumulate((part.num_stages for part in parts), initial=0))
    grid_of = [g for g, part in enumerate(parts) for _ in range(part.num_stages)]
    done: set[tuple[int, str, int]] = set()  # stage, F or B, microbatch
    met: set[Any] = set()

    def may_go(stage: int, step: Any) -> bool:
        if isinstance(step, Exchange):
            first = firsts[grid_of[stage]]
            met.update((stage, m) for m in messages(step))
            return all(
                (first + peer.peer, peer.message) in met for peer in (*step.sends, *step.recvs)
            )
        if isinstance(step, Forward):
            return stage not in firsts[1:] or (stage - 1, "F", step.microbatch) in done
        if isinstance(step, (Backward, BackwardInput)) and stage + 1 in firsts[1:-1]:
            return (stage + 1, "B", step.microbatch) in done
        return True

    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(todo):
            while steps and may_go(stage, steps[0]):
                step, moved = steps.pop(0), True
                if isinstance(step, (Forward, Backward, BackwardInput)):
                    kind = "F" if isinstance(step, Forward) else "B"
                    done.add((stage, kind, step.microbatch))
    return any(todo)


def messages(exchange: Exchange) -> list[Any]:
    return [one.message for one in (*exchange.sends, *exchange.recvs)]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_nobody_waits_for_ever(name: str) -> None:
    """Any cut of up to 6 stages in two or three, however cautiously stages wait."""
    for stages in range(2, 7):
        for count in (1, 2, 5, 9):
            whole = make_schedule(name, stages, count)
            for first in range(1, stages):
                cuts = [(first, stages - first)]
                cuts += [(first, 1, stages - first - 1)] if stages - first > 1 else []
                for cut in cuts:
                    assert not stuck(split_schedule(whole, *cut)), (stages, count, cut)


def test_parts_of_other_schedules_would_wait_for_ever() -> None:
    """Why schedules are cut: 1F1B in each grid by itself stops at the second forward."""
    assert stuck((make_schedule("1f1b", 2, 4), make_schedule("1f1b", 2, 4)))
    assert not stuck((make_schedule("gpipe", 2, 4), make_schedule("1f1b", 2, 4)))


def test_a_cut_that_does_not_fit_is_refused() -> None:
    with pytest.raises(commgrid.SpecError, match="has 2 chunks a stage"):
        split_schedule(make_schedule("interleaved", 2, 4, 2), 1, 1)
    for stages in ((), (2, 1), (4, 0), (5, -1)):
        with pytest.raises(commgrid.SpecError, match="expected how many of the 4 stages"):
            split_schedule(make_schedule("1f1b", 4, 4), *stages)
