"""The walk of a gradient: functions of ours entered between backward and the update.

The number is of calls for one more parameter: those of a step of a model with two layers, less
those of one with one layer. `pytest -s` prints both walks.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import initialize_parameters
from tests.walked import walked

MOST = 40


def walk(num_layers: int, shard: bool) -> Counter[str]:
    """Calls of our functions from backward to the update, in a step after the first."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False).double() for _ in range(num_layers)))
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model, shard=shard)
    optimizer: torch.optim.Optimizer = (
        ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
        if shard
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )
    seen: Counter[str] = Counter()

    for _ in range(3):
        seen.clear()
        loss = model(torch.ones(1, 4, dtype=torch.float64)).square().mean()
        with walked(seen):
            loss.backward()
            reducer.finish()
            reducer.clip_gradients(1e-3)
            optimizer.step()
        optimizer.zero_grad()
    reducer.close()
    return seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [False, True])
def test_a_gradient_walks_through_few_functions(grid: HyperCommGrid, shard: bool) -> None:
    one, two = walk(1, shard), walk(2, shard)
    added = two - one
    if grid.rank == 0:
        print(f"\n{added.total()} calls for one more gradient, of {one.total()} in a step:")
        print("\n".join(f"{count:3} {name}" for name, count in added.items()))
    assert any("begin" in name for name in added)  # backward's hooks are seen
    assert added.total() <= MOST
