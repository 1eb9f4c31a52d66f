"""Devices that ranks of a transfer share: NCCL refuses two ranks of one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from commgrid.store.hosts import own_host
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.transfer.barriers import TransferBarriers


class Sharing(NamedTuple):
    """A GPU that this rank shares.

    Args:
        ranks: the others on its GPU.
        device: that GPU; None: there are no others.
        backend: of the transfer's communicator; None: as it would be.
    """

    ranks: frozenset[int] = frozenset()
    device: torch.device | None = None
    backend: str | None = None


def shared_devices(barriers: TransferBarriers, backend: str, seconds: float) -> Sharing:
    """Find the ranks on this rank's GPU, and how the transfer's ranks are to talk.

    Ranks of one GPU move weights through its memory. The others then do it over gloo, through the
    memory of their hosts, since NCCL connects all ranks of a communicator or none.

    Args:
        barriers: of the transfer.
        backend: of its ranks; "": WORLD's.
        seconds: how long to wait for the other ranks.

    Raises:
        PeerTimeoutError: some ranks did not come.
    """
    if not torch_groups.nccl_kinds(backend):
        return Sharing()
    names = barriers.exchange("device", torch_nccl.device_name(own_host()), seconds)
    if len({*names.values()}) == len(names):
        return Sharing()
    mine = names.pop(barriers.rank)
    near = frozenset(rank for rank, name in names.items() if name == mine)
    return Sharing(near, torch_nccl.rank_device() if near else None, "gloo")
