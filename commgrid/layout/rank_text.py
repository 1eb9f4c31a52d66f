"""Lists of ranks as short text: for people, and for what thousands of ranks read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from commgrid.layout.ranks import RankSet, RankTuple, parse_ranks, runs_of

_NAMED_RUNS = 16
_SHORT = 64


def pack(ranks: Iterable[int]) -> str:
    """A set of ranks as text: runs, or the digits of a bit mask where these are shorter.

    >>> pack([0, 1, 2, 5, 8, 10, 12, 14]), pack([])
    ('0-2,5,8-14/2', '')
    """
    ordered = sorted(set(ranks))
    if not ordered:
        return ""
    text = _as_spans(ordered)
    if len(text) <= max(_SHORT, ordered[-1] // 4 + 2):
        return text
    mask = 0
    for rank in ordered:
        mask |= 1 << rank
    return f"x{mask:x}"


def unpack(text: str) -> set[int]:
    """The ranks that `pack` made a text of."""
    if text.startswith("x"):
        bits = bin(int(text[1:], 16))[:1:-1]
        return {rank for rank, bit in enumerate(bits) if bit == "1"}
    return set(parse_ranks(text)) if text else set()


def pack_order(order: Sequence[int]) -> str:
    """The numbers 0 to n - 1 in some order as text: in full, or after `~` by their places.

    Thousands of ranks that a scheduler deals out to hosts one by one take a few runs either way:

    >>> pack_order([0, 4, 1, 5, 2, 6, 3, 7]), pack_order([2, 3, 0, 1])
    ('~0-6/2,1-7/2', '2-3,0-1')
    """
    places = sorted(range(len(order)), key=order.__getitem__)
    return min(_as_spans(order), f"~{_as_spans(places)}", key=len)


def unpack_order(text: str) -> list[int]:
    """What `pack_order` made a text of."""
    listed = list(parse_ranks(text.removeprefix("~")))
    return sorted(range(len(listed)), key=listed.__getitem__) if text.startswith("~") else listed


def _as_spans(ordered: Sequence[int]) -> str:
    """Ranks in their order as evenly spaced runs, which `parse_ranks` reads; only neighbours make a
    run of two."""
    spans: list[str] = []
    at = 0
    while at < len(ordered):
        step = ordered[at + 1] - ordered[at] if at + 1 < len(ordered) else 1
        end = at
        while end + 1 < len(ordered) and ordered[end + 1] - ordered[end] == step:
            end += 1
        if step < 1 or (step > 1 and end - at < 2):
            end, step = at, 1
        span = str(ordered[at]) if at == end else f"{ordered[at]}-{ordered[end]}"
        spans.append(span if step == 1 else f"{span}/{step}")
        at = end + 1
    return ",".join(spans)


def listed_ranks(ranks: Iterable[int]) -> str:
    """Ranks with neighbours joined; of many runs the first ones, and how many ranks there are.

    Args:
        ranks: whose order counts in a `RankTuple`; of a `RankSet` or a range any number.

    >>> listed_ranks({0, 4, 1, 2}), listed_ranks(RankTuple((4, 0, 1))), listed_ranks(range(10**12))
    ('0-2, 4', '4, 0-1', '0-999999999999')
    """
    members = ranks if isinstance(ranks, RankSet | RankTuple | range) else sorted(set(ranks))
    runs = list(islice(runs_of(members), _NAMED_RUNS + 1))
    text = ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs[:_NAMED_RUNS])
    more = f", … ({len(members)} ranks in all)" if len(runs) > _NAMED_RUNS else ""
    return f"{text}{more}"


def describe_ranks(ranks: Iterable[int]) -> str:
    """`listed_ranks` after the word.

    >>> describe_ranks([0, 1, 2, 4]), describe_ranks([3]), describe_ranks([])
    ('ranks 0-2, 4', 'rank 3', 'no rank')
    """
    text = listed_ranks(ranks)
    return f"rank{'' if text.isdigit() else 's'} {text}" if text else "no rank"
