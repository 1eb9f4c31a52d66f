"""Layouts and plans over lists of ranks in any order, against brute force: count and filter."""

import functools
import itertools
import math
import operator
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from commgrid import GridSpec, GroupPlan, NotInGridError, RankLayout, SpecError
from commgrid.planning.ranks import RankTuple, as_ranks
from commgrid.planning.spec import SHARE_CHOICES
from tests.sizes import full

Table = dict[int, tuple[int, ...]]


def count_up(sizes: tuple[int, ...], ranks: tuple[int, ...]) -> Table:
    """Rank to coordinate: the p-th rank has the p-th coordinate, the first axis fastest."""
    table: Table = {}
    index = [0] * len(sizes)
    for rank in ranks:
        table[rank] = tuple(index)
        for axis, size in enumerate(sizes):
            index[axis] += 1
            if index[axis] < size:
                break
            index[axis] = 0
    return table


def along(table: Table, rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that differ from one only along some axes, by looking at every rank."""
    fixed = [axis for axis in range(len(table[rank])) if axis not in axes]
    return tuple(r for r, c in table.items() if all(c[axis] == table[rank][axis] for axis in fixed))


def factorizations(total: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (total,)
        return
    for size in (n for n in range(1, total + 1) if total % n == 0):
        for rest in factorizations(total // size, count - 1):
            yield (size, *rest)


def check(
    sizes: tuple[int, ...], ranks: tuple[int, ...], some: tuple[int, ...] | None = None
) -> None:
    """Every answer of a layout equals brute force, for all its ranks or some of them."""
    names = tuple("abc"[: len(sizes)])
    shape = dict(zip(names, sizes, strict=True))
    layout, table = RankLayout.from_sizes(shape, ranks=ranks), count_up(sizes, ranks)
    assert tuple(layout.ranks) == ranks
    assert layout.shape == shape
    subsets = [
        s for n in range(len(sizes) + 1) for s in itertools.combinations(range(len(sizes)), n)
    ]
    for axes in subsets:
        named = [names[axis] for axis in axes]
        groups = {rank: along(table, rank, axes) for rank in some or ranks}
        for rank, members in groups.items():
            assert tuple(layout.group(rank, *named)) == members
            fixed = {n: i for n, i in zip(names, table[rank], strict=True) if n not in named}
            part = layout.select(**fixed)
            assert tuple(part.ranks) == members
            assert part.coordinate(rank) == {names[axis]: table[rank][axis] for axis in axes}
        if some is None:
            assert list(map(tuple, layout.groups(*named))) == list(dict.fromkeys(groups.values()))
        if axes:
            flat = layout.flatten(*named, into="flat")
            for rank, members in groups.items():
                assert flat.coordinate(rank)["flat"] == members.index(rank)
            back = flat.split("flat", {name: shape[name] for name in named})
            moved = back.permute(*names)
            assert moved.shape == shape
            assert all(moved.coordinate(rank) == layout.coordinate(rank) for rank in groups)
    for rank in some or ranks:
        found = dict(zip(names, table[rank], strict=True))
        assert layout.coordinate(rank) == found
        assert layout.rank(**found) == rank
    absent = next(rank for rank in itertools.count() if rank not in table)
    with pytest.raises(NotInGridError, match=f"rank {absent} is not one of rank"):
        layout.coordinate(absent)


def check_groups(sizes: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    """Coordinates and groups of every rank, along every set of axes."""
    names = tuple("abc"[: len(sizes)])
    layout = RankLayout.from_sizes(dict(zip(names, sizes, strict=True)), ranks=ranks)
    for rank, index in count_up(sizes, ranks).items():
        assert tuple(layout.coordinate(rank).values()) == index
    for axes, placed in groups_of_places(sizes):
        named = [names[axis] for axis in axes]
        groups = [tuple(ranks[place] for place in places) for places in placed]
        for members in groups:
            assert tuple(layout.group(members[-1], *named)) == members
        assert sorted(map(tuple, layout.groups(*named))) == sorted(groups)


@functools.cache
def groups_of_places(
    sizes: tuple[int, ...],
) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    """For every set of axes the groups along them, as places in the list, whatever is listed."""
    table = count_up(sizes, tuple(range(math.prod(sizes))))
    return [
        (axes, list(dict.fromkeys(along(table, place, axes) for place in table)))
        for number in range(len(sizes) + 1)
        for axes in itertools.combinations(range(len(sizes)), number)
    ]


CUTS = {n: list(factorizations(n, 3)) for n in range(1, 9)}


@pytest.mark.parametrize("number", range(1, 9))
def test_every_list_of_up_to_8_ranks(number: int) -> None:
    """Every order of so many ranks, and of those below 8 every choice; the larger ones in the short
    run in fewer orders."""
    for at, ranks in enumerate(itertools.permutations(range(number))):
        if full() or number < 7 or at % 40 == 0:
            check_groups(CUTS[number][at % len(CUTS[number])], ranks)
    for at, chosen in enumerate(itertools.combinations(range(8), number)):
        orders = list(itertools.permutations(chosen) if number < 4 else (chosen[::-1],))
        for ranks in orders:
            check(CUTS[number][at % len(CUTS[number])], ranks)


def test_random_lists_of_up_to_4096_ranks() -> None:
    pick = random.Random(15)
    for _ in range(60 if full() else 12):
        sizes = tuple(pick.choice((1, 2, 3, 4, 7, 8, 16)) for _ in range(3))
        total = math.prod(sizes)
        ranks = tuple(pick.sample(range(3 * total), total))
        check(sizes, ranks, tuple(pick.sample(ranks, min(3, total))))


def test_overlap_of_lists() -> None:
    pick = random.Random(3)
    for _ in range(50):
        one, other = (tuple(pick.sample(range(40), 12)) for _ in range(2))
        layouts = [RankLayout.from_sizes({"dp": 12}, ranks=ranks) for ranks in (one, other)]
        expected = tuple(rank for rank in range(40) if rank in one and rank in other)
        assert layouts[0].overlap(layouts[1]) == expected
        even = RankLayout.from_sizes({"dp": 12}, stride=3)
        assert layouts[0].overlap(even) == tuple(r for r in range(0, 36, 3) if r in one)


def test_an_evenly_spaced_list_is_a_range() -> None:
    """Equal specs and layouts, and as cheap as a range, however it was spelled."""
    spelled: list[Any] = [
        range(4, 12, 2), [4, 6, 8, 10], (4, 6, 8, 10), "4,6,8,10", "4-10/2", "4-6/2,8,10",
        {"start": 4, "stop": 11, "step": 2}, torch.arange(4, 12, 2), iter([4, 6, 8, 10]),
    ]  # fmt: skip
    specs = [GridSpec.build(tp=2, ranks=ranks).resolve(16) for ranks in spelled]
    assert all(spec == specs[0] and spec.ranks == range(4, 11, 2) for spec in specs)
    assert all(isinstance(spec.ranks, range) for spec in specs)
    assert specs[1].layout("dense") == RankLayout.from_sizes(specs[0].shape, offset=4, stride=2)
    assert as_ranks([5]) == range(5, 6)
    assert (
        as_ranks(range(3, -1, -1)) == as_ranks({"start": 3, "stop": -1, "step": -1}) == (3, 2, 1, 0)
    )
    assert as_ranks("0-3,6") == (0, 1, 2, 3, 6)


class Number:
    """An integer as NumPy's are: by `__index__` alone."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("kind", [Number, torch.tensor])
def test_numbers_are_whatever_has_an_index(kind: Any) -> None:
    plain = GridSpec.build(
        tp=2, cp=4, ep=2, etp=1, ranks=[9, 1, 2, 3, 4, 5, 6, 7],
        groups={"ends": {"of": "cp", "pick": [0, 3]},
                "lv": {"of": "cp", "split": {"a": 2, "b": -1}}, "some": {"ranks": [[1, 9]]}},
    ).resolve(10)  # fmt: skip
    given = GridSpec.build(
        tp=kind(2), cp=kind(4), ep=kind(2), etp=kind(1), dp=kind(-1),
        ranks=[kind(rank) for rank in plain.grid_ranks],
        groups={"ends": {"of": "cp", "pick": [kind(0), kind(3)]},
                "lv": {"of": "cp", "split": {"a": kind(2), "b": kind(-1)}},
                "some": {"ranks": [[kind(1), kind(9)]]}},
    ).resolve(kind(10))  # fmt: skip
    assert given == plain
    assert repr(given) == repr(plain)  # plain ints, not what only equals them
    again = {"axes": {"tp": kind(2), "dp": 4}, "ranks": {"stop": kind(8)}}
    assert (
        GridSpec.from_dict(again).resolve() == GridSpec.build(tp=2, dp=4, ranks=range(8)).resolve()
    )
    plan = GroupPlan.for_rank(plain, kind(9))
    assert type(plan.rank) is int
    assert plan.groups["tp"] == (9, 1)


def test_names_and_words_of_long_lists_stay_short() -> None:
    lists = [RankTuple(pick) for pick in itertools.permutations(range(0, 60, 11))]
    lists += [RankTuple((*range(1000), last)) for last in range(2000, 2050)]
    assert len({str(ranks) for ranks in lists}) == len(lists)
    assert max(len(str(ranks)) for ranks in lists) < 70
    assert RankTuple((*range(1000), 2000)).describe() == "ranks 0-999, 2000"
    assert len(RankTuple(range(0, 9999, 3)).describe()) < 70


# -- plans ------------------------------------------------------------------------------

TABLE: dict[str, Any] = {
    "embedding": {"of": "pp", "pick": ["first", "last"]},
    "levels": {"of": "dp", "split": {"outer": 2, "inner": -1}},
    "fsdp": "dp_cp",
}


def check_spec(spec: GridSpec) -> None:
    """Every group of every rank, all groups of a name, and creation order."""
    layout = {region.name: spec.layout(region.name) for region in spec.regions}
    ranks = tuple(spec.grid_ranks)
    plans = {rank: GroupPlan.for_rank(spec, rank) for rank in ranks}
    for name, definition in spec.definitions.items():
        region = next(r for r in spec.regions if r.name == definition.region)
        table = count_up(tuple(size for _, size in region.numbers), ranks)
        axes = tuple(region.axes.index(axis) for axis in definition.axes)
        groups: dict[tuple[int, ...], None] = {}
        for rank in ranks:
            if definition.lists is not None:
                members = next((tuple(g) for g in definition.lists if rank in g), ())
            else:
                members = along(table, rank, axes)
            if definition.pick is not None and members:
                ends = {"first": 0, "last": len(members) - 1}
                kept = {ends.get(p, p) for p in definition.pick}  # type: ignore[call-overload]
                members = tuple(r for p, r in enumerate(members) if p in kept)
            if definition.part is not None:
                size, stride = definition.part
                at = members.index(rank)
                members = tuple(
                    r for p, r in enumerate(members)
                    if p % stride == at % stride and p // (size * stride) == at // (size * stride)
                )  # fmt: skip
            if members:
                groups[members] = None
            assert plans[rank].groups.get(name) == (members if rank in members else None)
        first = sorted(groups, key=lambda group: ranks.index(group[0]))
        assert definition.all_ranks(layout[definition.region]) == first, name
    listed = {rank: [(c.names, c.ranks) for c in p.communicators] for rank, p in plans.items()}
    for rank, peer in itertools.permutations(ranks, 2):
        ours = [c for c in listed[rank] if peer in c[1]]
        assert ours == [c for c in listed[peer] if rank in c[1]], (rank, peer)
    for plan in plans.values():
        assert sorted(n for c in plan.communicators for n in c.names) == sorted(plan.groups)


@pytest.mark.parametrize("share", SHARE_CHOICES)
@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"tp": 2, "pp": 3}, (0, 1, 2, 4, 5, 7)),
        ({"tp": 2, "pp": 2}, (5, 2, 0, 7)),
        ({"cp": 2, "dp": 4, "pp": 2}, tuple(random.Random(1).sample(range(40), 16))),
        ({"tp": 2, "dp": 4, "ep": 4, "etp": 1}, tuple(random.Random(2).sample(range(9), 8))),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, (7, 6, 5, 4, 3, 2, 1, 0)),
    ],
)
def test_plans_over_lists_equal_enumeration(
    sizes: dict[str, int], ranks: tuple[int, ...], share: str
) -> None:
    groups = {**TABLE}
    if sizes.get("dp") != 4:
        del groups["levels"]
    spec = GridSpec.build(**sizes, ranks=ranks, groups=groups, share=share).resolve(64)  # type: ignore[arg-type]
    assert spec.grid_ranks == ranks
    check_spec(spec)


@pytest.mark.parametrize("share", SHARE_CHOICES)
@pytest.mark.parametrize("ranks", [None, (7, 6, 0, 1, 3, 2, 4, 5)])
def test_rows_that_list_ranks(share: str, ranks: tuple[int, ...] | None) -> None:
    groups = {
        **TABLE, "some": {"ranks": [[4, 2, 1, 0], [3, 5]]}, "alias": "some",
        "slow": {"of": "some", "timeout": 9}, "apart": {"of": "some", "own": True},
        "ends": {"of": "some", "pick": ["first", "last"]},
        "pair": {"ranks": [[0, 1]], "timeout": 5}, "alone": {"ranks": [[6]]},
        "twin": {"ranks": [[4, 2, 1, 0], [3, 5]]},
    }  # fmt: skip
    spec = GridSpec.build(tp=2, dp=4, ranks=ranks, groups=groups, share=share).resolve(8)
    check_spec(spec)
    plan = GroupPlan.for_rank(spec, 2)
    assert plan.groups["some"] == plan.groups["twin"] == (4, 2, 1, 0)  # in the order of the list
    named = {name: c for c in plan.communicators for name in c.names}
    assert named["some"].names == ("some", "alias")  # own, whatever else has these ranks
    assert {named[n].name for n in ("slow", "apart", "twin")} == {"slow", "apart", "twin"}
    assert named["slow"].options.timeout == 9.0
    assert named["some"].connect
    assert "ends" not in plan.groups
    assert GroupPlan.for_rank(spec, 0).groups["ends"] == (4, 0)
    pair = {n: c for c in GroupPlan.for_rank(spec, 3).communicators for n in c.names}
    assert pair["ends"].ranks == pair["some"].ranks == (3, 5)
    assert (pair["ends"] is pair["some"]) == (share != "aliases")
    assert "some" not in GroupPlan.for_rank(spec, 7).groups
    assert GridSpec.from_dict(spec.to_dict()) == spec
    assert spec.to_dict()["groups"]["some"] == {"ranks": [[4, 2, 1, 0], [3, 5]]}


def test_get_all_ranks_does_not_look_at_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """4.7 s at 4,096 ranks for four groups, when every rank's was made to find them."""
    groups = {**TABLE, "some": {"ranks": [[1, 2, 3], [9, 8]]}}
    spec = GridSpec.build(tp=8, dp=128, pp=4, groups=groups).resolve(4096)
    layout, calls = spec.layout("dense"), [0]
    group = RankLayout.group

    def counted(self: RankLayout, rank: int, *axes: str) -> object:
        calls[0] += 1
        return group(self, rank, *axes)

    monkeypatch.setattr(RankLayout, "group", counted)
    found = {
        n: spec.definitions[n].all_ranks(layout)
        for n in ("dp_tp", *TABLE, "outer", "some")
        if n != "levels"
    }
    assert calls == [0]
    assert [len(found[n]) for n in ("dp_tp", "embedding", "fsdp", "outer", "some")] == [
        4, 1024, 32, 2048, 2,
    ]  # fmt: skip
    assert found["dp_tp"] == [tuple(range(first, first + 1024)) for first in range(0, 4096, 1024)]
    assert all(b == a + 3072 for a, b in found["embedding"])
    assert sorted(map(operator.itemgetter(0), found["outer"])) == [g[0] for g in found["outer"]]


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(SpecError, match="a=2 is not the 3 ranks listed"):
        RankLayout.from_sizes({"a": 2}, ranks=[4, 1, 0])
    with pytest.raises(SpecError, match="the axes reach place 3 of the 3 ranks listed"):
        RankLayout(RankLayout.from_sizes({"a": 4}).axes, 0, RankTuple((4, 1, 0)))
