"""Circles of ranks or calls that wait for each other: the one search, and deadlocks of threads.

**When ranks wait for ever.** A wait is a thread's, and needs every rank that has not entered its
event. A rank may enter it from any of its threads. So a wait is for ever if all threads of one such
rank wait for ever. The waits for ever are the largest set in which each wait needs a rank all of
whose threads wait within the set. Any circle in it is a deadlock.

If only the threads that have issued calls on the wanted communicator wait within the set, another
thread may still come: that is a possible deadlock, and records cannot tell. With a thread left that
has issued such calls before, it is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from commgrid.call_analysis.finding import Finding
from commgrid.call_analysis.standing import Standing, Standings, finding
from commgrid.call_records.call import Call
from commgrid.layout.rank_text import describe_ranks as said

Node = TypeVar("Node", bound=Hashable)
Step = TypeVar("Step")


def circle_through(
    first: Node,
    following: Callable[[Node], Iterable[tuple[Step, Node]]],
    shorter_than: int = 0,
) -> list[tuple[Node, Step]]:
    """Find a shortest circle through a node, by a breadth-first search.

    Args:
        first: the node.
        following: of a node, the nodes that wait for it, or that it waits for, each with its step.
        shorter_than: how many nodes it may not have; 0: any number.

    Returns:
        Its nodes, the first one first, each with the step to the next; empty: there is none.

    Example:
        >>> waits = {0: [1], 1: [2, 3], 2: [3], 3: [0]}
        >>> circle_through(0, lambda rank: [(f"{rank} to {on}", on) for on in waits[rank]])
        [(0, '0 to 1'), (1, '1 to 3'), (3, '3 to 0')]
    """
    came: dict[Node, tuple[Node, Step]] = {}
    ring, length = [first], 0
    while ring and (not shorter_than or length + 1 < shorter_than):
        length += 1
        beyond: list[Node] = []
        for node in ring:
            for step, after in following(node):
                if after == first:
                    way = [(node, step)]
                    while way[-1][0] != first:
                        way.append(came[way[-1][0]])
                    return way[::-1]
                if after not in came:
                    came[after] = node, step
                    beyond.append(after)
        ring = beyond
    return []


def held_threads(waits: list[Standing]) -> dict[int, set[int]]:
    """By rank, the threads that wait for other ranks."""
    held: dict[int, set[int]] = {}
    for wait in waits:
        if wait.needs:
            held.setdefault(wait.rank, set()).add(wait.call.thread)
    return held


def for_ever(standings: Standings, waits: list[Standing], suspect: bool = False) -> list[Standing]:
    """The waits that cannot end.

    Args:
        standings: of all ranks.
        waits: of all ranks that count.
        suspect: whether only threads that have used the wanted communicator are asked.
    """
    left = [wait for wait in waits if wait.needs]
    while True:
        held = held_threads(left)

        def is_held(rank: int, wait: Standing, held: dict[int, set[int]] = held) -> bool:
            group = wait.call.group if suspect else None
            return rank in held and standings.threads(rank, group) <= held[rank]

        kept = [wait for wait in left if any(is_held(rank, wait) for rank in wait.needs)]
        if len(kept) == len(left):
            return left
        left = kept


def circles(waits: list[Standing]) -> Iterator[list[Standing]]:
    """Circles of ranks in waits that cannot end, none of which has a rank of another."""
    of_rank: dict[int, list[Standing]] = {}
    for wait in waits:
        of_rank.setdefault(wait.rank, []).append(wait)

    def following(rank: int) -> Iterator[tuple[Standing, int]]:
        for wait in of_rank.get(rank, ()):
            for on in wait.needs:
                yield wait, on

    seen: set[int] = set()
    for start in sorted(of_rank):
        circle = [] if start in seen else circle_through(start, following)
        if circle and seen.isdisjoint(rank for rank, _ in circle):
            seen.update(rank for rank, _ in circle)
            yield [wait for _, wait in circle]


def deadlock(standings: Standings, circle: list[Standing], is_sure: bool) -> Finding:
    """Explain a circle: which rank waits for which, and if one alone is unlike before."""
    ranks = tuple(wait.rank for wait in circle)
    first = min(circle, key=lambda each: each.call.began)
    steps = []
    for i, wait in enumerate(circle):
        after = circle[(i + 1) % len(circle)].rank
        steps.append(f"rank {wait.rank} waits in {wait} at {wait.call.where} for rank {after}")
    operations = {wait.call.operation for wait in circle}
    kind = "deadlock"
    if operations <= {"send", "recv"}:
        kind = "crossed transfers"
        if len(operations) == 1:
            steps.append(f"all of them {'send' if operations == {'send'} else 'receive'} first")
    places = tuple(wait.call.where for wait in circle)
    text = f"{said(ranks)} wait for each other: {'; '.join(steps)}"
    if not is_sure:
        text = f"cannot tell: {text}; other threads of theirs do not wait"
        return finding("possible deadlock", ranks, [first], places, text)
    odd = [i for i in range(len(circle)) if _is_unlike(standings, circle[i], circle[i - 1])]
    if len(odd) == 1:
        mine, skipped = circle[odd[0]], circle[odd[0] - 1]
        text += f"; rank {mine.rank} alone entered {mine} without {skipped} before it"
        return finding(kind, (mine.rank,), [skipped], places, text)
    return finding(kind, ranks, circle, places, text)


def _is_unlike(standings: Standings, wait: Standing, skipped: Standing) -> bool:
    """Whether a rank alone entered its event without the call that another one waits for.

    Compared are the calls that it, at its earlier turns, and the other members, at this turn, had
    issued before on communicators of the skipped one's name.
    """
    event = wait.event
    if event is None or event.is_message or skipped.call.is_transfer:
        return False
    mine, others = None, set()
    for rank in event.needs:
        if rank not in standings.traces:
            continue
        for turn, lead in _leads(standings, rank, event.channel, skipped.call):
            if (rank, turn) == (wait.rank, event.turn):
                mine = lead
            elif turn == event.turn or rank == wait.rank:
                others.add(lead)
    return mine is not None and others == {mine + 1}


def _leads(
    standings: Standings, rank: int, channel: tuple[int, ...], skipped: Call
) -> Iterator[tuple[int, int]]:
    """At each turn of a channel, how many more calls a rank had issued on the other one."""
    issued: int | None = None if standings.traces[rank].dropped else 0
    for side in standings.matched.sides[rank]:
        if side is None or side.event.is_message:
            continue
        if side.event.channel == channel:
            if issued is not None:
                yield side.event.turn, issued - side.event.turn
        elif side.call.group.first == skipped.group.first:
            issued = side.event.turn + 1
