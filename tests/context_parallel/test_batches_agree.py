"""Batches that all ranks of cp must have read alike: other ones are refused by the first finish."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid import GridMismatchError
from commgrid.context_parallel import SequenceSharding, attention
from commgrid.data_parallel import GradientReducer
from commgrid.equality import inputs as noted
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import VocabParallelEmbedding, initialize_parameters

VOCABULARY, WIDTH, LENGTH = 11, 8, 16
SHARDING = SequenceSharding.zigzag(LENGTH, 2)
Batch = dict[str, Tensor]


class Model(nn.Module):
    """One layer of attention between an embedding and a head, in fp64."""

    def __init__(self, embedding: nn.Module | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = embedding or nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, batch: Mapping[str, Tensor], sharding: SequenceSharding | None) -> Tensor:
        """The sum of the losses of this rank's positions; without a sharding, of all."""
        x = self.dropout(self.embedding(batch["tokens"]) + self.positions(batch["positions"]))
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        if sharding is None:
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        else:
            y = attention(q, q, q, sharding=sharding)
        scores = self.head(y.transpose(1, 2).flatten(-2))
        losses = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return (losses * batch["mask"].flatten()).sum()


def batch(seed: int, padding: int = 0) -> Batch:
    """Tokens, labels, positions and loss mask of two sequences, the last positions without one."""
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(2, LENGTH, dtype=torch.float64)
    if padding:
        tokens[:, -padding:], mask[:, -padding:] = 0, 0
    positions = torch.arange(LENGTH).expand(2, -1)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "positions": positions, "mask": mask}


# -- other batches ------------------------------------------------------------------------


def other_tokens(rank: int) -> Batch:
    return batch(rank)


def other_labels(rank: int) -> Batch:
    return batch(0) | {"labels": batch(rank)["labels"]}


def other_mask(rank: int) -> Batch:
    return batch(0, padding=4 * rank)


@pytest.mark.ranks(2, cp=2)
@pytest.mark.parametrize(
    ("given", "what"),
    [(other_tokens, "'tokens'"), (other_labels, "'labels'"), (other_mask, "'tokens'")],
)
def test_a_batch_of_each_rank_is_refused(
    grid: HyperCommGrid, given: Callable[[int], Batch], what: str
) -> None:
    model = Model()
    reducer = GradientReducer(model)
    model(SHARDING.shard(given(grid.rank), dim=1), SHARDING).backward()
    told = (
        rf"the ranks of group 'cp' \(ranks 0-1\) have sharded different values of {what}, and each "
        r"takes a part .* the same batch: seed data loaders by grid.get_local_rank\('dp'\)"
    )
    with pytest.raises(GridMismatchError, match=told):
        reducer.finish()


@pytest.mark.ranks(2, cp=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.uint8])
def test_a_tensor_of_each_rank_is_refused(grid: HyperCommGrid, dtype: torch.dtype) -> None:
    """In a later step, of a model that has nothing of attention."""
    model = nn.Linear(4, 1)
    reducer = GradientReducer(model)
    for step in range(4):
        seed = torch.Generator().manual_seed(step + (grid.rank if step == 3 else 0))
        whole = torch.randint(2, (LENGTH, 4), generator=seed).to(dtype)
        model(SHARDING.shard(whole).float()).sum().backward()
        if step < 3:
            reducer.finish()
            reducer.zero_grad()
    with pytest.raises(GridMismatchError, match="different values of a tensor, and each takes a"):
        reducer.finish()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axis", ["cp", "sequence"])
def test_it_is_refused_on_all_ranks(rank: int, axis: str) -> None:
    """Ranks 2 and 3 read two batches; ranks 0 and 1, of the other place along dp, are told."""
    commgrid.initialize(order=f"{axis}-dp", **{axis: 2})
    model = nn.Linear(4, 1)
    reducer = GradientReducer(model, group=f"dp_{axis}")
    seed = torch.Generator().manual_seed(max(rank, 1))
    model(SHARDING.shard(torch.randn(LENGTH, 4, generator=seed), group=axis)).sum().backward()
    with pytest.raises(GridMismatchError, match="have sharded different values"):
        reducer.finish()
    commgrid.shutdown()


# -- right programs -----------------------------------------------------------------------


@pytest.mark.ranks(2, cp=2)
def test_one_batch_on_all_ranks_trains_as_one_rank_does(grid: HyperCommGrid) -> None:
    """Accumulated, with padding and evaluations by all ranks, past the steps that compare."""
    model, reference = Model(), Model()
    reducer = GradientReducer(model)
    for step in range(24):
        whole = [batch(3 * step + i, padding=i) for i in range(2)]
        for each in whole:
            with reducer.no_sync():
                model(SHARDING.shard(each, dim=1), SHARDING).backward()
            reference(each, None).backward()
        reducer.finish(count=1 - grid.rank)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
        if step % 3 == 0:
            with torch.no_grad():
                model(SHARDING.shard(batch(step), dim=1), SHARDING)
        for each in (model, reference):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.05 * parameter.grad
        reducer.zero_grad()
        reference.zero_grad()


@pytest.mark.ranks(4, cp=2, tp=2)
def test_batches_beside_tensor_parallel_layers(grid: HyperCommGrid) -> None:
    model = Model(VocabParallelEmbedding(VOCABULARY, WIDTH))
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    for step in range(3):
        model(SHARDING.shard(batch(step), dim=1), SHARDING).backward()
        reducer.finish()
        reducer.zero_grad()
    model(SHARDING.shard(batch(grid.coordinate["cp"]), dim=1), SHARDING).backward()
    with pytest.raises(GridMismatchError, match=r"group 'cp' .* different values of 'tokens'"):
        reducer.finish()


@pytest.mark.ranks(4, cp=2)
def test_each_rank_of_dp_has_its_batch(grid: HyperCommGrid) -> None:
    model = Model()
    reducer = GradientReducer(model)
    for step in range(3):
        whole = batch(10 * step + grid.coordinate["dp"])
        model(SHARDING.shard(whole, dim=1), SHARDING).backward()
        reducer.finish()
        reducer.zero_grad()


@pytest.mark.ranks(2, cp=2)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_each_rank_has_its_dropout(grid: HyperCommGrid, before: bool) -> None:
    """On its part; also on activations of the whole sequence, of which it then takes its part."""
    model, embedding = nn.Linear(WIDTH, 1), nn.Embedding(VOCABULARY, WIDTH)
    both = nn.ModuleList([model, embedding])
    reducer = GradientReducer(both)
    torch.manual_seed(grid.rank)
    for step in range(3):
        tokens = batch(step)["tokens"]
        if before:
            x = SHARDING.shard(F.dropout(embedding(tokens), 0.5), dim=1)
            with torch.no_grad():
                SHARDING.shard(F.dropout(embedding(tokens), 0.5), dim=1)
        else:
            x = F.dropout(embedding(SHARDING.shard(tokens, dim=1)), 0.5)
        model(x).sum().backward()
        reducer.finish()
        reducer.zero_grad()


def shown_on_one(rank: int, step: int) -> None:
    """Rank 0 looks at a batch that it does not train on."""
    if rank == 0 and step == 1:
        SHARDING.shard(batch(50), dim=1)


def read_ahead(rank: int, step: int) -> None:
    """Rank 0's loader is a batch ahead from the first step on; what it reads is the same."""
    for number in [step] if rank else [step + 1] if step else [0, 1]:
        SHARDING.shard(batch(60 + number), dim=1)


def parts_of_all(rank: int, step: int) -> None:
    for other in range(2):
        SHARDING.shard(torch.full((LENGTH,), rank + step), rank=other)


def other_names(rank: int, step: int) -> None:
    """In another order, as of a set of names."""
    whole = batch(step)
    SHARDING.shard(dict(sorted(whole.items(), reverse=bool(rank))), dim=1)


@pytest.mark.ranks(2, cp=2)
@pytest.mark.parametrize("habit", [shown_on_one, read_ahead, parts_of_all, other_names])
def test_ranks_that_shard_alone_are_not_blamed(
    grid: HyperCommGrid, habit: Callable[[int, int], Any]
) -> None:
    model = nn.Linear(4, 1)
    reducer = GradientReducer(model)
    for step in range(4):
        habit(grid.rank, step)
        whole = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(step))
        model(SHARDING.shard(whole)).sum().backward()
        reducer.finish(count=1)
        expected = whole.sum(0, keepdim=True) / 2  # of two ranks that count one each; fp32
        torch.testing.assert_close(model.weight.grad, expected, rtol=1e-5, atol=1e-5)
        reducer.zero_grad()


@pytest.mark.ranks(2, cp=2)
def test_without_a_reducer_nothing_is_noted(
    grid: HyperCommGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A reducer of an earlier test may be left, which a forked rank cannot collect.
    monkeypatch.setattr(noted, "_RECORDS", WeakSet())
    monkeypatch.delattr(noted, "fingerprint")
    SHARDING.shard(batch(grid.rank), dim=1)
