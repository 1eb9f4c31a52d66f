"""Ending groups after a failure, also while ranks wait on them for others that have gone.

A rank's wait for another one ends when their connection closes. NCCL's communicators are aborted.
gloo has no such call: its connections are broken by a receive that is not met, or, where not all
ranks have connected, one by one (`leaving`).

    wake(groups)        ends the waits; others of the program's threads may still use the groups
    abort_all(groups)   the same, and destroys them
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch._C._distributed_c10d import _unregister_process_group
from torch.distributed import distributed_c10d as c10d

from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import Asked, NoThreadError
from commgrid.torch_compat import gloo as torch_gloo
from commgrid.torch_compat import gloo_departure as torch_leaving
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat.bounded_calls import end_process
from commgrid.torch_compat.groups import (
    backend_of,
    connects_by_pairs,
    is_alive,
    nccl_backends,
    runs_on_gloo,
)

_WOKEN: WeakSet[dist.ProcessGroup] = WeakSet()
_BROKEN: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups of gloo's that `wake` was called for."""
_LEFT: WeakKeyDictionary[dist.ProcessGroup, list[dist.Work]] = WeakKeyDictionary()
"""Collectives of these groups that a rank has waited for in vain."""
_UNDER_WAY: WeakKeyDictionary[dist.ProcessGroup, WeakSet[dist.Work]] = WeakKeyDictionary()
_LEFT_EARLY: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups of gloo's that this rank has left before all of their ranks had connected."""
_NOT_FREED: list[dist.ProcessGroup] = []
_CALLS = ("commgrid.", "torch.distributed.")  # in whose frames variables may be cleared
_MOST_TOLD = 256  # a group of more is left to the timeout: each member costs an open file


def stop_waiting(groups: Iterable[dist.ProcessGroup]) -> None:
    """End what waits for members that should connect, after one of them did not.

    A gloo group could not be destroyed before: its threads would wait several times longer.
    """
    leaving = [Asked(partial(_leave, group)) for group in groups if connects_by_pairs(group)]
    until = time.monotonic() + timeouts().leave
    for each in leaving:
        each.is_over(until - time.monotonic())


def wake(
    groups: Iterable[dist.ProcessGroup],
    by_pairs: Container[dist.ProcessGroup] = (),
    tell: bool = True,
    watched: bool = False,
) -> None:
    """End all waits on groups, here and on other members, without waiting for any member.

    They cannot be used after it. Another thread may wait on them, or use them at the time.

    Args:
        groups: of this process.
        by_pairs: those of which some pairs of ranks may not be connected yet.
        tell: False where members wait elsewhere, as while they start: gloo's are left alone.
        watched: whether every member does this itself, when its watch tells it of the failure.
    """
    # Each on a thread: NCCL ends a communicator's own kernels, and frees its memory when those of
    # all have ended.
    ending: list[Asked] = []
    for group in groups:
        if group in _WOKEN or not is_alive(group) or group.size() == 1:
            continue
        _WOKEN.add(group)
        if tell and runs_on_gloo(group):
            _BROKEN.add(group)
        for backend in nccl_backends(group):
            ending.append(Asked(backend.abort))
        if tell and "gloo" in backend_of(group):
            if group in by_pairs:
                ending.append(Asked(partial(_leave, group, wake_others=not watched)))
            else:
                ending.append(Asked(partial(_break, group)))
    until = time.monotonic() + timeouts().abort
    for each in ending:
        each.is_over(until - time.monotonic())


def end_if_stuck(groups: Iterable[dist.ProcessGroup], why: str) -> None:
    """End the process if after a failure a thread stays within NCCL, which connects a group.

    Args:
        groups: that were being connected when the failure was learnt of; woken since.
        why: the failure.
    """
    left, until = list(groups), time.monotonic() + timeouts().abort
    while left and time.monotonic() < until:
        time.sleep(timeouts().moment)  # a look goes through the stacks of all threads
        left = [each for each in left if torch_nccl.is_called_on(each)]
    if left:
        names = " and ".join(each.group_desc for each in left)
        end_process(f"{why}; NCCL is still connecting {names}")


def follow(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Know of a collective on gloo until its handle is freed; see `wait_unless_broken`."""
    if runs_on_gloo(group):
        if group not in _UNDER_WAY:
            _UNDER_WAY[group] = WeakSet()
        _UNDER_WAY[group].add(work)


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
    if its_group not in _BROKEN and not runs_on_gloo(its_group):
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
    if not runs_on_gloo(group) or _end_until(works, until):
        return
    if by_pairs:
        # Connections that were made meanwhile.
        Asked(partial(_shut_down, group)).is_over(timeouts().leave)
    if not _end_until(works, time.monotonic() + timeouts().moment):
        # On a thread that never ends: what a module holds is freed when the process ends.
        try:
            Asked(partial(_hold, group), lasts=True)
        except NoThreadError:
            _NOT_FREED.append(group)


def _end_until(works: Sequence[dist.Work], until: float) -> bool:
    """Whether collectives end until a time."""
    while not all(work.is_completed() for work in works):
        if time.monotonic() > until:
            return False
        time.sleep(timeouts().poll)
    return True


def _hold(group: dist.ProcessGroup) -> None:
    threading.Event().wait()


def _leave(group: dist.ProcessGroup, wake_others: bool = True) -> None:
    """Leave a group of which some ranks may not have connected."""
    _LEFT_EARLY.add(group)
    if group.size() <= _MOST_TOLD:
        with suppress(RuntimeError, OSError):  # the store, or no open files are left
            torch_leaving.leave(group, timeouts().moment, wake_others)
    _shut_down(group)


def _shut_down(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError, OSError):
        torch_leaving.shut_down(group)


def _break(group: dist.ProcessGroup) -> None:
    _shut_down(group)
    with suppress(RuntimeError):
        torch_gloo.break_connections(group)


def _free_beside(groups: list[dist.ProcessGroup]) -> None:
    """Free groups on threads, once the program has no reference to them.

    If a connection was refused, gloo may wait for ever when the group is freed: `Loop::shutdown`
    waits for a thread that still has a socket.

    Args:
        groups: is emptied.
    """
    freeing: list[Asked] = []
    while groups:
        held = [groups.pop()]
        try:
            freeing.append(Asked(partial(_free_when_last, held), lasts=True))
        except NoThreadError:
            _NOT_FREED.extend(held)
    until = time.monotonic() + timeouts().moment
    for each in freeing:
        each.is_over(until - time.monotonic())


def _free_when_last(held: list[dist.ProcessGroup]) -> None:
    pause = timeouts().poll
    while sys.getrefcount(held[0]) > 2:  # the list, and the call's argument
        time.sleep(pause)
        pause = min(2 * pause, timeouts().beat)
    held.clear()


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
    groups: list[dist.ProcessGroup],
    by_pairs: set[dist.ProcessGroup] | None = None,
    tell: bool = True,
) -> None:
    """Destroys groups whose members may have failed, without waiting for any of them.

    Members that wait for this rank get an error, even if there are other references to a connected
    group. Within `except` those of the error's traceback are cleared.

    Args:
        groups: in order of creation; is emptied, so that they are freed here.
        by_pairs: as `wake` takes it; is emptied.
        tell: as `wake` takes it.
    """
    by_pairs = set() if by_pairs is None else by_pairs
    alive = [group for group in reversed(groups) if is_alive(group)]
    groups.clear()
    tried: list[dist.ProcessGroup] = []
    under_way = {group: [*_UNDER_WAY.get(group, ()), *_LEFT.pop(group, ())] for group in alive}
    _free_calls(sys.exc_info()[1])
    wake(alive, by_pairs, tell)
    until = time.monotonic() + (timeouts().beat if tell else 0.0)
    while alive:  # one after the other: a group whose calls were ended must not live on
        group = alive.pop(0)
        works = under_way.pop(group)
        with suppress(RuntimeError, ValueError):  # another thread may destroy it as well
            if "nccl" in backend_of(group) and group.size() > 1:
                _forget(group)  # torch would shut down what has been aborted, and may hang there
            else:
                _end_calls(group, works, group in by_pairs, until)
                dist.destroy_process_group(group)
        if group in _LEFT_EARLY:
            tried.append(group)
        del group, works
    by_pairs.clear()
    _free_beside(tried)


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
