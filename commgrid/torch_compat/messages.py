"""Messages between the ranks of a group: several tensors at once, and who its members are.

NCCL refuses two ranks of one GPU. Such a receiver copies out of the sender's memory
(`start_copies`), which it opens by a CUDA IPC handle; on a CPU it is shared memory.

    1  sender    says over the group where the numbers are
    2  receiver  copies them, and says over the group that it has
    3  sender    may use its memory again
"""

from __future__ import annotations

import inspect
import os
import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions
from torch.nn.parameter import is_lazy

from commgrid.torch_compat.interposer import batched

Transfer = tuple[torch.Tensor, int]
"""A tensor, and the group rank that it goes to or comes from."""
Refused = Callable[[RuntimeError, int | None], Exception]
"""Makes our error of torch's. Gets that, and the group rank of the message that failed to start, or
None if it was one of a batch."""


NCCL_SENDS = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""Dtypes that torch's NCCL backend can send (ProcessGroupNCCL, `ncclDataType`)."""


def can_send(dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group sends tensors of a dtype and device; for others torch raises an error on the
    sender alone, and the receiver waits for ever."""
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
        ended: on the CPU its end in seconds of `time.perf_counter()`; empty until then.
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
    refused: Refused,
) -> list[dist.Work]:
    """Start sends and receives of tensors, each with the group rank it goes to or comes from.

    Args:
        group, sends, recvs: of this rank.
        refused: makes the error to raise for one of torch's.

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


_PLACE, _TAKEN = 1, 2  # tags of the two messages about memory
_PLACE_BYTES = 4096
_DEVICE = [*inspect.signature(reductions.rebuild_cuda_tensor).parameters].index("storage_device")


def start_copies(
    group: dist.ProcessGroup,
    sends: Sequence[Transfer],
    recvs: Sequence[Transfer],
    refused: Refused,
) -> list[_Copies]:
    """Start messages between processes on one device: the receiver copies from the sender's memory.

    A tensor that is sent is of bytes in memory that `lend` has made. A send ends when its receiver
    waits for the receive: ranks wait for their starts in one order, and may do both in one start.

    Args:
        group: of a backend for CPU tensors, over which ranks say where their numbers are.
        sends, recvs, refused: as for `start_transfers`.
    """
    copies = _Copies(group)
    for tensor, peer in sends:
        place, taken = _place_of(tensor), torch.empty(1, dtype=torch.uint8)
        copies.held += [place, taken]
        try:
            copies.sent.append(group.send([place], peer, _PLACE))
            copies.sent.append(group.recv([taken], peer, _TAKEN))
        except RuntimeError as error:
            raise refused(error, peer) from error
    for tensor, peer in recvs:
        place = torch.empty(_PLACE_BYTES, dtype=torch.uint8)
        try:
            told = group.recv([place], peer, _PLACE)
        except RuntimeError as error:
            raise refused(error, peer) from error
        copies.received.append((told, place, tensor, peer))
    return [copies]


@dataclass
class _Copies:
    """Messages through the memory of a device that were started together.

    Args:
        group: of the messages that say where numbers are, and that they were copied.
        sent: handles of this rank's messages about memory that it sends from.
        received: of each tensor to receive: the handle of the message that says where its numbers
            are, that message, the tensor, and the sender.
        held: tensors of messages under way.
    """

    group: dist.ProcessGroup
    sent: list[dist.Work] = field(default_factory=list)
    received: list[tuple[dist.Work, torch.Tensor, torch.Tensor, int]] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Copy what this rank receives, then wait until its peers have copied what it sends."""
        given = () if timeout is None else (timeout,)
        for told, place, target, peer in self.received:
            told.wait(*given)
            target.copy_(_at(place, target.device))
            _settle(target.device)
            self.group.send([torch.zeros(1, dtype=torch.uint8)], peer, _TAKEN).wait(*given)
        self.received.clear()
        for work in self.sent:
            work.wait(*given)
        self.sent.clear()  # gloo waits for ever where a send is waited for twice


UnderWay = dist.Work | _Copies
"""A message that has been started."""
Start = Callable[[Sequence[Transfer], Sequence[Transfer], Refused], Sequence[UnderWay]]
"""Starts sends and receives; returns a handle for each, sends first, or one for all."""


def lend(size: int, device: torch.device) -> torch.Tensor:
    """Make memory for messages that `start_copies` sends.

    Args:
        size: its bytes.
        device: where it is; on a CPU another process finds it as a file of this one.
    """
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    file = os.memfd_create("commgrid")
    found = torch.from_file(
        f"/proc/{os.getpid()}/fd/{file}", shared=True, size=max(size, 1), dtype=torch.uint8
    )
    weakref.finalize(found, os.close, file)
    return found


def _place_of(tensor: torch.Tensor) -> torch.Tensor:
    """Say where a tensor's bytes are, once they are there, to another process of this host."""
    _settle(tensor.device)
    if tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        start = tensor.storage_offset()
        place: Any = storage.filename, storage.nbytes(), start, start + tensor.numel()
    else:
        place = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    said = pickle.dumps(place).ljust(_PLACE_BYTES, b"\0")
    return torch.frombuffer(bytearray(said), dtype=torch.uint8)


def _at(place: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor in another process's memory; a device may have another number there."""
    told = pickle.loads(bytes(place.tolist()))
    if device.type == "cpu":
        name, size, start, end = told
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)[start:end]
    rebuild, args = told
    found: torch.Tensor = rebuild(*args[:_DEVICE], device.index, *args[_DEVICE + 1 :])
    return found


def _settle(device: torch.device) -> None:
    """Wait for what this thread has queued on a device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def wait_for(work: UnderWay, seconds: float | None) -> None:
    """Waits for a message, however long gloo would by itself.

    A gloo group that connects by pairs (`commgrid.torch_compat.gloo`) gives a message a fifth of
    the group's timeout, unless a wait says how long.

    Args:
        work: what `start_transfers` has returned.
        seconds: at most; None: the backend's own timeout; with NCCL the host does not wait.
    """
    if seconds is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=seconds))
