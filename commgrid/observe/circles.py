"""Ranks that wait for each other in a circle, and what has made it."""

from __future__ import annotations

from collections.abc import Iterator

from commgrid.observe.astray import on_another_group
from commgrid.observe.cycles import circle_through
from commgrid.observe.findings import Finding, said
from commgrid.observe.ledger import Ledger, Wait
from commgrid.observe.waiting import finding, skipped, waited

CIRCLES = ("deadlock", "crossed transfers")
"""What a circle is called."""


def circles(graph: dict[int, list[Wait]]) -> Iterator[list[Wait]]:
    """Circles of ranks that wait for each other, none of which has a rank of another."""

    def following(rank: int) -> Iterator[tuple[Wait, int]]:
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


def deadlock(ledger: Ledger, circle: list[Wait]) -> Finding:
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


def _went_past(ledger: Ledger, wait: Wait, circle: list[Wait]) -> bool:
    """Whether a rank of a circle left out, this time, what the one before it waits for."""
    return skipped(ledger, wait.rank, circle[circle.index(wait) - 1])
