"""Groups that are given up for a while: what torch can do itself, and what keeps their place.

NCCL frees a communicator's buffers and takes them again (`Backend.suspend`: torch 2.12 with NCCL
2.29.7): the group stays the object that it was. Elsewhere the group is destroyed, and a `StandIn`
takes its place: torch finds it under the group's name, so that meshes and DTensor meet it, and it
counts among torch's groups, since torch names new ones by counting. A group of that name is made
when it is resumed.

torch has no way to take a backend out of a group, nor to give it another one of its kind, so that
an object which the program has kept of a destroyed group never connects again. It follows its name
instead: from the first suspension on, what Python calls of a group that was given up is called of
the group that torch finds under its name, a stand-in or its successor. What C++ alone holds, as
DDP's reducer does, stays cut off.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from commgrid.call_records.operations import methods
from commgrid.errors import CommGridError, GridDestroyedError, GroupSuspendedError
from commgrid.rendezvous.timeouts import timeouts
from commgrid.torch_compat import gloo as torch_gloo
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat.mesh import replace

_CALLS = (*dict(methods()), "gather_single", "gather_into_tensor", "_start_coalescing")
"""Methods of a ProcessGroup that communicate, in any of torch's versions."""

_LOOK_UPS = ("get_backend", "get_global_rank", "get_group_rank", "get_process_group_ranks")
"""Other functions that torch and programs call with a group, and that fail if it is destroyed."""

_bindings: Any = _distributed_c10d  # torch's types leave out what is private

_NOT_CONNECTED = re.compile(r"not (been )?initialized", re.IGNORECASE)

_given_up: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups whose calls go to the group with their name."""
_answering: WeakKeyDictionary[dist.ProcessGroup, StandIn] = WeakKeyDictionary()
"""For groups that NCCL has suspended, the group with their name; torch keeps a weak one only."""


class StandIn(dist.ProcessGroup):
    """Has a group's name, ranks and place; asked for anything else it says why it cannot.

    Args:
        group: whose place it takes.
        why: what its errors say.
        error: their class.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        why: str,
        error: Callable[[str], CommGridError] = GroupSuspendedError,
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # of Python's own
        self.why, self.error = why, error
        self._name, self._description = group.group_name, group.group_desc

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """What the members meet under."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What torch's logs call it."""
        return self._description


def _standing_in(name: str) -> Callable[..., Any]:
    def call(group: StandIn, *args: Any, **named: Any) -> Any:
        now = _now(group)
        if now is group:
            raise group.error(group.why)
        return getattr(now, name)(*args, **named)

    call.__name__ = name
    return call


for _name in (*_CALLS, "_get_backend"):  # C++ finds these too, as DTensor and compiled code do
    setattr(StandIn, _name, _standing_in(_name))


# -- work under way -------------------------------------------------------------------------


def work_under_way(groups: Iterable[dist.ProcessGroup], seconds: float) -> dict[str, list[str]]:
    """Return the calls under way on groups, by the group's description.

    Calls queued on a device are waited for. torch's flight recorder knows; it does not hear of
    gloo's sends and receives, and of nothing where TORCH_FR_BUFFER_SIZE is 0.

    Args:
        groups: to ask about.
        seconds: to wait at most.
    """
    asked = {group.group_name: group for group in groups}
    on_device = any(_has_nccl(group) for group in asked.values())
    patience = min(timeouts().device if on_device else timeouts().moment, seconds)
    until, pause = time.monotonic() + patience, timeouts().poll
    while (found := _recorded(asked, on_device)) and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, timeouts().moment)
    if on_device and not found:
        torch.cuda.synchronize(torch_nccl.rank_device())
    return found


def _recorded(names: Collection[str], on_device: bool) -> dict[str, list[str]]:
    dumps = [_bindings._dump_fr_trace(True, False, False)]
    if on_device:
        dumps.append(_bindings._dump_nccl_trace(True, False, False))
    found: dict[str, list[str]] = {}
    for dump in dumps:
        for description, operations in unfinished(pickle.loads(dump).get("entries", ()), names):
            found.setdefault(description, []).extend(operations)
    return found


def unfinished(
    entries: Iterable[Mapping[str, Any]], names: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the calls of a flight recorder that have not ended, with the group's description.

    Of a batch torch completes the last entry alone, `coalesced`, which stands for all of them.

    Args:
        entries: all of the recorder's, in order.
        names: torch's names of the groups to look at.
    """
    batches: dict[tuple[str, bool, int], list[Mapping[str, Any]]] = {}
    for entry in entries:
        name = entry["process_group"][0]
        if name in names:
            number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
            batches.setdefault((name, entry["is_p2p"], number), []).append(entry)
    for batch in batches.values():
        last = batch[-1]
        if not last["retired"] and last["state"] != "completed":
            operations = [str(each["profiling_name"]).rpartition(":")[2] for each in batch]
            parts = [each for each in operations if each != "coalesced"]
            yield last["process_group"][1], parts or operations


# -- what torch does itself -----------------------------------------------------------------


def _has_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in torch_groups.backend_of(group)


def suspends_itself(group: dist.ProcessGroup) -> bool:
    """Whether torch and NCCL can free a group's memory and keep the group."""
    return not isinstance(group, StandIn) and _has_nccl(group) and torch_nccl.can_suspend()


def suspend(group: dist.ProcessGroup, why: str) -> None:
    """Frees what NCCL has allocated for a group; its members all call it, and wait for each other.

    Args:
        group: one that `suspends_itself`.
        why: the error of collectives on it meanwhile.
    """
    torch_groups.freed_by(partial(_on_connected, call="suspend"), group)
    follow_name(group)
    _answering[group] = StandIn(group, why)
    _answer(group.group_name, _answering[group])


def resume(group: dist.ProcessGroup) -> None:
    """Takes the memory again; its members all call it, and wait for each other."""
    _on_connected(group, "resume")
    _given_up.discard(group)
    _answer(group.group_name, group)
    _answering.pop(group, None)


def _on_connected(group: dist.ProcessGroup, call: str) -> Any:
    """Calls a backend that has connected; None where it has not, and has no memory either."""
    backend = torch_groups.backend_on(group, torch_nccl.rank_device())
    if torch_nccl.is_connected(backend) is False:
        return None
    try:
        return getattr(backend, call)()
    except RuntimeError as error:
        if _NOT_CONNECTED.search(str(error)):
            return None
        raise


def memory_of(group: dist.ProcessGroup) -> dict[str, int] | None:
    """What NCCL counts of a group's device memory, in bytes; None where it does not."""
    if not suspends_itself(group):
        return None
    try:
        counted = _on_connected(group, "memory_stats")
    except RuntimeError:  # an NCCL that was told not to count
        return None
    return None if counted is None else {key: int(counted[key]) for key in sorted(counted)}


# -- a place that is kept -------------------------------------------------------------------


def destroy_for_now(group: dist.ProcessGroup, why: str) -> StandIn:
    """Destroys a group and puts a stand-in where torch and meshes look for it.

    Args:
        group: with no work under way.
        why: what the stand-in's errors say.
    """
    world = c10d._world
    made, name = StandIn(group, why), group.group_name
    backend, config = world.pg_map[group][0], world.pg_backend_config[group]
    ranks, tag = world.pg_group_ranks[group], world.pg_to_tag[group]
    torch_groups.destroy_group(group)
    world.pg_map[made] = (backend, HashStore())
    world.pg_names[made] = name
    world.pg_backend_config[made] = config
    world.pg_group_ranks[made] = ranks
    world.pg_to_tag[made] = tag
    for each in (tag, ""):
        world.tags_to_pg.setdefault(each, []).append(made)
    _bindings._register_process_group(name, made)
    return made


def keep_names(groups: Iterable[dist.ProcessGroup], why: str) -> None:
    """Have torch find an error under the names of groups that are about to be ended.

    Compiled functions keep the names, and torch would say that it knows none of them. The names of
    the last call are kept, of earlier ones no more.
    """
    _ENDED[:] = [StandIn(group, why, GridDestroyedError) for group in groups]


def answer_for_ended() -> None:
    """Register what `keep_names` has made, now that the groups are gone."""
    for each in _ENDED:
        with suppress(RuntimeError):  # a group has this name again
            _bindings._register_process_group(each.group_name, each)


_ENDED: list[StandIn] = []


def leave_place(stand_in: dist.ProcessGroup) -> None:
    """Takes a stand-in out of torch, so that a group of its name can be made, which it follows."""
    torch_groups.destroy_group(stand_in)
    follow_name(stand_in)


def _answer(name: str, group: dist.ProcessGroup) -> None:
    """Has torch's look-ups of a name, as DTensor's, find this group, which they keep weakly."""
    _bindings._unregister_process_group(name)
    _bindings._register_process_group(name, group)


# -- objects that programs have kept --------------------------------------------------------


def cut_off(group: dist.ProcessGroup, connected: bool) -> None:
    """End the connections of a destroyed group that the program still holds, and let it follow.

    Args:
        group: the destroyed one.
        connected: whether all of its pairs of ranks are connected; else gloo's stay as they are.
    """
    if connected and group.size() > 1 and torch.device("cpu") in group._device_types:
        with suppress(RuntimeError):  # the other side may have closed them first
            torch_gloo.break_connections(group)
    follow_name(group)


def follow_name(group: dist.ProcessGroup) -> None:
    """Forward Python's calls of a group to the group that torch finds under its name."""
    _guard_calls()
    _given_up.add(group)


def _now(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group that has the name of a destroyed one."""
    try:
        found: dist.ProcessGroup = _bindings._resolve_process_group(group.group_name)
    except RuntimeError as error:  # there is none
        raise GridDestroyedError(
            f"this handle is of communicator {group.group_desc}, whose grid was destroyed while it "
            "was suspended or after it; take the group of the grid that is alive"
        ) from error
    return found


def _guard_calls() -> None:
    """Has torch ask, before it calls a group, whether that was given up; until `shutdown`."""
    if hasattr(dist.ProcessGroup.allreduce, "asks_if_given_up"):
        return
    for name in (*_CALLS, "_get_backend"):
        if hasattr(dist.ProcessGroup, name):
            replace(dist.ProcessGroup, name, _asking(name, getattr(dist.ProcessGroup, name)))
    for name in _LOOK_UPS:
        looking = _looking(getattr(c10d, name))
        for module in (dist, c10d):
            replace(module, name, looking)


def _asking(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def ask_first(called: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
        # Not called `group`: an error names the innermost function with an argument of that name.
        if called in _given_up:
            return getattr(_now(called), name)(*args, **named)
        return call(called, *args, **named)

    ask_first.asks_if_given_up = True  # type: ignore[attr-defined]
    return ask_first


def _looking(call: Callable[..., Any]) -> Callable[..., Any]:
    """A look-up in torch's books, which no longer have a destroyed group."""

    @wraps(call)
    def look(*args: Any, **named: Any) -> Any:
        try:
            return call(*args, **named)
        except (KeyError, ValueError):
            group = args[0] if args else named.pop("group", None)
            if not isinstance(group, dist.ProcessGroup) or group not in _given_up:
                raise
            return call(_now(group), *args[1:], **named)

    return look
