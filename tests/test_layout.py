"""RankLayout against brute force: enumerate every rank's coordinate, then filter."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commgrid.errors import NotInGridError, SpecError
from commgrid.planning.layout import Axis, Mode, RankLayout, RankSet

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(
    lambda n: {f"axis{i}": size for i, size in enumerate(n)}
)


def coordinates(shape: dict[str, int], offset: int, stride: int) -> dict[int, dict[str, int]]:
    """Rank to coordinate by counting up, the first axis fastest."""
    indices = itertools.product(*(range(size) for size in reversed(shape.values())))
    return {
        offset + position * stride: dict(zip(shape, reversed(index), strict=True))
        for position, index in enumerate(indices)
    }


@given(sizes, st.integers(0, 3000), st.integers(1, 3), st.randoms())
def test_ranks_and_groups_equal_enumeration(
    shape: dict[str, int], offset: int, stride: int, pick: random.Random
) -> None:
    layout = RankLayout.from_sizes(shape, offset=offset, stride=stride)
    table = coordinates(shape, offset, stride)
    assert tuple(layout.ranks) == tuple(table)
    axes = pick.sample(list(shape), pick.randint(0, len(shape)))
    for rank, coordinate in table.items():
        assert layout.coordinate(rank) == coordinate
        assert layout.rank(**coordinate) == rank
        fixed = {a: i for a, i in coordinate.items() if a not in axes}
        peers = tuple(r for r, c in table.items() if fixed.items() <= c.items())
        group = layout.group(rank, *axes)
        assert tuple(group) == peers
        assert [group[i] for i in range(len(group))] == list(peers)
        assert group.index(rank) == peers.index(rank)
        assert tuple(layout.select(**fixed).ranks) == peers
    groups = [tuple(group) for group in layout.groups(*axes)]
    assert groups == sorted(groups)
    assert sorted(rank for group in groups for rank in group) == sorted(table)


@given(sizes, st.randoms())
def test_flatten_and_permute_move_no_rank(shape: dict[str, int], pick: random.Random) -> None:
    layout = RankLayout.from_sizes(shape, offset=7)
    axes = pick.sample(list(shape), pick.randint(1, len(shape)))
    flat = layout.flatten(*axes, into="flat")
    for rank in layout.ranks:
        assert flat.group(rank, "flat") == layout.group(rank, *axes)
        position = flat.coordinate(rank)["flat"]
        assert layout.group(rank, *axes)[position] == rank
    shuffled = pick.sample(list(shape), len(shape))
    permuted = layout.permute(*shuffled)
    assert list(permuted.shape) == shuffled
    assert all(permuted.coordinate(r) == layout.coordinate(r) for r in layout.ranks)


def test_flatten_of_axes_that_are_not_adjacent_splits_back() -> None:
    layout = RankLayout.from_sizes({"tp": 2, "cp": 3, "dp": 4})
    flat = layout.flatten("dp", "tp", into="both")
    back = flat.split("both", {"tp": 2, "dp": 4}).permute("tp", "cp", "dp")
    assert back == layout
    halves = flat.split("both", {"tp": 2, "inner": 2, "outer": 2})
    assert halves.group(0, "inner")[:] == (0, 6)
    assert halves.group(0, "outer")[:] == (0, 12)


def test_a_split_must_multiply_and_not_cut_through() -> None:
    layout = RankLayout((Axis("both", (Mode(3, 1), Mode(4, 6))),))
    with pytest.raises(SpecError, match=r"cannot split both of size 12 into a=2·b=5"):
        layout.split("both", {"a": 2, "b": 5})
    with pytest.raises(SpecError, match=r"a=2 cuts through both, which is made of 3·4"):
        layout.split("both", {"a": 2, "b": 6})


def test_ranks_that_do_not_start_at_0() -> None:
    layout = RankLayout.from_sizes({"tp": 8, "dp": 256}, offset=2048)
    assert (layout.ranks[0], layout.ranks[-1], len(layout)) == (2048, 4095, 2048)
    assert layout.group(2055, "dp")[:2] == (2055, 2063)
    with pytest.raises(NotInGridError, match=r"rank 2047 is not one of ranks 2048 to 4095"):
        layout.coordinate(2047)


def test_every_other_rank() -> None:
    layout = RankLayout.from_sizes({"tp": 2, "dp": 2}, stride=2)
    assert layout.groups("tp")[1][:] == (4, 6)
    with pytest.raises(NotInGridError, match=r"rank 3 is not one of ranks 0 to 6 \(4 of them\)"):
        layout.coordinate(3)


def test_overlap() -> None:
    low, high = (RankLayout.from_sizes({"dp": 4}, offset=offset) for offset in (0, 4))
    odd = RankLayout.from_sizes({"dp": 4}, offset=1, stride=2)
    assert low.overlap(high) == ()
    assert odd.overlap(high) == high.overlap(odd) == (5, 7)
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
        (lambda lay: lay.permute("tp"), "permute needs each of tp, dp once"),
        (lambda lay: lay.flatten(into="x"), "at least one axis"),
        (lambda lay: lay.flatten("tp", into="dp"), "axis names must differ"),
        (lambda lay: RankLayout.from_sizes({"tp": 0}), "axis tp has size 0"),
    ],
)
def test_misuse_is_named(call: object, said: str) -> None:
    assert callable(call)
    with pytest.raises(SpecError, match=said):
        call(RankLayout.from_sizes({"tp": 2, "dp": 2}))
