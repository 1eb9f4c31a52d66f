"""Suspending and resuming communicators of a grid, agreed by all of its ranks.

    compare   every rank calls the same with the same names
    idle      no rank has work under way: until here nothing has changed, and any may refuse
              each gives up its own, in creation order, which is the same on all
    suspended all have

Resuming goes compare, created, ready, as a grid's start does. If a rank fails after `idle`, or
while groups are made, some communicators lack members, and the grid is destroyed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from weakref import ref

from commgrid.errors import CommGridError
from commgrid.rendezvous.agreement import PHASES
from commgrid.runtime.communicator import Communicator, exchange_ranks
from commgrid.runtime.live_groups import LiveGroups
from commgrid.runtime.startup_agreement import Rendezvous
from commgrid.torch_compat import ended_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat import suspended_groups as torch_suspend
from commgrid.torch_compat import world as torch_world

Names = str | Sequence[str] | None


class _Alone:
    """Stand-in for a rendezvous in torch's fake world, where no other rank runs."""

    incarnation = "fake"

    def meet(self) -> None:
        """Nobody is late."""

    def patience(self) -> float:
        return 60.0

    def tell(self, error: BaseException) -> None:
        """Nobody waits for a word."""


def suspend(grid: LiveGroups, names: Names, timeout: float) -> None:
    """See `HyperCommGrid.suspend`."""
    with _agreed(grid, "suspend", names, timeout, ("idle", "suspended")) as rendezvous:
        chosen = [c for c in _chosen(grid, names) if not c.suspended]
        _check_idle(grid, chosen, rendezvous.patience())
        rendezvous.meet()
        with _or_destroyed(grid):
            _give_up(grid, chosen)
            rendezvous.meet()


def resume(grid: LiveGroups, names: Names, timeout: float) -> None:
    """See `HyperCommGrid.resume`."""
    with _agreed(grid, "resume", names, timeout, PHASES) as rendezvous:
        chosen = [c for c in _chosen(grid, names) if c.suspended]
        with _or_destroyed(grid):
            gone = [c for c in chosen if isinstance(c.group, torch_suspend.StandIn)]
            with torch_nccl.errors_are_ours() if grid.watch is not None else nullcontext():
                for communicator in gone:
                    _make_again(grid, communicator, rendezvous)
            rendezvous.meet()
            for communicator in chosen:
                if communicator not in gone:
                    torch_suspend.resume(communicator.group)
                communicator.suspended = False
            connecting = [c for c in gone if c.planned.connect]
            exchange_ranks(connecting, rendezvous.patience, rendezvous.tell)
            rendezvous.meet()


@contextmanager
def _agreed(
    grid: LiveGroups, call: str, names: Names, timeout: float, phases: Sequence[str]
) -> Iterator[Rendezvous | _Alone]:
    """A rendezvous of the grid's ranks, which all make the same call."""
    grid._resolve("")  # raises where the grid is gone
    if not grid._owns_groups:
        raise CommGridError(
            f"grid {grid.name!r} has adopted the groups of a DeviceMesh, which are not its own to "
            f"{call}; {call} the grid that made them"
        )
    if torch_world.world_backend() == torch_world.FAKE:
        yield _Alone()
        return
    with Rendezvous(
        torch_world.world_store(),
        name=grid.name,
        rank=grid.rank,
        ranks=grid.spec.grid_ranks,
        document={"call": f"grid.{call}", "names": _listed(names), "incarnation": grid.identity},
        deadline=time.monotonic() + timeout,
        phases=phases,
        call=f"grid.{call} of this grid",
        limit="timeout",
    ) as rendezvous:
        yield rendezvous


def _listed(names: Names) -> list[str] | str:
    return "all" if names is None else [names] if isinstance(names, str) else list(names)


def _chosen(grid: LiveGroups, names: Names) -> list[Communicator]:
    """This rank's communicators that answer to one of the names, in creation order.

    Raises:
        UnknownGroupError: no group has such a name, or it was not created.
    """
    if names is None:
        return list(grid.communicators)
    for name in _listed(names):
        grid.is_member(name)
    wanted = {grid.spec.resolve_name(name) for name in _listed(names)}
    return [c for c in grid.communicators if wanted & {*c.names}]


def _check_idle(grid: LiveGroups, chosen: list[Communicator], seconds: float) -> None:
    under_way = torch_suspend.work_under_way((c.group for c in chosen), seconds)
    if under_way:
        told = "; ".join(f"{', '.join(ops)} on {names}" for names, ops in under_way.items())
        raise CommGridError(
            f"grid {grid.name!r} cannot be suspended: on rank {grid.rank} work is under way "
            f"({told}); wait for its handles first, and see that every member has called it"
        )


@contextmanager
def _or_destroyed(grid: LiveGroups) -> Iterator[None]:
    """Within it, a failure leaves no communicator that only some of its members have."""
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):  # all wait at the store, and none in a collective
            ended_groups.abort_all(grid._release_all(), tell=False)
        error.add_note("commgrid: the grid was destroyed on this rank; initialize makes another")
        raise


def _give_up(grid: LiveGroups, chosen: list[Communicator]) -> None:
    themselves = [c for c in chosen if torch_suspend.suspends_itself(c.group)]
    for communicator in themselves:
        torch_suspend.suspend(communicator.group, _why(grid, communicator))
        communicator.suspended = True
    # Weak: what is alive once they are destroyed is what the program holds.
    others = [(ref(c.group), c, c.connected) for c in chosen if not c.suspended]
    for _, communicator, _ in reversed(others):
        communicator.suspended = True  # first: the watch looks at it meanwhile
        gone = torch_suspend.destroy_for_now(communicator.group, _why(grid, communicator))
        grid._swap(communicator, gone)
    for handle, _, connected in others:
        kept = handle()
        if kept is not None:
            torch_suspend.cut_off(kept, connected)


def _make_again(
    grid: LiveGroups, communicator: Communicator, rendezvous: Rendezvous | _Alone
) -> None:
    """A group in place of a stand-in, under its name."""
    planned, stand_in = communicator.planned, communicator.group
    started = time.perf_counter()
    torch_suspend.leave_place(stand_in)
    group = grid._make_group(
        planned, stand_in.group_name, rendezvous.patience(),
        prefix=f"commgrid/resumed/{grid.name}/{rendezvous.incarnation}",
    )  # fmt: skip
    communicator.seconds_to_create = time.perf_counter() - started
    communicator.seconds_to_connect = None
    grid._swap(communicator, group)


def _why(grid: LiveGroups, communicator: Communicator) -> str:
    return (
        f"{communicator.describe()} of grid {grid.name!r} is suspended; call grid.resume() on all "
        "ranks of the grid first"
    )
