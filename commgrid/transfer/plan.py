"""Who sends which boxes to whom: arithmetic on layouts, the same on every rank.

    source, tp 2 (ranks 0, 1)      target, tp 3 (ranks 2, 3, 4)      full (6, …)
    rank 0 rows 0-2                rank 2 rows 0, 1   ◄─ rank 0
    rank 1 rows 3-5                rank 3 rows 2, 3   ◄─ rank 0 row 2, rank 1 row 3
                                   rank 4 rows 4, 5   ◄─ rank 1

Tensors whose boxes lie alike on the same ranks are planned once. A target box is cut where source
boxes begin and end; what then has the same holders and the same receivers is one pool, a stream of
bytes that its holders share (see `shares`).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from commgrid.errors import TransferError
from commgrid.planning.boxes import Box, common, part_of_range, volume, without
from commgrid.planning.rank_lists import describe_ranks
from commgrid.transfer.layouts import Form, Side, check_sides
from commgrid.transfer.shares import Demand, cut, fair_shares
from commgrid.transfer.table import as_table
from commgrid.transfer.traffic import Traffic

Ranks = tuple[int, ...]

_ALONE = 1 << 18  # bytes: to pack so many on one rank and unpack them on another costs a message


@dataclass(frozen=True)
class Tensor:
    """A full tensor that is moved.

    Args:
        name: on the target.
        source: on the source.
        dtype: that it travels in, the narrower of both sides'.
        itemsize: bytes of an element on its way.
    """

    name: str
    source: str
    dtype: str
    itemsize: int


@dataclass(frozen=True)
class Move:
    """A box that goes from one rank to another, or is copied on one.

    Args:
        tensor: of which.
        box: in the full tensor.
        sender, receiver: ranks; the same where it is copied.
    """

    tensor: Tensor
    box: Box
    sender: int
    receiver: int

    @property
    def size(self) -> int:
        """Its bytes on the way."""
        return volume(self.box) * self.tensor.itemsize


@dataclass(frozen=True)
class Message:
    """Boxes that travel together between this rank and another.

    Args:
        peer: the other rank.
        is_send: whether this rank sends it.
        moves: longest elements first, so that each lies where an element of its dtype may.
    """

    peer: int
    is_send: bool
    moves: tuple[Move, ...]

    @cached_property
    def size(self) -> int:
        """Its bytes."""
        return sum(move.size for move in self.moves)


@dataclass
class Pool:
    """Boxes that the same ranks hold and the same ranks need.

    Args:
        holders: ranks of the source that have all of them.
        needing: ranks of the target that have a place for all of them.
    """

    holders: Ranks
    needing: Ranks
    boxes: list[tuple[int, Box]] = field(default_factory=list)  # tensor's number, box
    cuts: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    @cached_property
    def copying(self) -> Ranks:
        """Those that have them already."""
        held = set(self.holders)
        return tuple(rank for rank in self.needing if rank in held)

    @cached_property
    def receivers(self) -> Ranks:
        """Those that lack them."""
        held = set(self.holders)
        return tuple(rank for rank in self.needing if rank not in held)


class TransferPlan:
    """What a transfer does, of all ranks.

    Args:
        source, target: what the ranks of both grids hold.
        hosts: rank to the name of its host, where that is known.
        partly: whether the source may have tensors that the target has not.

    Raises:
        TransferError: the sides are not of one model, or nobody has a part of it.

    Example:
        >>> from commgrid.transfer.layouts import Entry, Form, Side, pack
        >>> def rows(*boxes: Box) -> bytes:
        ...     return pack([Entry("weight", Form((6, 2), "float32", 4, boxes))])
        >>> whole, half = rows(((0, 0), (6, 2))), rows(((3, 0), (3, 2)))
        >>> plan = TransferPlan(Side.of({0: whole, 1: whole}), Side.of({1: whole, 2: half}))
        >>> plan.pairs, plan.copied
        ({(0, 2): 24}, {1: 48})
    """

    def __init__(
        self,
        source: Side,
        target: Side,
        hosts: Mapping[int, str] | None = None,
        *,
        partly: bool = False,
    ) -> None:
        check_sides(source, target, partly)
        self.source_ranks: Ranks = tuple(sorted(source.places))
        self.target_ranks: Ranks = tuple(sorted(target.places))
        self._hosts = dict(hosts or {})
        self.tensors = _tensors(source, target)
        self._pools = _pools(self.tensors, source, target)
        for pool in self._pools:
            pool.boxes.sort(key=lambda one: -self.tensors[one[0]].itemsize)
        self._assign()
        self._inputs = source.digest, target.digest

    def _assign(self) -> None:
        shared = [pool for pool in self._pools if pool.receivers]
        demands = [Demand(self._size(pool), pool.holders, pool.receivers) for pool in shared]
        for pool, demand, share in zip(shared, demands, fair_shares(demands), strict=True):
            pool.cuts = cut(demand, share, self._hosts)

    def _size(self, pool: Pool) -> int:
        return sum(volume(box) * self.tensors[number].itemsize for number, box in pool.boxes)

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

    @property
    def sent(self) -> dict[int, int]:
        """Rank of the source to the bytes that it sends."""
        return self.traffic.sent

    @property
    def received(self) -> dict[int, int]:
        """Rank of the target to the bytes that it receives, which are those that it lacks."""
        return self.traffic.received

    @cached_property
    def copied(self) -> dict[int, int]:
        """Rank to the bytes that it has already and copies."""
        found: dict[int, int] = {}
        for pool in self._pools:
            for rank in pool.copying:
                found[rank] = found.get(rank, 0) + self._size(pool)
        return dict(sorted(found.items()))

    @cached_property
    def on_one_host(self) -> int:
        """The bytes sent between ranks of one host."""
        here = self._hosts
        return sum(n for (s, r), n in self.pairs.items() if s in here and here[s] == here.get(r))

    @cached_property
    def traffic(self) -> Traffic:
        """All of these numbers."""
        return Traffic(
            len(self.tensors), self.source_ranks, self.target_ranks, self.pairs, self.copied,
            self.on_one_host,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Writes a file for `commgrid show --transfer`; on one rank, since all have one plan.

        Args:
            path: of the file, as `plan.json`.

        Raises:
            SpecError: it cannot be written.
        """
        self.traffic.save(Path(path))

    @cached_property
    def digest(self) -> str:
        """Equal on ranks whose plans are."""
        found = hashlib.sha256(repr(self._inputs).encode())
        for pool in self._pools:
            found.update(repr((pool.holders, pool.boxes, pool.cuts)).encode())
        return found.hexdigest()

    def moves(self, rank: int | None = None) -> Iterator[Move]:
        """Every box that is sent, or those that one rank sends or receives.

        Args:
            rank: None: of all ranks.
        """
        for pool in self._pools:
            for receiver, parts in pool.cuts.items():
                mine = [p for p in parts if rank is None or rank in (p[0], receiver)]
                for sender, start, stop in mine:
                    for number, box in self._boxes(pool, start, stop):
                        yield Move(self.tensors[number], box, sender, receiver)

    def copies(self, rank: int) -> Iterator[Move]:
        """Every box that a rank has already, and copies."""
        for pool in self._pools:
            if rank in pool.copying:
                for number, box in pool.boxes:
                    yield Move(self.tensors[number], box, rank, rank)

    def _boxes(self, pool: Pool, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        """The boxes of a range of a pool's bytes."""
        starts = self._starts.setdefault(id(pool), [])
        if not starts:
            position = 0
            for number, box in pool.boxes:
                starts.append(position)
                position += volume(box) * self.tensors[number].itemsize
        index = bisect_right(starts, start) - 1
        while index < len(starts) and starts[index] < stop:
            number, box = pool.boxes[index]
            size = self.tensors[number].itemsize
            begin, end = (start - starts[index]) // size, (stop - starts[index]) // size
            for part in part_of_range(box, max(begin, 0), min(end, volume(box))):
                yield number, part
            index += 1

    @cached_property
    def _starts(self) -> dict[int, list[int]]:
        return {}

    def __str__(self) -> str:
        return as_table(self.traffic)

    # -- what a rank does ---------------------------------------------------------------

    def messages(self, rank: int, most: int) -> list[Message]:
        """What a rank sends and receives, in the order in which all ranks go about theirs.

        Every message of all ranks has a place in one order: by its number among those of its pair,
        by how far its receiver is from its sender, and by its sender. A rank starts its own in that
        order, and waits for its first unfinished one before it starts more than it has room for.
        So nobody waits for ever: of all unfinished messages take the first. Everything that its two
        ranks have before it is finished, so that both have started it, and it ends.

        Args:
            rank: whose.
            most: bytes of a message; a single element may be larger.
        """
        by_pair: dict[tuple[int, int], list[Move]] = {}
        for move in self.moves(rank):
            by_pair.setdefault((move.sender, move.receiver), []).append(move)
        world = max(*self.source_ranks, *self.target_ranks) + 1
        found = []
        for (sender, receiver), moves in by_pair.items():
            for number, part in enumerate(_chunked(moves, most)):
                place = number, (receiver - sender) % world, sender
                is_send = sender == rank
                found.append((place, Message(receiver if is_send else sender, is_send, part)))
        return [message for _, message in sorted(found, key=lambda one: one[0])]


def _chunked(moves: Sequence[Move], most: int) -> Iterator[tuple[Move, ...]]:
    """A pair's moves in messages of bounded size, longest elements first in each.

    A large box has messages of its own, which need not be packed where it lies in one piece.
    """
    taken: list[Move] = []
    room = most
    for move in moves:
        for part in _parts(move, most):
            if part.size >= _ALONE:
                yield (part,)
                continue
            if taken and room < part.size:
                yield _sorted(taken)
                taken, room = [], most
            taken.append(part)
            room -= part.size
    if taken:
        yield _sorted(taken)


def _parts(move: Move, most: int) -> Iterator[Move]:
    """A move in boxes of bounded size, cut between whole rows where these are not larger."""
    if move.size <= max(most, move.tensor.itemsize):
        yield move
        return
    start, count = 0, volume(move.box)
    row = count // move.box[1][0]
    at_once = max(most // move.tensor.itemsize, 1)
    at_once -= at_once % row if row <= at_once else 0
    while start < count:
        stop = min(count, start + at_once)
        for box in part_of_range(move.box, start, stop):
            yield Move(move.tensor, box, move.sender, move.receiver)
        start = stop


def _sorted(moves: list[Move]) -> tuple[Move, ...]:
    return tuple(sorted(moves, key=lambda move: -move.tensor.itemsize))


# -- from layouts to pools ---------------------------------------------------------------


def _tensors(source: Side, target: Side) -> list[Tensor]:
    """What is moved, by the target's names."""
    found = []
    for name, form in sorted(target.forms.items()):
        given = source.forms[target.reads[name]]
        travels = min(given, form, key=lambda one: one.itemsize)  # the source's where both are
        found.append(Tensor(name, target.reads[name], travels.dtype, travels.itemsize))
    return found


Kind = tuple[tuple[int, int], ...]
"""The layouts that have some of a tensor, and the number of the form in which each has it."""


def _kinds(side: Side, numbers: dict[Form, int]) -> dict[str, Kind]:
    """How each tensor lies on the ranks of a side."""
    found: dict[str, list[tuple[int, int]]] = {}
    for place, entries in enumerate(side.layouts):
        known: dict[int, int] = {}
        for name, form, _ in entries:
            number = known.get(id(form))
            if number is None:
                number = known[id(form)] = numbers.setdefault(form, len(numbers))
            found.setdefault(name, []).append((place, number))
    return {name: tuple(kind) for name, kind in found.items()}


Piece = tuple[Box, Ranks, Ranks]
"""A box, who holds all of it, and who needs it."""


def _pools(tensors: Sequence[Tensor], source: Side, target: Side) -> list[Pool]:
    numbers: dict[Form, int] = {}
    sources, targets = _kinds(source, numbers), _kinds(target, numbers)
    forms = list(numbers)
    known: dict[tuple[Kind, Kind], list[Piece]] = {}
    pools: dict[tuple[Ranks, Ranks], Pool] = {}
    ranks = _RankSets(source, target)
    for number, tensor in enumerate(tensors):
        kinds = sources[tensor.source], targets[tensor.name]
        if kinds not in known:
            known[kinds] = list(_pieces(tensor, *kinds, forms, ranks))
        for box, holders, needing in known[kinds]:
            pool = pools.setdefault((holders, needing), Pool(holders, needing))
            pool.boxes.append((number, box))
    return [pools[key] for key in sorted(pools)]


class _RankSets:
    """The ranks that have one of some layouts, each set made once."""

    def __init__(self, source: Side, target: Side) -> None:
        self._sides = source.ranks_of, target.ranks_of
        self._known: dict[tuple[int, frozenset[int]], Ranks] = {}

    def of(self, side: int, places: frozenset[int]) -> Ranks:
        found = self._known.get((side, places))
        if found is None:
            of = self._sides[side]
            found = self._known[side, places] = tuple(sorted(r for p in places for r in of[p]))
        return found


def _places_by_box(kind: Kind, forms: Sequence[Form]) -> dict[Box, frozenset[int]]:
    """Each box, and the layouts that have it."""
    found: dict[Box, set[int]] = {}
    for place, number in kind:
        for box in forms[number].boxes:
            if volume(box):
                found.setdefault(box, set()).add(place)
    return {box: frozenset(places) for box, places in sorted(found.items())}


def _pieces(
    tensor: Tensor, source: Kind, target: Kind, forms: Sequence[Form], ranks: _RankSets
) -> Iterator[Piece]:
    """The target's boxes of one tensor, cut where what ranks hold of it begins and ends.

    Raises:
        TransferError: the source has not all of a target's box.
    """
    held = _places_by_box(source, forms)
    for wanted, places in _places_by_box(target, forms).items():
        needing = ranks.of(1, places)
        for box, holding in _cut_by(wanted, held):
            if not holding:
                raise TransferError(
                    f"no rank of the source holds {_where(box)} of {tensor.source}, which "
                    f"{describe_ranks(needing)} of the target need; give every rank of the source "
                    "grid its part of the model"
                )
            yield box, ranks.of(0, holding), needing


def _cut_by(
    wanted: Box, held: Mapping[Box, frozenset[int]]
) -> Iterator[tuple[Box, frozenset[int]]]:
    """The parts of a box, each with the layouts of which one box or another holds all of it."""
    parts: list[tuple[Box, frozenset[int]]] = [(wanted, frozenset())]
    for box, places in held.items():
        if common(wanted, box) is None:
            continue
        before, parts = parts, []
        for part, holding in before:
            both = common(part, box)
            if both is None:
                parts.append((part, holding))
                continue
            parts.append((both, holding | places))
            parts.extend((rest, holding) for rest in without(part, both))
    yield from parts


def _where(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{start + n}" for start, n in zip(*box, strict=True)) + "]"
