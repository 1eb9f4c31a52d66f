"""Lists in sentences: counts, names, and the ranks around this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from commgrid.layout.ranks import Ranks, RankSet, runs_of

_RANKS = 12  # of a group that a line shows one by one
_RUNS = 2  # of neighbours that a line shows of a larger one, beside its own and the last
_NAMES = 16  # that a line lists


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


def around(members: Ranks, rank: int, is_far: Callable[[int], bool] | None = None) -> str:
    """The members with this rank in brackets; of many how they lie: their runs and steps.

    Args:
        members: of a group that this rank is in.
        rank: this one.
        is_far: which members get a `*`; of many none does.

    >>> from commgrid.layout.ranks import Mode, RankSet, RankTuple
    >>> around(RankTuple((1, 3, 5)), 3), around(RankTuple(range(40)), 37)
    ('1 [3] 5', '0-36 [37] 38-39 (40 ranks)')
    >>> around(RankTuple((1, 3, 5)), 3, lambda rank: rank > 4)
    '1 [3] 5*'
    >>> every_second_8 = RankSet(0, (Mode(8, 1), Mode(32, 16)))
    >>> around(every_second_8, 37), around(every_second_8, 0)
    ('0-7, 16-23, 32-36 [37] 38-39, … 496-503, step 16 (256 ranks)', \
'[0] 1-7, 16-23, … 496-503, step 16 (256 ranks)')
    """
    if len(members) <= _RANKS:
        far = is_far or (lambda _: False)
        return " ".join(f"[{r}]" if r == rank else f"{r}{'*' * far(r)}" for r in members)
    even = members.runs if isinstance(members, RankSet) else None
    if even is not None:  # of a set that may be very large
        starts, length = even
        own, count, steps = members.index(rank) // length, len(starts), starts.steps

        def run_at(place: int) -> tuple[int, int]:
            return starts[place], starts[place] + length - 1

    else:
        runs = list(runs_of(members))
        own = next(place for place, (first, last) in enumerate(runs) if first <= rank <= last)
        alike = len({last - first for first, last in runs}) == 1
        steps = {b[0] - a[0] for a, b in pairwise(runs)} if alike else set()
        count, run_at = len(runs), runs.__getitem__  # type: ignore[assignment]
    keep = sorted({*range(min(count, _RUNS)), own, count - 1})
    shown = ""
    for before, place in zip([-1, *keep], keep, strict=False):
        gap = "" if not shown else ", " if place == before + 1 else ", … "
        shown += gap + _run(run_at(place), rank if place == own else None)
    return f"{shown}{_apart(steps)} ({len(members):,} ranks)"


def _run(run: tuple[int, int], rank: int | None) -> str:
    """Neighbours; of a run that this rank is in, what comes before and after it."""
    first, last = run
    if rank is None:
        return str(first) if first == last else f"{first}-{last}"
    parts = [_run((first, rank - 1), None)] if first < rank else []
    parts.append(f"[{rank}]")
    return " ".join(parts + ([_run((rank + 1, last), None)] if rank < last else []))


def _apart(steps: set[int]) -> str:
    """How far runs that are alike are apart, where two numbers say it."""
    apart = sorted(steps)
    if not apart or apart[0] < 0 or len(apart) > 2:
        return ""
    return f", step {apart[0]}" if len(apart) == 1 else f", steps {apart[0]} and {apart[1]}"
