"""The world of a dry audit, in which every rank is taken to have what this one has: its sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from commgrid.testing import run_on_ranks
from commgrid.torch_compat.fake import pretend

RANKS, RANK = 4, 1
OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda x: RANKS * x, "PRODUCT": lambda x: x**RANKS, "AVG": lambda x: x,
    "MAX": lambda x: x, "MIN": lambda x: x,
}  # fmt: skip


FOREVER = 1000.0
"""Seconds to wait for another rank's numbers: no test lasts so long."""


def in_it(folder: Path, rank: int, function: Callable[..., Any], *given: Any) -> Any:
    """A function's result on a rank before which rank 0 has run, but for ranks 0 and 3."""
    before = dict(vars(dist.ProcessGroup))
    pretend(folder, [0] if rank in (1, 2) else [], FOREVER)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    found = function(*given)
    dist.destroy_process_group()
    for name, method in before.items():
        if vars(dist.ProcessGroup)[name] is not method:
            setattr(dist.ProcessGroup, name, method)
    return found


def reduced(name: str) -> dict[str, torch.Tensor]:
    """The results of each function for 1, 2, … on all ranks."""
    operation = getattr(dist.ReduceOp, name)
    found = {}
    for called, function in (
        ("all_reduce", dist.all_reduce),
        ("reduce", lambda x, op: dist.reduce(x, RANK, op=op)),
    ):
        found[called] = torch.arange(1.0, 3.0)
        function(found[called], op=operation)
    whole = torch.arange(1.0, 9.0)
    found["reduce_scatter_tensor"], found["reduce_scatter"] = torch.empty(2), torch.empty(2)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], whole, op=operation)
    dist.reduce_scatter(found["reduce_scatter"], list(whole.split(2)), op=operation)
    return found


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # names of before torch 2.13
@pytest.mark.parametrize("name", OPERATIONS)
def test_reductions_are_of_equal_ranks(name: str, tmp_path: Path) -> None:
    (found,) = run_on_ranks(in_it, 1, tmp_path, RANK, reduced, name, backend=None)
    whole = torch.arange(1.0, 9.0)
    for called, result in found.items():
        given = whole[2 * RANK : 2 * RANK + 2] if "scatter" in called else whole[:2]
        assert torch.equal(result, OPERATIONS[name](given)), called


def told(mine: str) -> str:
    said = [mine]
    dist.broadcast_object_list(said, 0)
    return said[0]


def test_an_object_reaches_ranks_that_run_later(tmp_path: Path) -> None:
    for rank, mine in enumerate(["of rank 0", "", "another"]):
        assert run_on_ranks(in_it, 1, tmp_path, rank, told, mine, backend=None) == ["of rank 0"]


def numbers() -> list[int]:
    x = torch.full((2,), 7)
    dist.broadcast(x, 0)
    return [int(each) for each in x]


def test_ranks_that_are_not_recorded_are_not_waited_for(tmp_path: Path) -> None:
    assert run_on_ranks(in_it, 1, tmp_path, 3, numbers, backend=None) == [[7, 7]]
