"""Programs that a pipeline once trained wrong in silence: right now, or refused on every stage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid.data_parallel import GradientReducer
from commgrid.errors import CommGridError, SpecError
from commgrid.pipeline import Pipeline
from commgrid.runtime.grid import HyperCommGrid
from commgrid.testing import run_on_ranks

WIDTH, ROWS, MICROBATCHES = 4, 3, 4


def microbatches() -> list[Tensor]:
    torch.manual_seed(7)
    return list(torch.randn(MICROBATCHES, ROWS, WIDTH, dtype=torch.float64))


def loss(output: Tensor, _: Tensor) -> Tensor:
    return output.square().sum()


# -- a stage that reuses its output's memory ----------------------------------------------------


class _Static(torch.autograd.Function):
    """x Wᵀ into the same memory each time, as a captured CUDA graph does, and ∂x too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor, dx: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dx = dx
        return torch.mm(x, weight.t(), out=y).detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return torch.mm(dy, weight, out=ctx.dx).detach(), dy.t() @ x, None, None


class Static(nn.Linear):
    """Its ∂x has one place for all microbatches; so has y, unless the loss's graph needs it."""

    def __init__(self, part: int) -> None:
        torch.manual_seed(part)
        super().__init__(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.y, self.dx = torch.empty(2, ROWS, WIDTH, dtype=torch.float64)
        self.calls, self.is_last = 0, part == 1

    def forward(self, x: Tensor) -> Tensor:
        out = self.y.clone() if self.is_last and self.training else self.y
        y: Tensor = _Static.apply(x, self.weight, out, self.dx)  # type: ignore[no-untyped-call]
        self.calls += 1
        if self.calls == MICROBATCHES and dist.get_world_size() > 1:
            meet()  # the other stage has received nothing yet
        return y


def meet() -> None:
    dist.barrier(group=commgrid.get_group("dp_pp"))


def reused(stages: int) -> None:
    """A model of two such parts against plain ones: losses, gradients and outputs."""
    grid = commgrid.initialize(pp=stages)
    stage, x = grid.get_local_rank("pp"), microbatches()
    mine = range(stage, 2, stages)
    chunks = [Static(part) for part in mine]
    pipeline = Pipeline(chunks, "gpipe", num_microbatches=MICROBATCHES, loss=loss)
    parts = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2)]
    for part, linear in enumerate(parts):
        linear.load_state_dict(Static(part).state_dict())
    whole = nn.Sequential(*parts)
    expected = torch.stack([loss(whole(one), one) for one in x])
    expected.sum().backward()
    if stage:
        meet()
        chunks[0].calls = MICROBATCHES
    losses = pipeline.step(x, x)
    if losses is not None:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=0)
    for part, chunk in zip(mine, chunks, strict=True):
        torch.testing.assert_close(chunk.weight.grad, parts[part].weight.grad, rtol=1e-12, atol=0)
    for chunk in chunks:
        chunk.eval()
    outputs = pipeline.forward(x)
    if outputs is not None:
        torch.testing.assert_close(outputs, [whole(one).detach() for one in x], rtol=1e-12, atol=0)


def test_a_stage_may_write_every_output_into_the_same_memory() -> None:
    for stages in (1, 2):
        run_on_ranks(reused, stages, stages)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Named:
    first: Tensor


class InOneBuffer(nn.Module):
    """Returns its input in memory that the next call overwrites."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap, self.out = wrap, torch.empty(ROWS, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.out.copy_(x))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("wrap", "first_of"),
    [
        (lambda y: Pair(y, y), lambda found: found.first),
        (Named, lambda found: found.first),
        (lambda y: OrderedDict(first=[y]), lambda found: found["first"][0]),
    ],
    ids=["named-tuple", "dataclass", "ordered-dict"],
)
def test_outputs_of_any_type_are_copied_from_memory_that_is_used_again(
    grid: HyperCommGrid, wrap: Callable[[Tensor], Any], first_of: Callable[[Any], Tensor]
) -> None:
    x = microbatches()
    outputs = Pipeline(InOneBuffer(wrap), num_microbatches=MICROBATCHES).forward(x)
    assert outputs is not None
    assert all(type(output) is type(wrap(x[0])) for output in outputs)
    assert all(torch.equal(first_of(output), one) for output, one in zip(outputs, x, strict=True))


# -- who reduces the gradients ------------------------------------------------------------------


def refused() -> list[str]:
    """Pipelines whose weights would differ between copies of the pipeline."""
    grid = commgrid.initialize(pp=2)
    stage, said = grid.get_local_rank("pp"), []

    def make(chunks: list[nn.Module], reducer: GradientReducer | None = None) -> None:
        with pytest.raises(SpecError) as caught:
            Pipeline(chunks, "gpipe", num_microbatches=2, loss=loss, reducer=reducer)
        said.append(str(caught.value))

    one, other = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH))
    some = GradientReducer(nn.ModuleList([one, other]) if stage == 0 else one)
    make([one, other], some)
    some.close()
    alone = GradientReducer(one) if stage == 0 else None
    make([one], alone)
    wrapped = DistributedDataParallel(one, process_group=grid.get_group("dp"))
    make([other, nn.Sequential(wrapped)] if stage else [other, one])
    # Right: frozen parameters need no reducer, and a reducer may know more than the chunks.
    other.double().requires_grad_(stage == 0)
    whole = nn.ModuleList([other, nn.Linear(1, 1)])
    reducer = None if stage else GradientReducer(whole)
    pipeline = Pipeline(other, num_microbatches=MICROBATCHES, loss=loss, reducer=reducer)
    for _ in range(2):  # and steps of one stage are compared with no other's
        pipeline.step(microbatches(), microbatches())
        if reducer is not None:
            reducer.finish(count=MICROBATCHES)
            torch.optim.SGD(other.parameters(), lr=0.1).step()
    return said


def test_gradients_that_would_not_be_reduced_are_refused_on_every_stage() -> None:
    """A reducer of some chunks or stages left the others apart; so did DDP around a stage."""
    for said in run_on_ranks(refused, 4):
        some, alone, wrapped = said
        assert "stage 1 (rank " in some
        assert "of some of its 2 chunks only: '0.weight' of chunk 1 is not in its model" in some
        assert "stage 1 (rank " in alone
        assert "has no reducer, but rank " in alone
        assert "stage 1 (rank " in wrapped
        assert "has a DistributedDataParallel in chunk 1 at '0', which" in wrapped
        assert "expected reducer=GradientReducer(torch.nn.ModuleList(chunks))" in wrapped


# -- parts without a graph ------------------------------------------------------------------------


class Detached(nn.Module):
    """A layer whose output has no graph, but for one microbatch of `kept`."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.layer, self.kept, self.calls = nn.Linear(WIDTH, WIDTH).double(), kept, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layer(x)
        return y if self.calls <= self.kept else y.detach()


def untrained(schedule: str, where: int) -> str:
    grid = commgrid.initialize(pp=2)
    stage = grid.coordinate["pp"]
    for kept, frozen in ((1, False), (0, True)):
        part = Detached(kept if stage == where else MICROBATCHES)
        part.requires_grad_(not (frozen and stage <= where))
        Pipeline(part, schedule, num_microbatches=MICROBATCHES, loss=loss).step(
            microbatches(), microbatches()
        )
    part = Detached(0 if stage == where else MICROBATCHES)
    pipeline = Pipeline(part, schedule, num_microbatches=MICROBATCHES, loss=loss)
    with pytest.raises(CommGridError) as caught:
        pipeline.step(microbatches(), microbatches())
    return str(caught.value)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("where", [0, 1])
def test_a_part_that_would_not_be_trained_is_refused(schedule: str, where: int) -> None:
    """Frozen parts, and parts that some microbatches do not use, are trained as they should be."""
    for said in run_on_ranks(untrained, 2, schedule, where, check=False):  # it ends the grid
        assert f"stage {where} (rank {where}) has not trained chunk 0" in said
        assert "depend on 'layer.weight' for autograd" in said


def whole_numbers() -> str:
    commgrid.initialize(pp=2)
    pipeline = Pipeline(
        nn.Linear(WIDTH, WIDTH).double(), num_microbatches=MICROBATCHES,
        loss=lambda y, _: y.square().sum().long(),
    )  # fmt: skip
    with pytest.raises(CommGridError) as caught:
        pipeline.step(microbatches(), microbatches())
    return str(caught.value)


def test_a_loss_of_whole_numbers_is_refused() -> None:
    for said in run_on_ranks(whole_numbers, 2, check=False):  # it ends the grid
        assert "its loss is () int64; expected one floating-point scalar" in said


@pytest.mark.ranks(4, pp=2)
def test_fsdp_under_a_schedule_that_splits_backward_is_refused(grid: HyperCommGrid) -> None:
    part = fully_shard(nn.Linear(WIDTH, WIDTH).double(), mesh=grid.device_mesh("dp_cp"))
    Pipeline(part, "1f1b", num_microbatches=MICROBATCHES, loss=loss)
    with pytest.raises(SpecError, match=r"stage 0 \(rank [01]\) has a module of fully_shard in ch"):
        Pipeline(part, "zb-h1", num_microbatches=MICROBATCHES, loss=loss)
