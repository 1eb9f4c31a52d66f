"""Steps that ranks take apart: refused on all ranks; right ones beside them pass.

Each program runs on stages or slices of a model in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from commgrid import GridMismatchError
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.parameters import mark_parameters
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear, initialize_parameters

ENDS = {"embedding": {"of": "pp", "pick": ["first", "last"]}}
SGD = torch.optim.SGD


class Stage(nn.Module):
    """Two layers whose inputs are larger on later stages, so that their gradients are."""

    def __init__(self, grid: HyperCommGrid, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = 1.0 + grid.get_local_rank("pp")
        self.one, self.two = (nn.Linear(4, 4, dtype=dtype) for _ in range(2))
        initialize_parameters(self, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(self.scale * x)))


def train(
    model: nn.Module, steps: int, edit: Callable[[int], object] = lambda step: None,
    optimizer: Any = None, dtype: torch.dtype = torch.float64, **finish: Any,
) -> None:  # fmt: skip
    """Train on other inputs each step; `edit` is called between finish and the optimizer's step."""
    reducer = GradientReducer(model)
    optimizer = optimizer or SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype)
        model(x).square().sum().backward()
        reducer.finish(**finish)
        edit(step)
        optimizer.step()
        optimizer.zero_grad()
    reducer.close()


def gradients(model: nn.Module) -> Iterator[Tensor]:
    yield from (p.grad for p in model.parameters() if p.grad is not None)


# -- stages -------------------------------------------------------------------------------


@pytest.mark.ranks(2, pp=2)
def test_a_count_on_the_last_stage_alone_is_refused(grid: HyperCommGrid) -> None:
    is_last = grid.get_local_rank("pp") == 1
    with pytest.raises(GridMismatchError, match=r"divides by 1 to 48 on ranks of group 'pp'"):
        train(Stage(grid), 1, count=48 if is_last else None)


@pytest.mark.ranks(4, pp=2)
@pytest.mark.parametrize("count", [None, 48, 0.5])
def test_one_count_on_all_stages_is_right(grid: HyperCommGrid, count: float | None) -> None:
    if count is not None and grid.get_local_rank("dp"):
        count += 1  # another number of samples
    train(Stage(grid), 3, count=count)


SCALED = (
    r"rank \d has scaled its gradients by .* after finish\(\), and rank \d by .*clip_grad_norm_"
)


@pytest.mark.ranks(2, pp=2)
@pytest.mark.parametrize("norm", [2.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_torchs_clipping_of_each_stage_is_refused(
    grid: HyperCommGrid, norm: float, dtype: torch.dtype
) -> None:
    model = Stage(grid, dtype)
    with pytest.raises(GridMismatchError, match=SCALED):
        train(model, 2, lambda _: clip_grad_norm_(model.parameters(), 0.1, norm), dtype=dtype)


@pytest.mark.ranks(2, pp=2)
@pytest.mark.parametrize("at", [0, 22])
def test_clipping_that_bites_on_one_stage_is_refused(grid: HyperCommGrid, at: int) -> None:
    model = Stage(grid)

    def edit(step: int) -> None:
        both = [torch.zeros(()).double() for _ in range(2)]
        mine = torch.stack([g.norm() for g in gradients(model)]).norm()
        torch.distributed.all_gather(both, mine, group=grid.get_group("pp"))
        between = float(f"{sum(both) / 2:.1e}")
        clip_grad_norm_(model.parameters(), between if step == at else 1e9)

    with pytest.raises(GridMismatchError, match=SCALED):
        train(model, at + 2, edit)


@pytest.mark.ranks(2, pp=2)
def test_clipping_of_each_group_by_its_stages_norm_is_refused(grid: HyperCommGrid) -> None:
    model = Stage(grid)
    weights, biases = [model.one.weight, model.two.weight], [model.one.bias, model.two.bias]
    decays = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decays, lr=0.01)

    def edit(_: int) -> None:
        for group in optimizer.param_groups:
            clip_grad_norm_(group["params"], 1e-2)

    with pytest.raises(GridMismatchError, match=SCALED):
        train(model, 2, edit, optimizer)


@pytest.mark.ranks(2, pp=2)
def test_factors_of_layers_and_commgrids_clipping_are_right(grid: HyperCommGrid) -> None:
    model, last = Stage(grid), grid.get_local_rank("pp") == 1
    train(model, 3, lambda _: [g.mul_(0.5) for g in gradients(model)] if last else None)
    train(model, 3, lambda _: [g.mul_(0.9 if last else 0.81) for g in gradients(model)])
    train(model, 3, lambda _: [clip_grad_norm_(p, 1e-3) for p in model.parameters()])
    train(model, 3, lambda _: [g.clamp_(-1e-3, 1e-3) for g in gradients(model)])
    train(model, 3, lambda _: [g.zero_() for g in gradients(model)] if last else None)
    train(model, 3, lambda _: clip_grad_norm_(model.parameters(), 1e9))
    reducer = GradientReducer(model)
    for _ in range(3):
        model(torch.ones(1, 4).double()).sum().backward()
        reducer.finish()
        reducer.clip_gradients(1e-3)
        SGD(model.parameters(), lr=0.1).step()


# -- slices -------------------------------------------------------------------------------


def sliced() -> nn.Sequential:
    model = nn.Sequential(
        ColumnParallelLinear(4, 4, bias=False, dtype=torch.float64), nn.Tanh(),
        RowParallelLinear(4, 4, bias=False, dtype=torch.float64),
    )  # fmt: skip
    initialize_parameters(model, seed=0)
    return model


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("hidden", [False, True])
def test_torchs_clipping_of_each_group_is_refused(grid: HyperCommGrid, hidden: bool) -> None:
    """Also written by hand through `.data`, which no version counts."""
    model = sliced()
    optimizer = SGD([{"params": [model[0].weight]}, {"params": [model[2].weight]}], lr=0.01)

    def edit(_: int) -> None:
        for number, group in enumerate(optimizer.param_groups):
            if hidden:
                (weight,) = group["params"]
                weight.grad.data.mul_(1e-3 / weight.grad.norm())
            else:
                clip_grad_norm_(group["params"], 1e-3 * (1 + number))

    with pytest.raises(GridMismatchError, match=SCALED):
        train(model, 2, edit, optimizer)


@pytest.mark.ranks(2, tp=2)
def test_edits_of_some_rows_or_of_one_slice_are_right(grid: HyperCommGrid) -> None:
    """As a user who keeps the rows of an old vocabulary, which are one rank's, or trains them less.

    Slices of a layer whose gradients are all halved keep one factor.
    """
    model, first = sliced(), grid.get_local_rank("tp") == 0

    def of_first(factor: float, rows: int) -> Callable[[int], object]:
        return lambda _: model[0].weight.grad[:rows].mul_(factor) if first else None

    for factor in (0.0, 0.1):
        for rows in (1, 2):
            train(model, 3, of_first(factor, rows))
    train(model, 3, lambda _: model[2].weight.grad.mul_(0.5))


# -- options ------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding on the first stage, its copy in a layer on the last."""

    def __init__(self, grid: HyperCommGrid) -> None:
        super().__init__()
        self.is_first = grid.get_local_rank("pp") == 0
        kind: Any = nn.Embedding(6, 4) if self.is_first else nn.Linear(4, 6, bias=False)
        self.tied = mark_parameters(kind.double(), shared="embedding")
        nn.init.constant_(self.tied.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.arange(6)) if self.is_first else self.tied(x)


def decayed(model: nn.Module, *kinds: type[nn.Module]) -> Any:
    """AdamW that does not decay parameters of some types of module."""
    left = [p for m in model.modules() if isinstance(m, kinds) for p in m.parameters(False)]
    rest = [p for p in model.parameters() if all(p is not other for other in left)]
    groups = [
        {"params": left, "weight_decay": 0.0, "name": f"left of {type(model).__name__}"},
        {"params": rest, "weight_decay": 0.1, "name": "rest"},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


@pytest.mark.ranks(2, pp=2, groups=ENDS)
def test_other_options_of_a_tied_embedding_are_refused(grid: HyperCommGrid) -> None:
    model = Tied(grid)
    told = r"has updated tied.weight with weight_decay=0\.\d and 0\.\d on ranks 0 and 1 of group"
    with pytest.raises(GridMismatchError, match=told):
        train(model, 2, optimizer=decayed(model, nn.Embedding))


@pytest.mark.ranks(2, pp=2, groups=ENDS)
def test_options_that_no_update_reads_may_differ(grid: HyperCommGrid) -> None:
    model = Tied(grid)
    optimizer = decayed(model, nn.Embedding, nn.Linear)
    optimizer.param_groups[0] |= {"name": f"stage {grid.rank}", "foreach": bool(grid.rank)}
    train(model, 3, optimizer=optimizer)


@pytest.mark.ranks(4, tp=2)
@pytest.mark.parametrize("at", [0, 30])
@pytest.mark.parametrize("shard", [False, True])
def test_another_learning_rate_on_one_rank_is_refused(
    grid: HyperCommGrid, at: int, shard: bool
) -> None:
    """As of a scheduler that goes by each rank's loss."""
    model = sliced()
    reducer = GradientReducer(model, shard=shard)
    optimizer = ShardedOptimizer(reducer, SGD, lr=0.01)
    told = r"with lr=0\.01 and 0\.005 on ranks|with lr=0\.005 and 0\.01 on ranks"
    with pytest.raises(GridMismatchError, match=told):  # noqa: PT012
        for step in range(at + 7):
            model(torch.ones(3, 4).double()).square().sum().backward()
            reducer.finish()
            if step >= at and grid.rank == 3:
                optimizer.param_groups[0]["lr"] = 0.005
            optimizer.step()
            optimizer.zero_grad()
    reducer.close()


# -- partial gradients --------------------------------------------------------------------


class Normed(nn.Module):
    """A norm marked as partial before layers that split the sequence, or do not."""

    def __init__(self, splits: bool, width: int = 4) -> None:
        super().__init__()
        self.norm = mark_parameters(nn.LayerNorm(width, dtype=torch.float64), partial="tp")
        options: dict[str, Any] = {"sequence_parallel": splits, "dtype": torch.float64}
        self.up = ColumnParallelLinear(width, 8, **options)
        self.down = RowParallelLinear(8, width, **options)
        initialize_parameters(self, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)))


@pytest.mark.ranks(2, tp=2)
def test_a_mark_without_sequence_parallelism_is_refused(grid: HyperCommGrid) -> None:
    told = r"norm.weight .* is marked partial='tp', and its gradient before the sum is the same on"
    with pytest.raises(GridMismatchError, match=told):
        train(Normed(splits=False), 1)


@pytest.mark.ranks(2, tp=2)
def test_a_mark_behind_the_layers_that_split_the_sequence_is_refused(grid: HyperCommGrid) -> None:
    model = Normed(splits=True)
    model.last = mark_parameters(nn.LayerNorm(4, dtype=torch.float64), partial="tp")
    reducer = GradientReducer(model)
    x = torch.randn(4, 1, 4, generator=torch.Generator().manual_seed(0)).double()
    y = model(x.chunk(2)[grid.get_local_rank("tp")])
    (y.square().sum() + model.last(x).square().mul(torch.arange(4)).sum()).backward()
    with pytest.raises(GridMismatchError, match=r"last.weight .* is marked partial='tp'"):
        reducer.finish()


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("zero", [False, True])
def test_equal_gradients_of_slices_of_the_sequence_are_right(
    grid: HyperCommGrid, zero: bool
) -> None:
    """The biases' under a sum over positions; all, behind a projection that is zero at first."""
    model = Normed(splits=True)
    if zero:
        nn.init.zeros_(model.down.weight)
    reducer = GradientReducer(model)
    for step in range(3):
        x = torch.randn(4, 1, 4, generator=torch.Generator().manual_seed(step)).double()
        model(x.chunk(2)[grid.get_local_rank("tp")]).sum().backward()
        reducer.finish()
        assert model.down.bias.grad.tolist() == [4.0] * 4  # of 4 positions
        SGD(model.parameters(), lr=0.01).step()
    for step in range(3):  # a constant sequence, whose slices are one
        model(torch.ones(2, 1, 4).double() + torch.arange(4) + step).square().sum().backward()
        reducer.finish()
        SGD(model.parameters(), lr=0.01).step()


# -- later steps --------------------------------------------------------------------------


@pytest.mark.ranks(2, tp=2)
def test_inputs_that_begin_to_differ_later_are_refused(grid: HyperCommGrid) -> None:
    model = sliced()
    reducer = GradientReducer(model)
    steps = []
    with pytest.raises(GridMismatchError, match=r"have different values of ColumnParallelLinear"):  # noqa: PT012
        for step in range(22 + 5):
            seed = step + (100 * grid.rank if step >= 22 else 0)
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).double()
            model(x).square().sum().backward()
            steps.append(step)
            reducer.finish()
            SGD(model.parameters(), lr=0.01).step()
    assert steps[-1] == 25
