"""What a spec and a plan print as: a few lines, whatever the size of the world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commgrid.planning.ranks import Ranks, RankTuple

if TYPE_CHECKING:
    from commgrid.planning.plan import GroupPlan
    from commgrid.planning.spec import GridSpec

_RANKS = 12  # of a group that a line shows
_NAMES = 16  # that a line lists


def of_spec(spec: GridSpec) -> str:
    """The sizes of every region, and what is created of it."""
    head = "grid of any number of ranks"
    if spec.ranks is not None:
        described = RankTuple(spec.ranks).describe()
        head = f"grid of {several(len(spec.ranks), 'rank')}: {described.split(' ', 1)[1]}"
    elif spec.is_resolved:
        head = f"grid of {several(spec.world_size, 'rank')}"
    choices = [f"{key}={listed(getattr(spec, key))}" for key in ("create", "connect", "share")]
    lines = [head, *(f"  {region}" for region in spec.regions), f"  {', '.join(choices)}"]
    if spec.groups:
        lines.append(f"  groups: {listed(spec.table_names)}")
    return "\n".join(lines)


def of_plan(plan: GroupPlan) -> str:
    """One rank's coordinate, and how much it has to create."""
    held = several(len(plan.communicators), "communicator")
    names = several(len(plan.members), "name")
    connecting = sum(each.connect for each in plan.communicators)
    return (
        f"rank {plan.rank} of {plan.spec.world_size:,}: {where(plan)}\n"
        f"  {held} for {names}, {connecting} of which connect at start"
    )


def where(plan: GroupPlan) -> str:
    """The rank's coordinate in words."""
    return ", ".join(f"{axis} {index}" for axis, index in plan.coordinate.items())


def several(count: int, what: str) -> str:
    """A number of something.

    >>> several(1, "rank"), several(16384, "rank")
    ('1 rank', '16,384 ranks')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"


def listed(names: str | Sequence[str]) -> str:
    """Names with commas, of many the first.

    >>> listed(["dp", "tp"]), listed("all"), listed([str(i) for i in range(90)])[-25:]
    ('dp, tp', 'all', '3, 14, 15, … (90 of them)')
    """
    if isinstance(names, str):
        return names
    more = [f"… ({len(names)} of them)"] if len(names) > _NAMES else []
    return ", ".join([*names[:_NAMES], *more])


def around(members: Ranks, rank: int) -> str:
    """The members with this rank in brackets; of many only the first, this one and the last.

    >>> around(RankTuple(range(40)), 37)
    '0 1 2 3 4 5 6 7 8 9 10 11 … [37] … 39 (40 ranks)'
    """
    last, position = len(members) - 1, members.index(rank)
    keep = sorted({*range(min(len(members), _RANKS)), position, last})
    shown = []
    for before, index in zip([-1, *keep], keep, strict=False):
        shown += ["…"] if index > before + 1 else []
        shown.append(f"[{rank}]" if index == position else str(members[index]))
    count = f" ({len(members):,} ranks)" if len(members) > _RANKS else ""
    return " ".join(shown) + count
