"""Circles of ranks or calls that wait for each other: the one search, and what made a circle."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from commgrid.call_analysis.event import Ledger, PendingCall
from commgrid.call_analysis.finding import Finding, said
from commgrid.call_analysis.wait_reason import finding, on_another_group, skipped, waited

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
                    return _way_back(first, node, step, came)
                if after not in came:
                    came[after] = node, step
                    beyond.append(after)
        ring = beyond
    return []


def _way_back(
    first: Node, last: Node, step: Step, came: dict[Node, tuple[Node, Step]]
) -> list[tuple[Node, Step]]:
    way = [(last, step)]
    while way[-1][0] != first:
        way.append(came[way[-1][0]])
    return way[::-1]


CIRCLES = ("deadlock", "crossed transfers")
"""What a circle is called."""


def circles(graph: dict[int, list[PendingCall]]) -> Iterator[list[PendingCall]]:
    """Circles of ranks that wait for each other, none of which has a rank of another."""

    def following(rank: int) -> Iterator[tuple[PendingCall, int]]:
        # Its first wait keeps a rank.
        for held in [w for w in graph.get(rank, ()) if w.absent or w.behind][:1]:
            for on in (*held.absent, *held.behind):
                yield held, on

    seen: set[int] = set()
    for start in sorted(graph):
        circle = [] if start in seen else circle_through(start, following)
        if circle and seen.isdisjoint(rank for rank, _ in circle):
            seen.update(rank for rank, _ in circle)
            yield [wait for _, wait in circle]


def deadlock(ledger: Ledger, circle: list[PendingCall]) -> Finding:
    for i, wait in enumerate(circle):
        astray = on_another_group(ledger, circle[(i + 1) % len(circle)].rank, wait, [wait])
        if astray is not None:
            return astray
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
    else:
        # Two that went past what the other waits for have another order, and none is to blame.
        past = [w for w in circle if _went_past(ledger, w, circle)]
        if len(past) == 1:
            (skipper,) = past
            before = circle[circle.index(skipper) - 1]
            text = (
                f"rank {skipper.rank} skipped {before} of {before.call.where}, for which rank "
                f"{before.rank} {waited(before)}: it went on to {skipper.call.group.first} "
                f"{skipper.call.operation} at {skipper.call.where}"
            )
            places = (skipper.call.where, before.call.where)
            return finding("skipped call", (skipper.rank,), [before], places, text)
    text = f"{said(ranks)} wait for each other: {'; '.join(steps)}"
    return finding(kind, ranks, [first], tuple(w.call.where for w in circle), text)


def _went_past(ledger: Ledger, wait: PendingCall, circle: list[PendingCall]) -> bool:
    """Whether a rank of a circle left out, this time, what the one before it waits for."""
    return skipped(ledger, wait.rank, circle[circle.index(wait) - 1])
