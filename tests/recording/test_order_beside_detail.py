"""What `verify="order"` and `TORCH_DISTRIBUTED_DEBUG=DETAIL` find, as the page says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.errors import GridMismatchError
from commgrid.testing import run_on_ranks
from tests.docs.pages import DOCS, entries

Mistake = Callable[[int, dist.ProcessGroup], object]


def other_operation(rank: int, group: dist.ProcessGroup) -> object:
    if rank:
        return dist.all_reduce(torch.ones(4), group=group)
    return dist.broadcast(torch.ones(4), 0, group=group)


MISTAKES: dict[str, Mistake] = {
    "another operation": other_operation,
    "another dtype": lambda rank, group: dist.all_reduce(
        torch.ones(4, dtype=torch.int32 if rank else torch.float32), group=group
    ),
    "another size": lambda rank, group: dist.all_reduce(torch.ones(4 + rank), group=group),
    "another root": lambda rank, group: dist.broadcast(torch.ones(4), rank, group=group),
    "another reduction": lambda rank, group: dist.all_reduce(
        torch.ones(4), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=group
    ),
}


def said(mistake: Mistake, rank: int, group: dist.ProcessGroup) -> str:
    try:
        mistake(rank, group)
    except GridMismatchError:
        return "error before it"
    except RuntimeError as error:
        return "error before it" if "Detected mismatch" in str(error) else "hangs"
    return "not found"


def under_detail(name: str) -> str:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(timeout=timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(torch.ones(4), group=group)  # a right call
    return said(MISTAKES[name], dist.get_rank(), group)


def under_order(name: str) -> str:
    grid = commgrid.initialize(verify="order", timeout=20)
    group = grid.get_group("dp")
    dist.all_reduce(torch.ones(4), group=group)
    found = said(MISTAKES[name], grid.rank, group)
    grid.abort()
    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_the_page_says_what_each_finds(name: str) -> None:
    (row,) = entries(DOCS / "debugging.md", rf"^\| {name} \|.*$", "Which command finds what")
    cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
    assert set(run_on_ranks(under_order, 2, name, check=False)) == {cells[3]}
    assert set(run_on_ranks(under_detail, 2, name, check=False)) == {cells[4]}
