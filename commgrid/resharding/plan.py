"""The plan of a transfer: arithmetic on layouts, with the same result on every rank.

    source, tp 2 (ranks 0, 1)      target, tp 3 (ranks 2, 3, 4)      full (6, …)
    rank 0 rows 0-2                rank 2 rows 0, 1   ◄─ rank 0
    rank 1 rows 3-5                rank 3 rows 2, 3   ◄─ rank 0 row 2, rank 1 row 3
                                   rank 4 rows 4, 5   ◄─ rank 1

Boxes with the same holders and the same receivers are one pool (see `pools`), a stream of bytes
that its holders share (see `assignment`). A message is made of ranges of such streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from commgrid.layout.box import Box, volume
from commgrid.resharding.assignment import Demand, cut, fair_shares
from commgrid.resharding.layouts import GridLayouts, check_sides
from commgrid.resharding.pools import MovedTensor, Ranks, Run, kinds_of, pools_of
from commgrid.resharding.traffic import as_table


@dataclass(frozen=True)
class Move:
    """A box that goes from one rank to another, or is copied on one.

    Args:
        tensor: of which.
        box: in the full tensor.
        sender, receiver: ranks; the same where it is copied.
    """

    tensor: MovedTensor
    box: Box
    sender: int
    receiver: int

    @property
    def size(self) -> int:
        """Its bytes on the way."""
        return volume(self.box) * self.tensor.itemsize


Stretch = tuple[Run, int, int]
"""A range of a run's bytes."""


@dataclass(frozen=True)
class Message:
    """Boxes that travel together between two ranks.

    Args:
        sender, receiver: ranks.
        is_send: whether this rank is the sender.
        stretches: its parts, longest elements first, so that each lies where an element
            of its dtype may.
    """

    sender: int
    receiver: int
    is_send: bool
    stretches: tuple[Stretch, ...]

    @property
    def peer(self) -> int:
        """The other rank."""
        return self.receiver if self.is_send else self.sender

    @cached_property
    def size(self) -> int:
        """Its bytes."""
        return sum(stop - start for _, start, stop in self.stretches)

    @property
    def moves(self) -> tuple[Move, ...]:
        """Its boxes; of a large model they are millions, and listed when they are asked for."""
        return tuple(
            Move(tensor, box, self.sender, self.receiver)
            for run, start, stop in self.stretches
            for tensor, box in run.within(start, stop)
        )


class TransferPlan:
    """All messages of a transfer.

    Args:
        source, target: what the ranks of both grids hold.
        hosts: rank to the name of its host, where that is known.
        partly: whether the source may have tensors that the target has not.

    Raises:
        TransferError: the sides are not of one model, or no rank has a part of it.

    Example:
        >>> from commgrid.resharding.layouts import Form, GridLayouts, LayoutEntry, pack
        >>> def rows(*boxes: Box) -> bytes:
        ...     return pack([LayoutEntry("weight", Form((6, 2), "float32", 4, boxes))])
        >>> whole, half = rows(((0, 0), (6, 2))), rows(((3, 0), (3, 2)))
        >>> source = GridLayouts.of({0: whole, 1: whole})
        >>> plan = TransferPlan(source, GridLayouts.of({1: whole, 2: half}))
        >>> plan.pairs, plan.copied
        ({(0, 2): 24}, {1: 48})
    """

    def __init__(
        self,
        source: GridLayouts,
        target: GridLayouts,
        hosts: Mapping[int, str] | None = None,
        *,
        partly: bool = False,
    ) -> None:
        check_sides(source, target, partly)
        self.source_ranks: Ranks = tuple(sorted(source.places))
        self.target_ranks: Ranks = tuple(sorted(target.places))
        self._hosts = dict(hosts or {})
        self.tensors = _tensors(source, target)
        self._kinds = kinds_of(self.tensors, source, target)
        self._pools = pools_of(self._kinds, source, target)
        self._assign()
        self._inputs = source.digest, target.digest

    def _assign(self) -> None:
        shared = [pool for pool in self._pools if pool.receivers]
        demands = [Demand(pool.size, pool.holders, pool.receivers) for pool in shared]
        for pool, demand, share in zip(shared, demands, fair_shares(demands), strict=True):
            if len(share) == 1:
                (sender,) = share
                pool.cuts = dict.fromkeys(pool.receivers, ((sender, 0, pool.size),))
            else:
                pool.cuts = {**cut(demand, share, self._hosts)}

    # -- what it says -------------------------------------------------------------------

    @cached_property
    def pairs(self) -> dict[tuple[int, int], int]:
        """Sender and receiver to the bytes between them."""
        found: dict[tuple[int, int], int] = {}
        for pool in self._pools:
            for receiver, parts in pool.cuts.items():
                for sender, start, stop in parts:
                    pair = sender, receiver
                    found[pair] = found.get(pair, 0) + stop - start
        return dict(sorted(found.items()))

    @cached_property
    def sent(self) -> dict[int, int]:
        """Rank of the source to the bytes that it sends."""
        return self._by_rank(self.source_ranks, 0)

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each rank of the target receives: without those it has already."""
        return self._by_rank(self.target_ranks, 1)

    def _by_rank(self, ranks: Ranks, place: int) -> dict[int, int]:
        """The bytes of the pairs by the rank at a place in them."""
        found = dict.fromkeys(ranks, 0)
        for pair, size in self.pairs.items():
            found[pair[place]] += size
        return found

    @cached_property
    def copied(self) -> dict[int, int]:
        """Rank to the bytes that it has already and copies."""
        found: dict[int, int] = {}
        for pool in self._pools:
            for rank in pool.copying:
                found[rank] = found.get(rank, 0) + pool.size
        return dict(sorted(found.items()))

    @cached_property
    def on_one_host(self) -> int:
        """The bytes sent between ranks of one host."""
        here = self._hosts
        return sum(n for (s, r), n in self.pairs.items() if s in here and here[s] == here.get(r))

    @cached_property
    def digest(self) -> str:
        """Equal on ranks whose plans are."""
        names = [[tensor.name for tensor in kind] for kind in self._kinds]
        found = hashlib.sha256(repr((self._inputs, names)).encode())
        for pool in self._pools:
            runs = [(run.kind, run.boxes) for run in pool.runs]
            cuts = pool.cuts if len(pool.holders) > 1 else None  # of one holder there is one way
            found.update(repr((pool.holders, pool.needing, runs, cuts)).encode())
        return found.hexdigest()

    def moves(self, rank: int | None = None) -> Iterator[Move]:
        """Yield the boxes that are sent, of all ranks or of one.

        Args:
            rank: None: of all ranks.
        """
        for (sender, receiver), stretches in self._by_pair(rank).items():
            for run, start, stop in stretches:
                for tensor, box in run.within(start, stop):
                    yield Move(tensor, box, sender, receiver)

    def copies(self, rank: int) -> Iterator[Move]:
        """Every box that a rank has already, and copies."""
        for pool in self._pools:
            if rank in pool.copying:
                for run in pool.runs:
                    for tensor, box in run.within(0, run.size):
                        yield Move(tensor, box, rank, rank)

    def _by_pair(self, rank: int | None) -> dict[tuple[int, int], list[Stretch]]:
        """Return the messages of all ranks, or of one."""
        found: dict[tuple[int, int], list[Stretch]] = {}
        for pool in self._pools:
            receivers: Iterable[int] = pool.cuts
            if rank is not None and rank not in pool.holders:
                receivers = (rank,) if rank in pool.cuts else ()
            for receiver in receivers:
                for sender, start, stop in pool.cuts[receiver]:
                    if rank is None or rank in (sender, receiver):
                        stretches = found.setdefault((sender, receiver), [])
                        stretches.extend(pool.within(start, stop))
        return found

    def __str__(self) -> str:
        return as_table(
            len(self.tensors), self.sent, self.received, self.pairs, self.copied, self.on_one_host
        )

    # -- what a rank does ---------------------------------------------------------------

    def messages(self, rank: int, most: int) -> list[Message]:
        """A rank's messages, in the order that all ranks follow; see `messages_of`.

        Args:
            rank: whose.
            most: bytes of a message; a single element may be larger.
        """
        world = max(*self.source_ranks, *self.target_ranks) + 1
        return messages_of(self._by_pair(rank), rank, world, most)


def messages_of(
    by_pair: Mapping[tuple[int, int], Iterable[Stretch]], rank: int, world: int, most: int
) -> list[Message]:
    """A rank's messages, in the order that all ranks follow.

    Every message of all ranks has a place in one order: by its number among those of its pair, by
    how far its receiver is from its sender, and by its sender. A rank starts its own in that order,
    and waits for its first unfinished one before it starts more than it has room for. So no rank
    waits for ever: of all unfinished messages, take the first. All messages before it that its two
    ranks have are finished, so that both have started it, and it ends.

    Args:
        by_pair: what goes from a sender to a receiver, of all pairs that the rank is in.
        rank: whose.
        world: more than any rank.
        most: bytes of a message; a single element may be larger.
    """
    found = []
    for (sender, receiver), stretches in by_pair.items():
        for number, part in enumerate(_chunked(stretches, most)):
            place = number, (receiver - sender) % world, sender
            found.append((place, Message(sender, receiver, sender == rank, part)))
    return [message for _, message in sorted(found, key=lambda one: one[0])]


def _chunked(stretches: Iterable[Stretch], most: int) -> Iterator[tuple[Stretch, ...]]:
    """A pair's stretches in messages of bounded size, longest elements first in each.

    A large box has messages of its own, which need not be packed where it lies in one piece.
    """
    taken: list[Stretch] = []
    room = most
    for run, start, stop in stretches:
        if run.is_large:
            yield from (((run, *piece),) for piece in run.pieces(start, stop, most))
            continue
        while start < stop:
            end = stop if stop - start <= room else run.floor(start + room)
            if end <= start and not taken:  # a box that is larger than a message
                end = min(start + max(room // run.itemsize, 1) * run.itemsize, stop)
            if end <= start:
                yield _sorted(taken)
                taken, room = [], most
                continue
            taken.append((run, start, end))
            room -= end - start
            start = end
    if taken:
        yield _sorted(taken)


def _sorted(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    return tuple(sorted(stretches, key=lambda stretch: -stretch[0].itemsize))


def _tensors(source: GridLayouts, target: GridLayouts) -> list[MovedTensor]:
    """The tensors that are moved, by the target's names."""
    found = []
    for name, form in sorted(target.forms.items()):
        given = source.forms[target.reads[name]]
        travels = min(given, form, key=lambda one: one.itemsize)  # the source's where both are
        found.append(MovedTensor(name, target.reads[name], travels.dtype, travels.itemsize))
    return found
