"""The worked cases of *The Device Mesh Abstraction*: members, how many groups, placement."""

from __future__ import annotations

import pytest

from commgrid import GridSpec
from commgrid.cost_model.cluster import CLUSTERS
from commgrid.cost_model.crossing import find_crossings
from commgrid.layout.rank_layout import RankLayout
from tests.enumeration import coordinates, groups_along


def by_brute_force(layout: RankLayout, axis: str) -> set[tuple[int, ...]]:
    """The groups along one axis, from every coordinate there is."""
    return set(groups_along(coordinates(layout.shape, range(len(layout))), [axis]).values())


def test_8_by_4_by_8_makes_32_and_64_and_32_groups() -> None:
    spec = GridSpec.build(tp=8, dp=4, pp=8).resolve(256)  # pp slowest, then dp, tp fastest
    layout = spec.layout("dense")
    counts = {}
    for axis in ("pp", "dp", "tp"):
        groups = [tuple(ranks) for ranks in layout.groups(axis)]
        assert set(groups) == by_brute_force(layout, axis)
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
    layout = RankLayout.from_sizes({f"a{dim}": size for dim, size in enumerate(shape)})
    groups = {axis: [tuple(ranks) for ranks in layout.groups(axis)] for axis in layout.shape}
    assert sum(map(len, groups.values())) == round(len(layout) * sum(1 / size for size in shape))
    for axis, found in groups.items():
        assert set(found) == by_brute_force(layout, axis)


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
