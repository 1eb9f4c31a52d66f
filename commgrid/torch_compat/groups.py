"""Making and destroying process groups.

torch's public `new_group` names a group by counters of the process and, where WORLD is
bound to a device, splits WORLD, which every rank has to take part in. A grid's groups
are created by their members alone, under names that the members agree on, so creation
goes through the function beneath it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, partial
from itertools import count
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import CommGridError, PeerTimeoutError
from commgrid.layout.ranks import RankSet
from commgrid.planning.group_row import GroupOptions
from commgrid.rendezvous.op import Drop, StoreLostError, single
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.driver import StoreDriver
from commgrid.store.gate import Gate, Hearing
from commgrid.torch_compat import gloo as torch_gloo
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat.bounded_calls import bounded
from commgrid.torch_compat.world import (
    FAKE,
    Numbering,
    is_initialized,
    set_numbering,
    set_timeout,
    unwrapped,
    world_backend,
    world_numbering,
)

T = TypeVar("T")
# torch's own; `suspend` puts a function in its place that raises for suspended groups.
_TORCHS_GET_BACKEND = dist.ProcessGroup._get_backend
# torch keeps what it makes groups from in module state, and threads may start grids at once.
_CREATING = threading.RLock()
_GATES: WeakKeyDictionary[dist.ProcessGroup, Gate] = WeakKeyDictionary()


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
    connect: bool = False,
    prefix: str = "",
    hearing: Hearing | None = None,
    numbering: Numbering | None = None,
) -> dist.ProcessGroup:
    """A process group of `ranks`, created by them alone; waits for none of them.

    Args:
        name: what the members meet under; used for no other group of this store.
        description: what torch's logs and flight recorder call it.
        ranks: in the group's order, this process's among them.
        backend: None takes WORLD's.
        options: what the groups table says of it; its backend and timeout go first.
        timeout: seconds a collective may take; None takes torch's default.
        startup_timeout: seconds that meeting the others may take, where torch does not let a
            backend connect later.
        backend_options: torch's own object, which replaces the NCCL options of `options`.
        connect: whether the caller connects it at once, by an exchange of all pairs of ranks.
        prefix: what its keys in the store begin with; a name that was used before needs one.
        hearing: callbacks of its gate to the failure detector (`commgrid.store.gate`).
        numbering: of its ranks; None: they are global ones.

    Raises:
        SpecError: an NCCL option that this torch does not have.
        CommGridError: a backend that makes no group of some ranks.
    """
    world = c10d._get_default_group()
    numbering = numbering or world_numbering()
    members = list(ranks)
    place = members.index(numbering.rank)
    chosen = world_backend()
    if chosen != FAKE:
        chosen = options.backend or backend or chosen
    parsed, config, kinds = _parsed(chosen)
    limit = _limit(parsed, options, timeout)
    lazy = "gloo" in kinds and torch_gloo.can_be_lazy()
    # Otherwise gloo connects while it is created; a member that never comes must not hold the
    # others for as long as a collective may take.
    waits = "gloo" in kinds and not lazy
    meeting_limit = timedelta(seconds=startup_timeout) if waits else limit
    on_nccl = bool(kinds & {*torch_nccl.NAMES})
    if on_nccl and backend_options is None:
        backend_options = torch_nccl.make_options(options, kinds, meeting_limit)
    torchs = torch_gloo.beside(config) if lazy else parsed  # what its function for groups makes
    # WORLD's, before that is taken away.
    device = None if torchs is None else torch_nccl.device_for(kinds)
    store: Any = PrefixStore(prefix, numbering.store) if prefix else numbering.store
    gate = None
    if on_nccl and len(members) > 1:
        gate = Gate(
            store, name, description, numbering.rank, members, limit.total_seconds(),
            startup_timeout if connect else None, hearing,
        )  # fmt: skip
    # Where creation waits for others, two threads must not wait for each other as well.
    with nullcontext() if waits else _CREATING, _unbound(world):
        gloo = None
        if lazy:
            gloo = torch_gloo.make_backend(name, members, place, store, config, limit, connect)
        if torchs is None:
            made: object = torch_gloo.empty_group(name, len(members), place, store)
        else:
            made, _ = c10d._new_process_group_helper(
                len(members),
                place,
                # It looks for this process's global rank among them.
                [*members[:place], world.rank(), *members[place + 1 :]],
                torchs,
                gate or store,
                c10d.GroupName(name),
                backend_options=backend_options,
                timeout=meeting_limit,
                device_id=device,
                group_desc=description,
            )
        if not isinstance(made, dist.ProcessGroup):  # its NON_GROUP_MEMBER
            raise CommGridError(f"{description}: torch's backend {chosen!r} made no group")
        group: dist.ProcessGroup = made
        if gloo is not None:
            torch_gloo.add(group, gloo, description, parsed, config)
        if gate is not None:
            _pass(group, gate, PrefixStore(f"{name}/", store))
        c10d._world.pg_group_ranks[group] = _places(ranks)
        set_numbering(group, numbering)
        if waits or lazy:
            set_timeout(group, limit)
    return group


def _pass(group: dist.ProcessGroup, gate: Gate, store: PrefixStore) -> None:
    """Keep a group's gate. What Python reads at its store, as gloo's addresses, is for no gate."""
    _GATES[group] = gate
    c10d._world.pg_map[group] = c10d._world.pg_map[group][0], store


def _places(ranks: Sequence[int]) -> Any:
    """Global ranks to group ranks, as torch looks them up."""
    return _Places(ranks) if isinstance(ranks, RankSet) else dict(zip(ranks, count(), strict=False))


class _Places(Mapping[int, int]):
    """`_places` of ranks that are no list: a dict of many takes long to make."""

    def __init__(self, ranks: RankSet) -> None:
        self._ranks = ranks

    def __getitem__(self, rank: int) -> int:
        if rank not in self._ranks:
            raise KeyError(rank)
        return self._ranks.index(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def items(self) -> ItemsView[int, int]:
        """Global ranks with group ranks, without a search for each."""
        return dict(zip(self._ranks, count(), strict=False)).items()


@cache
def _parsed(backend: str) -> tuple[c10d.Backend, c10d.BackendConfig, frozenset[str]]:
    """Parse a backend's name; return torch's values for it and its kinds, such as `gloo`."""
    parsed = c10d.Backend(backend)
    config = c10d.BackendConfig(parsed)
    return parsed, config, frozenset(config.get_device_backend_map().values())


def end_gate(group: dist.ProcessGroup, text: str, late: bool) -> None:
    """End all waits at a group's gate after a failure, which `text` describes."""
    if gate := _GATES.get(group):
        gate.end(text, late)


def is_connecting(group: dist.ProcessGroup) -> bool:
    """Whether a thread is within NCCL's connecting of a group, which nothing can stop."""
    gate = _GATES.get(group)
    begun = gate is not None and gate.has_begun
    return begun and torch_nccl.is_called_on(group) and is_connected(group) is False


def _limit(backend: c10d.Backend, options: GroupOptions, timeout: float | None) -> timedelta:
    """How long a collective of a group may take."""
    seconds = timeout if options.timeout is None else options.timeout
    default: timedelta = c10d._get_default_timeout(backend)
    return default if seconds is None else timedelta(seconds=seconds)


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
    """Destroy a group if torch still knows it; it ends with WORLD as well."""
    destroy_all([group])


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks of a group; on NCCL on this rank's device, which torch would guess.

    Args:
        group: None: WORLD.
    """
    on_nccl = "nccl" in dist.get_backend(group)
    dist.barrier(group, device_ids=[torch_nccl.rank_device().index] if on_nccl else None)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group."""
    return is_initialized() and group in c10d._world.pg_map


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend a group was made with, as a string."""
    backend: str = c10d._world.pg_map[group][0]
    return str(backend)


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """A device of this process for each backend of the group: where its tensors may live."""
    config = c10d._world.pg_backend_config.get(group)
    if config is None:  # the grid has suspended it and made another; a program may keep this one
        config = ",".join(f"{kind.type}:{group.name()}" for kind in group._device_types)
    found: dict[str, torch.device] = {}
    for pair in config.split(","):
        kind, _, backend = pair.partition(":")
        if kind == "cpu":
            found[backend] = torch.device("cpu")
        elif kind == "cuda" and torch.cuda.is_available():
            found.setdefault(backend, torch_nccl.rank_device())
    return list(found.values())


def host_device(group: dist.ProcessGroup) -> torch.device:
    """A device of the group's for what the host has, the CPU if possible."""
    return min(devices_of(group), key=lambda device: device.type != "cpu")


def is_connected(group: dist.ProcessGroup) -> bool | None:
    """Whether the members' network connections exist already; None: torch does not tell."""
    if group.size() == 1 or backend_of(group) == FAKE:
        return False
    told = {torch_nccl.is_connected(backend_on(group, each)) for each in devices_of(group)}
    return False if False in told else None if None in told else True


def connects_by_pairs(group: dist.ProcessGroup) -> bool:
    """Whether gloo is in it and connects two ranks when they first talk, where commgrid made it."""
    return "gloo" in backend_of(group) and torch_gloo.can_be_lazy()


def addresses(groups: Iterable[dist.ProcessGroup]) -> list[tuple[Any, str]]:
    """The keys that this rank has left at the store, which destroying alone would delete."""
    found: list[tuple[Any, str]] = []
    for group in groups:
        if is_alive(group):
            with suppress(RuntimeError):  # a suspended group has none
                store = c10d._world.pg_map[group][1]
                found += [(store, key) for key in torch_gloo.addresses(group)]
    return found


def forget_addresses(keys: Iterable[tuple[Any, str]]) -> None:
    """Delete addresses from their stores; a store that has gone keeps none."""
    with suppress(StoreLostError):
        for store, key in keys:
            StoreDriver(store, 1, lambda: timeouts().leave).run(single(Drop((key,))))


def runs_on_gloo(group: dist.ProcessGroup) -> bool:
    """Whether torch knows the group, and it has no NCCL backend beside gloo's."""
    kinds, _ = c10d._world.pg_map.get(group, ("", None))
    return "gloo" in kinds and "nccl" not in kinds


def nccl_kinds(backend: str | None) -> frozenset[str]:
    """Return the NCCL backends that a group would have, by torch's names; None, "": WORLD's."""
    chosen = backend or world_backend()
    return frozenset() if chosen == FAKE else _parsed(chosen)[2] & {*torch_nccl.NAMES}


class CalledGroup:
    """Base of objects with a group: torch's account of the calls on it."""

    group: dist.ProcessGroup

    def error(self) -> str:
        """The error that a backend has found by itself: `timeout`, `connection` or empty."""
        for backend in nccl_backends(self.group):
            if error := torch_nccl.error_of(backend):
                return error
        return ""

    def calls(self) -> int:
        """How many collectives NCCL has been given on it; 0 where it does not run on NCCL."""
        return sum(each._get_sequence_number_for_group() for each in nccl_backends(self.group))

    def held(self) -> int:
        """The number of a collective that holds a thread, and that no device has; 0: none."""
        backends = nccl_backends(self.group)
        return max((torch_nccl.held_call(each, self.group) for each in backends), default=0)

    def waits(self) -> bool | None:
        """Whether a call of this rank on NCCL has not ended; None where torch has no record."""
        gate = _GATES.get(self.group)
        if gate is not None and gate.waits:
            return True
        found = {torch_nccl.has_call_under_way(each) for each in nccl_backends(self.group)}
        return True if True in found else None if None in found else False


def nccl_backends(group: dist.ProcessGroup) -> list[Any]:
    """Return the NCCL backends of a group of several ranks; of a suspended one, none."""
    if not is_alive(group) or "nccl" not in backend_of(group) or group.size() == 1:
        return []
    if type(group) is not dist.ProcessGroup:
        return []  # a stand-in
    return [backend_on(group, device) for device in devices_of(group) if device.type == "cuda"]


def backend_on(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a group's own backend for a device, also while the group is suspended."""
    return unwrapped(_TORCHS_GET_BACKEND(group, device))


def freed_by(free: Callable[[dist.ProcessGroup], T], group: dist.ProcessGroup) -> T:
    """Return what a call returns that frees a communicator, for which NCCL may wait for ever.

    Raises:
        CommGridError: it has not returned after `Timeouts.abort` seconds.
    """
    if not nccl_backends(group):
        return free(group)
    names, limit = group.group_desc, timeouts().abort
    return bounded(
        limit,
        partial(free, group),
        lambda: f"freeing {names}",
        lambda: CommGridError(
            f"communicator {names} has not ended within {limit:.3g} s: NCCL waits for the CUDA "
            "graphs in which its calls were captured, and for calls that other ranks do not make; "
            f"free the graphs that captured calls on {names} first (del graph)"
        ),
    )


def connected_by(
    connect: Callable[[], T],
    groups: Sequence[dist.ProcessGroup],
    seconds: float,
    about: Callable[[], str],
    lost: Callable[[], str | None],
) -> T:
    """Return what a call returns that is the first one on groups.

    Args:
        connect: the call.
        groups: that it connects.
        seconds: to wait.
        about: names the group that is being connected.
        lost: returns the failure if another rank is known to be gone.

    Raises:
        PeerTimeoutError: NCCL has not connected them in time; all members have come, since a gate
            names absent ones before.
        PeerFailedError: another rank is gone.
    """
    if not any(nccl_backends(each) for each in groups):
        return connect()
    return bounded(
        seconds + timeouts().moment,
        connect,
        lambda: f"connecting {about()}",
        lambda: PeerTimeoutError(
            f"all ranks have come, and NCCL did not connect {about()} within {seconds:.3g} s; see "
            "NCCL_SOCKET_IFNAME for the network that it takes, and NCCL_DEBUG=INFO for what it does"
        ),
        lost,
    )


def destroy_all(groups: Iterable[dist.ProcessGroup], at_exit: bool = False) -> None:
    """Destroy groups in reverse order of creation, every one even if one of them fails.

    A call under way may still connect to a peer by the peer's address. A group without another
    reference ends with its calls, and only then are this rank's addresses deleted from the store.

    Args:
        groups: of this process.
        at_exit: whether the process ends. Its addresses then stay at the store: a connection to
            one of them is refused at once, but gloo waits for a missing one, and holds up all other
            calls of its process's connection to the store.
    """
    left = list(groups)
    del groups  # so that `left` alone holds them
    failed: list[Exception] = []
    kept: list[tuple[Any, str]] = []
    while left:
        group = left.pop()
        try:
            if is_alive(group):
                kept += addresses([group])
                freed_by(dist.destroy_process_group, group)
                if (gate := _GATES.get(group)) and not at_exit:
                    gate.close()
        except (RuntimeError, ValueError, CommGridError) as error:
            failed.append(error)  # another thread may destroy it as well
        del group  # waits for its calls
    if not at_exit:
        forget_addresses(kept)
    if failed:
        raise failed[0]
