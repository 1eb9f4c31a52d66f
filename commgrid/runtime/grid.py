"""HyperCommGrid: runs a plan once, then answers by name."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from commgrid.errors import CommGridError, GridNotInitializedError, PeerTimeoutError
from commgrid.health.culprit import missing_ranks
from commgrid.health.detector import Watch, is_wanted
from commgrid.layout.rank_text import describe_ranks
from commgrid.planning.sockets import check_limits
from commgrid.planning.spec import GridSpec
from commgrid.planning.survivors import Rebuilt
from commgrid.rendezvous.agreement import PHASES
from commgrid.rendezvous.timeouts import Seconds, as_seconds, timeouts
from commgrid.runtime import placement, summary, suspension
from commgrid.runtime.communicator import CheckReport, Communicator, check_all, exchange_ranks
from commgrid.runtime.device_mesh import GridMeshes, read_mesh
from commgrid.runtime.live_groups import LiveGroups
from commgrid.runtime.startup_agreement import Rendezvous
from commgrid.torch_compat import ended_groups
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.groups import is_connecting
from commgrid.torch_compat.peer_errors import lost_by_gloo

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_log = logging.getLogger("commgrid")


class HyperCommGrid(LiveGroups):
    """The live communicators of one grid, on a torch.distributed that is up.

    Made on every rank of the grid at once; returns when all of them have all their
    communicators. `commgrid.initialize` makes one and registers it under its name.

    Args:
        spec: a GridSpec, or the YAML path or dict of one; its -1 is filled from WORLD.
        name: for messages, and part of the keys under which its communicators meet.
        backend: of every communicator that the groups table gives none; None takes WORLD's.
        timeout: how long a collective may take, in seconds or as timedelta; None: torch's default.
        startup_timeout: how long starting may take in all, likewise.
        watch: whether a thread sees that ranks are gone; see `initialize`.
        pg_options: torch's own options of a group, in place of the groups table's `nccl`.
        before_ready: called with the grid before ranks say that they are ready, so that an error in
            it is one on all of them.

    Raises:
        SpecError: the spec does not fit the world.
        NotInGridError: this rank is not one of the grid's.
        GridNotInitializedError: torch.distributed is not up.
        GridMismatchError: ranks were given different specs, or a communicator has other members.
        PeerTimeoutError: a rank did not come in time.
        PeerFailedError: a rank came and failed.
    """

    def __init__(
        self,
        spec: GridSpec | str | Path | Mapping[str, Any],
        *,
        name: str = "default",
        backend: str | None = None,
        timeout: Seconds | None = None,
        startup_timeout: Seconds = 600.0,
        watch: bool | None = None,
        pg_options: Any = None,
        before_ready: Callable[[HyperCommGrid], object] = lambda grid: None,
    ) -> None:
        self._pg_options = pg_options
        limit = None if timeout is None else as_seconds("timeout", timeout)
        startup = as_seconds("startup_timeout", startup_timeout)
        if not torch_world.is_initialized():
            raise GridNotInitializedError(
                "torch.distributed is not up; commgrid.initialize starts it, HyperCommGrid does not"
            )
        deadline = time.monotonic() + startup
        self._describe(
            GridSpec.from_config(spec).resolve(torch_world.world_size()), name, backend, limit
        )
        if torch_world.world_backend() != torch_world.FAKE:
            torch_world.check_backend("backend", backend)
            for definition in self._plan.created.values():
                if definition.options.backend is not None:
                    key = f"groups.{definition.name}.backend"
                    torch_world.check_backend(key, definition.options.backend)
            check_limits(self._plan, backend or torch_world.world_backend())
        described = self.spec.to_dict()
        described.pop("ranks", None)  # which the rendezvous compares itself, in fewer words
        watched = is_wanted(watch, self.spec, backend)
        document = {
            "spec": described, "backend": backend, "timeout": limit,
            "versions": torch_world.versions(), "watch": watched,
        }  # fmt: skip
        self._make(document, deadline, watched, before_ready)

    def _describe(
        self, spec: GridSpec, name: str, backend: str | None, timeout: float | None
    ) -> None:
        """Set the attributes of a grid that has no communicators yet."""
        super().__init__(name, spec, torch_world.world_rank(), backend, timeout)
        self._checks = 0  # calls of `check`
        self.rebuilt: Rebuilt | None = None
        """The grid before, if `commgrid.rebuild` has made this one; else None."""

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, name: str = "default") -> HyperCommGrid:
        """Make a grid over the groups of an existing mesh, and of its flattened dims.

        It creates no group, and `destroy` leaves the mesh's groups alone. It is not in the
        registry: give it to layers as `grid=`.

        Args:
            mesh: with names for its dims. Its groups must list their ranks in the mesh's order, as
                torch's own do if ranks rise along every dim.
            name: for messages.

        Raises:
            SpecError: a mesh without names, or whose groups have their ranks in another order.
            NotInGridError: this rank is not in it.

        Example:
            >>> import commgrid
            >>> mesh = commgrid.initialize().device_mesh("dp", "tp")
            >>> grid = HyperCommGrid.from_device_mesh(mesh)
            >>> grid.get_group("tp") is mesh.get_group("tp")
            True
            >>> commgrid.shutdown()
        """
        spec, groups = read_mesh(mesh)
        adopted = object.__new__(cls)
        adopted._describe(spec, name, None, None)
        adopted._owns_groups, adopted._incarnation = False, "adopted"
        for planned in adopted._plan.communicators_by(groups.__getitem__):
            adopted._hold(Communicator(planned, groups[planned.name], 0.0, adopted=True))
        return adopted

    # -- starting and ending ------------------------------------------------------------

    def _make(
        self,
        document: Mapping[str, Any],
        deadline: float,
        watched: bool,
        before_ready: Callable[[HyperCommGrid], object],
    ) -> None:
        """Agree, create, connect; on any failure nothing that was made stays."""
        under_way: list[Rendezvous] = []
        if torch_world.world_backend() == torch_world.FAKE:
            # Ranks of a fake world do not meet, and their records name one communicator alike.
            self._create("fake", lambda: 60.0)
            before_ready(self)
            return
        connects = bool(self.spec.connecting_names)  # of any rank
        asked = (placement.PHASE,) if placement.needs_hosts(self.spec) else ()
        watch, unwatched = None, None
        if watched:
            try:
                key = f"commgrid/watch/{self._name}@{min(self.spec.grid_ranks)}"
                wake = partial(self._wake_waiting, under_way=under_way)
                watch = Watch(key, self.spec.grid_ranks, self._timeout, wake)
            except CommGridError as error:
                unwatched = error  # raised, and told to the others, when all have arrived
        try:
            with Rendezvous(
                torch_world.world_store(),
                name=self._name,
                rank=self.rank,
                ranks=self.spec.grid_ranks,
                document=document,
                deadline=deadline,
                phases=(*asked, *(PHASES if connects else PHASES[1:])),
                beforehand=None if watch is None else watch.tell_address,
                let_go=lambda: ended_groups.abort_all(self._release_all(), tell=False),
            ) as rendezvous:
                under_way.append(rendezvous)
                if unwatched is not None:
                    raise unwatched
                if watch is not None:
                    watch.connect(f"{self._name} {rendezvous.incarnation}")
                if asked:
                    placed = placement.settle(self.spec, rendezvous, self._name, self.rank)
                    self._describe(placed, self._name, self._backend, self._timeout)
                self._watch = watch
                with torch_nccl.errors_are_ours() if watched else nullcontext():
                    self._create(rendezvous.incarnation, rendezvous.patience)
                if connects:
                    rendezvous.meet()  # a rank that could not create is named before others call it
                    self._connect(rendezvous)
                before_ready(self)  # what fails from here on fails on all ranks
                rendezvous.meet()
                under_way.clear()
                if watch is not None:
                    watch.begin([each for each in self._communicators if len(each.ranks) > 1])
        except BaseException:
            self._watch = watch
            with suppress(RuntimeError):
                # To destroy could wait for ranks that are gone.
                ended_groups.abort_all(self._release_all(), tell=False)
            raise

    def _wake_waiting(self, why: str, late: bool, under_way: list[Rendezvous]) -> None:
        """Ends what waits for a rank that was lost, here or in a rendezvous that is not over.

        gloo's connections are left alone until then, of which some are just being made.
        """
        for rendezvous in under_way:
            rendezvous.interrupt(why, late)
        self.note_failure(why, late)
        groups = [c.group for c in self._communicators]
        connecting = [] if under_way else [each for each in groups if is_connecting(each)]
        for group in groups:
            torch_groups.end_gate(group, why, late)
        by_pairs = self._connected_by_pairs()
        ended_groups.wake(groups, by_pairs, tell=not under_way, watched=True)
        ended_groups.end_if_stuck(connecting, why)

    def _create(self, incarnation: str, patience: Callable[[], float]) -> None:
        self._incarnation = incarnation
        for planned in self._plan.communicators:
            started = time.perf_counter()
            name = f"commgrid/{self._name}/{incarnation}/{planned.name}/{planned.members}"
            group = self._make_group(planned, name, patience())
            self._hold(Communicator(planned, group, time.perf_counter() - started))

    def _connect(self, rendezvous: Rendezvous) -> None:
        def tell(error: BaseException) -> None:
            lost, watch = lost_by_gloo(error), self._watch
            if lost and watch is not None and (seen := watch.read(timeouts().seen)):
                rendezvous.interrupt(seen, watch.late)
            else:
                rendezvous.tell(error)

        connecting = [c for c in self._communicators if c.planned.connect]
        exchange_ranks(connecting, rendezvous.patience, tell, self._lost)

    def _lost(self) -> str | None:
        return None if self.failure is None else self.failure.text

    def suspend(
        self, names: str | Sequence[str] | None = None, *, timeout: Seconds = 600.0
    ) -> None:
        """Free connections and device memory of communicators, until `resume`.

        Every rank of the grid calls it with the same names. NCCL frees its memory, and the torch
        groups stay the same objects; on gloo, and on torch before 2.12 or NCCL before 2.29.7, the
        groups are destroyed, and `resume` makes others under their names. WORLD is not suspended.

        Args:
            names: names of groups, with other names of the same communicators; None: all.
            timeout: how long this call may take, in seconds or as timedelta.

        Raises:
            CommGridError: work is under way on one of them, or the grid did not make them. Nothing
                has changed then, on any rank.
            PeerFailedError: that was so on another rank.
            PeerTimeoutError: a rank did not call it in time; it is named.
            GridMismatchError: ranks gave other names, or call something else.
            UnknownGroupError: no group has such a name, or it was not created.

        Example:
            >>> import commgrid
            >>> grid = commgrid.initialize()
            >>> grid.suspend("tp")
            >>> [c.state for c in grid.communicators if "tp" in c.names]
            ['suspended']
            >>> grid.resume()
            >>> commgrid.shutdown()
        """
        suspension.suspend(self, names, as_seconds("timeout", timeout))

    def resume(self, names: str | Sequence[str] | None = None, *, timeout: Seconds = 600.0) -> None:
        """Takes up again what `suspend` has given up, connected as `connect` of the grid says.

        Every rank of the grid calls it with the same names. Look-ups, layers, meshes and what else
        finds groups by name go on. So does a torch group that the program has kept; where it was
        destroyed, Python's calls of it go to the new one, and what only C++ holds, as DDP does, is
        an error.

        Args:
            names: names of groups; None: all. Groups that are not suspended do not change.
            timeout: likewise.

        Raises:
            PeerTimeoutError, GridMismatchError, UnknownGroupError: as in `suspend`.
            PeerFailedError: another rank failed. If it did so after all had come, the grid is
                destroyed.
        """
        suspension.resume(self, names, as_seconds("timeout", timeout))

    # -- parts and proof ----------------------------------------------------------------

    def device_mesh(self, *names: str, drop_size_1: bool = False) -> DeviceMesh:
        """A torch DeviceMesh over the grid's own communicators; creates none.

        It has the dims that are named and no others, and is a root by itself: what is flattened
        from it can be sliced from it by name. A single dim beside others above size 1 is a slice
        of the root of those, as DDP and FSDP1 expect. Meshes of a region with their axes slowest
        first meet in one DTensor, as DDP or FSDP2 over dp and layers over tp do.

        FSDP1 of two dims beside tp looks for tp in its mesh's root: give it a slice, as
        `device_mesh("dp_replicate", "dp_shard", "tp")["dp_replicate", "dp_shard"]`. Groups that
        torch makes when a mesh is unflattened, or flattened to a name that the grid has not, last
        as long as torch.distributed.

        Args:
            *names: axes, combinations such as `dp_cp`, or names of the groups table, of one region;
                none: all dense axes. In another order than slowest-varying first the mesh is
                transposed, and a root apart.
            drop_size_1: leave out those of size 1, but for the last if all are.

        Raises:
            SpecError: axes of two regions, one axis twice, or a group that has only some ranks
                along its axes.
            UnknownGroupError: no group has such a name, or it was not created.

        Example:
            >>> import commgrid
            >>> grid = commgrid.initialize()
            >>> grid.device_mesh("dp_cp", "tp").mesh_dim_names
            ('dp_cp', 'tp')
            >>> commgrid.shutdown()
        """
        self._resolve("")
        if self._meshes is None:
            self._meshes = GridMeshes(self.spec, self._plan.created, self._groups)
        return self._meshes.mesh(names, drop_size_1)

    def check(self, timeout: Seconds = 60.0) -> CheckReport:
        """Runs an all-gather on every communicator, in order, on all ranks of the grid at once.

        Args:
            timeout: how long each may take.

        Raises:
            GridMismatchError: a communicator that has other members than planned.
            PeerTimeoutError: one on which a member did not answer; names the ranks that did not
                come to `check`.
        """
        self._resolve("")
        limit, self._checks = as_seconds("timeout", timeout), self._checks + 1
        try:
            return check_all(self.rank, self._communicators, limit)
        except PeerTimeoutError as error:
            at = f"commgrid/check/{self.identity}/{self._checks}"
            missing = missing_ranks(at, self.spec.grid_ranks)
            if not missing:
                raise
            told = f"{error}; {describe_ranks(missing)} did not come to grid.check"
            raise PeerTimeoutError(told) from error

    def show(
        self,
        path: str | Path | None = None,
        *,
        names: Sequence[str] = (),
        gpus_per_node: int | None = None,
    ) -> Figure | None:
        """Draws the grid by node, this rank's groups pointed out; on this rank alone.

        Args:
            path: where to write it, a `.svg`, `.png`, `.pdf`, or a `.html` page to explore; None:
                nowhere.
            names: the groups to draw; none: the axes, and the groups table.
            gpus_per_node: ranks of a node; None: as torchrun says, else 8.

        Returns:
            Without a path a matplotlib figure, which a notebook shows.

        Raises:
            CommGridError: matplotlib is not installed, which a page does not need.
            SpecError: another ending, or a file that cannot be written.
        """
        from commgrid.viz.live import show

        return show(self.spec, self.rank, path, names, gpus_per_node)

    def _repr_html_(self) -> str:
        return summary.as_html(self)

    def __str__(self) -> str:
        return summary.as_text(self)

    def __repr__(self) -> str:
        shape = " ".join(f"{axis}={size}" for axis, size in self.shape.items())
        state = ", destroyed" if self._destroyed else ""
        return f"HyperCommGrid({self._name!r}, {shape}, rank {self.rank}{state})"
