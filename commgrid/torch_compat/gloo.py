"""gloo groups that connect two ranks when they first talk.

torch makes a gloo group by connecting all pairs of its ranks. Here a group gets a device of its own
that connects lazily: each rank writes one key to the store, its address, reads none, and does not
wait. torch's function for new groups takes no options for gloo, so the group is put together here,
with torch's own gloo backend; other backends of the group are torch's to make.

Of a pair of ranks one connects and the other waits for it, up to five times the seconds gloo knows
when it is made (gloo's `Pair::waitUntil`); those seconds are also what a send or receive may take.
Of a group that is connected at once the first cannot happen, and it gets the whole timeout; of
others a fifth, so that a rank that died before it ever talked is an error within the timeout.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, _register_process_group
from torch.distributed import distributed_c10d as c10d

CONNECTING = 5
"""How many times its timeout gloo waits for a rank that should connect."""

_NEVER_SENT = 0x7E57  # a tag
_Gloo: Any = getattr(c10d, "ProcessGroupGloo", None)  # torch's types leave out what is private


def can_be_lazy() -> bool:
    """Whether gloo groups connect at first use; torch's wrapper for debugging connects all."""
    return bool(dist.is_gloo_available() and c10d.get_debug_level() != c10d.DebugLevel.DETAIL)


@cache
def beside(config: c10d.BackendConfig) -> c10d.Backend | None:
    """Return the backends of a group that are not gloo, for torch to make; None: gloo alone."""
    kinds = config.get_device_backend_map().items()
    rest = ",".join(f"{on}:{kind}" for on, kind in kinds if kind != "gloo")
    return c10d.Backend(rest) if rest else None


def make_backend(
    name: str,
    ranks: list[int],
    place: int,
    store: Any,
    config: c10d.BackendConfig,
    timeout: timedelta,
    connect: bool,
) -> Any:
    """A gloo backend of a group whose pairs of ranks connect when they first talk.

    Args:
        name: of the group.
        ranks: in the group's order.
        place: this process's among them.
        store: where they meet.
        config: the backends, gloo among them.
        timeout: how long a collective of the group may take.
        connect: whether the caller is going to connect it at once.
    """
    options, alone = _Gloo._Options(), len(ranks) == 1
    options._devices = _world_devices() if alone else []
    options._devices = options._devices or _lazy_devices()
    # One thread runs the collectives one after the other; two of a group rarely overlap.
    options._threads = (2 if connect else 1) * len(options._devices)
    options._timeout = timeout if connect or alone else timeout / CONNECTING
    options.global_ranks_in_group, options.group_name = ranks, name
    if alone:
        return _Gloo(HashStore(), 0, 1, options)
    kinds = config.get_device_backend_map().items()
    device = next(on for on, kind in kinds if kind == "gloo")
    kept = PrefixStore(f"{device}/", PrefixStore(f"{name}/", store))
    return _Gloo(kept, place, len(ranks), options)


def empty_group(name: str, size: int, place: int, store: Any) -> dist.ProcessGroup:
    """A group without a backend, registered in torch's tables like any other.

    Args:
        size: number of its ranks.
        name, place, store: as for `make_backend`.
    """
    kept, known, world = PrefixStore(f"{name}/", store), c10d.GroupName(name), c10d._world
    group = dist.ProcessGroup(kept, place, size)
    group._set_group_name(known)
    _register_process_group(known, group)
    world.pg_map[group] = (c10d.Backend(c10d.Backend.UNDEFINED), kept)
    world.pg_names[group] = known
    world.pg_to_tag[group] = f"ptd:{name}"
    for tag in ("", world.pg_to_tag[group]):
        world.tags_to_pg.setdefault(tag, []).append(group)
    return group


def add(
    group: dist.ProcessGroup,
    backend: Any,
    description: str,
    chosen: c10d.Backend,
    config: c10d.BackendConfig,
) -> None:
    """Give a group its gloo backend, on all devices that `config` names gloo for.

    Args:
        group, backend: of one name.
        description: what torch's logs and flight recorder call it.
        chosen, config: all backends of the group.
    """
    gloo = dist.ProcessGroup.BackendType.GLOO
    kinds = config.get_device_backend_map()
    for device, kind in kinds.items():
        if kind == "gloo":
            group._register_backend(torch.device(device), gloo, backend)
    if "nccl" not in kinds.values():
        group._set_default_backend(gloo)
    group._set_group_name(c10d.GroupName(group.group_name))  # passed on to backends that are there
    group._set_group_desc(description)
    c10d._world.pg_map[group] = (chosen, c10d._world.pg_map[group][1])
    c10d._world.pg_backend_config[group] = str(config)


def addresses(group: dist.ProcessGroup, of: int | None = None) -> list[str]:
    """Return the keys that a rank has written to a group's store.

    Args:
        of: its rank in the group; None: this rank's.
    """
    rank = group.rank() if of is None else of
    for pair in c10d._world.pg_backend_config[group].split(","):
        on, _, kind = pair.partition(":")
        if kind == "gloo" and group.size() > 1:
            backend: Any = group._get_backend(torch.device(on))
            devices = len(backend.options._devices) if isinstance(backend, _Gloo) else 0
            return [f"{on}//{number}/{rank}" for number in range(devices)]
    return []  # torch makes one for all its devices


def break_connections(group: dist.ProcessGroup) -> None:
    """Closes a connected group's connections: gloo does so where a receive is not met in time.

    From a rank whose connection is closed already a receive fails otherwise, and closes nothing.
    The backend itself receives, so that no record takes these for the program's messages.
    """
    gloo: Any = group._get_backend(torch.device("cpu"))
    for step in range(1, group.size()):
        try:
            work = gloo.recv([torch.empty(1)], (group.rank() + step) % group.size(), _NEVER_SENT)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return


def _lazy_devices() -> list[Any]:
    """Devices as torch makes them for a gloo group, but lazy.

    Groups that talk need one each: a lazy device finds a connection's group by nothing but ranks.
    To make them when a group is first used would have others wait for this rank's address at the
    store, where gloo's wait delays all other calls of its process.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:
        return [_Gloo.create_device(interface=name, lazy_init=True) for name in names.split(",")]
    own = _own_address()
    if own:
        return [_Gloo.create_device(hostname=own, lazy_init=True)]
    return [_Gloo.create_default_device(lazy_init=True)]


@cache
def _own_address() -> str:
    """The first address of this host's name that is its own, as torch finds it; "": there is none.

    torch looks the name up twice for each device, at a name server where no file has it.
    """
    name = os.fsencode(socket.gethostname())  # for text Python loads its codec of domain names
    with suppress(OSError):
        for kind, *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(kind) as probe:
                probe.bind(where)
                return str(where[0])
    return ""


def _world_devices() -> list[Any]:
    """WORLD's gloo devices, which a group that never connects can share; [] where it has none."""
    world = c10d._get_default_group()
    if torch.device("cpu") not in world._device_types:
        return []
    backend: Any = world._get_backend(torch.device("cpu"))
    return list(backend.options._devices) if isinstance(backend, _Gloo) else []
