"""Starting and stopping torch.distributed, the store its ranks meet at, and what its errors mean.

With `torch_groups` and `torch_transfers` this is the one door to torch.distributed: whatever of
it is not public torch stands in these three files.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import CommGridError, PeerTimeoutError, SpecError
from commgrid.planning.names import nearest
from commgrid.runtime.launch import Launch

FAKE = "fake"
_STORE_TIMEOUT = timedelta(minutes=5)  # torch's own, for whoever uses the store after the start


def is_initialized() -> bool:
    """Whether torch.distributed is up."""
    return dist.is_available() and bool(dist.is_initialized())


def world_rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def world_backend() -> str:
    """WORLD's backend as it was given: `gloo`, `cpu:gloo,cuda:nccl`, `fake`, …"""
    backend: str = c10d._world.pg_map[c10d._get_default_group()][0]
    return backend


def world_store() -> Any:
    """The store that WORLD met at."""
    return c10d._get_default_store()


def default_backend() -> str:
    """What commgrid starts torch.distributed with: NCCL where CUDA is, else gloo.

    Not gloo beside NCCL, which would connect every rank with every other.
    """
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def take_device(launch: Launch, backend: str) -> None:
    """Makes the CUDA device of this rank's number on its node the current one.

    A current device other than 0 was chosen by the program and stays. 0 is also what merely
    touching CUDA leaves, so a launcher's number goes before it.

    Raises:
        SpecError: NCCL among several ranks and devices, and nothing says which is this one's.
    """
    if not torch.cuda.is_available():
        return
    touched, count = torch.cuda.is_initialized(), torch.cuda.device_count()  # type: ignore[no-untyped-call]
    if touched and torch.cuda.current_device() != 0:
        return
    local: Any = launch.local_rank  # None: no launcher gave a number
    if local is not None:
        torch.cuda.set_device(local % count)
    elif not touched and count > 1 and launch.world_size > 1 and "nccl" in backend:
        raise SpecError(
            f"rank {launch.rank} sees {count} CUDA devices, and neither LOCAL_RANK nor "
            "SLURM_LOCALID says which is its own; start with torchrun or srun, set LOCAL_RANK, or "
            "call torch.cuda.set_device before commgrid.initialize"
        )


def connect_store(launch: Launch, timeout: float) -> Any:
    """The store that all ranks of a launch share; a world of one keeps its own.

    Raises:
        PeerTimeoutError: nobody serves it within `timeout` seconds; names its address.
    """
    if launch.address is None:
        return HashStore()
    deadline = time.monotonic() + timeout
    where = f"{launch.address}:{launch.port}"
    if not launch.hosts_store and not _is_served(launch.address, launch.port, deadline):
        raise PeerTimeoutError(
            f"nobody serves the store at {where} within startup_timeout={timeout:.0f} s; is rank "
            "0's process, or the launcher there, running and reachable?"
        )
    # A first connection can get lost where many ranks connect at once: short tries, then longer.
    patience = 1.0
    while True:
        limit = min(patience, max(deadline - time.monotonic(), 0.1))
        try:
            store = TCPStore(
                launch.address,
                launch.port,
                is_master=launch.hosts_store,
                timeout=timedelta(seconds=limit),
                wait_for_workers=False,
                multi_tenant=True,
            )
            break
        except RuntimeError as error:
            final = launch.hosts_store and "in use" in str(error)
            if final or time.monotonic() + limit > deadline:
                raise PeerTimeoutError(
                    f"the store at {where} cannot be {'served' if final else 'reached'} within "
                    f"startup_timeout={timeout:.0f} s: {str(error).splitlines()[0]}"
                ) from error
            patience *= 2
    store.set_timeout(_STORE_TIMEOUT)
    # A launcher that restarts its workers keeps the store, with the keys of the attempt before.
    return PrefixStore(f"commgrid/attempt_{launch.attempt}", store)


def _is_served(address: str, port: int, deadline: float) -> bool:
    """Waits until something listens there; torch's own client keeps trying past its timeout."""
    while True:
        patience = min(1.0, max(deadline - time.monotonic(), 0.1))
        try:
            with socket.create_connection((address, port), patience) as probe:
                # Trying a port nobody listens on, a socket can get that very port and meet itself.
                if probe.getsockname() != probe.getpeername():
                    return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def start_world(
    launch: Launch, store: Any, incarnation: int, backend: str, startup_timeout: float
) -> None:
    """Starts torch.distributed on a store, with keys that no earlier start has used.

    Raises:
        PeerTimeoutError: the ranks could not connect within `startup_timeout` seconds.
        SpecError: nothing says which CUDA device is this rank's.
    """
    take_device(launch, backend)
    limit = c10d._get_default_timeout(c10d.Backend(backend))
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(f"world/{incarnation}", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=startup_timeout) if "gloo" in backend else limit,
        )
    except RuntimeError as error:
        raise as_peer_error("torch.distributed cannot be started", error) from error
    if "gloo" in backend:
        c10d._set_pg_timeout(limit)


def stop_world() -> None:
    """Ends torch.distributed if it is up."""
    if is_initialized():
        dist.destroy_process_group()


def as_peer_error(what: str, error: RuntimeError) -> CommGridError:
    """What torch's error while meeting peers means: that one did not come, or something else."""
    if isinstance(error, CommGridError):
        return error
    text = first_line(error)
    words = ("timeout", "timed out", "connect", "reset by peer", "closed by peer")
    if any(word in text.lower() for word in words):
        return PeerTimeoutError(f"{what}: a member did not answer in time ({text})")
    return CommGridError(f"{what}: {text}")


def is_peer_failure(error: BaseException) -> bool:
    """Whether a backend raised it, as it does where another rank is gone or does not answer."""
    if isinstance(error, CommGridError) or not isinstance(error, RuntimeError):
        return False
    said = first_line(error).lower()
    words = ("timeout", "timed out", "connect", "reset", "closed", "broken pipe", "remote")
    from_backend = "gloo" in said or "nccl" in said
    return isinstance(error, dist.DistError) or (from_backend and any(w in said for w in words))


def first_line(error: BaseException) -> str:
    """An error's message without what follows its first line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def check_backend(key: str, backend: str | None) -> None:
    """Raises SpecError where `backend` is none of this torch's (`gloo`, `cpu:gloo,cuda:nccl`)."""
    # MPI makes groups of all ranks only, and fake stands for a whole world or not at all.
    known = [name for name in c10d.Backend.backend_list if name not in ("undefined", "mpi", FAKE)]
    for pair in (backend or "gloo").split(","):
        name = pair.rpartition(":")[2].lower()
        if name not in known:
            raise SpecError(
                f"{key}={backend!r}: there is no backend {name!r} for a grid; expected one of "
                f"{', '.join(known)}, or as cpu:gloo,cuda:nccl{nearest(name, known)}"
            )
        if name == "nccl" and not dist.is_nccl_available():
            raise SpecError(f"{key}={backend!r}: this torch was built without NCCL; use gloo")
    devices = [pair.partition(":")[0] for pair in (backend or "").split(",") if ":" in pair]
    if len(set(devices)) < len(devices) or not set(devices) <= {"cpu", "cuda", "xpu"}:
        raise SpecError(f"{key}={backend!r}: expected each device once, as in cpu:gloo,cuda:nccl")
