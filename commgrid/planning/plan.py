"""GroupPlan: the groups one rank is in, and the communicators it will hold, in order.

A plan is a few integers per group name for a world of any size. All members
of a communicator list it at the same place relative to the others they share, so
running down the list cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from commgrid.errors import NotInGridError
from commgrid.layout.rank_text import describe_ranks
from commgrid.layout.ranks import Ranks, as_index
from commgrid.planning.group import GroupDef
from commgrid.planning.group_row import GroupOptions
from commgrid.planning.spec import GridSpec
from commgrid.wording import several

NCCL_GB = (0.4, 0.7)
"""Device memory reported for one connected NCCL communicator: 388 MiB to 688 MB on A100."""


@dataclass(frozen=True)
class PlannedCommunicator:
    """One communicator and all names it answers to.

    Args:
        names: in creation order; the first is the one it meets under.
        members: the ranks in it, in the grid's order.
        options: what it is created with.
        connect: whether it connects during start-up (one of size 1 never does).
    """

    names: tuple[str, ...]
    members: Ranks
    options: GroupOptions
    connect: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members as global ranks."""
        return tuple(self.members)

    @property
    def size(self) -> int:
        return len(self.members)


class RankGroups(Mapping[str, tuple[int, ...]]):
    """Group name to global ranks, each tuple made when asked for."""

    def __init__(self, members: Mapping[str, Ranks]) -> None:
        self._members = members

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return tuple(self._members[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


@dataclass(frozen=True)
class GroupPlan:
    """The groups that one rank creates.

    Args:
        spec: a resolved spec.
        rank: the global rank.

    Example:
        >>> spec = GridSpec.build(tp=2, pp=2).resolve(world_size=8)
        >>> plan = GroupPlan.for_rank(spec, rank=5)
        >>> plan.groups["tp"], plan.groups["pp"]
        ((4, 5), (1, 5))
        >>> [c.name for c in plan.communicators if c.connect]
        ['tp', 'dp', 'pp']
    """

    spec: GridSpec
    rank: int

    @classmethod
    def for_rank(cls, spec: GridSpec, rank: int) -> GroupPlan:
        """The plan of one rank.

        Raises:
            SpecError: the spec has open sizes; `resolve` it first.
            NotInGridError: the rank is not one of the grid's.
        """
        spec.check_resolved()
        number = as_index(rank)
        if number is None or number not in spec.grid_ranks:
            held = describe_ranks(spec.layout("dense").ranks)
            raise NotInGridError(f"rank {rank} is not in this grid, which covers {held}")
        return cls(spec, number)

    def __str__(self) -> str:
        """Two lines, however many ranks and groups there are.

        >>> print(GroupPlan.for_rank(GridSpec.build(tp=2, pp=2).resolve(8), 5))
        rank 5 of 8: tp 1, cp 0, dp 0, pp 1
          15 communicators for 15 names, 3 of which connect at start
        """
        held = several(len(self.communicators), "communicator")
        names = several(len(self.members), "name")
        connecting = sum(each.connect for each in self.communicators)
        return (
            f"rank {self.rank} of {self.spec.world_size:,}: {self.place}\n"
            f"  {held} for {names}, {connecting} of which connect at start"
        )

    @property
    def place(self) -> str:
        """The rank's coordinate in words."""
        return ", ".join(f"{axis} {index}" for axis, index in self.coordinate.items())

    @property
    def coordinate(self) -> dict[str, int]:
        """Axis to this rank's index, of every region."""
        found: dict[str, int] = {}
        for layout in self.spec.layouts.values():
            found.update(layout.coordinate(self.rank))
        return found

    @cached_property
    def members(self) -> dict[str, Ranks]:
        """Every created group this rank is in, with its ranks unexpanded."""
        found = {name: self.around(name) for name in self.created}
        return {name: ranks for name, ranks in found.items() if self.rank in ranks}

    def around(self, name: str) -> Ranks:
        """The group of a canonical name at this rank's place, created or not; after a pick the rank
        itself may not be in it."""
        definition = self.spec.definitions[name]
        return definition.ranks(self.spec.layout(definition.region), self.rank)

    @property
    def groups(self) -> RankGroups:
        """Every created group this rank is in: name to its global ranks, in order."""
        return RankGroups(self.members)

    @cached_property
    def created(self) -> dict[str, GroupDef]:
        """The names that are created on any rank, with their meaning."""
        names = self.spec.created_names
        return {name: d for name, d in self.spec.definitions.items() if name in names}

    @cached_property
    def communicators(self) -> tuple[PlannedCommunicator, ...]:
        """The distinct communicators this rank holds, in creation order."""

        def key(name: str) -> Hashable:
            definition = self.created[name]
            layout = self.spec.layouts[definition.region]
            return definition.key(self.spec.share, layout, self.rank)

        return self.communicators_by(key)

    def communicators_by(self, key: Callable[[str], Hashable]) -> tuple[PlannedCommunicator, ...]:
        """The communicators if names with equal keys share one, such as groups that exist already.

        Args:
            key: of each group this rank is in.

        Returns:
            In creation order.
        """
        names: dict[Hashable, list[str]] = {}
        for name in self.members:
            names.setdefault(key(name), []).append(name)
        for shared in names.values():  # names that share must have the same ranks
            assert len({self.members[name] for name in shared}) == 1, shared
            assert len({self.created[name].options for name in shared}) == 1, shared
        return tuple(
            PlannedCommunicator(
                names=tuple(shared),
                members=self.members[shared[0]],
                options=self.created[shared[0]].options,
                connect=len(self.members[shared[0]]) > 1
                and not self.spec.connecting_names.isdisjoint(shared),
            )
            for shared in names.values()
        )
