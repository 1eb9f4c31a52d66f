"""Bytes that a training step sends, by group name, and over the links that leave a unit.

Each rank's bytes are those of the step's terms: over n ranks a ring's all-reduce of s bytes sends
2 s (n - 1) / n, its reduce-scatter and its all-gather s (n - 1) / n each (Patarasuk & Yuan 2009),
and an all-to-all of s bytes as much as one of these. Of each ring one rank in a unit sends on to
the next unit, so the link that leaves a unit carries as much as one rank sends, once for each group
that shares it. In an all-to-all every rank of the unit sends to the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from commgrid.advisor.step import StepCost, Term


@dataclass(frozen=True)
class Traffic:
    """Bytes sent in a step on the groups of one name.

    Args:
        name: of the groups.
        sent: bytes that a rank sends, of a stage with most layers.
        level: the place of the highest level that they cross, 0 within a node.
        link: bytes over the link that leaves a unit of the level below, of all groups that share
            it; 0 within a node.
    """

    name: str
    sent: float
    level: int
    link: float


def traffic(cost: StepCost) -> tuple[Traffic, ...]:
    """Bytes sent in a step by group name, the most first; names without any are left out."""
    found: dict[str, list[Term]] = {}
    for term in cost.terms:
        if term.sent > 0:
            found.setdefault(term.group, []).append(term)
    made = []
    for name, terms in found.items():
        level = max(cost.cluster.highest(term.spread) for term in terms)
        link = sum(_link(cost, term, level) for term in terms)
        made.append(Traffic(name, sum(term.sent for term in terms), level, link))
    return tuple(sorted(made, key=lambda each: -each.sent))


def _link(cost: StepCost, term: Term, level: int) -> float:
    """Bytes over the link of one unit below a level, of all groups that share it."""
    if level == 0 or cost.cluster.highest(term.spread) < level:
        return 0.0
    unit = cost.placement.held[level - 1]
    if term.collective == "all_to_all":
        units = term.spread[level]
        return term.sends * term.bytes * (units - 1) / units * unit
    return term.sent * unit / math.prod(term.spread[:level])
