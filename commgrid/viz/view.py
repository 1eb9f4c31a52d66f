"""Data of a grid's picture: ranks by node, groups by name, and groups across nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.crossing import Crossing, find_crossings
from commgrid.errors import SpecError
from commgrid.layout.rank_text import describe_ranks
from commgrid.layout.ranks import as_index, highest_rank
from commgrid.planning.spec import GridSpec
from commgrid.wording import several

DEFAULT_GPUS_PER_NODE = 8
MOST_RANKS = 200_000
"""Of the largest view, which looks at each."""


@dataclass(frozen=True)
class GridView:
    """A resolved spec, placed on nodes.

    Rank r is on node r // gpus_per_node, as launchers number ranks.

    Args:
        spec: resolved.
        gpus_per_node: ranks of a node; with a cluster its own number counts.
        names: the groups to show, in any spelling; empty: every axis of a size above 1, and the
            groups table.
        rank: the global rank to point out; None: none.
        cluster: what the nodes are of, which says how fast the links are that groups cross; None:
            not known.
        notes: further words on a name, such as its traffic in a step.

    Raises:
        SpecError: nodes of no ranks, a spec with open sizes or too many ranks, or a rank that is
            not the grid's.

    Example:
        >>> view = GridView(GridSpec.build(tp=2, pp=2).resolve(16))
        >>> view.shown, view.nodes[1], view.nodes_of("tp"), view.nodes_of("pp")
        (('tp', 'dp', 'pp'), (8, 9, 10, 11, 12, 13, 14, 15), 1, 2)
        >>> view.groups("tp")[:2]
        ((0, 1), (2, 3))
    """

    spec: GridSpec
    gpus_per_node: int = DEFAULT_GPUS_PER_NODE
    names: Sequence[str] = ()
    rank: int | None = None
    cluster: Cluster | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    _groups: dict[str, tuple[tuple[int, ...], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.spec.check_resolved()
        if self.spec.world_size > MOST_RANKS:
            raise SpecError(
                f"world_size={self.spec.world_size}: more than {MOST_RANKS:,} ranks are not shown "
                "one by one; `commgrid plan` describes any number"
            )
        size = as_index(self.gpus_per_node)
        if self.cluster is not None:
            node = self.cluster.unit_size(self.cluster.node_level)
            size = highest_rank(self.spec.grid_ranks) + 1 if math.isinf(node) else int(node)
        if size is None or size < 1:
            raise SpecError(
                f"gpus_per_node={self.gpus_per_node!r}: expected how many ranks a node has, as 8"
            )
        object.__setattr__(self, "gpus_per_node", size)
        if self.rank is not None and self.rank not in self.spec.grid_ranks:
            held = describe_ranks(self.spec.layout("dense").ranks)
            raise SpecError(f"rank {self.rank} is not in this grid, which covers {held}")

    @cached_property
    def shown(self) -> tuple[str, ...]:
        """The canonical names that are shown.

        Raises:
            SpecError: one is not created.
            UnknownGroupError: no group has it.
        """
        created = self.spec.created_names
        if self.names:
            asked = dict.fromkeys(self.spec.resolve_name(name) for name in self.names)
            for name in asked.keys() - created:
                raise SpecError(f"group {name!r} is not created; add it to create, or leave it out")
            return tuple(asked)
        axes = [axis for region in self.spec.regions for axis, n in region.numbers if n > 1]
        found = [n for n in dict.fromkeys((*axes, *self.spec.table_names)) if n in created]
        whole = self.spec.resolve_name()
        return tuple(found) or tuple(n for n in (whole, *self.spec.definitions) if n in created)[:1]

    @cached_property
    def nodes(self) -> dict[int, tuple[int, ...]]:
        """Node to the grid's ranks on it, both rising."""
        found: dict[int, list[int]] = {}
        for rank in sorted(self.spec.grid_ranks):
            found.setdefault(self.node_of(rank), []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return rank // self.gpus_per_node

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Every group of a name, each in the group's order."""
        if name not in self._groups:
            definition = self.spec.definitions[name]
            made = definition.all_ranks(self.spec.layout(definition.region))
            self._groups[name] = tuple(made)
        return self._groups[name]

    def numbers(self, name: str) -> dict[int, int]:
        """Rank to the number of its group; ranks in none are left out."""
        return {rank: i for i, group in enumerate(self.groups(name)) for rank in group}

    def nodes_of(self, name: str) -> int:
        """Over how many nodes a group of this name spreads at most."""
        return max(len({self.node_of(rank) for rank in group}) for group in self.groups(name))

    @cached_property
    def crossings(self) -> dict[str, Crossing]:
        """Over which links of the cluster each created name goes; nothing without a cluster."""
        return {} if self.cluster is None else find_crossings(self.spec, self.cluster)

    def describe(self, name: str) -> str:
        """A name's groups in words.

        >>> GridView(GridSpec.build(tp=2, pp=2).resolve(16)).describe("pp")
        'pp: 8 groups of 2, over 2 nodes each'
        """
        groups = self.groups(name)
        sizes = sorted({len(group) for group in groups})
        of = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        many = several(len(groups), "group")
        over = self.nodes_of(name)
        where = "within a node"
        if over > 1:
            where = f"over {over} nodes{' each' if len(groups) > 1 else ''}"
        return f"{name}: {many} of {of}, {where}{self._speed(name)}{self._note(name)}"

    def _note(self, name: str) -> str:
        return f"; {self.notes[name]}" if name in self.notes else ""

    def _speed(self, name: str) -> str:
        """The slowest links that a name's groups use, and how many groups share them."""
        crossing = self.crossings.get(name)
        if crossing is None or crossing.size == 1 or crossing.bandwidth is None:
            return ""
        told = f"; {crossing.bandwidth / 1e9:g} GB/s"
        if crossing.place == 0:
            return told
        unit = crossing.levels[crossing.place - 1].name
        return f"{told}, {several(crossing.at_once, 'group')} on a {unit}'s link"

    def as_text(self) -> str:
        """A table of the shown names."""
        spec = self.spec
        ranks, nodes = several(spec.world_size, "rank"), several(len(self.nodes), "node")
        lines = [f"{ranks} on {nodes}"]
        lines += [f"  {region}" for region in spec.regions]
        lines += ["", *(f"  {self.describe(name)}" for name in self.shown)]
        return "\n".join(lines)
