"""Ranks of a grid's groups as torch's own functions give them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import commgrid
from commgrid.testing import run_on_ranks


def translated() -> int:
    grid = commgrid.initialize(tp=2, pp=2)
    seen = 0
    for name in grid.group_names:
        group, ranks = grid.get_group(name), grid.get_ranks(name)
        assert dist.get_process_group_ranks(group) == list(ranks)
        for place, rank in enumerate(ranks):
            assert dist.get_group_rank(group, rank) == place
            assert dist.get_global_rank(group, place) == rank
        for other in set(range(grid.world_size)) - set(ranks):
            with pytest.raises(ValueError, match=f"Global rank {other} is not part of group"):
                dist.get_group_rank(group, other)
        with pytest.raises(ValueError, match="is not part of group"):
            dist.get_global_rank(group, len(ranks))
        seen += 1
    whole = dist.distributed_c10d._world.pg_group_ranks[grid.get_group("dp_tp")]
    assert whole == {rank: place for place, rank in enumerate(grid.get_ranks("dp_tp"))}
    commgrid.shutdown()
    return seen


def test_torch_translates_ranks() -> None:
    assert all(seen > 5 for seen in run_on_ranks(translated, 8))


def test_other_orders_are_translated_too() -> None:
    assert run_on_ranks(listed, 4) == [None] * 4


def listed() -> None:
    """Ranks in an order of their own, which no strides describe."""
    grid = commgrid.initialize(tp=2, ranks=[3, 0, 2, 1])
    for name in ("tp", "dp", "dp_tp"):
        group, ranks = grid.get_group(name), grid.get_ranks(name)
        assert dist.get_process_group_ranks(group) == list(ranks)
        assert [dist.get_group_rank(group, rank) for rank in ranks] == list(range(len(ranks)))
    commgrid.shutdown()
