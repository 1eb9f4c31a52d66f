"""Replicas of a target that have other names: what one of them leaves out would stay stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import commgrid
from commgrid.testing import run_on_ranks
from commgrid.transfer import Part, Transfer


def names(what: str, rank: int) -> dict[str, Any]:
    """The target of a rank, two replicas (dp 2) of two slices (tp 2): ranks 0 and 2, 1 and 3."""
    whole = torch.zeros(4)
    if what == "sliced":
        part = Part(torch.zeros(2), (4,), (2 * (rank % 2),))
        return {"w": part} if rank == 3 else {"w": part, "norm": whole}
    if what == "own slices":  # as FSDP cuts
        return {"w": Part(torch.zeros(1), (4,), (rank,)), "norm": whole}
    if what == "experts":  # as many as there are, on the ranks that have some
        return {"norm": whole, **({"w": torch.zeros(4)} if rank % 2 else {})}
    if what == "by name":  # each rank has some
        return {"w": whole} if rank < 2 else {"norm": whole}
    return {} if what == "nothing" and rank > 1 else {"w": whole, "norm": whole.clone()}


def moved(what: str) -> str:
    grid = commgrid.initialize(tp=2, dp=2)
    source = {"w": torch.ones(4), "norm": torch.ones(4)}
    target = names(what, grid.rank)
    told = ""
    try:
        sides = {"source_grid": grid, "target_grid": grid}
        Transfer(source, target, **sides, timeout=30).run()
        for one in target.values():
            assert bool((getattr(one, "tensor", one) == 1).all())
    except commgrid.TransferError as error:
        told = str(error)
    commgrid.shutdown()
    return told


def test_a_replica_that_leaves_out_a_name_is_refused() -> None:
    for told in run_on_ranks(moved, 4, "sliced", check=False):
        assert "rank 3 of the target is a replica of rank 1, and leaves out norm" in told


@pytest.mark.parametrize("what", ["alike", "own slices", "experts", "by name", "nothing"])
def test_ranks_that_are_no_replicas_may_have_other_names(what: str) -> None:
    assert run_on_ranks(moved, 4, what) == [""] * 4
