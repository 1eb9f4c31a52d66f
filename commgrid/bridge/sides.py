"""The two sides of a bridge: which ranks of a grid hold which part of the tensor, and as copies.

A tensor leaves a grid from its last pipeline stage, and arrives at the first one of another. Along
some groups of the stage it is cut; along the other axes ranks hold copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commgrid.bridge.plan import BridgeSide, Place, even, one_by_one
from commgrid.context_parallel.ranges import Ranges
from commgrid.context_parallel.sharding import SequenceSharding
from commgrid.errors import ShapeError, SpecError
from commgrid.layout.axis_names import nearest
from commgrid.planning.spec import GridSpec

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"


@dataclass(frozen=True)
class Cut:
    """Along which dim of a tensor the ranks of a group hold parts of it.

    Args:
        dim: of the tensor; from the end where negative.
        group: a group's name, such as `dp`, `cp` or `dp_cp`.
        sharding: which positions each of its ranks has: `"contiguous"`, `"zigzag"` (Megatron-LM's,
            which balances causal attention) or a `SequenceSharding`, which is of one length.
    """

    dim: int
    group: str
    sharding: SequenceSharding | str = CONTIGUOUS

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            raise SpecError(f"dim={self.dim!r}: expected the number of a tensor's dim")
        named = self.sharding in (CONTIGUOUS, ZIGZAG)
        if not named and not isinstance(self.sharding, SequenceSharding):
            raise SpecError(
                f"sharding={self.sharding!r}: expected 'contiguous', 'zigzag' or a SequenceSharding"
            )

    def held(self, total: int, lengths: Sequence[int] | None, size: int) -> tuple[Ranges, ...]:
        """The positions of each rank of the group.

        Args:
            total: length of the whole dim.
            lengths: of each rank's tensor; None: as this cut gives them.
            size: how many ranks.

        Raises:
            ShapeError: a length that the sharding does not have, or lengths that are not its.
        """
        if self.sharding == CONTIGUOUS:
            return even(total, size) if lengths is None else one_by_one(lengths)
        try:
            sharding = (
                self.sharding
                if isinstance(self.sharding, SequenceSharding)
                else SequenceSharding.zigzag(total, size)
            )
        except SpecError as error:
            raise ShapeError(
                f"dim {self.dim} cannot be cut as its sharding says: {error}"
            ) from error
        if sharding.length != total or (lengths or sharding.local_lengths) != tuple(
            sharding.local_lengths
        ):
            has = f"{total} positions" + (f" as {tuple(lengths)}" if lengths else "")
            raise ShapeError(
                f"dim {self.dim} has {has} over group {self.group!r}, its sharding expects "
                f"{sharding.length} as {sharding.local_lengths}; make the sharding of these lengths"
            )
        return sharding.ranges

    def to_dict(self) -> dict[str, Any]:
        """The arguments that must be equal on all ranks."""
        said = self.sharding if isinstance(self.sharding, str) else self.sharding.digest
        return {"dim": self.dim, "group": self.group, "sharding": said}


@dataclass(frozen=True)
class GridSide:
    """One side of a bridge: its cuts, and the ranks of its stage.

    Args:
        cuts: along which the tensor is cut.
        sizes: of each, its group's number of ranks.
        side: the ranks of the stage; their places are along the cuts.
    """

    cuts: tuple[Cut, ...]
    sizes: tuple[int, ...]
    side: BridgeSide

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the stage, in the grid's order."""
        return tuple(self.side.places)


def check_axes(
    copies: Sequence[str], partial: Sequence[str] | None, source: GridSpec, target: GridSpec
) -> None:
    """Refuse names of axes that neither grid has, which would have no effect.

    Raises:
        SpecError: copies= names an axis of neither grid, or partial= none of the target's.
    """
    theirs, all_axes = _axes(target), list(dict.fromkeys([*_axes(source), *_axes(target)]))
    for key, given, known in (("partial", partial or (), theirs), ("copies", copies, all_axes)):
        for axis in given:
            if axis not in known and (key, axis) != ("copies", "tp"):  # tp is its default
                raise SpecError(
                    f"{key}={tuple(given)}: {axis!r} is no axis of "
                    f"{'the target' if key == 'partial' else 'either grid'}, only "
                    f"{', '.join(known)}{nearest(str(axis), known)}"
                )


def _axes(spec: GridSpec) -> list[str]:
    return list(dict.fromkeys(axis for region in spec.regions for axis in region.axes))


def grid_side(
    what: str,
    spec: GridSpec,
    cuts: Sequence[Cut],
    *,
    stage: int,
    copies: Sequence[str],
    partial: Sequence[str] | None,
) -> GridSide:
    """The ranks of a grid's stage, and which part of a tensor each has.

    Args:
        what: `source` or `target`, for messages.
        spec: the grid's, resolved.
        cuts: of this side.
        stage: the pipeline stage; the last is -1.
        copies: axes along which ranks may hold copies.
        partial: those along which each copy has its own part of the gradient; None: all but
            `tp`.

    Raises:
        SpecError: a group of some ranks only, groups of two regions or along one axis, a stage that
            there is not, an axis that is neither cut nor named as one of copies, or a sharding over
            another number of ranks.
        UnknownGroupError: the spec has no such group.
    """
    names = [spec.resolve_name(cut.group) for cut in cuts]
    definitions = [spec.definitions[name] for name in names]
    for cut, definition in zip(cuts, definitions, strict=True):
        if not definition.is_whole:
            raise SpecError(
                f"{what}: group {cut.group!r} has only some of the ranks along its axes; cut along "
                "one that has all, such as dp"
            )
    regions = {definition.region for definition in definitions}
    if len(regions) > 1:
        raise SpecError(f"{what}: groups {', '.join(names)} are of {len(regions)} regions; "
                        "expected groups of one")  # fmt: skip
    layout = spec.layout(regions.pop())
    along = [axis for definition in definitions for axis in definition.axes]
    if len(set(along)) < len(along) or "pp" in along:
        raise SpecError(
            f"{what}: groups {', '.join(names)} run along {', '.join(along)}; expected each axis "
            "once, and not pp, whose first or last stage is on a bridge"
        )
    shape = layout.shape
    stages = shape.get("pp", 1)
    if type(stage) is not int or not -stages <= stage < stages:
        raise SpecError(f"{what}_stage={stage!r}: expected a stage of {stages}, or -1 for the last")
    rest = [axis for axis in shape if axis not in along and axis != "pp" and shape[axis] > 1]
    unsaid = [axis for axis in rest if axis not in copies]
    if unsaid:
        wider = "_".join((*definitions[0].axes, unsaid[0]))
        other = f"{what}_sequence=Cut(dim, {unsaid[0]!r}), or " if len(cuts) == 1 else ""
        raise SpecError(
            f"{what}: the ranks along {', '.join(unsaid)} hold parts or copies, and nothing says "
            f"which: cut along it ({other}group={wider!r}), or name it in "
            f"copies={(*copies, unsaid[0])!r}"
        )
    parted = [a for a in rest if (a != "tp" if partial is None else a in partial)]
    places: dict[int, Place] = {}
    parts: dict[int, int] = {}
    for rank in layout.ranks:
        at = layout.coordinate(rank)
        if at.get("pp", 0) != stage % stages:
            continue
        places[rank] = tuple(
            definition.ranks(layout, rank).index(rank) for definition in definitions
        )
        parts[rank] = 0
        for axis in parted:
            parts[rank] = parts[rank] * shape[axis] + at[axis]
    sizes = tuple(definition.size(shape) for definition in definitions)
    for cut, size in zip(cuts, sizes, strict=True):
        if isinstance(cut.sharding, SequenceSharding) and cut.sharding.parts != size:
            raise SpecError(
                f"{what}: the sharding of dim {cut.dim} is over {cut.sharding.parts} ranks, group "
                f"{cut.group!r} has {size}; give it parts={size}"
            )
    return GridSide(tuple(cuts), sizes, BridgeSide(places, parts))
