"""Megatron's parallel state as a grid gives it: which groups, ranks and numbers, and of which grid.

Megatron-core keeps its state in some fifty variables of one module. `MegatronState` holds the
same variables for one grid; `STORE` knows every grid that has such a state, which of them is
asked, and keeps the variables of an installed megatron-core the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from commgrid.errors import SpecError, UnknownGroupError
from commgrid.planning.spec import GridSpec
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid
from megatron_adapter.errors import AmbiguousGridError, MegatronStateError
from megatron_adapter.names import MEGATRON_GROUPS, hierarchical, hybrid
from megatron_adapter.spec import sizes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OVERRIDES = tuple(
    f"_MPU_{what}_{number}"
    for what in (
        "TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL", "DATA_PARALLEL",
        "EXPERT_MODEL_PARALLEL", "EXPERT_TENSOR_PARALLEL",
    )
    for number in ("WORLD_SIZE", "RANK")
)  # fmt: skip
_OTHERS = (
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", "_HYBRID_DP_CP_GROUPS", "_GLOBAL_MEMORY_BUFFER",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER", "_global_process_group_list",
)  # fmt: skip
_KEPT = (*_OVERRIDES, *_OTHERS[:2])
"""What is not initialization's to set alone: it stays if it was set before."""

VARIABLES = (
    *(group.state for group in MEGATRON_GROUPS),
    *(group.ranks for group in MEGATRON_GROUPS if group.ranks is not None),
    *_OVERRIDES,
    *_OTHERS,
)
"""Every variable of `megatron.core.parallel_state` that is state."""


def initial() -> dict[str, Any]:
    """The variables as they are before any initialization."""
    values: dict[str, Any] = dict.fromkeys(VARIABLES)
    values["_HYBRID_DP_CP_GROUPS"] = {}
    return values


class MegatronState:
    """Megatron's variables for one grid.

    Groups that Megatron has and the grid has not (embedding groups, gloo twins, an expert
    region) are created on a companion grid over the same ranks, which every rank must reach.

    Args:
        grid: alive, with axes that Megatron has words for.
        owns_grid: whether it was made for Megatron: it has what it is to have, and `close`
            destroys it.

    Raises:
        SpecError: Megatron cannot express the grid, or a group of one of its names is another.
    """

    def __init__(self, grid: HyperCommGrid, *, owns_grid: bool = False) -> None:
        self.grid, self.owns_grid = grid, owns_grid
        self._expected = grid.spec if owns_grid else sizes_of(grid.spec, grid.world_size).spec()
        self.companion = None if owns_grid else self._make_companion()
        self.handed_out = False  # whether somebody keeps its groups, as in a collection
        self.values = initial()
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def _fill(self) -> None:
        for group in MEGATRON_GROUPS:
            name = self._meaning(group.name)
            if self.is_member(name):
                self.values[group.state] = self.find(name)
                if group.ranks is not None:
                    self.values[group.ranks] = list(self._grid_with(name).get_ranks(name))
        self.values["_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"] = self._levels() or None
        self.values["_HYBRID_DP_CP_GROUPS"] = self._parts()
        self.values["_global_process_group_list"] = [
            None, *(c.group for one in self._grids for c in one.communicators)
        ]  # fmt: skip

    @property
    def _grids(self) -> list[HyperCommGrid]:
        return [self.grid] if self.companion is None else [self.grid, self.companion]

    def _meaning(self, name: str) -> str:
        """The name itself, or that of the group it is merely another name of."""
        definition = self._expected.definitions.get(_canonical(self._expected, name))
        return name if definition is None or definition.same_as is None else definition.same_as

    def _make_companion(self) -> HyperCommGrid | None:
        expected = self._expected
        rows = {
            made: entry
            for entry in expected.groups for made in (dict(entry.split or {}) or [entry.name])
        }  # fmt: skip
        wanted = {self._meaning(group.name) for group in MEGATRON_GROUPS}
        known = {name for name in wanted if _canonical(expected, name) in expected.definitions}
        missing = [name for name in sorted(known) if not _has(self.grid, name)]
        for name in rows:
            if name in self.grid.spec.definitions:
                _check_same(self.grid, expected, name)
        if not missing:
            return None
        spec = replace(
            expected,
            create=tuple(name for name in missing if name not in rows),
            groups=tuple(dict.fromkeys(rows[name] for name in missing if name in rows)),
            connect="none",
            share=self.grid.spec.share,
            ranks=self.grid.spec.ranks,
        )
        return HyperCommGrid(
            spec, name=f"{self.grid.name}/megatron", backend=self.grid.backend,
            timeout=self.grid.timeout,
        )  # fmt: skip

    def _grid_with(self, name: str) -> HyperCommGrid:
        for grid in self._grids:
            if _has(grid, name):
                return grid
        raise UnknownGroupError(f"grid {self.grid.name!r} has no group {name!r}")

    def has(self, name: str) -> bool:
        """Whether a group of this name was created, on this rank or others."""
        return any(_has(grid, name) for grid in self._grids)

    def is_member(self, name: str) -> bool:
        """Whether this rank is in the group; also False where there is none of this name."""
        return self.has(name) and self._grid_with(name).is_member(name)

    def find(self, name: str) -> ProcessGroup:
        """A group by its commgrid name."""
        return self._grid_with(name).get_group(name)

    def _levels(self) -> list[ProcessGroup]:
        found: list[ProcessGroup] = []
        while self.is_member(hierarchical(len(found))):
            found.append(self.find(hierarchical(len(found))))
        return found

    def _parts(self) -> dict[int, ProcessGroup]:
        found = {}
        members = len(self.grid.get_ranks("dp_cp")) if _has(self.grid, "dp_cp") else 0
        size = 2
        while 2 * size <= members:
            block = self.grid.get_local_rank("dp_cp") // size
            for name in (hybrid(size), hybrid(size, block)):
                if self.is_member(name):
                    found[size] = self.find(name)
            size *= 2
        return found

    def close(self) -> None:
        """Destroys what it made."""
        self.values = initial()
        companion, self.companion = self.companion, None
        if companion is not None:
            companion.destroy()
        if self.owns_grid and not self.grid.is_destroyed:
            self.grid.destroy()


def _canonical(spec: GridSpec, name: str) -> str:
    try:
        return spec.resolve_name(name)
    except UnknownGroupError:
        return name


def _has(grid: HyperCommGrid, name: str) -> bool:
    return _canonical(grid.spec, name) in grid.group_names


def _check_same(grid: HyperCommGrid, expected: GridSpec, name: str) -> None:
    """Refuses a group that has one of Megatron's names and other members."""
    mine, theirs = grid.spec.definitions[name], expected.definitions[name]
    size = grid.size(*mine.axes)
    pairs = [(d.region, {*d.axes}, d.positions(size), d.part) for d in (mine, theirs)]
    over = theirs.options.backend in (None, mine.options.backend)
    if pairs[0] != pairs[1] or (theirs.own and not mine.own) or not over:
        row = next(e for e in expected.groups if name in (e.name, *dict(e.split or ())))
        raise SpecError(
            f"groups.{name} of grid {grid.name!r} is not what Megatron means by it; expected "
            f"{row.to_dict()}, or another name"
        )


class Publisher(Protocol):
    """An installed megatron-core, whose variables of these names follow."""

    variables: dict[str, Any]
    names: frozenset[str]

    def publish(self, values: dict[str, Any] | None) -> None:
        """Shows these variables; None: a grid must be chosen first."""


class Store:
    """Every grid that has a Megatron state, and which of them is asked."""

    def __init__(self) -> None:
        self.states: list[MegatronState] = []  # those that getters answer for
        self._made: list[MegatronState] = []  # those and what only collections were made of
        self._watched: WeakSet[HyperCommGrid] = WeakSet()
        self._chosen: list[MegatronState] = []
        self._blank = initial()  # what is asked and set while there is no grid
        self._publisher: Publisher | None = None
        self._shown: dict[str, Any] | None = None

    # -- which grids there are ----------------------------------------------------------

    def state_of(self, grid: HyperCommGrid) -> MegatronState:
        """The state of a grid; made, with all its ranks, at the first call.

        Raises:
            MegatronStateError: the grid was destroyed.
            SpecError: Megatron cannot express the grid.
        """
        if grid.is_destroyed:
            raise MegatronStateError(
                f"grid {grid.name!r} was destroyed; give one that is alive, as "
                "commgrid.initialize makes it"
            )
        for state in self._made:
            if state.grid is grid:
                return state
        return self.keep(MegatronState(grid))

    def keep(self, state: MegatronState) -> MegatronState:
        """A new state, which goes when its grid does."""
        self._made.append(state)
        grid = state.grid
        if grid not in self._watched:
            self._watched.add(grid)
            grid.before_destroy(lambda: self._grid_goes(grid))
        return state

    def _grid_goes(self, grid: HyperCommGrid) -> None:
        for state in [state for state in self._made if state.grid is grid]:
            state.handed_out = False
            self.remove(state)

    def add(self, state: MegatronState) -> None:
        """A state that getters answer for from now on, alone or after a choice."""
        if state in self.states:
            return
        self._take_back()
        for name in _KEPT:  # what was set before there was a grid
            if state.values[name] is None:
                state.values[name] = self._blank[name]
        more = self._blank["_global_process_group_list"] or [None]
        state.values["_global_process_group_list"] += more[1:]
        self._blank = initial()
        self.states.append(state)
        self._show()

    def remove(self, state: MegatronState) -> None:
        """Getters do not answer for it any more; what it made goes, unless somebody keeps it."""
        if state in self.states:
            self.states.remove(state)
            self._show()
            state.values |= dict.fromkeys((*_KEPT, "_GLOBAL_MEMORY_BUFFER"))
        if state in self._made and not state.handed_out:
            self._made.remove(state)
            state.close()

    def clear(self) -> None:
        """Forgets what was set while there was no grid."""
        self._take_back()
        self._blank = initial()
        self._show()

    # -- which is asked -----------------------------------------------------------------

    @property
    def current(self) -> MegatronState | None:
        """The state that is asked; None: there is none.

        Raises:
            AmbiguousGridError: there are several and none was chosen.
            MegatronStateError: the one that was chosen is gone.
        """
        if self._chosen:
            chosen = self._chosen[-1]
            if chosen not in self.states:
                raise MegatronStateError(
                    f"grid {chosen.grid.name!r}, which megatron_adapter.active chose here, was "
                    "destroyed or uninstalled meanwhile; leave the `with`, or choose another"
                )
            return chosen
        if len(self.states) > 1:
            names = ", ".join(repr(state.grid.name) for state in self.states)
            raise AmbiguousGridError(
                f"grids {names} are alive; say whose groups are meant, as in `with "
                f"megatron_adapter.active({self.states[0].grid.name!r}):`"
            )
        return self.states[0] if self.states else None

    def variables(self, name: str) -> dict[str, Any]:
        """Where a variable is read and written now: in an installed megatron-core if it is there.

        Raises:
            MegatronStateError: see `current`.
        """
        state = self.current
        publisher = None if self._shown is None else self._publisher
        if publisher is not None and name in publisher.names:
            return publisher.variables
        return self._blank if state is None else state.values

    @contextmanager
    def choose(self, state: MegatronState) -> Iterator[None]:
        """Within, this state is asked, on all threads."""
        self._chosen.append(state)
        self._show()
        try:
            yield
        finally:
            self._chosen.remove(state)  # the same state may be there twice; either will do
            self._show()

    # -- an installed megatron-core -----------------------------------------------------

    def follow(self, publisher: Publisher | None) -> None:
        """Keeps the variables of an installed megatron-core; None: of none any more."""
        self._take_back()
        if self._publisher is not None and publisher is None:
            self._publisher.publish(initial())
        self._publisher = publisher
        self._show()

    def _take_back(self) -> None:
        """What Megatron's own functions have set belongs to the grid it was set for."""
        if self._publisher is not None and self._shown is not None:
            self._shown.update((n, self._publisher.variables[n]) for n in self._publisher.names)
        self._shown = None

    def _show(self) -> None:
        if self._publisher is None:
            return
        self._take_back()
        try:
            state = self.current
        except MegatronStateError:
            self._publisher.publish(None)
            return
        shown = self._blank if state is None else state.values
        self._publisher.publish(shown)
        self._shown = shown


STORE = Store()


@contextmanager
def active(grid: HyperCommGrid | str) -> Iterator[HyperCommGrid]:
    """Within, Megatron's getters answer for this grid, on all threads.

    Args:
        grid: a grid, or the name of one; every rank of it must come here the first time.

    Raises:
        SpecError: Megatron cannot express the grid.
        MegatronStateError: the grid was destroyed.

    Example:
        >>> import commgrid, megatron_adapter
        >>> import megatron_adapter.parallel_state as mpu
        >>> grid = commgrid.initialize()
        >>> with megatron_adapter.active(grid):
        ...     mpu.get_tensor_model_parallel_world_size()
        1
        >>> commgrid.shutdown()
    """
    found = get_grid(grid) if isinstance(grid, str) else grid
    state = STORE.state_of(found)
    STORE.add(state)
    with STORE.choose(state):
        yield found
