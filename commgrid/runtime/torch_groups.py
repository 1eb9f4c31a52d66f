"""Making and destroying process groups.

torch's public `new_group` names a group by counters of the process and, where WORLD is
bound to a device, splits WORLD, which every rank has to take part in. A grid's groups
are created by their members alone, under names that the members agree on, so creation
goes through the function beneath it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import SpecError
from commgrid.planning.groups import GroupOptions
from commgrid.runtime.torch_world import FAKE, is_initialized, world_backend, world_store


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
