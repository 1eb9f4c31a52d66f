"""The walk of a microbatch and of an activation: functions of ours entered for one more of them.

A microbatch's number is of calls for one more in a step of a 1F1B pipeline of two stages; an
activation's is for one more pair of a column and a row layer, forward and backward. Of several
steps the fewest calls count, as a stage waits at its end only for messages that are still on their
way. `pytest -s` prints the walks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from commgrid.pipeline import Pipeline
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.walked import walked

STEPS = 6
MOST_OF_A_MICROBATCH = (36, 37)  # by stage
MOST_OF_A_PAIR = {False: 58, True: 94}  # by sequence_parallel


def fewest(step: Callable[[], object]) -> Counter[str]:
    """Calls of our functions in the step with the fewest, after a first one."""
    found = []
    for _ in range(STEPS):
        found.append(Counter[str]())
        with walked(found[-1]):
            step()
    return min(found[1:], key=Counter.total)


def report(what: str, one: Counter[str], two: Counter[str]) -> int:
    """Print the calls of `two` beyond those of `one`; return their number."""
    added = two - one
    lines = [f"{added.total()} calls for one more {what}, of {two.total()}:"]
    print("\n" + "\n".join([*lines, *(f"{count:3} {name}" for name, count in added.items())]))
    return added.total()


def step_of(num_microbatches: int) -> Callable[[], object]:
    """A step of a pipeline over pp."""
    pipeline = Pipeline(
        nn.Linear(4, 4), "1f1b", num_microbatches=num_microbatches, loss=lambda y, _: y.sum()
    )
    inputs = [torch.ones(2, 4)] * num_microbatches
    return lambda: pipeline.step(inputs, inputs)


@pytest.mark.ranks(2, pp=2)
def test_a_microbatch_walks_through_few_functions(grid: HyperCommGrid) -> None:
    stage = grid.get_local_rank("pp")
    one, two = fewest(step_of(4)), fewest(step_of(5))
    added = report(f"microbatch on stage {stage}", one, two)
    assert any("start" in name for name in two - one)  # messages are seen
    assert added <= MOST_OF_A_MICROBATCH[stage]


def pass_of(num_pairs: int, sequence_parallel: bool) -> Callable[[], object]:
    """Forward and backward of pairs of a column and a row layer over tp."""
    pairs = nn.Sequential()
    for _ in range(num_pairs):
        pairs.append(ColumnParallelLinear(4, 4, sequence_parallel=sequence_parallel))
        pairs.append(RowParallelLinear(4, 4, sequence_parallel=sequence_parallel))
    x = torch.ones(2, 4, requires_grad=True)

    def once() -> None:
        y: Tensor = pairs(x)
        y.sum().backward()

    return once


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_activation_walks_through_few_functions(
    grid: HyperCommGrid, sequence_parallel: bool
) -> None:
    one, two = (fewest(pass_of(pairs, sequence_parallel)) for pairs in (1, 2))
    what = f"pair of layers, {sequence_parallel=}"
    assert any("backward" in name for name in two - one)
    assert report(what, one, two) <= MOST_OF_A_PAIR[sequence_parallel]
