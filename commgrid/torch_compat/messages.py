"""Messages between the ranks of a group: several tensors at once, and who its members are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from commgrid.torch_compat.interposer import batched

Transfer = tuple[torch.Tensor, int]
"""A tensor, and the group rank that it goes to or comes from."""

NCCL_SENDS = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""Dtypes that torch's NCCL backend can send (ProcessGroupNCCL, `ncclDataType`)."""


def can_send(dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group sends tensors of a dtype and device. Of others torch raises an error on the
    sender alone, while the receiver waits."""
    return dtype in NCCL_SENDS or "nccl" not in backend_for(group, device)


def version_of(tensor: torch.Tensor) -> int | None:
    """A count of changes in place, without those through .data; None where torch keeps none."""
    return None if is_lazy(tensor) or tensor.is_inference() else tensor._version


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that a group has for tensors of a device."""
    return str(group._get_backend(device).name()).lower()


@dataclass(frozen=True)
class RankExchange:
    """An exchange of the members' global ranks over one backend of a group, under way.

    Args:
        work: torch's handle.
        heard: is filled with the ranks.
        ended: on the CPU gets the `time.perf_counter()` at which the exchange has ended.
    """

    work: dist.Work
    heard: torch.Tensor
    ended: list[float]

    def wait(self, timeout: float) -> tuple[int, ...]:
        """Return the ranks that answered, in group order; torch's RuntimeError after `timeout`."""
        self.work.wait(timedelta(seconds=timeout))
        if self.heard.device.type != "cpu":
            self.ended.append(time.perf_counter())
        return tuple(self.heard.tolist())


def start_exchange(group: dist.ProcessGroup, device: torch.device) -> RankExchange:
    """Starts an exchange that connects every pair of a group's ranks, where a backend has pairs.

    NCCL connects here: it returns, or raises torch's error, once all members are there or late.
    """
    mine = torch.full((1,), dist.get_rank(), dtype=torch.int64, device=device)
    heard = torch.full((group.size(),), -1, dtype=torch.int64, device=device)
    if "gloo" in backend_for(group, device):
        # Its other collectives talk along a ring or a tree, which connects only some pairs.
        work = dist.all_to_all_single(
            heard, mine.expand_as(heard).clone(), group=group, async_op=True
        )
    else:
        work = dist.all_gather(list(torch.split(heard, 1)), mine, group=group, async_op=True)
    assert work is not None  # only non-members get None
    ended: list[float] = []
    if device.type == "cpu":
        work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))
    return RankExchange(work, heard, ended)


def starts_batches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group's backend starts several messages as one, as NCCL does."""
    return bool(group._get_backend(device).supports_coalescing)


def start_transfers(
    group: dist.ProcessGroup,
    sends: Sequence[Transfer],
    recvs: Sequence[Transfer],
    refused: Callable[[RuntimeError, int | None], Exception],
) -> list[dist.Work]:
    """Start sends and receives of tensors, each with the group rank it goes to or comes from.

    Args:
        group, sends, recvs: of this rank.
        refused: makes the error to raise for one of torch's, from that and the group rank of the
            message that could not be started, as to a rank that has ended; None: one of the batch.

    Returns:
        A handle for each, sends first; one for all if the backend starts them as a batch.
    """
    if not sends and not recvs:
        return []
    device = (*sends, *recvs)[0][0].device
    if not starts_batches(group, device):
        # As torch's batch does then, without its checks of every operation.
        works = []
        with batched():
            for operation, transfers in ((group.send, sends), (group.recv, recvs)):
                for tensor, peer in transfers:
                    try:
                        works.append(operation([tensor], peer, 0))
                    except RuntimeError as error:
                        raise refused(error, peer) from error
        return works
    batch = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, transfers in ((dist.isend, sends), (dist.irecv, recvs))
        for tensor, peer in transfers
    ]
    try:
        return dist.batch_isend_irecv(batch)
    except RuntimeError as error:
        raise refused(error, None) from error


def wait_for(work: dist.Work, seconds: float | None) -> None:
    """Waits for a message, however long gloo would by itself.

    A gloo group that connects by pairs (`commgrid.torch_compat.gloo`) gives a message a fifth of
    the group's timeout, unless a wait says how long.

    Args:
        work: what `start_transfers` has returned.
        seconds: at most; None: what the backend allows, without holding the host where it does not.
    """
    if seconds is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=seconds))
