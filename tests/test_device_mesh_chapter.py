"""The worked cases of *The Device Mesh Abstraction*: members, how many groups, placement."""

from __future__ import annotations

import itertools
import math

import pytest

from commgrid import GridSpec
from commgrid.planning.cluster import CLUSTERS
from commgrid.planning.crossing import find_crossings
from commgrid.planning.layout import RankLayout


def grid(*shape: int) -> RankLayout:
    """A mesh of this shape as numpy reads it, the last dim fastest."""
    names = [f"a{i}" for i in range(len(shape))]
    return RankLayout.from_sizes(dict(zip(reversed(names), reversed(shape), strict=True)))


def by_brute_force(shape: tuple[int, ...], dim: int) -> set[tuple[int, ...]]:
    """The ranks that differ along one dim alone, from every coordinate there is."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*map(range, shape))):
        found.setdefault(place[:dim] + place[dim + 1 :], []).append(rank)
    return {tuple(ranks) for ranks in found.values()}


def test_8_by_4_by_8_makes_32_and_64_and_32_groups() -> None:
    spec = GridSpec.build(tp=8, dp=4, pp=8).resolve(256)  # pp slowest, then dp, tp fastest
    layout = spec.layout("dense")
    counts = {}
    for dim, axis in enumerate(("pp", "dp", "tp")):
        groups = [tuple(ranks) for ranks in layout.groups(axis)]
        assert set(groups) == by_brute_force((8, 4, 8), dim)
        counts[axis] = len(groups)
    assert counts == {"pp": 32, "dp": 64, "tp": 32}
    assert layout.group(0, "tp")[:] == tuple(range(8))
    assert layout.group(0, "dp")[:] == (0, 8, 16, 24)
    assert layout.group(0, "pp")[:] == tuple(range(0, 256, 32))


def test_dp_rank_2_of_4_by_4_by_8_holds_ranks_64_to_95() -> None:
    layout = RankLayout.from_sizes({"tp": 8, "pp": 4, "dp": 4})
    assert layout.select(dp=2).ranks[:] == tuple(range(64, 96))


@pytest.mark.parametrize(
    "shape", [(2,), (4, 4), (8, 4, 8), (3, 5, 2), (2, 1, 6), (2, 2, 2, 2), (7, 3), (1, 1, 4)]
)
def test_there_are_p_times_the_sum_of_1_over_d_groups(shape: tuple[int, ...]) -> None:
    layout, ranks = grid(*shape), math.prod(shape)
    groups = [list(layout.groups(f"a{dim}")) for dim in range(len(shape))]
    assert sum(map(len, groups)) == round(ranks * sum(1 / size for size in shape))
    for dim, found in enumerate(groups):
        assert {tuple(each) for each in found} == by_brute_force(shape, dim)


def test_32_nodes_of_8_put_tp_inside_nodes() -> None:
    spec = GridSpec.build(tp=8, dp=32).resolve(256)
    found = find_crossings(spec, CLUSTERS["h100"])
    assert found["tp"].level.name == "node"
    assert (found["dp"].level.name, found["dp"].spread, found["dp"].at_once) == (
        "cluster", (1, 32), 8,
    )  # fmt: skip
    for ranks in spec.layout("dense").groups("tp"):
        assert len({rank // 8 for rank in ranks}) == 1
    for ranks in spec.layout("dense").groups("dp"):
        assert len({rank // 8 for rank in ranks}) == 32
