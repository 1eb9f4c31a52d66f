"""The plan against every element of every tensor, its order against every way it can run."""

import itertools
import math
import pickle
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commgrid.errors import TransferError
from commgrid.layout.box import Box, boxes_of_range, common, volume, without
from commgrid.resharding import pools
from commgrid.resharding.assignment import Demand, fair_shares
from commgrid.resharding.layouts import Form, GridLayouts, LayoutEntry, pack, unpack
from commgrid.resharding.plan import TransferPlan
from commgrid.resharding.transport import RingBuffer, Room, aligned

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2}
Layout = dict[str, tuple[str, list[Box]]]  # name to dtype and boxes


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True))))


def form(shape: tuple[int, ...], dtype: str, boxes: list[Box]) -> Form:
    return Form(shape, dtype, SIZES[dtype], tuple(boxes))


shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def cuts(draw: Any, shape: tuple[int, ...], parts: int) -> list[list[Box]]:
    """The boxes of each of some parts, which together are all of a tensor: slices or ranges."""
    count = math.prod(shape)
    if not shape or draw(st.booleans()):
        places = sorted([0, count, *(draw(st.integers(0, count)) for _ in range(parts - 1))])
        return [list(boxes_of_range(a, b, shape)) for a, b in itertools.pairwise(places)]
    dim = draw(st.integers(0, len(shape) - 1))
    share = math.ceil(shape[dim] / parts)
    found: list[list[Box]] = []
    for part in range(parts):
        start, stop = (min(place * share, shape[dim]) for place in (part, part + 1))
        offset = tuple(start if d == dim else 0 for d in range(len(shape)))
        size = tuple(stop - start if d == dim else n for d, n in enumerate(shape))
        found.append([(offset, size)] if stop > start else [])
    return found


@st.composite
def sides(draw: Any) -> tuple[dict[int, Layout], dict[int, Layout], dict[str, tuple[int, ...]]]:
    """Boxes of one to four tensors on the ranks of a source and of a target."""
    tensors = {f"t{number}": draw(shapes) for number in range(draw(st.integers(1, 4)))}
    found: list[dict[int, Layout]] = []
    for first in (0, draw(st.integers(0, 4))):
        ranks = range(first, first + draw(st.integers(1, 4)))
        side: dict[int, Layout] = {rank: {} for rank in ranks}
        for name, shape in tensors.items():
            parts = draw(st.integers(1, len(ranks)))
            dtype = draw(st.sampled_from(sorted(SIZES)))
            pieces = draw(cuts(shape, parts))
            for place, rank in enumerate(ranks):
                side[rank][name] = dtype, pieces[place % parts]
        found.append(side)
    return found[0], found[1], tensors


def packed(side: dict[int, Layout], tensors: dict[str, tuple[int, ...]]) -> GridLayouts:
    return GridLayouts.of(
        {
            rank: pack([LayoutEntry(n, form(tensors[n], d, b)) for n, (d, b) in layout.items()])
            for rank, layout in side.items()
        }
    )


@given(sides(), st.sampled_from([1, 7, 64, 1 << 20]), st.sampled_from([1, 40, 1 << 20]))
@settings(max_examples=60, deadline=None)
def test_every_element_comes_once_and_from_who_has_it(
    given_sides: Any, most: int, large: int
) -> None:
    source, target, tensors = given_sides
    with mock.patch.object(pools, "LARGE", large):
        plan = TransferPlan(packed(source, tensors), packed(target, tensors))
    sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
    received: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for rank in {*source, *target}:
        got: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        lacked = 0
        for move in plan.copies(rank):
            assert any(
                common(box, move.box) == move.box for box in source[rank][move.tensor.name][1]
            )
            got[move.tensor.name] += elements(move.box)
        for message in plan.messages(rank, most):
            assert message.size <= most or len(message.moves) == 1
            if message.is_send:
                sent[rank, message.peer].append(message.moves)
                for move in message.moves:
                    boxes = source[rank][move.tensor.name][1]
                    assert any(common(box, move.box) == move.box for box in boxes)
            else:
                received[message.peer, rank].append(message.moves)
                lacked += message.size
                for move in message.moves:
                    got[move.tensor.name] += elements(move.box)
        expected = 0
        for name, (dtype, boxes) in target.get(rank, {}).items():
            wanted = set().union(*map(elements, boxes))
            assert sorted(got.pop(name, [])) == sorted(wanted)
            own = set().union(*map(elements, source.get(rank, {}).get(name, ("", []))[1]))
            width = min(SIZES[dtype], SIZES[next(iter(source.values()))[name][0]])
            expected += len(wanted - own) * width
        assert not got
        assert lacked == plan.received.get(rank, 0) == expected
    assert sent == received  # message by message, in one order on both sides
    assert {p: sum(m.size for ms in msgs for m in ms) for p, msgs in sent.items()} == plan.pairs


@pytest.mark.full
@given(sides(), st.integers(1, 40), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_nobody_waits_for_ever_however_they_take_turns(
    given_sides: Any, room: int, in_batches: bool, random: Any
) -> None:
    """A send ends with its receive; a rank starts its messages in order while its ring has room."""
    source, target, tensors = given_sides
    plan = TransferPlan(packed(source, tensors), packed(target, tensors))
    ranks = sorted({*source, *target})
    left, rings = {}, {}
    for rank in ranks:
        batches = _batched(plan.messages(rank, max(room // 8, 1)), room * 32 if in_batches else 0)
        needs = [  # what lies in one piece needs no buffer
            sum(aligned(m.size) for m in batch if random.random() < 0.7) for batch in batches
        ]
        left[rank] = list(zip(batches, needs, strict=True))
        rings[rank] = RingBuffer(max([room * 64, *needs]), torch.device("meta"))
    posted: dict[tuple[int, int, bool], int] = defaultdict(int)
    waiting: dict[int, list[tuple[Room, list[tuple[int, int, bool, int]]]]]
    waiting = {rank: [] for rank in ranks}

    def is_done(place: tuple[int, int, bool, int]) -> bool:
        sender, receiver, is_send, number = place
        return posted[sender, receiver, not is_send] > number

    def step(rank: int) -> bool:
        queue, ring = waiting[rank], rings[rank]
        if left[rank]:
            batch, need = left[rank][0]
            taken = ring.take(need)
            if taken is not None:
                del left[rank][0]
                places = []
                for message in batch:
                    pair = (rank, message.peer) if message.is_send else (message.peer, rank)
                    places.append((*pair, message.is_send, posted[*pair, message.is_send]))
                    posted[*pair, message.is_send] += 1
                queue.append((taken, places))
                return True
        if queue and all(map(is_done, queue[0][1])):
            ring.give_back(queue.pop(0)[0])
            return True
        return False

    while any(left.values()) or any(waiting.values()):
        order = random.sample(ranks, len(ranks))
        assert any(step(rank) for rank in order), "all of them wait"


def _batched(messages: list[Any], most: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    size = most + 1
    for message in messages:
        size += aligned(message.size)
        if size > most:
            found.append([])
            size = aligned(message.size)
        found[-1].append(message)
    return found


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 600))
def test_rooms_of_a_ring_are_apart_and_come_back_in_order(sizes: list[int], more: int) -> None:
    """Against the bytes themselves: no message is written over numbers still to be read."""
    ring = RingBuffer(aligned(max(sizes)) + more, torch.device("cpu"))
    taken: list[tuple[Room, int]] = []

    def give_back() -> None:
        room, number = taken.pop(0)
        assert (room.buffer == number).all()
        ring.give_back(room)

    for number, size in enumerate(sizes):
        while (room := ring.take(size)) is None:
            give_back()
        assert len(room.buffer) == size
        room.buffer.fill_(number)
        taken.append((room, number))
    while taken:
        give_back()
    assert ring.take(max(sizes)) is not None


def fewest(demands: list[Demand]) -> float:
    """The least that the most loaded sender can send: the worst of all sets of senders."""
    senders = sorted({s for demand in demands for s in demand.senders})
    most = 0.0
    for count in range(1, len(senders) + 1):
        for chosen in itertools.combinations(senders, count):
            bound = sum(d.size * len(d.receivers) for d in demands if set(d.senders) <= set(chosen))
            most = max(most, bound / count)
    return most


demand_lists = st.lists(
    st.builds(
        Demand,
        st.integers(1, 400).map(lambda n: 4096 * n),
        st.sets(st.integers(0, 5), min_size=1).map(lambda s: tuple(sorted(s))),
        st.sets(st.integers(6, 12), min_size=1).map(lambda s: tuple(sorted(s))),
    ),
    min_size=1,
    max_size=8,
)


@given(demand_lists)
@settings(max_examples=60, deadline=None)
def test_no_sender_is_a_funnel_where_copies_allow_it(demands: list[Demand]) -> None:
    shares = fair_shares(demands)
    loads: dict[int, int] = {s: 0 for d in demands for s in d.senders}
    for demand, share in zip(demands, shares, strict=True):
        assert set(share) <= set(demand.senders)
        assert sum(share.values()) == demand.size * len(demand.receivers)
        for rank, size in share.items():
            loads[rank] += size
    mean = sum(loads.values()) / len(loads)
    best = fewest(demands)
    if best <= 1.1 * mean:
        assert max(loads.values()) <= 1.25 * mean
    assert max(loads.values()) <= best + 0.25 * mean


def whole(shape: tuple[int, ...] = (64, 64)) -> bytes:
    return pack([LayoutEntry("weight", form(shape, "float32", [((0, 0), shape)]))])


def test_one_copy_of_many_is_not_asked_for_all() -> None:
    plan = TransferPlan(
        GridLayouts.of(dict.fromkeys(range(8), whole())),
        GridLayouts.of(dict.fromkeys(range(8, 13), whole())),
    )
    assert max(plan.sent.values()) <= 1.25 * sum(plan.sent.values()) / 8
    assert set(plan.received.values()) == {64 * 64 * 4}


def test_a_sender_on_the_same_host_is_preferred() -> None:
    hosts = {rank: f"host{rank % 2}" for rank in range(8)}
    plan = TransferPlan(
        GridLayouts.of(dict.fromkeys(range(4), whole())),
        GridLayouts.of(dict.fromkeys(range(4, 8), whole())),
        hosts,
    )
    assert all(hosts[sender] == hosts[receiver] for sender, receiver in plan.pairs)
    assert plan.on_one_host == sum(plan.sent.values())


def test_the_plan_is_the_same_in_whatever_order_ranks_were_heard() -> None:
    half = pack([LayoutEntry("weight", form((64, 64), "float32", [((32, 0), (32, 64))]))])
    sides = {0: whole(), 1: whole(), 5: half}, {2: half, 3: whole()}
    one, other = (
        TransferPlan(*(GridLayouts.of(dict(order(side.items()))) for side in sides))
        for order in (list, lambda pairs: reversed(list(pairs)))
    )
    assert one.pairs == other.pairs
    assert TransferPlan(*map(GridLayouts.of, sides)).digest == one.digest
    assert TransferPlan(GridLayouts.of(sides[0]), GridLayouts.of({2: half})).digest != one.digest


def test_layouts_come_back_as_they_were() -> None:
    entries = [
        LayoutEntry("a", form((), "float64", [((), ())])),
        LayoutEntry("b", form((3, 0), "bfloat16", []), "a"),
    ]
    assert unpack(pack(entries)) == entries


def test_a_layout_with_other_names_in_its_places_is_another_one() -> None:
    """All of these have the same boxes, of tensors that are called or ordered otherwise."""
    alike = form((2,), "float32", [((0,), (2,))])

    def packed(*names: str) -> bytes:
        return pack([LayoutEntry(name, alike) for name in names])

    side = GridLayouts.of({0: packed("a", "b")})
    assert side.is_still(0, packed("a", "b"))
    for names in (("b", "a"), ("a", "c"), ("a",)):
        assert not side.is_still(0, packed(*names))


def test_ranks_with_other_rows_of_the_same_tensors_share_one_list_of_names() -> None:
    """As FSDP2 cuts a model: the description of 64 ranks is little longer than that of one."""

    def rows(rank: int) -> bytes:
        box = (rank, 0), (1, 8)
        return pack([LayoutEntry(f"{i}.up", form((64, 8), "float32", [box])) for i in range(500)])

    one, all_of_them = (
        GridLayouts.of({0: rows(0)}),
        GridLayouts.of({rank: rows(rank) for rank in range(64)}),
    )
    assert all_of_them.lists == one.lists
    assert len(pickle.dumps(all_of_them)) < 4 * len(pickle.dumps(one))
    assert [all_of_them.is_still(place, rows(7)) for place in (6, 7)] == [False, True]
    plan = TransferPlan(all_of_them, GridLayouts.of({64: pack([
        LayoutEntry(f"{i}.up", form((64, 8), "float32", [((0, 4), (64, 4))])) for i in range(500)
    ])}))  # fmt: skip
    assert plan.sent == dict.fromkeys(range(64), 500 * 4 * 4)
    (message,) = plan.messages(3, 1 << 20)
    assert [move.box for move in message.moves] == [((3, 4), (1, 4))] * 500


@pytest.mark.parametrize(
    ("source", "target", "partly", "told"),
    [
        ({0: whole()}, {1: whole((8, 64))}, False, r"weight has shape \(64, 64\) on rank 0 of the "
         r"source and \(8, 64\) on rank 1 of the target"),
        ({0: whole()}, {1: pack([]), 2: pack([])}, False, "the target has no tensors"),
        ({0: whole()},
         {3: pack([LayoutEntry("weigth", form((1,), "float32", [((0,), (1,))]))])}, True,
         "weigth is on rank 3 of the target, and the source has no weigth; did you mean 'weight'"),
        ({0: pack([*unpack(whole()), LayoutEntry("bias", form((1,), "float32", [((0,), (1,))]))])},
         {1: whole()}, False, "bias on rank 0 of the source is on no rank of the target"),
        ({0: pack([LayoutEntry("weight", form((64, 64), "float32", [((0, 0), (60, 64))]))])},
         {1: whole()}, False, r"no rank of the source holds \[60:64, 0:64\] of weight, which rank"),
        ({0: whole(), 1: whole((8, 8))}, {1: whole()}, False,
         r"weight has shape \(64, 64\) and dtype float32 on rank 0 and shape \(8, 8\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(source: Any, target: Any, partly: bool, told: str) -> None:
    with pytest.raises(TransferError, match=told):
        TransferPlan(GridLayouts.of(source), GridLayouts.of(target), partly=partly)


def test_a_source_may_have_more_where_only_parts_are_moved() -> None:
    more = pack([*unpack(whole()), LayoutEntry("bias", form((1,), "float32", [((0,), (1,))]))])
    plan = TransferPlan(GridLayouts.of({0: more}), GridLayouts.of({1: whole()}), partly=True)
    assert plan.pairs == {(0, 1): 64 * 64 * 4}


@given(shapes, st.data())
def test_a_box_without_a_part_is_the_rest_of_it(shape: Any, data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.integers(1, n)) for n in shape)
    part = tuple(data.draw(st.integers(0, n - s)) for n, s in zip(shape, sizes, strict=True)), sizes
    box = (0,) * len(shape), shape
    rest = list(without(box, part))
    assert sum(map(volume, rest)) == volume(box) - volume(part)
    assert set().union(elements(part), *map(elements, rest)) == elements(box)


@pytest.mark.full
def test_ten_thousand_tensors_of_thirteen_hundred_ranks_are_a_short_table() -> None:
    """tp 8 · pp 8 · dp 16 to tp 4 · dp 64, each kind of rank planned once."""

    def layout(tensor: tuple[int, int], stage: tuple[int, int]) -> bytes:
        (tp, rank), (pp, place) = tensor, stage
        entries = []
        for layer in range(place * 1250 // pp, (place + 1) * 1250 // pp):
            for name, shape, dim in (
                ("norm", (64,), None), ("up", (256, 64), 0), ("down", (64, 256), 1),
                ("bias", (256,), 0), ("q", (64, 64), 0), ("k", (64, 64), 0), ("v", (64, 64), 0),
                ("proj", (64, 64), 1),
            ):  # fmt: skip
                offset, size = [0] * len(shape), list(shape)
                if dim is not None:
                    size[dim] //= tp
                    offset[dim] = rank * size[dim]
                box = tuple(offset), tuple(size)
                entries.append(
                    LayoutEntry(f"blocks.{layer}.{name}", form(shape, "bfloat16", [box]))
                )
        return pack(entries)

    sources = {(t, p): layout((8, t), (8, p)) for t in range(8) for p in range(8)}
    targets = {t: layout((4, t), (1, 0)) for t in range(4)}
    plan = TransferPlan(
        GridLayouts.of({rank: sources[rank % 8, rank // 128] for rank in range(1024)}),
        GridLayouts.of({1024 + rank: targets[rank % 4] for rank in range(256)}),
    )
    assert max(plan.sent.values()) <= 1.25 * sum(plan.sent.values()) / 1024
    needs = 1250 * 2 * (64 + (256 * 64 * 2 + 256 + 64 * 64 * 4) // 4)
    assert set(plan.received.values()) == {needs}
    assert len(str(plan).splitlines()) == 5
    assert all(len(line) < 320 for line in str(plan).splitlines())
