"""rebuild: the same named grid over the ranks that are left, in the processes that live."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from commgrid.errors import (
    CommGridError,
    GridNotInitializedError,
    PeerFailedError,
    PeerTimeoutError,
    SpecError,
)
from commgrid.layout.rank_text import describe_ranks, unpack
from commgrid.layout.ranks import as_ranks, whole_number
from commgrid.planning.spec import GridSpec
from commgrid.planning.survivors import Fits, Rebuilt, refit
from commgrid.recording import order_check
from commgrid.rendezvous.membership import LateError, Membership, Subject
from commgrid.rendezvous.timeouts import Seconds, as_seconds, timeouts
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import Made, Registry, _registry
from commgrid.store import standby as torch_standby
from commgrid.store.driver import StoreDriver
from commgrid.store.search import first_line
from commgrid.torch_compat import suspended_groups as torch_suspend
from commgrid.torch_compat import world as torch_world

_SHARE = 0.5  # of the time left for each attempt: more ranks may fail meanwhile


def rebuild(
    ranks: range | Sequence[int] | str | None = None,
    *,
    name: str | None = None,
    grace: Seconds = 10.0,
    at_least: int | None = None,
    fits: Fits | None = None,
    timeout: Seconds = 60.0,
) -> HyperCommGrid | None:
    """Makes a grid again, of the same name and description, over the ranks that are left.

    Ranks call it after a failure, such as a PeerFailedError; the processes and torch.distributed
    stay. The axis that was given as -1 shrinks, or else dp, and then pp. Whole replicas are left
    out, so that as many ranks as possible keep their place on the other axes. Later
    `commgrid.recover` brings together the states that the new grid's ranks have in memory. A rank
    without a place, which `initialize(ranks=)` or a rebuild left out or which came by `join`, waits
    in this call until a rebuild needs it.

    Args:
        ranks: exactly these come, and an error names the missing ones. A rank that is not among
            them waits as one without a part. None: any rank may come.
        name: of the grid; None: the default one.
        grace: how long after the first ranks others may come, in seconds or as timedelta. Ranks
            learn of a failure in their next collective; give more than they compute without one.
            On a watched grid, no rank waits for a process that was seen to end.
        at_least: how many ranks of the grid before must come, where `ranks` is not given; None:
            half, or more than half where the store is out of reach and others may be there still.
            Fewer may be the smaller side of a network that was cut, while the larger one continues.
        fits: whether the job can use sizes, `{"tp": 2, "dp": 3, …}`, such as a batch that must
            divide; asked on one rank. None: any.
        timeout: how long it may take in all, likewise; not the waiting of a rank without a part.

    Returns:
        The new grid, which `get_grid(name)` returns from now on and `rebuilt` says more of; None on
        a rank that has waited for a place when the others have ended.

    Raises:
        GridNotInitializedError: torch.distributed is not up.
        PeerTimeoutError: ranks did not come, or this one came too late.
        PeerFailedError: too few ranks are left, or the store and all standby stores are gone.
        SpecError: no grid of this description fits the ranks that are left.
        GridMismatchError: ranks call for different things.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize()
        >>> grid.abort()                        # as after a failure
        >>> commgrid.rebuild(grace=0.1).shape["dp"]
        1
        >>> commgrid.shutdown()
    """
    return _Rebuild(
        name or _registry.default,
        None if ranks is None else tuple(sorted(as_ranks(ranks))),
        as_seconds("grace", grace),
        None if at_least is None else whole_number("at_least", at_least),
        fits,
        as_seconds("timeout", timeout),
    ).run()


class _AttemptError(PeerFailedError):
    """An attempt that failed because a further rank was lost; it is tried again."""


class _StoreGoneError(PeerFailedError):
    """No store is left for the ranks to meet at."""


@dataclass
class _Rebuild:
    """One call of `rebuild`, with its arguments."""

    name: str
    ranks: tuple[int, ...] | None
    grace: float
    at_least: int | None
    fits: Fits | None
    timeout: float
    registry: Registry = _registry
    unsure: bool = False
    moved: bool = False
    started: float = field(default=0.0, init=False)
    deadline: float = field(default=0.0, init=False)

    def run(self) -> HyperCommGrid | None:
        if not torch_world.is_initialized():
            raise GridNotInitializedError(
                "rebuild: torch.distributed is not up; call commgrid.initialize, or "
                "commgrid.join() on a rank that waits for a place"
            )
        before = self._let_go()
        self._begin()
        while True:
            made = self.registry.made.get(self.name)
            try:
                self._find_store()
                verdict = self._meet(made)
                if before is not None and not self.moved:
                    before.forget_addresses()  # only now: ranks still in abort read them
                if verdict is None:
                    return None
                if made is None:
                    self._begin()  # it has waited until now
                if verdict.get("aside"):
                    self._follow(verdict)
                    continue
                self._settle_store(verdict)
                spec = GridSpec.from_config(verdict["spec"]).resolve(torch_world.world_size())
                if self._rank in spec.grid_ranks:
                    return self._make(spec, verdict)
                self.registry.made.pop(self.name, None)  # and waits for a place from now on
            except LateError:
                if self.ranks is None or self._rank in self.ranks:
                    raise  # else it was left out, and waits for a place
            except _StoreGoneError:
                if made is None:  # and this rank waited there
                    return None
                raise
            except _AttemptError:
                if made is not None and time.monotonic() > self.deadline:
                    raise

    def _begin(self) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + self.timeout

    @property
    def _rank(self) -> int:
        return torch_world.world_rank()

    def _let_go(self) -> HyperCommGrid | None:
        """End the grid, whose collectives may be half done, and return it."""
        grid = self.registry.grids.pop(self.name, None)
        self.registry.tables.pop(self.name, None)
        if grid is not None and not grid.is_destroyed:
            torch_suspend.keep_names(
                [each.group for each in grid.communicators],
                f"this is a communicator of grid {self.name!r} before it was rebuilt; a compiled "
                "function keeps it: compile the function again (torch.compiler.reset())",
            )
            grid.abort_after_failure()
            torch_suspend.answer_for_ended()
        return grid

    # -- the store ----------------------------------------------------------------------

    def _find_store(self) -> None:
        """Keep the store if it answers, else move to the first standby store that does.

        Raises:
            _StoreGoneError: none answers.
        """
        answer = torch_standby.ask(torch_world.world_store())
        if answer is torch_standby.Answer.HERE:
            return
        place = self.registry.place
        for server, address in place.standbys:  # the store before it may be alive for others
            self.unsure = self.unsure or answer is torch_standby.Answer.SILENT
            store, answer = torch_standby.connect(address, place.own)
            if store is not None:
                self._move(store, server)
                return
        raise _StoreGoneError(
            f"rebuild of grid {self.name!r}: the store of torch.distributed is gone, and of "
            f"{len(place.standbys)} standby stores none answers (commgrid keeps some where it "
            "starts torch.distributed itself); start the job again"
        )

    def _move(self, store: Any, server: int | None) -> None:
        self.registry.move_store(store, server)
        self.moved = True

    def _own_standby(self) -> torch_standby.Standby | None:
        """The store that this process serves, for when it is needed."""
        place, launch = self.registry.place, self.registry.launch
        if place.own is None and launch is not None and launch.address is not None:
            place.own = torch_standby.serve((launch.address, launch.port))
        return place.own

    def _follow(self, verdict: Mapping[str, Any]) -> None:
        """Goes where the others meet now, to wait there.

        Raises:
            _StoreGoneError: that store has gone too.
        """
        try:
            self._settle_store(verdict)
        except _AttemptError as error:
            raise _StoreGoneError(f"{error}") from error

    def _settle_store(self, verdict: Mapping[str, Any]) -> None:
        """Use the stores of the decision: the one to meet at, and the standby stores."""
        place, goes_to = self.registry.place, verdict["store"]
        place.gone, place.ended = frozenset(verdict["gone"]), frozenset(unpack(verdict["ended"]))
        place.standbys = [(rank, address) for rank, address in verdict["standbys"]]
        place.server = verdict["server"]
        if goes_to is not None:
            store, answer = torch_standby.connect(goes_to, place.own)
            if store is None:
                raise _AttemptError(f"the store of rank {place.server}: {answer.value}")
            self._move(store, place.server)
        if self._rank not in (place.server, *(rank for rank, _ in place.standbys)):
            place.own = None

    # -- agreeing -----------------------------------------------------------------------

    def _meet(self, made: Made | None) -> Mapping[str, Any] | None:
        """The verdict of the ranks that are left; None: the job is over."""
        own, place = self._own_standby(), self.registry.place
        said = json.dumps({
            "address": own.address if own is not None else "",
            "server": place.server, "unsure": self.unsure,
        })  # fmt: skip
        world = range(torch_world.world_size())
        watch = made.seen_by if made is not None else None
        ended = place.ended.union(watch.ended if watch is not None else ())
        calls = Membership(self._rank, world, ended)
        driver = StoreDriver(torch_world.world_store(), len(world))
        try:
            if made is None:
                return driver.run(calls.wait(self.name, said))
            call = Subject(self.name, made.identity, self.ranks)
            conclude = partial(self._conclude, made)
            return driver.run(calls.answer(call, said, conclude, self.grace, self.deadline))
        except LateError:
            self.registry.made.pop(self.name, None)
            with suppress(RuntimeError):  # it learns the same when it calls again
                if move := driver.run(calls.last_move()):
                    self._settle_store(move)
            raise
        except CommGridError:
            raise
        except RuntimeError as error:
            told = first_line(error)
            raise _AttemptError(f"rebuild: the store has gone meanwhile ({told})") from error
        finally:
            driver.close()

    def _conclude(self, made: Made, here: list[int], texts: list[str]) -> dict[str, Any]:
        """The verdict for all ranks that have come."""
        said = {rank: json.loads(text) for rank, text in zip(here, texts, strict=True)}
        were = set(made.last.grid_ranks)
        left = sorted(were & set(here))
        unsure = any(said[rank]["unsure"] for rank in left)
        needed = self.at_least or (len(were) // 2 + 1 if unsure else -(-len(were) // 2))
        about = f"rebuild of grid {self.name!r}"
        if len(left) < needed and self.ranks is None:
            return {"error": "few", "refused": (
                f"{about}: only {describe_ranks(left)} of its {len(were)} ranks came, and "
                f"{needed} are needed: the others may have gone on where these do not reach them; "
                "if they have not, give at_least= or ranks="
            )}  # fmt: skip
        try:
            spec = refit(made.given, made.full, made.last, here, self.fits)
        except SpecError as error:
            return {"error": "unfit", "refused": f"{about}: {error}"}
        server = said[left[0]]["server"] if left else None
        can_serve = [rank for rank in here if said[rank]["address"] and rank != server]
        moves = server is not None and server not in here and bool(can_serve)
        if moves:
            server = can_serve[0]
        gone = sorted({*range(torch_world.world_size())} - set(here))
        spares = sorted({*here} - {*spec.grid_ranks})
        return {
            "spec": spec.to_dict(), "given": made.given.to_dict(), "full": made.full,
            "before": made.last.shape, "backend": made.backend, "timeout": made.timeout,
            "watch": made.watch, "trace": made.trace, "verify": made.verify,
            "token": uuid4().hex, "gone": gone, "spares": spares,
            "server": server, "store": said[can_serve[0]]["address"] if moves else None,
            "standbys": [(rank, said[rank]["address"]) for rank in torch_standby.chosen(can_serve)],
        }  # fmt: skip

    # -- the grid -----------------------------------------------------------------------

    def _make(self, spec: GridSpec, verdict: Mapping[str, Any]) -> HyperCommGrid:
        """Make the grid with the last one's settings, within this attempt's part of the time."""
        backend, limit = verdict["backend"], verdict["timeout"]
        left = max(self.deadline - time.monotonic(), 0.0)
        with self.registry.reserved(self.name):
            try:
                grid = HyperCommGrid(
                    spec, name=self.name, backend=backend, timeout=limit,
                    startup_timeout=max(left * _SHARE, timeouts().answer), watch=verdict["watch"],
                    before_ready=partial(order_check.observe, verdict["trace"], verdict["verify"]),
                )  # fmt: skip
            except (PeerTimeoutError, PeerFailedError) as error:
                raise _AttemptError(f"rebuild: {error}") from error
            grid.rebuilt = Rebuilt(
                verdict["before"], tuple(verdict["gone"]), tuple(verdict["spares"]),
                time.monotonic() - self.started, self.moved,
            )  # fmt: skip
            self.registry.add(grid)
        self.registry.made[self.name] = Made(
            GridSpec.from_config(verdict["given"]), verdict["full"], grid.spec,
            f"{grid.identity}/{verdict['token']}", backend, limit, verdict["trace"],
            verdict["watch"], verdict["verify"], grid.watch,
        )  # fmt: skip
        return grid
