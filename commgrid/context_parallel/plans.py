"""Plans as plain numbers: keys to send, keys to receive, rectangles to compute, heads to share."""

from __future__ import annotations

from dataclasses import dataclass

from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.ranges import Ranges, count, runs_of
from commgrid.context_parallel.tiles import Tile, needed, tiles


@dataclass(frozen=True)
class Step:
    """One step of a ring.

    Args:
        source: rank whose keys this step computes with.
        target: rank that computes with this rank's keys meanwhile.
        send: rows of this rank's keys that the target needs.
        receive: how many rows come from the source.
        tiles: where this rank's queries attend them.
    """

    source: int
    target: int
    send: Ranges
    receive: int
    tiles: tuple[Tile, ...]


def ring_steps(
    ranges: tuple[Ranges, ...], documents: tuple[int, ...], rank: int, mask: Mask
) -> tuple[Step, ...]:
    """The steps of a rank; the first has its own keys.

    Args:
        ranges: what each rank holds.
        documents: the boundaries.
        rank, mask: whose, and of what attention.

    Example:
        >>> zigzag = (((0, 2), (6, 8)), ((2, 6),))
        >>> steps = ring_steps(zigzag, (0, 8), 1, Mask())
        >>> [(step.source, step.send, step.receive) for step in steps]
        [(1, (), 0), (0, ((0, 4),), 2)]
    """
    own, parts = ranges[rank], len(ranges)
    steps = [Step(rank, rank, (), 0, tiles(own, own, documents, mask))]
    for i in range(1, parts):
        source, target = (rank - i) % parts, (rank + i) % parts
        wanted = needed(own, ranges[source], documents, mask)
        given = needed(ranges[target], own, documents, mask)
        steps.append(
            Step(
                source=source,
                target=target,
                send=runs_of(given, own),
                receive=count(wanted),
                tiles=tiles(own, wanted, documents, mask),
            )
        )
    return tuple(steps)


def heads_complaint(heads: int, kv_heads: int, size: int) -> str | None:
    """Why so many ranks cannot share the heads; None: they can."""
    if heads % size:
        return (
            f"Ulysses shares heads among ranks: {heads} query heads are no multiple of {size} "
            "ranks; use way='ring' or 'allgather', or '2d' with fewer ranks inside"
        )
    if kv_heads % size and size % kv_heads:
        return (
            f"Ulysses shares heads among ranks: {kv_heads} heads of keys neither are a multiple of "
            f"{size} ranks nor divide them; use way='ring' or 'allgather'"
        )
    return None
