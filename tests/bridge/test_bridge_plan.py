"""Who sends what over a bridge, against every position taken one by one."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from commgrid.bridge.plan import BridgeMessage, BridgeSide, Positions, even, messages, one_by_one
from commgrid.context_parallel.ranges import Ranges, union


def listed(ranges: Ranges) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


@st.composite
def shares(draw: st.DrawFn, length: int) -> tuple[Ranges, ...]:
    """A dim's positions dealt out to some places in any way, some of them with none."""
    places = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, places - 1), min_size=length, max_size=length))
    return tuple(
        union((at, at + 1) for at, owner in enumerate(owners) if owner == place)
        for place in range(places)
    )


@st.composite
def sides(draw: st.DrawFn, held: Positions, first: int, parted: bool) -> BridgeSide:
    """A rank or several at each place, on ranks from `first`; each copy with a part, or none."""
    copies, parts = draw(st.integers(1, 3)), draw(st.integers(1, 2)) if parted else 1
    everywhere = list(product(*(range(len(along)) for along in held)))
    ranks = draw(st.permutations(range(first, first + len(everywhere) * copies * parts)))
    at = [(place, part) for part in range(parts) for place in everywhere for _ in range(copies)]
    return BridgeSide(
        {rank: place for rank, (place, _) in zip(ranks, at, strict=True)},
        {rank: part for rank, (_, part) in zip(ranks, at, strict=True)},
    )


def delivered(
    plan: list[BridgeMessage], held: Positions, senders: BridgeSide
) -> dict[int, Counter]:  # type: ignore[type-arg]
    """The positions in each row of every receiver: (row, position, part) counts."""
    found: dict[int, Counter] = {}  # type: ignore[type-arg]
    for one in plan:
        at = senders.places[one.sender]
        owned = [listed(held[dim][place]) for dim, place in enumerate(at)]
        taken = [[owned[dim][row] for row in listed(runs)] for dim, runs in enumerate(one.taken)]
        put = [listed(runs) for runs in one.put]
        assert one.rows == tuple(map(len, taken))
        for rows, positions in zip(product(*put), product(*taken), strict=True):
            part = senders.parts[one.sender]
            found.setdefault(one.receiver, Counter())[rows, positions, part] += 1
    return found


@given(st.data(), st.integers(0, 9), st.integers(1, 4), st.integers(0, 12))
def test_every_row_arrives_once_of_every_part(
    data: st.DataObject, length: int, other: int, apart: int
) -> None:
    held, wanted = (
        (data.draw(shares(length)), data.draw(shares(other))) for _ in range(2)
    )  # two dims
    senders = data.draw(sides(held, 0, True))
    receivers = data.draw(sides(wanted, apart, False))
    ranks = {*senders.places, *receivers.places}
    by_rank = {rank: messages(senders, receivers, held, wanted, rank) for rank in ranks}
    # Both ends of a message know it, in one order between them, and no other rank does.
    plan = [one for rank, many in by_rank.items() for one in many if one.sender == rank]
    for rank, many in by_rank.items():
        assert all(rank in (one.sender, one.receiver) for one in many)
    for one in plan:
        assert one in by_rank[one.receiver]
    pairs = Counter((one.sender, one.receiver) for one in plan)
    assert set(pairs.values()) <= {1}  # so that nothing between two ranks can be taken for another
    arrived = sum(sum(one.receiver == rank for one in many) for rank, many in by_rank.items())
    assert arrived == len(plan)
    parts = set(senders.parts.values())
    found = delivered(plan, held, senders)
    for rank, place in receivers.places.items():
        rows = [list(enumerate(listed(wanted[dim][at]))) for dim, at in enumerate(place)]
        expected = Counter(
            {
                ((a, b), (x, y), part): 1
                for (a, x), (b, y) in product(*rows)
                for part in parts
            }
        )  # fmt: skip
        assert found.get(rank, Counter()) == expected
    for one in plan:  # a rank that has it needs no sender, and the first of the parts is not added
        here = senders.places.get(one.receiver) == senders.places[one.sender]
        if here and senders.parts[one.receiver] == senders.parts[one.sender]:
            assert one.sender == one.receiver
        assert one.adds == (senders.parts[one.sender] > 0)


@given(st.integers(0, 40), st.integers(1, 9))
def test_even_shares_are_those_of_tensor_split(length: int, parts: int) -> None:
    import torch

    expected = [chunk.tolist() for chunk in torch.arange(length).tensor_split(parts)]
    assert [listed(ranges) for ranges in even(length, parts)] == expected


def test_lengths_follow_each_other() -> None:
    assert [listed(one) for one in one_by_one([2, 0, 3])] == [[0, 1], [], [2, 3, 4]]


def test_copies_take_turns() -> None:
    """8 receivers of one sender's 4 copies: each of these sends to 2."""
    senders = BridgeSide(dict.fromkeys(range(4), (0,)), dict.fromkeys(range(4), 0))
    receivers = BridgeSide(
        {rank: (rank - 10,) for rank in range(10, 18)}, dict.fromkeys(range(10, 18), 0)
    )
    held, wanted = (even(80, 1),), (even(80, 8),)
    sent = [
        sum(one.rows[0] for one in messages(senders, receivers, held, wanted, rank))
        for rank in range(4)
    ]
    assert sent == [20, 20, 20, 20]
