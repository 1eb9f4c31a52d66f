"""Lists of ranks: how they may be spelled, and how they are printed."""

import itertools
from typing import Any

import pytest
import torch

from commgrid import GridSpec, GroupPlan, RankLayout
from commgrid.layout.rank_text import describe_ranks
from commgrid.layout.ranks import RankTuple, as_ranks


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
    assert describe_ranks(RankTuple((*range(1000), 2000))) == "ranks 0-999, 2000"
    assert len(describe_ranks(RankTuple(range(0, 9999, 3)))) < 110
