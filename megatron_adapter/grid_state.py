"""Megatron's parallel state as one grid gives it: which groups, ranks and numbers.

Megatron-core keeps its state in some sixty variables of one module; `MegatronState` holds the same
variables for one grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed import ProcessGroup

from commgrid.errors import SpecError, UnknownGroupError
from commgrid.planning.group_row import GroupEntry
from commgrid.planning.spec import GridSpec
from commgrid.runtime.grid import HyperCommGrid
from megatron_adapter.names import MEGATRON_GROUPS, hierarchical_name, hybrid_name
from megatron_adapter.sizes_of import sizes_of

_OVERRIDES = tuple(
    f"_MPU_{what}_{number}"
    for what in (
        "TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL", "DATA_PARALLEL",
        "EXPERT_MODEL_PARALLEL", "EXPERT_TENSOR_PARALLEL",
    )
    for number in ("WORLD_SIZE", "RANK")
)  # fmt: skip
VIRTUAL_STAGES = (
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
)
_OTHERS = (
    *VIRTUAL_STAGES,
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", "_HYBRID_DP_CP_GROUPS", "_GLOBAL_MEMORY_BUFFER",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER", "_global_process_group_list",
)  # fmt: skip
KEPT = (*_OVERRIDES, *VIRTUAL_STAGES)
"""Variables that initialization leaves alone if they were set before."""

VARIABLES = (
    *(group.state for group in MEGATRON_GROUPS),
    *(group.ranks for group in MEGATRON_GROUPS if group.ranks is not None),
    *_OVERRIDES,
    *_OTHERS,
)
"""Every variable of `megatron.core.parallel_state` that is state, in one release or another."""


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
        self._names = {
            group.state: self._meaning(group.name_on(self._expected.words))
            for group in MEGATRON_GROUPS
        }
        self.companion = None if owns_grid else self._make_companion()
        self._later: list[HyperCommGrid] = []  # with groups that were asked for afterwards
        self.handed_out = False  # whether somebody keeps its groups, as in a collection
        self.values = initial()
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def _fill(self) -> None:
        for group in MEGATRON_GROUPS:
            name = self._names[group.state]
            ranks = [self.grid.rank]
            if self.is_member(name):
                self.values[group.state] = self.find(name)
                ranks = list(self._grid_with(name).get_ranks(name))
            if group.ranks is not None and self.values[group.state] is not None:
                self.values[group.ranks] = ranks
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
        wanted = {*self._names.values()}
        known = {name for name in wanted if _canonical(expected, name) in expected.definitions}
        missing = [name for name in sorted(known) if not _has(self.grid, name)]
        for name in rows:
            if name in self.grid.spec.definitions:
                _check_same(self.grid, expected, name)
        if not missing:
            return None
        entries = dict.fromkeys(rows[name] for name in missing if name in rows)
        return self._make("megatron", entries, [name for name in missing if name not in rows])

    def _make(
        self, name: str, groups: Iterable[GroupEntry], create: Iterable[str] = ()
    ) -> HyperCommGrid:
        """Another grid over the same ranks, with rows of a groups table and groups of axes."""
        grid = self.grid
        spec = replace(
            self._expected, create=tuple(create), groups=tuple(groups), connect="none",
            share=grid.spec.share, ranks=grid.spec.ranks,
        )  # fmt: skip
        return HyperCommGrid(
            spec, name=f"{grid.name}/{name}", backend=grid.backend, timeout=grid.timeout
        )

    def _grid_with(self, name: str) -> HyperCommGrid:
        for grid in self._grids:
            if _has(grid, name):
                return grid
        raise UnknownGroupError(f"grid {self.grid.name!r} has no group {name!r}")

    def is_member(self, name: str) -> bool:
        """Whether this rank is in the group; also False where there is none of this name."""
        return any(_has(grid, name) and grid.is_member(name) for grid in self._grids)

    def find(self, name: str) -> ProcessGroup:
        """A group by its commgrid name."""
        return self._grid_with(name).get_group(name)

    def _levels(self) -> list[ProcessGroup]:
        found: list[ProcessGroup] = []
        while self.is_member(hierarchical_name(len(found))):
            found.append(self.find(hierarchical_name(len(found))))
        return found

    def _parts(self) -> dict[int, ProcessGroup]:
        found = {}
        members = len(self.grid.get_ranks("dp_cp")) if _has(self.grid, "dp_cp") else 0
        size = 2
        while 2 * size <= members:
            block = self.grid.get_local_rank("dp_cp") // size
            for name in (hybrid_name(size), hybrid_name(size, block)):
                if self.is_member(name):
                    found[size] = self.find(name)
            size *= 2
        return found

    def create(self, rows: Mapping[str, Mapping[str, Any]]) -> list[ProcessGroup]:
        """Further groups, which live as long as the state; every rank of the grid calls it.

        Args:
            rows: of a groups table, made of combinations of axes.
        """
        made = self._make("more", [GroupEntry.parse(name, row) for name, row in rows.items()])
        self._later.append(made)
        self.handed_out = True
        groups = [made.get_group(name) for name in rows]
        self.values["_global_process_group_list"] += groups
        return groups

    def close(self) -> None:
        """Destroys what it made."""
        self.values = initial()
        companion, self.companion = self.companion, None
        later, self._later = self._later, []
        for made in [companion, *later]:
            if made is not None:
                made.destroy()
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
    if name in ("gtp", "egtp") and mine.size(grid.spec.shape) == theirs.size(expected.shape) == 1:
        return  # an axis of size 1 that the grid has, and a part of tp
    size = grid.size(*mine.axes)
    pairs = [(d.region, {*d.axes}, d.places(size), d.part) for d in (mine, theirs)]
    over = theirs.options.backend in (None, mine.options.backend)
    if pairs[0] != pairs[1] or (theirs.own and not mine.own) or not over:
        row = next(e for e in expected.groups if name in (e.name, *dict(e.split or ())))
        raise SpecError(
            f"groups.{name} of grid {grid.name!r} is not what Megatron means by it; expected "
            f"{row.to_dict()}, or another name"
        )
