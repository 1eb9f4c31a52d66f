"""Stand-in for torch's NCCL backend: lazy, with NCCL's requests to its store, over gloo on the CPU.

Real are the store that commgrid hands to torch, the threads, and the errors that pass through C++.
"""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Work

from commgrid.torch_compat import ended_groups
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat import suspended_groups as torch_suspend

NAME = "nccl-stand-in"


def unique_id(store: dist.Store, rank: int, key: str, root: bool) -> bytes:
    """Exchange an id as ProcessGroupNCCL does: the root writes it, others read it."""
    if root:
        made = os.urandom(128)
        store.set(key, made)  # type: ignore[arg-type]
        return made
    try:
        return bytes(store.get(key))
    except Exception as error:  # as torch, which catches every std::exception
        raise dist.DistBackendError(
            f"[{rank}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via "
            f"c10d key-value store by key '{key}', but store->get('{key}') got error: {error}"
        ) from None


class Backend:
    """What commgrid asks of an NCCL backend; `connect` and `calls` may be set by a test."""

    def __init__(self, group: LazyGroup) -> None:
        self.group, self.uid = group, group.uid
        self.aborted = False
        self.found = "SUCCESS"

    def name(self) -> str:
        return NAME

    def _is_initialized(self) -> bool:
        return self.group.real is not None

    def _get_sequence_number_for_group(self) -> int:
        return self.group.calls

    def get_error(self) -> Any:
        return type("Error", (), {"name": self.found})

    def abort(self) -> None:
        self.aborted = True


class LazyGroup(dist.ProcessGroup):
    """A group that connects within its first call."""

    count = 0

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.store, self.timeout = store, timeout
        self.real: dist.ProcessGroup | None = None
        self.calls, self.uid = 0, LazyGroup.count
        LazyGroup.count += 1
        self.backend = Backend(self)
        self._name = self._description = ""

    def connect(self) -> dist.ProcessGroup:
        """Connect, as the first call does."""
        if self.real is None:
            unique_id(self.store, self.rank(), "0", self.rank() == 0)
            store = PrefixStore("real", self.store)
            self.real = dist.ProcessGroupGloo(store, self.rank(), self.size(), self.timeout)
        return self.real

    def _get_backend(self, device: torch.device) -> Any:
        return self.backend

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    def shutdown(self) -> None:
        self.real = None


def _calling(name: str, group: LazyGroup, *args: Any, **named: Any) -> Work:
    group.calls += 1
    found: Work = getattr(group.connect(), name)(*args, **named)
    return found


for _name in ("allreduce", "allgather", "_allgather_base", "broadcast", "barrier", "alltoall_base"):
    setattr(LazyGroup, _name, lambda group, *args, _name=_name, **named: _calling(
        _name, group, *args, **named
    ))  # fmt: skip


def install() -> None:
    """Let commgrid take the stand-in for NCCL, in a process that a test has started."""
    dist.Backend.register_backend(NAME, LazyGroup, devices=["cpu"])
    torch_nccl.NAMES = (*torch_nccl.NAMES, NAME)
    torch_nccl.check_device = lambda *_: None
    torch_nccl.rank_device = partial(torch.device, "cpu")

    def backends(group: Any) -> list[Any]:
        return [group.backend] if isinstance(group, LazyGroup) and group.size() > 1 else []

    torch_groups.nccl_backends = ended_groups.nccl_backends = backends
    # A build for the CPU has no recorder of NCCL's.
    torch_suspend._bindings._dump_nccl_trace = lambda *_: pickle.dumps({})
    torch.cuda.synchronize = lambda *_: None
    torch_groups.backend_on = lambda group, device: group.backend
