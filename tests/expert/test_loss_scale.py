"""The auxiliary losses of a router are scaled as the model's loss is, or the step is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import commgrid
from commgrid import CommGridError, ShapeError, SpecError
from commgrid.data_parallel import GradientReducer, GradScaler
from commgrid.expert import MoELayer, Router, follow_loss_scale, set_loss_scale
from commgrid.pipeline import Pipeline
from commgrid.testing import run_on_ranks
from tests.expert.dense import Case, balance, mixture

LOSSES = {"aux_loss": 0.3, "z_loss": 0.2}
CASE = Case(num_experts=4, options=tuple(LOSSES.items()))

# Sums of some 100 products of numbers around 1, which the layer adds up in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def layer(seed: int = 0) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(4, 6, 4, 2, dtype=torch.float64, **LOSSES)


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected(made: nn.Module, batches: list[Tensor], scale: float) -> list[Tensor]:
    """The gradients of scale · (mean square + auxiliary losses), added up, without the layer."""
    full = {name: p.detach().clone().requires_grad_() for name, p in made.named_parameters()}
    loss = torch.zeros((), dtype=torch.float64)
    for x in batches:
        loss = loss + mixture(x, full, CASE).square().mean() + balance(x, full, CASE)
    return list(torch.autograd.grad(loss * scale, list(full.values())))


def same(made: nn.Module, wanted: list[Tensor], scale: float) -> None:
    for (name, parameter), gradient in zip(made.named_parameters(), wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad / scale, gradient / scale, **CLOSE,
            msg=lambda text, name=name: f"{name} at scale {scale}: {text}",
        )  # fmt: skip


def scaled() -> None:
    """Multiplied before backward, over several microbatches, with activations computed again."""
    commgrid.initialize(ep=1, etp=1)
    plain: Callable[..., Tensor] = lambda made, x: made(x)  # noqa: E731
    runs = {
        "plain": plain,
        "checkpoint": lambda made, x: checkpoint(made, x, use_reentrant=False),
        "reentrant": lambda made, x: checkpoint(
            made, x.clone().requires_grad_(), use_reentrant=True
        ),
    }
    for kind, run in runs.items():
        for scale in (1.0, 1 / 8, 65536.0):
            made, batches = layer(), [tokens(seed) for seed in (1, 2, 3)]
            for x in batches:
                loss = follow_loss_scale(run(made, x).square().mean(), made)
                (loss * scale).backward()
            same(made, expected(made, batches, scale), scale)
            assert float(made.router.loss_scale) == scale, kind  # type: ignore[arg-type]


def test_auxiliary_losses_are_scaled_as_the_loss_is() -> None:
    run_on_ranks(scaled, 1)


def without_a_loss() -> None:
    """As on a stage that begins backward with the gradient of its output."""
    commgrid.initialize(ep=1, etp=1)
    made = layer()
    for scale in (1 / 8, torch.tensor(4.0)):
        made.zero_grad()
        set_loss_scale(nn.Sequential(made), scale)
        y = made(tokens())
        y.backward(2 * y.detach() / y.numel() * scale)
        same(made, expected(made, [tokens()], float(scale)), float(scale))


def test_a_stage_without_a_loss_is_told_the_scale() -> None:
    run_on_ranks(without_a_loss, 1)


def pipelined() -> None:
    """Two layers on two stages, whose last has the loss, against both in one piece."""
    grid = commgrid.initialize(pp=2, ep=1, etp=1)
    batches = [tokens(seed) for seed in (1, 2)]
    both = [layer(seed) for seed in (0, 1)]
    full = [
        {name: p.detach().clone().requires_grad_() for name, p in made.named_parameters()}
        for made in both
    ]
    total = torch.zeros((), dtype=torch.float64)
    for x in batches:
        y = mixture(x, full[0], CASE)
        total = total + balance(x, full[0], CASE) + balance(y, full[1], CASE)
        total = total + mixture(y, full[1], CASE).square().mean()
    stage = grid.get_local_rank("pp")
    wanted = list(torch.autograd.grad(total / 2, list(full[stage].values())))
    for schedule in ("1f1b", "zb-h1"):
        own = copy.deepcopy(both[stage])
        set_loss_scale(own, 1 / 2)
        pipeline = Pipeline(
            own, schedule, num_microbatches=2,
            loss=lambda y, _, own=own: follow_loss_scale(y.square().mean(), own) / 2,
        )  # fmt: skip
        pipeline.step(batches, targets=batches)
        same(own, wanted, 1.0)


def test_the_losses_of_every_pipeline_stage_are_scaled() -> None:
    run_on_ranks(pipelined, 2)


def loss_scaling() -> None:
    """fp16 tokens and experts; the router is fp32 inside."""
    grid = commgrid.initialize(ep=2)
    torch.manual_seed(0)
    made = MoELayer(8, 16, 4, 2, dtype=torch.float16, **LOSSES)
    torch.manual_seed(1 + grid.rank)
    x = torch.randn(12, 8).half()
    found = []
    for init_scale in (1.0, 1024.0):
        reducer = GradientReducer(made)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
        scaler = GradScaler("cpu", init_scale=init_scale)
        loss = follow_loss_scale(made(x).float().square().mean(), made)
        scaler.scale(loss).backward()
        reducer.finish()
        scaler.unscale_(optimizer)
        assert made.router.weight.grad is not None
        found.append(made.router.weight.grad.float())
        reducer.close()
        made.zero_grad()
    # fp16 keeps 11 bits of each factor and gradient.
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)


def test_a_grad_scaler_scales_auxiliary_losses() -> None:
    run_on_ranks(loss_scaling, 2)


def not_told() -> list[str]:
    commgrid.initialize(ep=2)
    said = []
    made = layer()
    reducer = GradientReducer(made)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    y = made(tokens())  # as on a pipeline stage without a loss
    y.backward(scaler.scale(2 * y.detach() / y.numel()))
    reducer.finish()
    with pytest.raises(CommGridError) as caught:
        scaler.unscale_(optimizer)
    said.append(str(caught.value))
    made.zero_grad()
    made(tokens()).square().sum().backward()
    with pytest.raises(CommGridError) as caught:
        reducer.finish(count=9)
    said.append(str(caught.value))
    made.eval()  # then nothing is added to the loss
    reducer.finish(count=9)
    return said


def test_a_scaled_or_summed_loss_that_routers_do_not_know_is_refused_on_every_rank() -> None:
    for scaled, summed in run_on_ranks(not_told, 2):
        assert scaled.startswith(
            "Router(4, 4, top_k=2, score='softmax'): the GradScaler multiplied the model's loss, "
            "but not the router's aux_loss and z_loss"
        )
        assert "follow_loss_scale(loss, model)" in scaled
        assert "finish(count=…) divides the gradients of a summed loss" in summed
        assert "Give summed_loss=True, or False" in summed


def accumulated(
    made: nn.Module,
    passes: int,
    backward: Callable[[Tensor], None],
    reducer: GradientReducer | None = None,
    told: bool = False,
) -> list[Tensor]:
    """As many passes over other tokens; the gradients of the mean of their losses."""
    batches = [tokens(seed) for seed in range(passes)]
    for i, x in enumerate(batches):
        more = reducer is not None and i + 1 < passes
        with reducer.no_sync() if reducer is not None and more else nullcontext():
            loss = made(x).square().mean()
            backward(follow_loss_scale(loss, made) if told else loss)
    return expected(made, batches, 1 / passes)


SCALED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "scaled": lambda scaler, loss: scaler.scale(loss),
    "divided afterwards": lambda scaler, loss: scaler.scale(loss) / 3,
    "multiplied afterwards": lambda scaler, loss: scaler.scale(loss) * (1 / 3),
}


@pytest.mark.ranks(1, ep=1, etp=1)
@pytest.mark.parametrize("how", SCALED)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_scaled_loss_tells_routers_by_itself(how: str, reduced: bool, optimizer: Any) -> None:
    """With a reducer or without, over two steps; after a failed backward too."""
    made = layer()
    reducer = GradientReducer(made) if reduced else None
    update, scaler = optimizer(made.parameters(), lr=0.1), GradScaler("cpu", init_scale=4096.0)
    with pytest.raises(RuntimeError, match="does not require grad"):
        scaler.scale(torch.zeros(())).backward()
    passes = 1 if how == "scaled" else 3
    for _ in range(2):
        before = copy.deepcopy(made)
        accumulated(made, passes, lambda loss: SCALED[how](scaler, loss).backward(), reducer)
        if reducer is not None:
            reducer.finish()
        scaler.unscale_(update)
        same(made, expected(before, [tokens(seed) for seed in range(passes)], 1 / passes), 1.0)
        scaler.step(update)
        scaler.update()
        made.zero_grad()


DIVIDED: dict[str, Callable[[Tensor], None]] = {
    "divided": lambda loss: (loss / 3).backward(),
    "in place": lambda loss: loss.div_(3).backward(),
    "multiplied": lambda loss: (loss * (1 / 3)).backward(),
    "by the gradient": lambda loss: loss.backward(torch.tensor(1 / 3, dtype=torch.float64)),
    "and weighed": lambda loss: (0.5 * (loss / 3)).backward(),
    "before it is scaled": lambda loss: (loss / 3 * torch.tensor(8.0)).backward(),
}


@pytest.mark.ranks(1, ep=1, etp=1)
@pytest.mark.parametrize("how", DIVIDED)
@pytest.mark.parametrize("reduced", [False, True])
def test_a_loss_divided_by_the_number_of_passes_is_refused(how: str, reduced: bool) -> None:
    made = layer()
    reducer = GradientReducer(made) if reduced else None
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    told = r"divided by 3 in each of 3 backward passes, but the router's aux_loss and z_loss"
    for _ in range(2):
        accumulated(made, 3, DIVIDED[how], reducer)
        with pytest.raises(CommGridError, match=told):
            (optimizer.step if reducer is None else reducer.finish)()
        made.zero_grad()
        reducer = None if reducer is None else (reducer.close(), GradientReducer(made))[1]  # type: ignore[func-returns-value]


@pytest.mark.ranks(1, ep=1, etp=1)
def test_losses_that_are_told_or_not_divided_pass() -> None:
    """A sum divided by its tokens, weights of losses, one pass, other divisors, and a told one."""
    made = layer()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    wanted = accumulated(made, 3, lambda loss: (loss / 3).backward(), told=True)
    same(made, wanted, 1.0)
    optimizer.step()
    made = layer()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    for passes, backward in (
        (3, lambda loss: loss.backward()),
        (1, lambda loss: (loss / 2).backward()),
        (3, lambda loss: (0.5 * loss).backward()),
        (2, lambda loss: (loss / 3).backward()),
        (3, lambda loss: (loss.expand(3).sum() / 3).backward()),
    ):
        made.zero_grad()
        accumulated(made, passes, backward)
        optimizer.step()
    both = (made(tokens(1)).square().mean() + made(tokens(2)).square().mean()) / 2
    both.backward()  # one pass through the router twice
    optimizer.step()


@pytest.mark.ranks(1, ep=1, etp=1)
def test_torchs_grad_scaler_needs_a_told_loss() -> None:
    made = layer()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for told in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        accumulated(made, 1, lambda loss, scaler=scaler: scaler.scale(loss).backward(), told=told)  # type: ignore[misc]
        if told:
            scaler.step(optimizer)
            continue
        with pytest.raises(CommGridError, match="GradScaler multiplied the model's loss, but not"):
            scaler.step(optimizer)
        made.zero_grad()


def test_backward_is_torchs_again_without_routers() -> None:
    before = torch.autograd.backward
    router = Router(4, 4, 2, z_loss=0.1)
    router(torch.randn(3, 4)).weights.sum().backward()
    assert torch.autograd.backward is not before
    del router
    gc.collect()
    assert torch.autograd.backward is before


def test_bad_scales() -> None:
    router = Router(4, 4, 2)
    with pytest.raises(ShapeError, match=r"a loss of shape \(2,\); expected \(\)"):
        follow_loss_scale(torch.zeros(2), router)
    for scale, said in ((0, "scale=0"), (torch.ones(1), r"a scale of shape \(1,\)")):
        with pytest.raises(SpecError, match=said):
            set_loss_scale(router, scale)
