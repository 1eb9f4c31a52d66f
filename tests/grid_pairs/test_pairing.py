"""Grids that find each other by a name, on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.bridge import Bridge
from commgrid.grid_pairs.pairing import Card
from commgrid.rendezvous import grid_match as match
from commgrid.testing import run_on_ranks
from commgrid.torch_compat.world import world_store
from commgrid.transfer import Transfer
from tests.waiting import comes, until_waits


def test_what_a_card_says_comes_back() -> None:
    for spec in (
        commgrid.GridSpec.build(dp=2, tp=2).resolve(4),
        commgrid.GridSpec.build(dp=2, tp=2, ranks=range(4, 12, 2)).resolve(),
        commgrid.GridSpec.build(dp=-1, ranks=[3, 1, 7]).resolve(),
    ):
        card = Card("grid@0/0.1", spec, "gloo", 2.5, True)
        assert Card.from_text(card.to_text()) == card
    assert card.first == 3


# -- on ranks -----------------------------------------------------------------------------


def said(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def no_match(*_: Any) -> None:
    raise ValueError("no more")


def engines() -> dict[str, Any]:
    """Ranks 0 and 1 send to 2 and 3, and to 4; all under one name, some late, some twice."""
    rank, found = dist.get_rank(), {}
    trainer = commgrid.initialize(name="trainer", ranks=[0, 1]) if rank < 2 else None
    ranks = [2, 3] if rank in (2, 3) else [4]
    engine = commgrid.initialize(name="engine", ranks=ranks) if rank >= 2 else None
    mine = {"w": torch.full((4,), float(rank))}
    model, served = (mine, None) if rank < 2 else (None, mine)

    def transfer(**options: Any) -> Transfer:
        how = {"copies": "any", "timeout": 60, **options}
        made = Transfer(model, served, source_grid=trainer, target_grid=engine, **how)
        made.run()
        return made

    if rank < 4:
        found["bytes"] = said(lambda: transfer(max_bytes=64 if rank < 3 else 128))
    dist.barrier()
    if rank == 0:  # rank 1 comes late to a call that is over, and waits for the next
        found["nobody"] = said(lambda: transfer(timeout=1))
    dist.barrier()
    if rank in (0, 1, 2):  # rank 3 does not come
        found["late"] = said(lambda: transfer(timeout=4))
    dist.barrier()
    keys = []
    for _ in range(3):
        if rank < 4:
            transfer().close()
        dist.barrier()
        if rank not in (2, 3):
            transfer().close()
        dist.barrier()
        keys.append(world_store().num_keys())
        dist.barrier()
    found["keys"], found["w"] = keys, mine["w"].tolist()
    if rank < 4:  # rank 3 gives another dim
        found["bridge"] = said(lambda: Bridge(trainer, engine, dim=rank // 3, startup_timeout=60))
    if rank < 2:  # rank 1 waits to be told when rank 0 fails; later it would wait for the next call
        if rank == 0:
            until_waits("rank 1 at broken")
            match.match, found_before = no_match, match.match
        else:
            comes("rank 1 at broken")
        found["broken"] = said(lambda: Bridge(trainer, None, name="broken"))
        if rank == 0:
            match.match = found_before
    if rank < 2:  # rank 1 gives up before the first of its grid, which came later, can tell it
        if rank == 0:
            until_waits("rank 1")
        else:
            comes("rank 1")
        how = {"source_grid": trainer, "timeout": 3}
        found["alone"] = said(lambda: Transfer(mine, None, name="alone", **how))
    return found


@pytest.mark.full
def test_a_trainer_meets_its_engines_one_after_the_other() -> None:
    # A grid that failed leaves keys in the store.
    ranks = run_on_ranks(engines, 5, check=False)
    for rank, found in enumerate(ranks):
        if rank < 4:
            assert found["bytes"].startswith("GridMismatchError: transfer 'default': ranks dis")
            assert "max_bytes is 128 on rank 3 and 64 on ranks 0-2" in found["bytes"]
            assert found["bridge"].startswith("GridMismatchError: bridge 'bridge': ranks disagree")
            assert "on rank 3" in found["bridge"]
        if rank < 2:
            assert found["alone"].startswith(
                "PeerTimeoutError: transfer 'alone': no target grid has come to meet the source "
                "grid of ranks 0-1 within timeout"
            ), rank
        if rank < 3:
            assert "rank 3 did not arrive within timeout" in found["late"]
        assert found["keys"][0] == found["keys"][-1]
        assert found["w"][0] == (rank if rank < 2 else found["w"][-1])
    assert "no target grid has come" in ranks[0]["nobody"]
    assert ranks[0]["broken"] == "ValueError: no more"
    told = "PeerFailedError: bridge 'broken': rank 0 failed: ValueError('no more')"
    assert ranks[1]["broken"] == told  # long before its timeout
    assert ranks[4]["w"][0] in (0.0, 1.0)
