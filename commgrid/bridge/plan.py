"""The messages of a bridge: parts of a tensor, between two sides that cut it in other ways.

    source over 3 ranks   0000111122
    target over 2 ranks   0000011111     rank 0 sends to target 0, rank 1 to both, rank 2 to 1

A side is some ranks, each at a place along every dim that is cut; ranks at one place hold copies.
Two places share, along each dim, the positions that both hold. All of it
is arithmetic on whole numbers, which every rank does alone and for its own messages only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from commgrid.context_parallel.ranges import Ranges, count, meet, runs_of

Place = tuple[int, ...]
"""An index along each dim that is cut."""
Positions = tuple[tuple[Ranges, ...], ...]
"""For each dim that is cut, the positions that each place along it holds."""


@dataclass(frozen=True)
class BridgeSide:
    """The ranks that hold a tensor's parts.

    Args:
        places: of each rank, which dims it is cut in being the same for all.
        parts: of each rank, which part of the gradient it has, where copies have a part each.
    """

    places: Mapping[int, Place]
    parts: Mapping[int, int]

    @cached_property
    def copies(self) -> dict[tuple[Place, int], tuple[int, ...]]:
        """The ranks at each place that have the same part of the gradient."""
        found: dict[tuple[Place, int], list[int]] = {}
        for rank, place in self.places.items():
            found.setdefault((place, self.parts[rank]), []).append(rank)
        return {key: tuple(ranks) for key, ranks in sorted(found.items())}

    def spread(self, own: Sequence[int], dims: Sequence[int]) -> BridgeSide:
        """The same side with places along further dims, in which it is not cut.

        Args:
            own: the dims that its places are along.
            dims: those wanted, all of `own` among them.
        """
        places = {
            rank: tuple(place[own.index(dim)] if dim in own else 0 for dim in dims)
            for rank, place in self.places.items()
        }
        return BridgeSide(places, self.parts)


@dataclass(frozen=True)
class BridgeMessage:
    """A part of a tensor, sent by one rank to another.

    Args:
        sender, receiver: global ranks; the same one where it has what it needs.
        taken: for each dim that is cut, the rows of the sender's tensor.
        put: likewise, where they go in the receiver's.
        adds: whether it is added to the numbers of a message before it.
    """

    sender: int
    receiver: int
    taken: tuple[Ranges, ...]
    put: tuple[Ranges, ...]
    adds: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows it has in each dim that is cut."""
        return tuple(map(count, self.taken))


def even(length: int, shares: int) -> tuple[Ranges, ...]:
    """Consecutive shares of a length; where they cannot be equal the first ones have 1 more.

    The rule of `torch.tensor_split` and `numpy.array_split`.

    >>> even(10, 4)
    (((0, 3),), ((3, 6),), ((6, 8),), ((8, 10),))
    """
    size, more = divmod(length, shares)
    return one_by_one([size + (share < more) for share in range(shares)])


def one_by_one(lengths: Iterable[int]) -> tuple[Ranges, ...]:
    """Consecutive shares of given lengths; one of length 0 has no range.

    >>> one_by_one([4, 0, 2])
    (((0, 4),), (), ((4, 6),))
    """
    ends = list(accumulate(lengths, initial=0))
    return tuple(((a, b),) if a < b else () for a, b in pairwise(ends))


def messages(
    senders: BridgeSide, receivers: BridgeSide, held: Positions, wanted: Positions, rank: int
) -> tuple[BridgeMessage, ...]:
    """One rank's messages, with which every receiver gets all of its part.

    Of the copies of a place the receiver itself is the sender, if it is one of them; else they
    take turns, so that none sends more than its share. Of places whose copies have parts it gets
    each part, in order, and adds the later ones.

    Args:
        senders, receivers: along the same dims.
        held, wanted: of these, the positions at each place.
        rank: a global rank.

    Example:
        >>> three = BridgeSide({0: (0,), 1: (1,), 2: (2,)}, {0: 0, 1: 0, 2: 0})
        >>> two = BridgeSide({3: (0,), 4: (1,)}, {3: 0, 4: 0})
        >>> for one in messages(three, two, (even(10, 3),), (even(10, 2),), rank=1):
        ...     print(one.receiver, one.taken, one.put)
        3 (((0, 1),),) (((4, 5),),)
        4 (((1, 3),),) (((0, 2),),)
    """
    found = []
    for number, (receiver, to) in enumerate(receivers.places.items()):
        for (at, part), copies in senders.copies.items():
            sender = receiver if receiver in copies else copies[number % len(copies)]
            if rank not in (sender, receiver):
                continue
            both = [
                (held[dim][a], wanted[dim][b], meet(held[dim][a], wanted[dim][b]))
                for dim, (a, b) in enumerate(zip(at, to, strict=True))
            ]
            if all(common for _, _, common in both):
                taken = tuple(runs_of(common, there) for there, _, common in both)
                put = tuple(runs_of(common, here) for _, here, common in both)
                found.append(BridgeMessage(sender, receiver, taken, put, adds=part > 0))
    return tuple(found)
