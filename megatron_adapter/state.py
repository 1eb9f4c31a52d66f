"""The grids that Megatron's parallel state answers for.

`STORE` knows every grid that has such a state, which of them is asked, and keeps the variables of
an installed megatron-core the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid
from megatron_adapter.errors import AmbiguousGridError, MegatronStateError
from megatron_adapter.grid_state import KEPT, VIRTUAL_STAGES, MegatronState, initial


class Publisher(Protocol):
    """An installed megatron-core, whose variables of these names follow."""

    variables: dict[str, Any]
    names: frozenset[str]

    def publish(self, values: dict[str, Any] | None) -> None:
        """Shows these variables; None: a grid must be chosen first."""


class Store:
    """Every grid that has a Megatron state, and which of them is asked."""

    def __init__(self) -> None:
        self.states: list[MegatronState] = []  # of grids that getters answer for
        self._made: list[MegatronState] = []  # those and what only collections were made of
        self._watched: WeakSet[HyperCommGrid] = WeakSet()
        self._chosen: list[MegatronState] = []
        self._blank = initial()  # what is asked and set while there is no grid
        self._outside = False  # whether virtual stages in it are of a grid without this rank
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
        if self._outside:  # of a grid that this rank is not in
            self._blank |= dict.fromkeys(VIRTUAL_STAGES)
        self._outside = False
        for name in KEPT:  # what was set before there was a grid
            if state.values[name] is None:
                state.values[name] = self._blank[name]
        more = self._blank["_global_process_group_list"] or [None]
        state.values["_global_process_group_list"] += more[1:]
        self._blank = initial()
        self.states.append(state)
        self._show()

    def remove(self, state: MegatronState) -> None:
        """Getters do not answer for it any more; what it made goes, unless it is still in use."""
        if state in self.states:
            self.states.remove(state)
            self._show()
            state.values |= dict.fromkeys((*KEPT, "_GLOBAL_MEMORY_BUFFER"))
        if state in self._made and not state.handed_out:
            self._made.remove(state)
            state.close()

    def clear(self) -> None:
        """Forgets what was set while there was no grid."""
        self._take_back()
        self._blank = initial()
        self._show()

    def set_virtual_stages(self, count: int | None) -> None:
        """The variables of a rank outside the grid, if nothing else is set.

        Not where the rank is in another grid: its stages are its own.
        """
        if count is not None and not self.states:
            self._take_back()
            self._blank |= zip(VIRTUAL_STAGES, (0, count), strict=True)
            self._outside = True
            self._show()

    # -- which is asked -----------------------------------------------------------------

    @property
    def current(self) -> MegatronState | None:
        """The state that is asked; None: there is none.

        Raises:
            AmbiguousGridError: there are several and none was chosen.
            MegatronStateError: the chosen grid is gone.
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
