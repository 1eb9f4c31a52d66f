"""Making and destroying process groups.

torch's public `new_group` names a group by counters of the process and, where WORLD is
bound to a device, splits WORLD, which every rank has to take part in. A grid's groups
are created by their members alone, under names that the members agree on, so creation
goes through the function beneath it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _unregister_process_group
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import CommGridError
from commgrid.planning.groups import GroupOptions
from commgrid.rendezvous.addresses import remove
from commgrid.rendezvous.op import StoreLostError
from commgrid.rendezvous.timeouts import timeouts
from commgrid.runtime import torch_gloo, torch_nccl
from commgrid.runtime.patient import Asked, PatientStore
from commgrid.runtime.torch_all_to_all import fill_in_sizes
from commgrid.runtime.torch_store import StoreDriver
from commgrid.runtime.torch_world import (
    FAKE,
    is_initialized,
    set_timeout,
    unwrapped,
    world_backend,
    world_store,
)

# torch keeps what it makes groups from in module state, and threads may start grids at once.
_CREATING = threading.RLock()

_WOKEN: WeakSet[dist.ProcessGroup] = WeakSet()
_BROKEN: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups of gloo's that `wake` was called for."""
_LEFT: WeakKeyDictionary[dist.ProcessGroup, list[dist.Work]] = WeakKeyDictionary()
"""Collectives of these groups that a rank has waited for in vain."""
_UNDER_WAY: WeakKeyDictionary[dist.ProcessGroup, WeakSet[dist.Work]] = WeakKeyDictionary()
_CONNECTING: WeakKeyDictionary[dist.ProcessGroup, dist.Work] = WeakKeyDictionary()
"""Of groups that `wake` was called for, the receive that connects their pairs."""
_CALLS = ("commgrid.", "torch.distributed.")  # whose variables are of no use to the program
_MOST_TOLD = 256  # a group of more is left to the timeout: each member costs an open file


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
    watched: bool = False,
) -> dist.ProcessGroup:
    """A process group of `ranks`, created by them alone; waits for none of them.

    Args:
        name: what the members meet under; used for no other group of this store.
        description: what torch's logs and flight recorder call it.
        ranks: global ranks in the group's order, this process's among them.
        backend: None takes WORLD's.
        options: what the groups table says of it; its backend and timeout go first.
        timeout: seconds a collective may take; None takes torch's default.
        startup_timeout: seconds that meeting the others may take, where torch does not let a
            backend connect later.
        backend_options: torch's own object, which replaces the NCCL options of `options`.
        connect: whether the caller connects it at once, by an exchange of all pairs of ranks.
        prefix: what its keys in the store begin with; a name that was used before needs one.
        watched: whether a `Watch` sees to its errors, and not torch.

    Raises:
        SpecError: an NCCL option that this torch does not have.
        CommGridError: a backend that makes no group of some ranks.
    """
    world = c10d._get_default_group()
    members = list(ranks)
    chosen = world_backend()
    if chosen != FAKE:
        chosen = options.backend or backend or chosen
    parsed, config, kinds = _parsed(chosen)
    limit = _limit(parsed, options, timeout)
    lazy = "gloo" in kinds and torch_gloo.can_be_lazy()
    # Otherwise gloo connects while it is created; a member that never comes must not hold the
    # others for as long as a collective may take.
    waits = "gloo" in kinds and not lazy
    connecting = connect and torch_nccl.is_bound(kinds)  # see `keep_timeout`
    meeting_limit = timedelta(seconds=startup_timeout) if waits or connecting else limit
    if backend_options is None and kinds & {*torch_nccl.NAMES}:
        within = startup_timeout if connect else None
        backend_options = torch_nccl.make_options(options, kinds, meeting_limit, within)
    device = torch_nccl.device_for(kinds)  # WORLD's, before that is taken away
    naming = torch_gloo.instead_of_gloo(config, limit, connect) if lazy else nullcontext(parsed)
    # Where creation waits for others, two threads must not wait for each other as well.
    erring = torch_nccl.errors_are_ours() if watched else nullcontext()
    with nullcontext() if waits else _CREATING, _unbound(world), erring, naming as named:
        made, _ = c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            members,
            named,
            PrefixStore(prefix, world_store()) if prefix else world_store(),
            c10d.GroupName(name),
            backend_options=backend_options,
            timeout=meeting_limit,
            device_id=device,
            group_desc=description,
        )
        if not isinstance(made, dist.ProcessGroup):  # its NON_GROUP_MEMBER
            raise CommGridError(f"{description}: torch's backend {chosen!r} made no group")
        group: dist.ProcessGroup = made
        if lazy:
            torch_gloo.adopt(group, parsed, config)
        if getattr(getattr(backend_options, "config", None), "blocking", 1) == 0:
            fill_in_sizes(group)
        c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(members)}
        if (waits or lazy) and not connecting:
            set_timeout(group, limit)
    return group


@cache
def _parsed(backend: str) -> tuple[c10d.Backend, c10d.BackendConfig, frozenset[str]]:
    """Parse a backend's name; return torch's values for it and its kinds, such as `gloo`."""
    parsed = c10d.Backend(backend)
    config = c10d.BackendConfig(parsed)
    return parsed, config, frozenset(config.get_device_backend_map().values())


def keep_timeout(group: dist.ProcessGroup, options: GroupOptions, timeout: float | None) -> None:
    """Gives a group that was to connect at start, and has, the timeout of its collectives.

    NCCL's second backend waits for members as long as for collectives.

    Args:
        group: what `create_group(connect=True)` returned.
        options, timeout: as they were given to it.
    """
    backend, _, kinds = _parsed(backend_of(group))
    if torch_nccl.is_bound(kinds):
        set_timeout(group, _limit(backend, options, timeout))


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


def _patient_store() -> PatientStore:
    # Groups are destroyed meanwhile, and other ranks may wait for that.
    return PatientStore(world_store(), lambda: timeouts().leave)


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
            found.setdefault(backend, torch_nccl.rank_device())
    return list(found.values())


def is_connected(group: dist.ProcessGroup) -> bool:
    """Whether the members' network connections exist already."""
    if group.size() == 1 or backend_of(group) == FAKE:
        return False
    for device in devices_of(group):
        backend = unwrapped(group._get_backend(device))
        if torch_nccl.is_connected(backend) is False:
            return False
    return True


def connects_by_pairs(group: dist.ProcessGroup) -> bool:
    """Whether gloo is in it and connects two ranks when they first talk, where commgrid made it."""
    return "gloo" in backend_of(group) and torch_gloo.can_be_lazy()


def tells_connected(group: dist.ProcessGroup) -> bool:
    """Whether torch tells of a group that commgrid made if its members have connected."""
    if connects_by_pairs(group):
        return False
    backends = (unwrapped(group._get_backend(device)) for device in devices_of(group))
    return all(torch_nccl.is_connected(backend) is not None for backend in backends)


def addresses(groups: Iterable[dist.ProcessGroup]) -> list[tuple[Any, str]]:
    """The keys that this rank has left at the store, which destroying alone would delete."""
    found: list[tuple[Any, str]] = []
    for group in groups:
        if is_alive(group):
            with suppress(RuntimeError):  # a suspended group has none
                store = c10d._world.pg_map[group][1]
                found += [(store, key) for key in torch_gloo.addresses(group)]
    return found


def stop_waiting(groups: Iterable[dist.ProcessGroup]) -> None:
    """Ends what waits for members that should connect, after one of them did not.

    A gloo group could not be destroyed before: its threads would wait several times longer.
    """
    trying: list[dist.Work] = []
    for group in groups:
        if connects_by_pairs(group):
            with suppress(RuntimeError):
                trying.append(torch_gloo.connect_all(group))
    if trying:
        time.sleep(timeouts().moment)
    for work in trying:
        torch_gloo.give_up(work)


def wake(
    groups: Iterable[dist.ProcessGroup],
    by_pairs: Container[dist.ProcessGroup] = (),
    tell: bool = True,
    ended: bool = False,
) -> None:
    """End all waits on groups, here and on other members, without waiting for any member.

    They cannot be used after it. Another thread may wait on them, or use them at the time.

    Args:
        groups: of this process.
        by_pairs: those of which some pairs of ranks may not be connected yet.
        tell: False where members wait elsewhere, as while they start: gloo's are left alone.
        ended: whether a member's process has ended, and its host lives. Waits here for it to
            connect then end some seconds later.
    """
    woken: list[dist.ProcessGroup] = []
    # Each on a thread: NCCL ends a communicator's own kernels, and frees its memory when those of
    # all have ended; and gloo waits for the addresses of peers that may have gone.
    ending: list[Asked] = []
    for group in groups:
        if group in _WOKEN or not is_alive(group) or group.size() == 1:
            continue
        _WOKEN.add(group)
        woken.append(group)
        if tell and _runs_on_gloo(group):
            _BROKEN.add(group)
        for backend in _nccl_backends(group):
            ending.append(Asked(backend.abort))
        if tell and "gloo" in backend_of(group):
            ending.append(Asked(partial(_break_gloo, group, group in by_pairs)))
    until = time.monotonic() + timeouts().abort
    for each in ending:
        each.is_over(until - time.monotonic())
    connecting = [ref(group) for group in woken if group in _CONNECTING]
    if connecting:
        time.sleep(timeouts().moment)
    if connecting and ended:
        Asked(partial(_end_waiting, connecting))


def follow(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Know of a collective on gloo until its handle is freed; see `wait_unless_broken`."""
    if _runs_on_gloo(group):
        _UNDER_WAY.setdefault(group, WeakSet()).add(work)


def wait_unless_broken(work: dist.Work, its_group: dist.ProcessGroup) -> None:
    """Wait for a collective, as torch does; on gloo until its connections are broken.

    A connection that closes ends the waits on it, but for a message of which gloo has received a
    part: that one waits until the group's timeout (gloo's `Pair::signalException` leaves out
    the buffer that it is filling). So this looks once a second for a failure.

    Args:
        work: a collective's handle.
        its_group: whose ranks take part; by this name, so that errors name the caller's function.

    Raises:
        DistNetworkError: the group's connections were broken after a failure (`wake`).
    """
    if its_group not in _BROKEN and not _runs_on_gloo(its_group):
        work.wait()  # NCCL's holds the host if it is given a time
        return
    while True:
        try:
            work.wait(timedelta(seconds=timeouts().beat))
            return
        except RuntimeError:
            if work.is_completed():  # since then, or with an error of its own
                work.wait()
                return
            if its_group in _BROKEN:
                _LEFT.setdefault(its_group, []).append(work)
                raise dist.DistNetworkError(
                    f"the connections of {its_group.group_desc!r} were broken after a failure"
                ) from None


def _runs_on_gloo(group: dist.ProcessGroup) -> bool:
    """Whether torch knows the group, and it has no NCCL backend beside gloo's."""
    kinds, _ = c10d._world.pg_map.get(group, ("", None))
    return "gloo" in kinds and "nccl" not in kinds


def _end_calls(
    group: dist.ProcessGroup, works: Sequence[dist.Work], by_pairs: bool, until: float
) -> None:
    """End the calls under way on a group that is about to be destroyed, which waits for them.

    A group whose calls gloo does not end is kept, since to free it would wait for them.

    Args:
        group: after `wake`.
        works: its calls.
        by_pairs: whether some pairs of ranks may not be connected yet.
        until: time until which they may end by themselves.
    """
    if not _runs_on_gloo(group) or _end_until(works, until):
        return
    if by_pairs:
        with suppress(RuntimeError):  # it asks the store
            connecting = partial(torch_gloo.connect_all, group)
            torch_gloo.give_up(_patient_store().during(connecting))
    if not _end_until(works, time.monotonic() + timeouts().moment):
        # On a thread that never ends: what a module holds is freed when the process ends.
        Asked(partial(_hold, group))


def _end_until(works: Sequence[dist.Work], until: float) -> bool:
    """Whether collectives end until a time."""
    while not all(work.is_completed() for work in works):
        if time.monotonic() > until:
            return False
        time.sleep(timeouts().poll)
    return True


def _hold(group: dist.ProcessGroup) -> None:
    threading.Event().wait()


def _end_waiting(connecting: list[ref[dist.ProcessGroup]]) -> None:
    """End what waits for members to connect, on groups that are not destroyed until then.

    By then every connection that `wake` has begun is made or refused; gloo ends the process if one
    is refused later.
    """
    time.sleep(timeouts().answer)
    for each in connecting:
        group = each()
        if group is not None and is_alive(group) and (work := _CONNECTING.pop(group, None)):
            torch_gloo.give_up(work)


def _break_gloo(group: dist.ProcessGroup, by_pairs: bool) -> None:
    with suppress(RuntimeError):
        if not by_pairs:
            torch_gloo.break_connections(group)
        elif group.size() <= _MOST_TOLD:
            # A rank that waits for this one to connect gets a connection, which closes.
            connecting = partial(torch_gloo.connect_all, group)  # asks the store
            _CONNECTING[group] = _patient_store().during(connecting)


def _free_calls(error: BaseException | None) -> None:
    """Clear the frames of commgrid's and torch's calls that led to an error.

    They hold groups and work, whose connections stay open as long as a reference is left, so that
    other ranks would go on waiting. The program's own variables stay."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if str(frame.f_globals.get("__name__")).startswith(_CALLS):
                with suppress(RuntimeError):  # it runs still
                    frame.clear()
                    _ = frame.f_locals  # empties the copy of who looked before, which Python keeps
        error = error.__cause__ or error.__context__


def abort_all(
    groups: Iterable[dist.ProcessGroup],
    by_pairs: Container[dist.ProcessGroup] = (),
    tell: bool = True,
) -> None:
    """Destroys groups whose members may have failed, without waiting for any of them.

    Members that wait for this rank get an error, even if there are other references to a connected
    group. Within `except` those of the error's traceback are cleared.

    Args:
        groups: in order of creation.
        by_pairs, tell: as `wake` takes them.
    """
    alive = [group for group in reversed(list(groups)) if is_alive(group)]
    under_way = {group: [*_UNDER_WAY.get(group, ()), *_LEFT.pop(group, ())] for group in alive}
    _free_calls(sys.exc_info()[1])
    wake(alive, by_pairs, tell)
    until = time.monotonic() + (timeouts().beat if tell else 0.0)
    while alive:  # one after the other: a group whose calls were ended must not live on
        group = alive.pop(0)
        works = under_way.pop(group)
        with suppress(RuntimeError, ValueError):  # another thread may destroy it as well
            if "nccl" in backend_of(group):
                _forget(group)  # torch would shut down what has been aborted, and may hang there
            else:
                _end_calls(group, works, group in by_pairs, until)
                dist.destroy_process_group(group)
        del group, works


def _forget(group: dist.ProcessGroup) -> None:
    """Takes a group from torch's tables."""
    world = c10d._world
    for table in (
        world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config,
        world.pg_coalesce_state,
    ):  # fmt: skip
        table.pop(group, None)
    world.pg_to_tag.pop(group, None)
    for tagged in world.tags_to_pg.values():
        if group in tagged:
            tagged.remove(group)
    _unregister_process_group(group.group_name)


def forget_addresses(keys: Iterable[tuple[Any, str]]) -> None:
    """Delete addresses from their stores; a store that has gone keeps none."""
    with suppress(StoreLostError):
        for store, key in keys:
            StoreDriver(store, 1, lambda: timeouts().leave).run(remove(key))


def runs_on_nccl(backend: str | None, options: GroupOptions) -> bool:
    """Whether a group of these arguments would have an NCCL backend."""
    chosen = options.backend or backend or world_backend()
    return chosen != FAKE and bool(_parsed(chosen)[2] & {*torch_nccl.NAMES})


def error_of(group: dist.ProcessGroup) -> str:
    """Return the error that a backend has found by itself: `timeout`, `connection` or empty."""
    for backend in _nccl_backends(group):
        if error := torch_nccl.error_of(backend):
            return error
    return ""


def calls_of(group: dist.ProcessGroup) -> int:
    """How many collectives NCCL has been given on a group; 0 where it does not run on NCCL."""
    return sum(each._get_sequence_number_for_group() for each in _nccl_backends(group))


def _nccl_backends(group: dist.ProcessGroup) -> list[Any]:
    if not is_alive(group) or "nccl" not in backend_of(group) or group.size() == 1:
        return []
    return [
        unwrapped(group._get_backend(device))
        for device in devices_of(group)
        if device.type == "cuda"
    ]


def destroy_all(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy groups in reverse order of creation, every one even if one of them fails.

    A call under way may still connect to a peer by the peer's address. A group without another
    reference ends with its calls, and only then are this rank's addresses deleted from the store.
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
                dist.destroy_process_group(group)
        except RuntimeError as error:
            failed.append(error)
        del group  # waits for its calls
    forget_addresses(kept)
    if failed:
        raise failed[0]
