"""Agreement of an event's sides: what differs, which ranks are the odd ones, and how that is said.

The diagnosis of records, the check of programs and the live check ask the same functions. A value
that was not recorded agrees with every other. Lines decide nothing: ranks may make one call from
several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from commgrid.call_analysis.event import Channel, Event
from commgrid.call_analysis.finding import Finding
from commgrid.call_records.call import Call, Group
from commgrid.call_records.operations import Alike
from commgrid.layout.rank_text import describe_ranks as said

_KINDS = {
    "operation": "other operation", "root": "other root", "reduction": "other reduction",
    "dtype": "other dtype", "size": "other shape",
}  # fmt: skip


class Party(NamedTuple):
    """Ranks whose calls agree, and the properties that are recorded of any of them."""

    ranks: list[int]
    alike: Alike


def difference(one: Alike, other: Alike) -> str:
    """The kind of finding if two calls do not belong together; "": they agree.

    >>> mine = Alike("all_reduce", "float32", 8, None, "SUM")
    >>> difference(mine, mine._replace(dtype="int64")), difference(mine, mine._replace(dtype=""))
    ('other dtype', '')
    """
    for name, kind in _KINDS.items():
        here, there = getattr(one, name), getattr(other, name)
        if here != there and _is_known(name, here) and _is_known(name, there):
            return "other size" if (kind, one[0]) == ("other shape", "message") else kind
    return ""


def _is_known(name: str, value: object) -> bool:
    return value not in ("", None) and not (name == "size" and value == 0)


def agree(one: Call, other: Call) -> bool:
    """Whether two calls can belong to one event."""
    return not difference(one.alike, other.alike)


def parties(calls: Mapping[int, Call]) -> list[Party]:
    """Return the ranks whose calls agree, the largest party first; one party: all agree."""
    found: list[Party] = []
    for rank in sorted(calls):
        mine = calls[rank].alike
        for i, (ranks, theirs) in enumerate(found):
            if not difference(mine, theirs):
                known = {
                    name: value for name, value in mine._asdict().items() if _is_known(name, value)
                }
                found[i] = Party([*ranks, rank], theirs._replace(**known))
                break
        else:
            found.append(Party([rank], mine))
    return sorted(found, key=lambda party: -len(party.ranks))


def both(sides: Iterable[tuple[Sequence[int], str, str]]) -> str:
    """Calls that differ, in words.

    Args:
        sides: ranks, what they issue, and where.

    Example:
        >>> both([((0, 1), "barrier", "a.py:3 f"), ((2,), "all_reduce", "a.py:4 f")])
        'barrier at a.py:3 f on ranks 0-1, all_reduce at a.py:4 f on rank 2'
    """
    return ", ".join(
        f"{words}{f' at {where}' if where else ''} on {said(ranks)}"
        for ranks, words, where in sides
    )


def mismatches(events: Iterable[Event]) -> Iterator[Finding]:
    """The first of each communicator, and of each pair of ranks that send to each other."""
    channels: dict[Channel, dict[int, Event]] = {}
    for event in events:
        channels.setdefault(event.channel, {})[event.turn] = event
    for turns in channels.values():
        for turn in sorted(turns):
            found = parties(turns[turn].calls)
            if len(found) > 1:
                explain = _of_message if turns[turn].is_message else _of_collective
                yield explain(turns, turn, found)
                break
    for turns in channels.values():
        yield from _uneven(turns)


def _of_message(turns: Mapping[int, Event], turn: int, found: list[Party]) -> Finding:
    event = turns[turn]
    (source, target), calls = event.needs, event.calls
    one, other = calls[source], calls[target]
    kind = difference(found[0].alike, found[1].alike)
    text = (
        f"rank {source} sends what rank {target} does not expect ({kind}): {event.group.first} "
        f"send {turn} is {one.said()} at {one.where}, the recv is {other.said()} at {other.where}"
    )
    return _finding(kind, (source, target), event, (one, other), (), text)


def _of_collective(turns: Mapping[int, Event], turn: int, found: list[Party]) -> Finding:
    event = turns[turn]
    same = found[0].ranks
    odd = sorted(rank for party in found[1:] for rank in party.ranks)
    kind = _kind(turns, turn, odd[0], same[0])
    if kind == "extra call" and len(odd) == len(same):
        # If both kinds are as frequent, the rank that has continued has left a call out.
        kind, odd, same = "skipped call", same, odd
    kind = kind or difference(found[1].alike, found[0].alike)
    mine, theirs = event.calls[odd[0]], event.calls[same[0]]
    name = event.group.first
    if kind == "skipped call":
        text = (
            f"{said(odd)} skipped {name} {theirs.operation} {turn} of {theirs.where}, "
            f"which {said(same)} issued: the next call was {mine.said()} at {mine.where}"
        )
    elif kind == "extra call":
        text = (
            f"{said(odd)} issued {name} {mine.said()} {turn} at {mine.where}, which "
            f"{said(same)} did not: there it is {theirs.said()} at {theirs.where}"
        )
    else:
        text = (
            f"{said(odd)} and {said(same)} issued different calls as {name} {turn} ({kind}): "
            f"{both([(odd, mine.said(), mine.where), (same, theirs.said(), theirs.where)])}"
        )
    return _finding(kind, tuple(odd), event, (mine, theirs), tuple(same), text)


def _kind(turns: Mapping[int, Event], turn: int, odd: int, same: int) -> str:
    """The kind of finding that follows from later calls on the communicator; "": none does."""
    mine, theirs = (
        {t: each.calls[rank] for t, each in turns.items() if t >= turn and rank in each.calls}
        for rank in (odd, same)
    )
    next_here, next_there = mine.get(turn + 1), theirs.get(turn + 1)
    if (
        next_here
        and next_there
        and agree(mine[turn], next_there)
        and agree(next_here, theirs[turn])
    ):
        return "other order"
    if _is_one_behind(theirs, mine):
        return "extra call"
    return "skipped call" if _is_one_behind(mine, theirs) else ""


def _is_one_behind(one: Mapping[int, Call], other: Mapping[int, Call]) -> bool:
    """Whether each call of one rank is the next one of the other, as far as both have issued."""
    pairs = [(call, other[turn + 1]) for turn, call in one.items() if turn + 1 in other]
    return bool(pairs) and all(agree(*pair) for pair in pairs)


def _uneven(turns: Mapping[int, Event]) -> Iterator[Finding]:
    """The first all-to-all in which a rank sends another amount than the other side expects."""
    for turn in sorted(turns):
        event, count = turns[turn], len(turns[turn].needs)
        sizes = {side.rank: side.call.sizes for side in event.sides if side.call.sizes}
        rows = {rank: each for rank, each in sizes.items() if len(each) == 2 * count}
        for i, source in enumerate(event.needs if rows else ()):
            for j, target in enumerate(event.needs):
                if source in rows and target in rows:
                    given, expected = rows[source][j], rows[target][count + i]
                    if given != expected:
                        yield _of_pair(event, source, target, given, expected)
                        return


def _of_pair(event: Event, source: int, target: int, given: int, expected: int) -> Finding:
    one, other = event.calls[source], event.calls[target]
    text = (
        f"rank {source} sends {given:,} bytes to rank {target} in {event.group.first} "
        f"{one.operation} {event.turn} at {one.where}, which expects {expected:,} from it at "
        f"{other.where}"
    )
    return _finding("other size", (source, target), event, (one, other), (), text)


def _finding(
    kind: str, ranks: tuple[int, ...], event: Event, calls: Sequence[Call],
    waiting: tuple[int, ...], text: str,
) -> Finding:  # fmt: skip
    began = min(call.began for call in event.calls.values())
    group: Group = event.group
    return Finding(
        kind, ranks, group.name, group.ranks, calls[0].operation, event.turn,
        tuple(call.where for call in calls), waiting, began, None, text,
    )  # fmt: skip
