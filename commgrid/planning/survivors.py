"""The grid that is left: which sizes shrink when ranks are gone, and who takes which place.

    tp 2 · dp 4, rank 3 gone          tp 2 · dp 3 over (0, 1, 4, 5, 6, 7)
    dp 0   0  1                       dp 0   0  1
    dp 1   2  .   ── left out ──►     dp 1   4  5
    dp 2   4  5                       dp 2   6  7
    dp 3   6  7                       rank 2 is spare

The axis given as -1 shrinks, or dp, and pp where these cannot. A whole replica is
left out rather than everybody moved, so that as many ranks as possible keep what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from commgrid.errors import SpecError
from commgrid.layout.axis_names import sizes_text
from commgrid.layout.rank_text import describe_ranks
from commgrid.layout.ranks import as_ranks
from commgrid.planning.region import Region
from commgrid.planning.spec import GridSpec
from commgrid.planning.yaml_keys import BY_RANK

_REPLICAS = ("dp_replicate", "dp_shard", "dp")
Fits = Callable[[Mapping[str, int]], bool]


def refit(
    given: GridSpec,
    full: Mapping[str, int],
    last: GridSpec,
    here: Iterable[int],
    fits: Fits | None = None,
) -> GridSpec:
    """The grid of these sizes, or the largest that fits, over the ranks that are left.

    Args:
        given: as the user gave it, its -1 not filled.
        full: the sizes of the first grid; none grows beyond.
        last: the resolved grid before, which has told its ranks what they hold.
        here: the ranks that are left, of the grid before and others.
        fits: whether the job can use sizes, `{"tp": 2, …}`; None: any.

    Returns:
        A resolved spec; ranks of `here` that it leaves out are spare.

    Raises:
        SpecError: not even the smallest grid fits.

    Example:
        >>> given = GridSpec.build(tp=2)
        >>> last = given.resolve(8)
        >>> new = refit(given, last.shape, last, [0, 1, 2, 4, 5, 6, 7])
        >>> new.shape["dp"], tuple(new.grid_ranks)
        (3, (0, 1, 4, 5, 6, 7))
    """
    left = sorted(set(here))
    full = {axis: full[axis] for axis in given.regions[0].axes}
    why = ""
    for sizes in smaller(full, shrinking(given)):
        if math.prod(sizes.values()) > len(left) or (fits is not None and not fits(sizes)):
            continue
        changed = [axis for axis in sizes if sizes[axis] != last.shape[axis]]
        along = changed or shrinking(given)[:1]
        try:
            return _with_ranks(given, sizes, seats(last, sizes, along, left))
        except SpecError as error:  # such as experts that do not divide so many ranks
            why = why or f"; {error}"
    axes = " and ".join(shrinking(given))
    fixed = {axis: size for axis, size in full.items() if axis not in shrinking(given)}
    needs = sizes_text(fixed) or "its sizes"
    raise SpecError(
        f"no grid fits {describe_ranks(left)}: {axes} shrink to 1 at least, and {needs} need "
        f"{math.prod(fixed.values())} ranks"
        f"{', of sizes that fits= allows' if fits is not None else ''}{why}; make another grid "
        "with commgrid.initialize, or start with spare ranks"
    )


def shrinking(given: GridSpec) -> tuple[str, ...]:
    """The axes that may shrink, in turn: the one given as -1 or else those of dp, and then pp.

    >>> shrinking(GridSpec.build(tp=2, dp=4)), shrinking(GridSpec.build(dp_replicate=2, dp_shard=4))
    (('dp', 'pp'), ('dp_replicate', 'dp_shard', 'pp'))
    """
    numbers = dict(given.regions[0].numbers)
    open_axes = [axis for axis, size in given.regions[0].sizes if size == -1]
    replicas = [axis for axis in _REPLICAS if axis in numbers and axis not in open_axes]
    return tuple(dict.fromkeys([*open_axes, *replicas, *(["pp"] if "pp" in numbers else [])]))


def smaller(full: Mapping[str, int], axes: Sequence[str]) -> list[dict[str, int]]:
    """The sizes to try, the full ones first: as long as it goes one axis alone shrinks, then the
    next one too, and of these the larger grids come first.

    >>> [tuple(s.values()) for s in smaller({"tp": 2, "dp": 2, "pp": 3}, ["dp", "pp"])]
    [(2, 2, 3), (2, 1, 3), (2, 2, 2), (2, 2, 1), (2, 1, 2), (2, 1, 1)]
    """
    every = (
        {**full, **dict(zip(axes, sizes, strict=True))}
        for sizes in product(*(range(full[axis], 0, -1) for axis in axes))
    )
    later = axes[:0:-1]
    return sorted(
        every,
        key=lambda sizes: (
            [sizes[axis] != full[axis] for axis in later],
            -math.prod(sizes.values()),
        ),
    )


def seats(
    last: GridSpec, sizes: Mapping[str, int], along: Sequence[str], here: Sequence[int]
) -> list[int]:
    """Who takes which place, in the new grid's order.

    A row is what stays together, all ranks of one index along some axes. The fullest rows stay;
    their gaps are filled with ranks of the others at the same place in their row, then with ranks
    that were in no row, then with any.

    Args:
        last: the resolved grid before.
        sizes: of the new one.
        along: the axes whose sizes differ; if none does, the axes of the rows.
        here: the remaining ranks, ascending.
    """
    layout = last.layout("dense")
    alive = set(here)
    rows: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    for rank in last.grid_ranks:
        where = layout.coordinate(rank)
        row = rows.setdefault(tuple(where[axis] for axis in along), {})
        if rank in alive:
            row[tuple(where[axis] for axis in sizes if axis not in along)] = rank
    new_rows = list(product(*(range(sizes[axis]) for axis in along)))
    kept = sorted(sorted(rows, key=lambda at: (-len(rows[at]), at))[: len(new_rows)])
    others = [axis for axis in sizes if axis not in along]
    places = list(product(*(range(sizes[axis]) for axis in others)))
    taken = {
        (row, place): rows[at][place]
        for row, at in zip(new_rows, kept, strict=False) for place in places if place in rows[at]
    }  # fmt: skip
    seated = set(taken.values())
    free = [rank for rank in here if rank not in seated]
    at_place = {
        rank: place for row in rows.values() for place, rank in row.items() if rank not in seated
    }
    gaps = [gap for gap in product(new_rows, places) if gap not in taken]
    for wanted in ("same place", "new", "any"):
        for gap in [gap for gap in gaps if gap not in taken]:
            place = gap[1] if wanted == "same place" else None
            fitting = [rank for rank in free if wanted == "any" or at_place.get(rank) == place]
            if fitting:
                taken[gap] = fitting[0]
                free.remove(fitting[0])
    ordered, slowest = [], [*sizes][::-1]  # the first axis of `sizes` is the fastest
    for indices in product(*(range(sizes[axis]) for axis in slowest)):
        at = dict(zip(slowest, indices, strict=True))
        ordered.append(taken[tuple(at[a] for a in along), tuple(at[a] for a in others)])
    return ordered


def _with_ranks(given: GridSpec, sizes: Mapping[str, int], ranks: Sequence[int]) -> GridSpec:
    """The spec with these dense sizes over these ranks; other regions follow."""
    dense = given.regions[0]
    resized = Region(dense.name, tuple(sizes.items()), dense.inherited)
    regions = (resized, *given.regions[1:])
    return replace(given, regions=regions, ranks=as_ranks(ranks), place=BY_RANK).resolve(None)


@dataclass(frozen=True)
class Rebuilt:
    """Facts about a rebuild of a grid.

    Args:
        before: the sizes of the grid before.
        gone: ranks of the world that did not come.
        spares: ranks that came and have no part.
        seconds: from the call on this rank to the new grid.
        moved: whether ranks meet at a standby store now.
    """

    before: dict[str, int]
    gone: tuple[int, ...]
    spares: tuple[int, ...]
    seconds: float
    moved: bool
