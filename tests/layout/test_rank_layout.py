"""RankLayout against enumeration, over ranges and over lists in any order."""

import itertools
import math
import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commgrid.errors import NotInGridError, SpecError
from commgrid.layout.rank_layout import Axis, Mode, RankLayout, RankSet
from commgrid.layout.ranks import RankTuple
from tests.enumeration import coordinates, factorizations, groups_along, subsets

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(
    lambda n: {f"axis{i}": size for i, size in enumerate(n)}
)


def check(shape: dict[str, int], ranks: Sequence[int], closely: Iterable[int]) -> None:
    """Compare all coordinates and groups with enumeration, and every answer on some ranks."""
    if isinstance(ranks, range):
        layout = RankLayout.from_sizes(shape, offset=ranks.start, stride=ranks.step)
    else:
        layout = RankLayout.from_sizes(shape, ranks=ranks)
    table = coordinates(shape, ranks)
    assert (tuple(layout.ranks), layout.shape) == (tuple(ranks), shape)
    assert {rank: layout.coordinate(rank) for rank in ranks} == table
    assert [layout.rank(**at) for at in table.values()] == list(table)
    for axes in subsets(list(shape), least=0):
        groups = groups_along(table, axes)
        assert list(map(tuple, layout.groups(*axes))) == list(dict.fromkeys(groups.values()))
        for rank in closely:
            check_group(layout, axes, rank, table[rank], groups[rank])
    absent = next(rank for rank in itertools.count() if rank not in table)
    with pytest.raises(NotInGridError, match=f"rank {absent} is not one of rank"):
        layout.coordinate(absent)


def check_group(
    layout: RankLayout,
    axes: tuple[str, ...],
    rank: int,
    at: dict[str, int],
    members: tuple[int, ...],
) -> None:
    """One rank's group: by axes, and by fixing the others."""
    group = layout.group(rank, *axes)
    assert tuple(group) == members
    assert [group[i] for i in range(len(group))] == list(members)
    assert group.index(rank) == members.index(rank)
    part = layout.select(**{axis: index for axis, index in at.items() if axis not in axes})
    assert tuple(part.ranks) == members
    assert part.coordinate(rank) == {axis: at[axis] for axis in axes}


@given(sizes, st.integers(0, 3000), st.integers(1, 3), st.booleans(), st.randoms())
def test_ranges_and_lists_equal_enumeration(
    shape: dict[str, int], offset: int, stride: int, shuffle: bool, pick: random.Random
) -> None:
    count = math.prod(shape.values())
    ranks: Sequence[int] = range(offset, offset + count * stride, stride)
    check(shape, pick.sample(ranks, count) if shuffle else ranks, pick.sample(ranks, min(3, count)))


CUTS = {
    n: [dict(zip("abc", cut, strict=True)) for cut in factorizations(n, 3)] for n in range(1, 9)
}


@pytest.mark.nightly("[678]-1")
@pytest.mark.parametrize(
    ("number", "step"),
    [*((n, 1) for n in range(1, 9)), (6, 7), (7, 41), (8, 401)],
)
def test_every_list_of_up_to_8_ranks(number: int, step: int) -> None:
    """So many of 8 ranks: every order of the first ones, every choice of the others."""
    orders = itertools.islice(itertools.permutations(range(number)), 0, None, step)
    chosen = (each[::-1] for each in itertools.combinations(range(8), number))
    for at, ranks in enumerate(itertools.chain(orders, chosen)):
        check(CUTS[number][at % len(CUTS[number])], ranks, ranks[:1])


def test_lists_of_thousands_of_ranks() -> None:
    pick = random.Random(15)
    for cut in ((16, 16, 16), (3, 7, 8), (16, 1, 7), (2, 16, 8)):
        total = math.prod(cut)
        ranks = tuple(pick.sample(range(3 * total), total))
        check(dict(zip("abc", cut, strict=True)), ranks, pick.sample(ranks, 3))


def test_ranks_that_do_not_start_at_0() -> None:
    layout = RankLayout.from_sizes({"tp": 8, "dp": 256}, offset=2048)
    assert (layout.ranks[0], layout.ranks[-1], len(layout)) == (2048, 4095, 2048)
    assert layout.group(2055, "dp")[:2] == (2055, 2063)
    with pytest.raises(NotInGridError, match=r"rank 2047 is not one of ranks 2048-4095"):
        layout.coordinate(2047)


def test_every_other_rank() -> None:
    layout = RankLayout.from_sizes({"tp": 2, "dp": 2}, stride=2)
    assert layout.groups("tp")[1][:] == (4, 6)
    with pytest.raises(NotInGridError, match=r"rank 3 is not one of ranks 0, 2, 4, 6"):
        layout.coordinate(3)


def test_an_axis_of_several_modes() -> None:
    """Along `a` ranks are 0, 1, 4, 5, 8 and 9: its index has a digit of 2 and one of 3."""
    layout = RankLayout((Axis("a", (Mode(2, 1), Mode(3, 4))), Axis("b", (Mode(2, 2),))))
    found = [layout.coordinate(rank) for rank in range(12)]
    assert found == [{"a": r % 2 + 2 * (r // 4), "b": r // 2 % 2} for r in range(12)]
    assert [layout.rank(**at) for at in found] == list(range(12))


def test_two_coordinates_never_mean_one_rank() -> None:
    with pytest.raises(SpecError, match="two coordinates mean one rank"):
        RankLayout((Axis("a", (Mode(3, 1),)), Axis("b", (Mode(2, 2),))))


@given(st.sets(st.integers(0, 40), min_size=1, max_size=12))
def test_rank_sets_equal_exactly_when_they_hold_the_same_ranks(ranks: set[int]) -> None:
    made = RankSet.of(ranks)
    assert tuple(made) == tuple(sorted(ranks))
    assert made == RankSet.of(sorted(ranks, reverse=True))
    assert all((rank in made) == (rank in ranks) for rank in range(-3, 45))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=3))
def test_one_set_has_one_form(shape: list[int], gaps: list[int]) -> None:
    modes, stride = [], 1
    for size, gap in zip(shape, gaps, strict=False):
        modes.append(Mode(size, stride))
        stride *= size + gap
    ranks = RankSet(5, tuple(modes))
    assert RankSet.of(ranks) == ranks
    assert hash(RankSet.of(ranks)) == hash(ranks)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda lay: lay.axis("cp"), "no axis 'cp'; its axes are tp, dp"),
        (lambda lay: lay.rank(tp=2), "tp=2 is outside axis tp of size 2"),
        (lambda lay: RankLayout.from_sizes({"tp": 0}), "axis tp has size 0"),
    ],
)
def test_misuse_is_named(call: object, said: str) -> None:
    assert callable(call)
    with pytest.raises(SpecError, match=said):
        call(RankLayout.from_sizes({"tp": 2, "dp": 2}))


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(SpecError, match="a=2 is not the 3 ranks listed"):
        RankLayout.from_sizes({"a": 2}, ranks=[4, 1, 0])
    with pytest.raises(SpecError, match="the axes reach place 3 of the 3 ranks listed"):
        RankLayout(RankLayout.from_sizes({"a": 4}).axes, 0, RankTuple((4, 1, 0)))


def test_ranks_come_in_order_however_many_modes_there_are() -> None:
    """By ranges, and not rank by rank: compared with adding up digits."""
    for modes in ((), ((3, 1),), ((4, 2), (3, 16)), ((2, 1), (3, 4), (2, 100))):
        ranks = RankSet(5, tuple(Mode(*mode) for mode in modes))
        digits = itertools.product(*(range(size) for size, _ in reversed(modes)))
        expected = [
            5 + sum(d * stride for d, (_, stride) in zip(each, reversed(modes), strict=True))
            for each in digits
        ]
        assert list(ranks) == expected
        assert [ranks[place] for place in range(len(ranks))] == expected
