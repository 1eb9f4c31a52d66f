"""Inputs that must be equal along tp: other ones on each rank are refused in the first steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import GridMismatchError
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.equality.inputs import fingerprint
from commgrid.expert import MoELayer
from commgrid.parameters import mark_parameters
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    initialize_parameters,
    vocab_parallel_cross_entropy,
)
from commgrid.testing import run_on_ranks

VOCABULARY, WIDTH = 11, 4
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.head = VocabParallelHead(WIDTH, VOCABULARY)
        initialize_parameters(self, seed=0)

    def forward(self, batch: Batch) -> Tensor:
        tokens, targets = batch
        return vocab_parallel_cross_entropy(
            self.head(self.embedding(tokens)), targets, vocabulary=VOCABULARY
        ).sum()


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
    return tokens, tokens.roll(-1, 1)


def other_batch(rank: int) -> Batch:
    return batch(rank)


def other_targets(rank: int) -> Batch:
    return batch(0)[0], batch(rank)[1]


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (other_batch, r"have different values of VocabParallelEmbedding\(11, 4\)'s tokens"),
        (other_targets, r"have different values of vocab_parallel_cross_entropy's target"),
    ],
    ids=["batch", "targets"],
)
def test_a_batch_of_each_rank_is_refused(
    grid: HyperCommGrid, given: Callable[[int], Batch], told: str
) -> None:
    model = Model()
    reducer = GradientReducer(model)
    for _ in range(3):
        model(batch(7)).backward()
        reducer.finish()
        reducer.zero_grad()
    model(given(grid.rank)).backward()
    with pytest.raises(GridMismatchError, match=told):
        reducer.finish()


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize(("other", "differs"), [(1, True), (2**-28, False)])
def test_large_counts_are_compared_exactly(
    grid: HyperCommGrid, other: float, differs: bool
) -> None:
    """2^24 and 2^24 + 1 are one number in fp32; 2^24 + 1 and a little more round apart there."""
    model = Model()
    reducer = GradientReducer(model)
    model(batch(7)).backward()
    count = 2.0**24 + (0 if differs else 1) + (other if grid.rank else 0)
    if differs:
        with pytest.raises(GridMismatchError, match=r"divides by 1.67772e\+07 to"):
            reducer.finish(count=count)
    else:
        reducer.finish(count=count)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("width", [16, 17, 1024, 2048, 6765])
def test_exchanged_rows_have_another_fingerprint(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-1000, 1000, (4, width), generator=generator).to(dtype)
    tolerance, *expected = fingerprint(rows).tolist()
    _, *found = fingerprint(rows[[1, 0, 2, 3]]).tolist()
    apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert apart > 2 * tolerance * max(map(abs, expected))
    assert [tolerance, *expected] == fingerprint(rows.clone()).tolist()


@pytest.mark.ranks(2, tp=2)
def test_a_model_without_copies(grid: HyperCommGrid) -> None:
    """No gradient along tp could differ; floating-point inputs do."""
    model = nn.Sequential(
        ColumnParallelLinear(64, 64, bias=False), RowParallelLinear(64, 64, bias=False)
    )
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(grid.rank))
    model(x).square().sum().backward()
    with pytest.raises(GridMismatchError, match=r"of ColumnParallelLinear\(64, 64\)'s input"):
        reducer.finish()


@pytest.mark.ranks(2, tp=2)
def test_a_forward_on_one_rank_alone_is_counted(grid: HyperCommGrid) -> None:
    """As of an evaluation on rank 0, whose collectives meet those of the next step."""
    model = ColumnParallelLinear(4, 4, bias=False)  # without a collective in forward
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    if grid.rank == 0:
        with torch.no_grad():
            model(torch.ones(1, 4))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(GridMismatchError, match=r"have called its layers 1 to 2 times since the l"):
        reducer.finish()


@pytest.mark.ranks(2, tp=2)
def test_counts_of_each_ranks_slice_are_refused(grid: HyperCommGrid) -> None:
    model = ColumnParallelLinear(4, 4, sequence_parallel=True, bias=False)
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    model(torch.ones(2, 1, 4)).sum().backward()
    with pytest.raises(GridMismatchError, match=r"finish\(count=…\) divides by 3 to 4 on ranks of"):
        reducer.finish(count=3 + grid.rank)


@pytest.mark.ranks(2, tp=2, etp=1)
def test_a_slice_of_the_sequence_without_the_flag(grid: HyperCommGrid) -> None:
    model = MoELayer(4, 8, 4, 2)
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(grid.rank))).sum().backward()
    with pytest.raises(GridMismatchError, match=r"'s tokens, and .*needs sequence_parallel"):
        reducer.finish()


@pytest.mark.ranks(4, tp=2)
def test_other_batches_along_dp_and_evaluations_are_right(grid: HyperCommGrid) -> None:
    model = Model()
    reducer = GradientReducer(model)
    for step in range(25):
        for microbatch in range(2):
            with reducer.no_sync():
                model(batch(100 * step + 10 * microbatch + grid.coordinate["dp"])).backward()
        if grid.coordinate["dp"] == 0:
            with torch.no_grad():
                model(batch(step))
        reducer.finish(count=20)
        reducer.zero_grad()


def parts_of_other_parameters() -> float:
    """Rank 0 keeps pieces of the norm and the head, and rank 1, along tp, of the head alone."""
    commgrid.initialize(tp=2)
    norm = mark_parameters(nn.RMSNorm(64), partial="tp")
    column = ColumnParallelLinear(64, 64, bias=False, sequence_parallel=True)
    row = RowParallelLinear(64, 64, bias=False)
    model = nn.Sequential(norm, column, row, nn.Linear(64, 1000))
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(2, 3, 64)).square().mean().backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return float(norm.weight.detach().sum())


def test_ranks_that_keep_pieces_of_other_parameters_compare_over_the_same_groups() -> None:
    assert len(set(run_on_ranks(parts_of_other_parameters, 4, timeout=60))) == 1
