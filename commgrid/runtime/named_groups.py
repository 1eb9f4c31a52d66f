"""Looking up this rank's groups by name: communicators, ranks, sizes and positions."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from commgrid.errors import GridDestroyedError, NotInGroupError, SpecError, UnknownGroupError
from commgrid.layout.ranks import Ranks
from commgrid.planning.plan import GroupPlan
from commgrid.planning.spec import GridSpec
from commgrid.runtime.sub_grid import SubGrid


class NamedGroups:
    """The groups of a plan, and where this rank is in them.

    Results are kept, so that the next look-up is an access to a dictionary. What is kept goes
    when the grid is destroyed, so that no look-up has to check whether it was.

    Args:
        name: the grid's.
        spec: its resolved spec.
        rank: this process's global rank.
    """

    def __init__(self, name: str, spec: GridSpec, rank: int) -> None:
        self._name, self._plan = name, GroupPlan.for_rank(spec, rank)
        self._destroyed = False
        self._groups: dict[str, ProcessGroup] = {}
        self._positions: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}

    def _forget(self) -> None:
        self._groups.clear()
        self._positions.clear()
        self._sizes.clear()
        self._ranks.clear()

    # -- what it is ---------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name it was given."""
        return self._name

    @property
    def spec(self) -> GridSpec:
        """The resolved spec."""
        return self._plan.spec

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self._plan.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the grid."""
        return self.spec.world_size

    @property
    def shape(self) -> dict[str, int]:
        """Axis to size, fastest-varying first, of every region."""
        return self.spec.shape

    @property
    def coordinate(self) -> dict[str, int]:
        """Axis to this rank's index, of every region."""
        return self._plan.coordinate

    @property
    def group_names(self) -> tuple[str, ...]:
        """Every created name, in creation order, also of groups this rank is not in."""
        return tuple(self._plan.created)

    # -- looking up ---------------------------------------------------------------------

    def get_group(self, name: str = "", *more: str) -> ProcessGroup:
        """The communicator of a group, by name or by axes in any order.

        Args:
            name: a name, such as `dp_cp`, or the first of several axes; none: the whole grid.
            *more: further axes: `get_group("cp", "dp")`.

        Raises:
            UnknownGroupError: no group has this name, or it was not created.
            NotInGroupError: this rank is not in it.
            GridDestroyedError: the grid was destroyed.
        """
        if more:
            name = "_".join((name, *more))
        try:
            return self._groups[name]
        except KeyError:
            pass
        canonical = self._resolve(name)
        if canonical not in self._groups:
            self._explain_missing(canonical)
        return self._groups.setdefault(name, self._groups[canonical])

    def _resolve(self, name: str) -> str:
        """The canonical name; the empty one means the whole grid."""
        if self._destroyed:
            raise GridDestroyedError(
                f"grid {self._name!r} was destroyed; call commgrid.initialize again"
            )
        return self.spec.resolve_name(name) if name else self.spec.resolve_name()

    def _explain_missing(self, name: str) -> None:
        if name not in self._plan.created:
            raise UnknownGroupError(
                f"group {name!r} of grid {self._name!r} was not created; add it to create="
            )
        members = tuple(self._plan.around(name))
        here = f"which here has ranks {members}" if members else "none of whose lists has it"
        raise NotInGroupError(
            f"rank {self.rank} is not in group {name!r}, {here}; ask grid.is_member({name!r}) first"
        )

    def is_member(self, *names: str) -> bool:
        """Whether this rank is in the group, so that `get_group` would find it.

        Raises:
            UnknownGroupError: no group has this name, or it was not created.
        """
        name = self._resolve("_".join(names))
        if name not in self._plan.created:
            self._explain_missing(name)
        return name in self._plan.members

    def _members(self, name: str) -> Ranks:
        """The group at this rank's place; with `pick=` this rank may not be in it."""
        canonical = self._resolve(name)
        found = self._plan.around(canonical)
        if not found:
            self._explain_missing(canonical)
        return found

    def size(self, *names: str) -> int:
        """The number of ranks in the group; without a name, in the grid.

        Raises:
            NotInGroupError: a group of listed ranks, and this rank is in no list.
        """
        name = names[0] if len(names) == 1 else "_".join(names)
        try:
            return self._sizes[name]
        except KeyError:
            pass
        return self._sizes.setdefault(name, len(self._members(name)))

    def get_local_rank(self, *names: str) -> int:
        """This rank's position in the group (DeviceMesh's name for the group rank).

        Raises:
            NotInGroupError: this rank is not in it.
        """
        name = names[0] if len(names) == 1 else "_".join(names)
        try:
            return self._positions[name]
        except KeyError:
            pass
        return self._positions.setdefault(name, self.get_ranks(name).index(self.rank))

    def get_ranks(self, *names: str) -> tuple[int, ...]:
        """The global ranks of this rank's group, in its order, which is the grid's.

        Raises:
            NotInGroupError: this rank is not in it.
        """
        name = names[0] if len(names) == 1 else "_".join(names)
        try:
            return self._ranks[name]
        except KeyError:
            pass
        members = tuple(self._members(name))
        if self.rank not in members:
            self._explain_missing(self._resolve(name))
        return self._ranks.setdefault(name, members)

    def get_all_ranks(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """All groups of that name over the whole grid, ordered by their first ranks' places in it;
        in a grid over a range, by first rank."""
        definition = self.spec.definitions[self._resolve("_".join(names))]
        return tuple(definition.all_ranks(self.spec.layout(definition.region)))

    # -- parts --------------------------------------------------------------------------

    def select(self, **fixed: int) -> SubGrid:
        """The sub-grid in which the given axes have the given index.

        Args:
            **fixed: axes of one region and their index: `select(dp=2)`.

        Raises:
            SpecError: an unknown axis, an index outside it, or axes of two regions.
        """
        self._resolve("")
        if "dp" in fixed and len(self.spec.words["dp"]) > 1:  # HSDP: the name of both its parts
            replica, shard = divmod(fixed.pop("dp"), self.shape["dp_shard"])
            fixed |= {"dp_replicate": replica, "dp_shard": shard}
        layouts = [lay for lay in self.spec.layouts.values() if set(fixed) <= set(lay.shape)]
        if not layouts:
            known = " | ".join(", ".join(layout.shape) for layout in self.spec.layouts.values())
            raise SpecError(
                f"select({', '.join(fixed)}): no region has all of these axes; the regions have "
                f"{known}"
            )
        kept = [layout.select(**fixed) for layout in layouts]
        return SubGrid(self.spec, self.rank, self.get_group, kept, fixed)

    # -- around a ring ------------------------------------------------------------------

    def next_rank(self, *names: str) -> int:
        """The global rank after this one in the group; the first after the last."""
        return self._step("_".join(names), 1)

    def prev_rank(self, *names: str) -> int:
        """The global rank before this one in the group; the last before the first."""
        return self._step("_".join(names), -1)

    def _step(self, name: str, by: int) -> int:
        try:
            ranks, position = self._ranks[name], self._positions[name]
        except KeyError:
            ranks, position = self.get_ranks(name), self.get_local_rank(name)
        return ranks[(position + by) % len(ranks)]

    def is_first(self, *names: str) -> bool:
        """Whether this rank is the first of its group."""
        return self.get_local_rank(*names) == 0

    def is_last(self, *names: str) -> bool:
        """Whether this rank is the last of its group."""
        return self.get_local_rank(*names) == self.size(*names) - 1
