"""Shardings and levels against megatron-core's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.context_parallel import WAYS, SequenceSharding, attention
from commgrid.testing import run_on_ranks
from tests.peers import parallel_state


def zigzag() -> None:
    from megatron.core.utils import get_batch_on_this_cp_rank

    parts = dist.get_world_size()
    for length in (2 * parts, 6 * parts, 64 * parts):
        batch = {
            "tokens": torch.arange(2 * length).view(2, length),
            "loss_mask": torch.rand(2, length, generator=torch.Generator().manual_seed(0)),
            "labels": None,
        }
        theirs = get_batch_on_this_cp_rank(dict(batch), cp_group=dist.group.WORLD)
        ours = SequenceSharding.zigzag(length, parts).shard(batch, dist.get_rank(), dim=1)
        assert ours["labels"] is theirs["labels"] is None
        for name in ("tokens", "loss_mask"):
            assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.full("2")
@pytest.mark.parametrize("parts", [2, 3])
def test_zigzag_is_megatrons(parts: int) -> None:
    run_on_ranks(zigzag, parts)


def levels(across: int, inside: int) -> None:
    split = {"of": "cp", "split": {"cp_ring": across, "cp_a2a": inside}}
    grid = commgrid.initialize(tp=2, cp=across * inside, groups={"cp_levels": split})
    for ranks in grid.get_all_ranks("cp"):
        theirs, _ = parallel_state.create_hierarchical_groups(grid.rank, ranks, [inside, across])
        if grid.rank in ranks:
            found = [tuple(dist.get_process_group_ranks(group)) for group in theirs]
            assert found == [grid.get_ranks("cp_a2a"), grid.get_ranks("cp_ring")]


@pytest.mark.full
def test_two_levels_are_megatrons_hierarchical_groups() -> None:
    # Megatron, or its stand-ins for CUDA, change torch and the environment.
    run_on_ranks(levels, 8, 2, 2, check=False)


@pytest.mark.ranks(2)
def test_ways_have_megatrons_names_too(rank: int) -> None:
    commgrid.initialize(cp=2, groups={"cp_levels": {"of": "cp", "split": {"r": 1, "a": 2}}})
    sharding = SequenceSharding.zigzag(8, 2)
    q, k, v = torch.randn(3, 1, 2, 4, 4, dtype=torch.float64)
    for way, name in zip(WAYS, ("p2p", "all_gather", "a2a", "a2a+p2p"), strict=True):
        ours = attention(q, k, v, sharding=sharding, way=way, levels=("r", "a"))
        mixed = way if rank else name
        assert torch.equal(
            ours, attention(q, k, v, sharding=sharding, way=mixed, levels=("r", "a"))
        )
    commgrid.shutdown()
