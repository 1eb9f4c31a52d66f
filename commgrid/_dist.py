"""The one place that starts and stops torch.distributed and makes and destroys its groups.

torch's public `new_group` names a group by counters of the process and, where WORLD is
bound to a device, splits WORLD, which every rank has to take part in. A grid's groups
are created by their members alone, under names that the members agree on, so creation
goes through the function beneath it. Everything that is not public torch stands here.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import CommGridError, PeerTimeoutError, SpecError
from commgrid.groups import GroupOptions
from commgrid.launch import Launch
from commgrid.names import nearest

FAKE = "fake"
Transfer = tuple[torch.Tensor, int]
"""A tensor, and the group rank that it goes to or comes from."""
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
    """What commgrid starts torch.distributed with: gloo, and NCCL beside it where CUDA is."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


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
    """
    if torch.cuda.is_available() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
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


def create_group(
    name: str,
    description: str,
    ranks: Sequence[int],
    *,
    backend: str | None,
    options: GroupOptions,
    timeout: float | None,
    startup_timeout: float,
    backend_options: Any = None,
) -> dist.ProcessGroup:
    """A process group of `ranks`, created by them alone.

    Args:
        name: what the members meet under; used for no other group of this store.
        description: what torch's logs and flight recorder call it.
        ranks: global ranks, ascending, this process's among them.
        backend: None takes WORLD's.
        options: what the groups table says of it; its backend and timeout go first.
        timeout: seconds a collective may take; None takes torch's default.
        startup_timeout: seconds that meeting the others may take.
        backend_options: torch's own object instead of what `options` says of NCCL.

    Raises:
        SpecError: an NCCL option that this torch does not have.
    """
    world = c10d._get_default_group()
    members = list(ranks)
    chosen = world_backend()
    if chosen != FAKE:
        chosen = options.backend or backend or chosen
    parsed = c10d.Backend(chosen)
    seconds = timeout if options.timeout is None else options.timeout
    limit = c10d._get_default_timeout(parsed) if seconds is None else timedelta(seconds=seconds)
    kinds = set(c10d.BackendConfig(parsed).get_device_backend_map().values())
    # gloo connects while it is created; a member that never comes must not hold the others
    # for as long as a collective may take.
    meeting_limit = timedelta(seconds=startup_timeout) if "gloo" in kinds else limit
    if backend_options is None and "nccl" in kinds:
        backend_options = _nccl_options(options, meeting_limit)
    with _unbound(world):
        made, _ = c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            members,
            parsed,
            world_store(),
            c10d.GroupName(name),
            backend_options=backend_options,
            timeout=meeting_limit,
            group_desc=description,
        )
    group: dist.ProcessGroup = made
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(members)}
    if meeting_limit != limit:
        c10d._set_pg_timeout(limit, group)
    return group


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


def _nccl_options(options: GroupOptions, timeout: timedelta) -> Any:
    """torch's options for NCCL; None where nothing is asked of it."""
    if not options.nccl or not dist.is_nccl_available():
        return None
    made = dist.ProcessGroupNCCL.Options()
    made._timeout = timeout  # torch warns where this and its argument differ
    for key, value in options.nccl:
        target = made if key == "is_high_priority_stream" else made.config
        if not hasattr(target, key):
            raise SpecError(f"nccl.{key}: the NCCL of torch {torch.__version__} does not have it")
        setattr(target, key, value)
    return made


@contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """WORLD without its device: bound to one, torch makes a new group by splitting WORLD,
    which waits for ranks that are not in the group and connects at once."""
    device = world.bound_device_id
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroys a group if torch still knows it (whoever ended WORLD has destroyed it too)."""
    if is_initialized() and group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group."""
    return is_initialized() and group in c10d._world.pg_map


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend a group was made with, as a string."""
    backend: str = c10d._world.pg_map[group][0]
    return str(backend)


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """A device of this process for each backend of the group: where its tensors may live."""
    found: dict[str, torch.device] = {}
    for pair in c10d._world.pg_backend_config[group].split(","):
        kind, _, backend = pair.partition(":")
        if kind == "cpu":
            found[backend] = torch.device("cpu")
        elif kind == "cuda" and torch.cuda.is_available():
            found.setdefault(backend, torch.device("cuda", torch.cuda.current_device()))
    return list(found.values())


def is_connected(group: dist.ProcessGroup) -> bool:
    """Whether the members' network connections exist already."""
    if group.size() == 1 or backend_of(group) == FAKE:
        return False
    for device in devices_of(group):
        backend = group._get_backend(device)
        connected = getattr(backend, "_is_initialized", None)
        if connected is not None and not connected():
            return False
    return True


def gather_ranks(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[dist.Work, list[torch.Tensor]]:
    """Starts the exchange of the members' global ranks over a group."""
    mine = torch.tensor([dist.get_rank()], dtype=torch.int64, device=device)
    heard = [torch.full_like(mine, -1) for _ in range(group.size())]
    work = dist.all_gather(heard, mine, group=group, async_op=True)
    assert work is not None  # only non-members get None
    return work, heard


def abort_all(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroys groups whose members may have failed, without waiting for any of them.

    Members that wait for this rank get an error, also where something, such as the traceback of
    the failure, still holds the group.
    """
    for group in reversed(list(groups)):
        if not is_alive(group):
            continue
        for kind in {device.type for device in devices_of(group)} if group.size() > 1 else ():
            with suppress(RuntimeError):
                if kind == "cuda":
                    group.abort()  # what NCCL has under way would be waited for
                else:
                    _break_connections(group)
        with suppress(RuntimeError):
            destroy_group(group)


def _break_connections(group: dist.ProcessGroup) -> None:
    """Closes a gloo group's connections: gloo does so itself when a receive is not met in time."""
    work = group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), 0x7E57)
    assert work is not None
    work.wait(timedelta(milliseconds=1))


def start_transfers(
    group: dist.ProcessGroup, sends: Sequence[Transfer], recvs: Sequence[Transfer]
) -> list[dist.Work]:
    """Starts sends and receives of tensors, each with the group rank it goes to or comes from.

    Returns:
        A handle for each, sends first, or where the backend batches them one for all.
    """
    if not sends and not recvs:
        return []
    device = (*sends, *recvs)[0][0].device
    if not group._get_backend(device).supports_coalescing:
        # What torch's batch does then, without its checks of every operation.
        return [
            *(group.send([tensor], peer, 0) for tensor, peer in sends),
            *(group.recv([tensor], peer, 0) for tensor, peer in recvs),
        ]
    return dist.batch_isend_irecv(
        [
            dist.P2POp(operation, tensor, group=group, group_peer=peer)
            for operation, transfers in ((dist.isend, sends), (dist.irecv, recvs))
            for tensor, peer in transfers
        ]
    )


def group_count() -> int:
    """How many process groups this process has, WORLD among them."""
    return len(c10d._world.pg_map)


def destroy_all(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroys groups in reverse order of creation, every one even if one of them fails."""
    failed: list[Exception] = []
    for group in reversed(list(groups)):
        try:
            destroy_group(group)
        except RuntimeError as error:
            failed.append(error)
    if failed:
        raise failed[0]
