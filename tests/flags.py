"""Flags in WORLD's store, by which the ranks of a test tell each other how far they are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def tell(what: str) -> None:
    """Set a flag, through the store that torch was started with."""
    dist.distributed_c10d._get_default_store().set(f"told: {what}", "")


def hear(*what: str) -> None:
    """Wait until all of these flags are set, so that a silent rank lives as long as it must."""
    keys = [f"told: {each}" for each in what]
    dist.distributed_c10d._get_default_store().wait(keys, timedelta(seconds=200))


def meet(rank: int, ranks: int | Sequence[int]) -> None:
    """Wait for all ranks, or for these; rank 0, which may serve the store, leaves last."""
    every = range(ranks) if isinstance(ranks, int) else ranks
    tell(f"rank {rank} has come")
    hear(*(f"rank {each} has come" for each in every))
    if rank == 0:
        hear(*(f"rank {each} has heard" for each in every[1:]))
    else:
        tell(f"rank {rank} has heard")
