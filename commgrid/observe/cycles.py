"""The one search for ranks or calls that wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

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
