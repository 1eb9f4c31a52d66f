"""Which grid is left, and who takes which place in it: against every other choice there is."""

import itertools
import random
from collections.abc import Sequence

import pytest

from commgrid import GridSpec, SpecError
from commgrid.planning.survivors import refit, shrinking
from tests.enumeration import Coordinates, coordinates

SPECS = [
    {"tp": 2},
    {"tp": 2, "dp": 2},
    {"pp": 2},
    {"pp": 4},
    {"tp": 2, "cp": 2},
    {"pp": 2, "tp": 2, "order": "pp-tp-cp-ep-dp"},
    {"dp_replicate": 2, "dp_shard": 2},
    {"tp": 2, "ep": 2},
]


def seats(spec: GridSpec) -> Coordinates:
    return coordinates(dict(spec.regions[0].numbers), spec.grid_ranks)


def kept(last: Coordinates, new: Coordinates, axes: Sequence[str]) -> int:
    """How many ranks have the coordinate on these axes that they had."""
    return sum(
        rank in last and all(last[rank][axis] == at[axis] for axis in axes)
        for rank, at in new.items()
    )


@pytest.mark.parametrize("sizes", SPECS, ids=str)
def test_no_other_choice_keeps_more_ranks_where_they_are(sizes: dict[str, int]) -> None:
    """Brute force over all ways to seat the ranks that are left, for any two ranks gone."""
    given = GridSpec.build(**sizes)
    last = given.resolve(4 if len(sizes) < 2 or "dp" in sizes else 8 if "cp" in sizes else 4)
    before = seats(last)
    draws = random.Random(0)
    for gone in (1, 2):
        for dead in itertools.combinations(last.grid_ranks, gone):
            here = [rank for rank in last.grid_ranks if rank not in dead]
            if draws.random() < 0.5:
                here.append(99)  # a spare
            try:
                new = refit(given, last.shape, last, here)
            except SpecError:
                assert "cp" in sizes or "ep" in sizes
                continue
            dense = new.regions[0].axes
            model = [axis for axis in dense if new.shape[axis] == last.shape[axis]]
            if len(model) == len(dense):
                model.remove(shrinking(given)[0])
            found = seats(new)
            assert set(found) <= set(here)
            assert len(found) == len(new.grid_ranks)
            places = list(found.values())
            if len(places) > 6:
                continue
            best = max(
                kept(before, dict(zip(seated, places, strict=True)), model)
                for seated in itertools.permutations(here, len(places))
            )
            assert kept(before, found, model) == best, (dead, here, tuple(new.grid_ranks))


@pytest.mark.parametrize("sizes", SPECS, ids=str)
def test_no_larger_grid_of_the_shrinking_axis_fits(sizes: dict[str, int]) -> None:
    given = GridSpec.build(**sizes)
    last = given.resolve(4 if len(sizes) < 2 or "dp" in sizes else 8 if "cp" in sizes else 4)
    axis, *others = shrinking(given)
    dense = dict(last.regions[0].numbers)
    for count in range(1, 12):
        try:
            new = refit(given, last.shape, last, range(100, 100 + count))
        except SpecError:
            continue
        if any(new.shape[other] != last.shape[other] for other in others):
            continue
        rest = len(last.grid_ranks) // dense[axis]
        assert new.shape[axis] == min(dense[axis], count // rest)


def test_whole_replicas_are_left_out() -> None:
    given = GridSpec.build(tp=2, dp=4)
    last = given.resolve(8)
    new = refit(given, last.shape, last, [0, 1, 2, 4, 5, 6, 7])
    assert tuple(new.grid_ranks) == (0, 1, 4, 5, 6, 7)
    # A second one goes: whole rows stay where they are, and rank 2 comes back.
    again = refit(given, last.shape, new, [0, 1, 2, 4, 5, 6])
    assert tuple(again.grid_ranks) == (0, 1, 4, 5, 6, 2)


def test_a_spare_takes_the_place_of_the_dead() -> None:
    given = GridSpec.build(tp=2, ranks=range(8))
    last = given.resolve(9)
    new = refit(given, last.shape, last, [0, 1, 2, 4, 5, 6, 7, 8])
    assert tuple(new.grid_ranks) == (0, 1, 2, 8, 4, 5, 6, 7)
    assert new.shape == last.shape


def test_it_never_grows_beyond_what_it_was() -> None:
    given = GridSpec.build(tp=2)
    last = given.resolve(4)
    assert refit(given, last.shape, last, range(9)).shape["dp"] == 2


def test_sizes_that_the_job_cannot_use_are_left_out() -> None:
    given = GridSpec.build(tp=2)
    last = given.resolve(8)
    new = refit(given, last.shape, last, range(7), fits=lambda sizes: 16 % sizes["dp"] == 0)
    assert new.shape["dp"] == 2


def test_pp_shrinks_where_dp_cannot() -> None:
    given = GridSpec.build(pp=4)
    last = given.resolve(4)
    new = refit(given, last.shape, last, [0, 1, 3])
    assert new.shape["pp"] == 3
    assert tuple(new.grid_ranks) == (0, 1, 3)


def test_other_regions_follow() -> None:
    given = GridSpec.build(tp=2, ep=2)
    last = given.resolve(8)
    new = refit(given, last.shape, last, range(7))
    assert new.shape["dp"] == 2  # dp 3 makes 6 ranks, which etp 2 · ep 2 does not divide
    assert new.shape["edp"] == 1


def test_what_cannot_shrink_is_an_error_that_says_what_it_needs() -> None:
    given = GridSpec.build(tp=4)
    last = given.resolve(8)
    with pytest.raises(SpecError, match=r"no grid fits ranks 0-2: dp and pp .* tp 4 need 4 ranks"):
        refit(given, last.shape, last, [0, 1, 2])
