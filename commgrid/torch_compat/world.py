"""Starting and stopping torch.distributed, the store its ranks meet at, and what its errors mean.

`tests/torch_compat/VERSIONS.md` lists the names that are private to torch, and says what to do when
one is removed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from importlib.metadata import entry_points
from typing import Any, ClassVar
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.planning.group_row import GroupOptions
from commgrid.store.client import served
from commgrid.store.hosts import address_towards, outward_address
from commgrid.store.launch import Launch
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat.peer_errors import as_peer_error
from commgrid.version import VERSION

FAKE = "fake"
_bindings: Any = _distributed_c10d


def is_initialized() -> bool:
    """Whether torch.distributed is up."""
    return dist.is_available() and bool(dist.is_initialized())


class _World:
    """The present world: its process group and its name, and how many there were of each size."""

    group: ref[Any] | None = None
    name = ""
    numbers: ClassVar[dict[int, int]] = {}


def world_key() -> str:
    """Name of the present world, the same on all ranks, which no other world of theirs has.

    commgrid's name for a world that it has started; else its size, and how many of that size this
    process has had so far. While calls are recorded each new one is counted (`interposer`).
    """
    world = c10d.GroupMember.WORLD
    if world is not None and (_World.group is None or _World.group() is not world):
        size, numbers = world.size(), _World.numbers
        numbers[size] = numbers.get(size, 0) + 1
        _World.group, _World.name = ref(world), f"{size}.{numbers[size]}"
    return _World.name


def seeing(update: Callable[..., None]) -> Callable[..., None]:
    """Return torch's function that takes up another world, which then is seen."""

    @wraps(update)
    def update_default_pg(group: Any) -> None:
        update(group)
        world_key()

    return update_default_pg


def world_rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def world_backend() -> str:
    """Return the name of WORLD's backend, such as `gloo`, `cpu:gloo,cuda:nccl` or `fake`."""
    world = c10d._get_default_group()
    backend: str = c10d._world.pg_map[world][0]
    if backend == c10d.Backend.UNDEFINED:  # none was given: what torch chose, a device each
        backend = c10d._world.pg_backend_config[world]
    return backend


def world_kinds() -> tuple[str, ...]:
    """Return WORLD's backend for each device, NCCL's with its version: `cpu:gloo`."""
    kinds = c10d.BackendConfig(c10d.Backend(world_backend())).get_device_backend_map()
    nccl = versions().get("nccl", "")
    return tuple(f"{on}:{kind}{f' {nccl}' * (kind == 'nccl')}" for on, kind in kinds.items())


def common_backend(kinds: Sequence[str], others: Sequence[str]) -> str:
    """Return the backend that two worlds have in common, from their `world_kinds`; "": none.

    >>> common_backend(["cpu:gloo", "cuda:nccl 2.27.3"], ["cpu:gloo", "cuda:gloo"])
    'cpu:gloo'
    """
    return ",".join(kind.partition(" ")[0] for kind in kinds if kind in others)


def world_store() -> Any:
    """The store that WORLD met at."""
    return c10d._get_default_store()


def flight_records() -> dict[str, Any]:
    """Return the last calls of all backends, as torch's flight recorders dump them.

    torch names the ranks of NCCL's groups only; here all living groups have theirs, and the number
    of calls that each of their backends has counted.
    """
    held: dict[str, Any] = pickle.loads(_bindings._dump_fr_trace(True, True, False))
    entries, groups = held.get("entries", []), held["pg_config"]
    if hasattr(_bindings, "_dump_nccl_trace"):
        held = pickle.loads(_bindings._dump_nccl_trace(True, True, False))
        entries = sorted(
            [*entries, *held.get("entries", [])], key=lambda each: each["time_created_ns"]
        )
    joint = {name for group, name in list(c10d._world.pg_names.items()) if is_joint(group)}
    entries = [each for each in entries if each.get("process_group", ("",))[0] not in joint]
    for group, name in list(c10d._world.pg_names.items()):
        if name in joint:
            continue
        ranks = str(dist.get_process_group_ranks(group))
        groups[name] = {
            "name": name, "desc": group.group_desc, "ranks": ranks, "issued": _issued(group),
        }  # fmt: skip
    return {**held, "entries": entries, "pg_config": {**held.get("pg_config", {}), **groups}}


def _issued(group: dist.ProcessGroup) -> dict[str, int]:
    """Number of calls on a group, by backend, as far as backends count them."""
    found = {}
    for device in group._device_types:
        with suppress(RuntimeError):  # it was destroyed meanwhile, or does not count
            backend: Any = group._get_backend(device)
            found[backend.name()] = backend._get_sequence_number_for_group()
    return found


@dataclass(frozen=True)
class Numbering:
    """The numbers of processes that make something together, as one of them has them.

    Args:
        rank: this process's: within one world its global rank.
        store: that all of them reach.
        is_joint: whether they are of two worlds, numbered together. A number is then no global
            rank, and no other number or counter of either world is used.
    """

    rank: int
    store: Any
    is_joint: bool = False


def world_numbering() -> Numbering:
    """The numbers of this world."""
    return Numbering(world_rank(), world_store())


def joint_numbering(rank: int, store: Any, prefix: str) -> Numbering:
    """The numbers of two worlds, whose keys at their store begin with a prefix."""
    return Numbering(rank, PrefixStore(prefix, store), is_joint=True)


def is_store(value: object) -> bool:
    """Whether a value is a store of torch's."""
    return isinstance(value, Store)


_JOINT: WeakSet[Any] = WeakSet()


def set_numbering(group: dist.ProcessGroup, numbering: Numbering) -> None:
    """Note whose numbers a group has; torch finds a group of two worlds not by its ranks."""
    if numbering.is_joint:
        _JOINT.add(group)
        by_ranks = c10d._world.tags_to_pg.get("", [])
        by_ranks[:] = [each for each in by_ranks if each is not group]


def is_joint(group: dist.ProcessGroup) -> bool:
    """Whether a group's ranks are of two worlds, so that what torch says of them is no global rank.

    Records and checks of calls, which name ranks of one world, leave such a group out.
    """
    return bool(_JOINT) and group in _JOINT


def own_address(store: Any) -> str:
    """Return this host's address for other hosts: the one from which it reaches a store."""
    store = served(store)
    found = address_towards(store.host, store.port) if hasattr(store, "host") else None
    return outward_address() if found is None else found


def group_timeout(limit: float | None) -> float:
    """Return the seconds that collectives of a grid may take.

    Args:
        limit: the grid's `timeout`; None: torch's default for WORLD's backend.
    """
    if limit is not None:
        return limit
    backend = world_backend()
    kind = "nccl" if "nccl" in backend else backend.partition(",")[0].rpartition(":")[2]
    return float(c10d._get_default_timeout(c10d.Backend(kind)).total_seconds())


def default_backend() -> str:
    """Return the backend with which commgrid starts torch.distributed: NCCL with CUDA, else gloo.

    Gloo beside NCCL would connect every rank with every other rank.
    """
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def take_device(launch: Launch, backend: str) -> None:
    """Make the CUDA device with this rank's local rank the current one.

    A current device other than 0 was chosen by the program, and stays. Device 0 is also current
    after any first use of CUDA, so a launcher's number replaces it.

    Raises:
        SpecError: NCCL among several ranks and devices, and nothing says which is this one's.
    """
    if not torch.cuda.is_available():
        return
    touched, count = torch.cuda.is_initialized(), torch.cuda.device_count()  # type: ignore[no-untyped-call]
    if touched and torch.cuda.current_device() != 0:
        return
    if launch.local_rank is not None:
        torch.cuda.set_device(launch.local_rank % count)
    elif not touched and count > 1 and launch.world_size > 1 and "nccl" in backend:
        raise SpecError(
            f"rank {launch.rank} sees {count} CUDA devices, and neither LOCAL_RANK nor "
            "SLURM_LOCALID says which is its own; start with torchrun or srun, set LOCAL_RANK, or "
            "call torch.cuda.set_device before commgrid.initialize"
        )


def versions() -> dict[str, str]:
    """Return the versions that all ranks must share: of commgrid, torch, and NCCL with CUDA."""
    found = {"commgrid": VERSION, "torch": str(torch.__version__)}
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def start_world(
    launch: Launch,
    store: Any,
    incarnation: str,
    backend: str,
    startup_timeout: float,
    watched: bool = False,
) -> None:
    """Start torch.distributed on a store, with keys that no earlier start has used.

    Args:
        launch: this process's place.
        store: of all ranks.
        incarnation: prefix of the keys.
        backend: of WORLD.
        startup_timeout: seconds in which the ranks must connect.
        watched: whether grids are watched, so that survivors of a timeout live on.

    Raises:
        PeerTimeoutError: the ranks could not connect within `startup_timeout` seconds.
        SpecError: nothing says which CUDA device is this rank's.
    """
    take_device(launch, backend)
    limit = c10d._get_default_timeout(c10d.Backend(backend))
    patience = timedelta(seconds=startup_timeout) if "gloo" in backend else limit
    kinds = set(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().values())
    lives_on = torch_nccl.dumps_nothing() if watched else nullcontext()
    try:
        with lives_on:
            dist.init_process_group(
                backend,
                store=PrefixStore(f"world/{incarnation}", store),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=patience,
                device_id=torch_nccl.device_for(kinds),
                pg_options=torch_nccl.make_options(GroupOptions(), kinds, patience),
            )
    except RuntimeError as error:
        raise as_peer_error("torch.distributed cannot be started", error) from error
    world_key()
    _World.name = incarnation
    if "gloo" in backend:
        set_timeout(c10d._get_default_group(), limit)


def start_fake_world(rank: int, world_size: int) -> None:
    """Make this process one rank of a world without other processes, in which nothing is sent.

    `init_process_group` does nothing from then on, so that a program can call it.

    Args:
        rank, world_size: what torch.distributed says from now on.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(FAKE, store=FakeStore(), rank=rank, world_size=world_size)
    everywhere: Any = dist
    everywhere.init_process_group = lambda *_, **__: None


def set_timeout(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Set the time limit of a group's collectives, on each of its backends."""
    if hasattr(dist, "set_timeout"):  # torch 2.14
        dist.set_timeout(limit, group)
        return
    # The one before leaves out what is in torch's wrapper for debugging, and warns.
    for device in group._device_types:
        backend = unwrapped(group._get_backend(device))
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(limit)


def unwrapped(backend: Any) -> Any:
    """Return the backend within torch's wrapper for debugging."""
    return getattr(backend, "wrapped_pg", backend)


def stop_world() -> None:
    """End torch.distributed if it is started."""
    if is_initialized():
        dist.destroy_process_group()


def check_backend(key: str, backend: str | None) -> None:
    """Raise SpecError if this torch has no such `backend` (`gloo`, `cpu:gloo,cuda:nccl`)."""
    # MPI makes groups of all ranks only, and fake stands for a whole world or not at all.
    never = ("undefined", "mpi", FAKE)
    for pair in (backend or "gloo").split(","):
        kind = pair.rpartition(":")[2].lower()
        torch_nccl.check_device(key, backend or "gloo", kind)
        if kind in never or not _is_available(kind):
            known = [name for name in _backend_names() if name not in never]
            raise SpecError(
                f"{key}={backend!r}: there is no backend {kind!r} for a grid; expected one of "
                f"{', '.join(known)}, or as cpu:gloo,cuda:nccl{nearest(kind, known)}"
            )
    devices = [pair.partition(":")[0] for pair in (backend or "").split(",") if ":" in pair]
    if len(set(devices)) < len(devices) or not set(devices) <= {"cpu", "cuda", "xpu"}:
        raise SpecError(f"{key}={backend!r}: expected each device once, as in cpu:gloo,cuda:nccl")


def _is_available(kind: str) -> bool:
    """Return whether torch has a backend, or a package that registers it on demand."""
    if not kind.replace("-", "_").isidentifier():
        return False
    try:
        return bool(dist.is_backend_available(kind))
    except (RuntimeError, TypeError):  # such a package, but it does not load
        return False


def _backend_names() -> list[str]:
    """Return the names of torch's backends, with those that it registers on demand (2.14)."""
    asked = {entry.name.lower() for entry in entry_points(group="torch.distributed.backends")}
    return sorted({*c10d.Backend.backend_list, *asked})
