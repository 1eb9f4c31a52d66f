"""Levels that groups cross, against counting rank by rank; and wrong clusters."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from commgrid import GridSpec, SpecError
from commgrid.cost_model.cluster import CLUSTERS, Cluster, Device, Level, find_cluster, nodes_of
from commgrid.cost_model.crossing import check_within, find_crossings, warnings

H100 = CLUSTERS["h100"]


def units_of(cluster: Cluster, rank: int, hosts: Sequence[int] | None) -> list[int]:
    """The unit of every level that a rank is in, by dividing."""
    unit = rank // cluster.per_node if hosts is None else hosts[rank]
    found = [unit]
    for level in cluster.levels[1:]:
        found.append(0 if level.size is None else found[-1] // level.size)
    return found


def by_hand(
    groups: list[tuple[int, ...]], cluster: Cluster, hosts: Sequence[int] | None
) -> tuple[tuple[int, ...], int]:
    """How the worst group lies, and how many cross the link of one unit there."""
    lying = []
    for ranks in groups:
        paths = [(rank, *units_of(cluster, rank, hosts)) for rank in ranks]
        spread: list[int] = []
        for level in range(len(cluster.levels)):
            within: dict[int, set[int]] = {}
            for path in paths:
                within.setdefault(path[level + 1], set()).add(path[level])
            spread.append(max(map(len, within.values())))
        lying.append(tuple(spread))
    worst = max(lying, key=lambda each: tuple(reversed(each)))
    level = max((i for i, count in enumerate(worst) if count > 1), default=0)
    if level == 0:
        return worst, 1
    links: dict[int, int] = {}
    for ranks, each in zip(groups, lying, strict=True):
        if each[level] > 1:
            for unit in {units_of(cluster, rank, hosts)[level - 1] for rank in ranks}:
                links[unit] = links.get(unit, 0) + 1
    return worst, max(links.values())


def random_cluster(draw: random.Random) -> Cluster:
    sizes = [draw.choice([1, 2, 3, 4, 6, 8]), draw.choice([2, 3, 4]), draw.choice([2, 4])]
    levels = [Level(f"l{i}", size, 1e9, 1e-6) for i, size in enumerate(sizes[: draw.randint(1, 3)])]
    return Cluster(
        "random", Device("", 1.0, 1.0, 1.0), (*levels, Level("all", None, 1e8, 1e-5)), ""
    )


def test_random_grids_on_random_clusters_equal_counting() -> None:
    draw = random.Random(20)
    crossed = 0
    for _ in range(120):
        sizes: Any = {axis: draw.choice([1, 2, 2, 3, 4]) for axis in ("tp", "cp", "dp", "pp")}
        groups: dict[str, Any] = {"ends": {"of": "dp_tp", "pick": ["first", "last"]}}
        if sizes["dp"] % 2 == 0:
            groups["halves"] = {"of": "dp", "split": {"outer": -1, "inner": 2}}
        order = draw.sample(list(sizes), 4)
        world = math.prod(sizes.values())
        ranks = draw.sample(range(world + 5), world) if draw.random() < 0.3 else None
        spec = GridSpec.build(**sizes, order="-".join(order), groups=groups, ranks=ranks)
        spec = spec.resolve(None if ranks else world)
        cluster = random_cluster(draw)
        hosts = None
        if draw.random() < 0.3:
            hosts = [draw.randrange(6) for _ in range(world + 5)]
        elif ranks is None and world > cluster.per_node and world % cluster.per_node:
            with pytest.raises(SpecError, match="does not fill nodes"):
                find_crossings(spec, cluster)
            continue
        for name, crossing in find_crossings(spec, cluster, hosts).items():
            definition = spec.definitions[name]
            every = definition.all_ranks(spec.layout(definition.region))
            assert (crossing.spread, crossing.at_once) == by_hand(every, cluster, hosts), name
            assert crossing.level is cluster.levels[crossing.place]
            assert crossing.spread in {cluster.spread(ranks, hosts) for ranks in every}
            crossed += crossing.place > 0
    assert crossed > 390


def test_groups_that_lie_alike_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No unit of a million ranks on nodes of 8 is looked up; on racks of 72 each once a name."""
    looked_up = []
    units = Cluster.lowest_units

    def counting(cluster: Cluster, ranks: Sequence[int], hosts: Any = None) -> list[int]:
        looked_up.append(len(ranks))
        return units(cluster, ranks, hosts)

    monkeypatch.setattr(Cluster, "lowest_units", counting)
    spec = GridSpec.build(tp=8, pp=16, cp=2, ep=8, etp=1).resolve(2**20)
    found = find_crossings(spec, H100)
    assert looked_up == []
    assert (found["dp"].spread, found["dp"].at_once) == ((1, 4096), 8)
    spec = GridSpec.build(tp=8, pp=16, cp=2, ep=8, etp=1).resolve(16384)
    found = find_crossings(spec, CLUSTERS["gb200"])
    assert sum(looked_up) <= 16384 * len(found)
    assert set(found) == set(spec.definitions)
    assert found["tp"].describe() == "4 ranks of each of 2 nodes; 1 group at once on a node's link"


@pytest.mark.parametrize(
    ("sizes", "world", "kind", "told"),
    [
        ({"tp": 8}, 64, "h100", []),
        ({"tp": 16}, 64, "h100", [
            "tp spans 2 nodes: each layer's all-reduce goes over 50 GB/s instead of 450; a node "
            "has 8 devices, so that tp=8 stays within one"]),
        ({"tp": 4, "order": "dp-tp-pp"}, 64, "a100", [
            "tp spans 4 nodes: each layer's all-reduce goes over 25 GB/s instead of 300; 4 ranks "
            "fit a node of 8 devices: put tp earlier in order"]),
        ({"tp": 3}, 24, "h100", [
            "tp spans 2 nodes: each layer's all-reduce goes over 50 GB/s instead of 450; tp=3 does "
            "not divide a node's 8 devices; tp=2 or 4 does"]),
        ({"tp": 2, "cp": 4, "order": "tp-dp-cp"}, 64, "h100", [
            "cp spans 4 nodes: each layer's exchange of keys and values goes over 50 GB/s instead "
            "of 450; 4 ranks fit a node of 8 devices: put cp earlier in order"]),
        ({"tp": 4, "cp": 4}, 64, "h100", []),  # both do not fit: tp comes first
        ({"ep": 4, "etp": 1, "order": "tp-cp-dp-ep-pp"}, 64, "h100", [
            "ep spans 4 nodes: each expert layer's all-to-all goes over 50 GB/s instead of 450; 4 "
            "ranks fit a node of 8 devices: put ep earlier in order"]),
        ({"tp": 12}, 192, "gb200", [  # 64 is no multiple of 12: ranks 60 to 71 are in two racks
            "tp spans 2 racks: each layer's all-reduce goes over 50 GB/s instead of 900; tp=12 "
            "does not divide a rack's 64 devices; tp=8 or 16 does"]),
        ({"tp": 12, "cp": 2}, 192, "gb200", [
            "tp spans 2 racks: each layer's all-reduce goes over 50 GB/s instead of 900; tp=12 "
            "does not divide a rack's 64 devices; tp=8 or 16 does",
            "cp spans 2 racks: each layer's exchange of keys and values goes over 50 GB/s instead "
            "of 900; tp=12 · cp=2 does not divide a rack's 64 devices"]),
        ({"tp": 8}, 128, "gb200", []),  # over nodes of 4, within a rack as fast
        ({"tp": 16}, 64, "cpu", []),
    ],
)  # fmt: skip
def test_warnings_say_what_is_slow_and_the_fix(
    sizes: dict[str, Any], world: int, kind: str, told: list[str]
) -> None:
    spec = GridSpec.build(**sizes).resolve(world)
    found = find_crossings(spec, CLUSTERS[kind])
    assert warnings(spec, CLUSTERS[kind], found) == told


def test_without_speeds_it_says_no_numbers() -> None:
    spec, nodes = GridSpec.build(tp=4).resolve(8), nodes_of(2)
    assert warnings(spec, nodes, find_crossings(spec, nodes)) == [
        "tp spans 2 nodes: each layer's all-reduce goes between nodes; a node has 2 devices, so "
        "that tp=2 stays within one"
    ]


# -- clusters that are none -------------------------------------------------------------


def written(**changes: Any) -> dict[str, Any]:
    """An H100 cluster as a file has it, with with changed values; `...` removes the key."""
    made: dict[str, Any] = copy.deepcopy(H100.to_dict())
    for path, value in changes.items():
        inner: Any = made
        *keys, last = [int(k) if k.isdigit() else k for k in path.split("__")]
        for key in keys:
            inner = inner[key]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    return made


NUMBERS = {
    "device__peak_tflops": "device.peak_tflops", "device__memory_gb": "device.memory_gb",
    "device__memory_gb_per_s": "device.memory_gb_per_s",
    "levels__0__gb_per_s": "levels[0].gb_per_s", "levels__1__latency_us": "levels[1].latency_us",
    "levels__0__size": "levels[0].size",
}  # fmt: skip


@pytest.mark.parametrize("path", NUMBERS)
@pytest.mark.parametrize("value", [..., 0, -1, "eight", True, None, math.inf, math.nan])
def test_every_number_of_a_cluster_is_one_above_0(path: str, value: Any) -> None:
    if path.endswith("size") and value is None:
        return  # as left out of the highest level
    with pytest.raises(SpecError) as raised:
        Cluster.from_dict(written(**{path: value}))
    assert str(raised.value).startswith(NUMBERS[path])
    assert "expected" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": ...}, "name: missing; expected name, device, levels"),
        ({"device": 3}, "device=3: expected a mapping"),
        ({"device__name": ...}, "device.name: missing"),
        ({"levels": []}, "levels=[]: expected a list of levels, the lowest first"),
        ({"levels__0": "node"}, "levels[0]='node': expected a mapping"),
        ({"levels__0__size": 2.5}, "levels[0].size=2.5: expected a whole number from 1 on"),
        ({"levels__0__gb_per_sec": 1}, "levels[0].gb_per_sec: unknown key"),
        ({"levels__1__name": "node"}, "levels: 'node' is the name of two; names must differ"),
        ({"speed": 1}, "speed: unknown key, expected some of name, device, levels, source"),
    ],
)
def test_what_is_no_cluster_says_which_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as raised:
        Cluster.from_dict(written(**changes))
    assert str(raised.value).startswith(said)


def test_a_cluster_reads_back_and_names_are_found() -> None:
    for cluster in CLUSTERS.values():
        assert Cluster.from_dict(cluster.to_dict()) == cluster
        assert cluster.source
    with pytest.raises(SpecError, match=r"cluster 'h10': expected one of .*did you mean 'h100'"):
        find_cluster("h10")
    with pytest.raises(SpecError, match=r"^nowhere/c\.yaml: there is no such file"):
        find_cluster("nowhere/c.yaml")
    with pytest.raises(SpecError, match=r"level 'nod': cluster 'h100' has .*did you mean 'node'"):
        H100.find_level("nod")
    with pytest.raises(SpecError, match=r"world_size=12: does not fill nodes of 8 .* 8 or 16"):
        H100.check_world(12)
    with pytest.raises(SpecError, match="cluster 'h100' has 16 devices"):
        Cluster.from_dict(written(levels__1__size=2)).check_world(24)
    with pytest.raises(SpecError, match="gpus_per_node=0: expected a whole number from 1 on"):
        H100.with_node(0)


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_GPUS_ON_NODE": "8"}, 4),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_TASKS_PER_NODE": "1(x2)"}, 8),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "4"}, 4),  # two GPUs a rank
        ({"SLURM_GPUS_ON_NODE": "1", "SLURM_NTASKS_PER_NODE": "1"}, 1),
        ({"SLURM_NTASKS_PER_NODE": "6"}, 6),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, 2),
        ({"SLURM_TASKS_PER_NODE": "2(x3),2"}, 2),
        ({}, 8),
    ],
)
def test_the_launcher_says_how_large_nodes_are(environ: dict[str, str], size: int) -> None:
    cluster = Cluster.from_launcher(H100, environ)
    assert (cluster.per_node, cluster.levels[1], cluster.device) == (
        size, H100.levels[1], H100.device,
    )  # fmt: skip
    if environ:
        assert Cluster.from_launcher(environ=environ).per_node == size


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0': expected a number above 0"),
        ({"SLURM_TASKS_PER_NODE": "8(x"}, r"SLURM_TASKS_PER_NODE='8\(x': expected a number"),
        ({"SLURM_TASKS_PER_NODE": "8(x2),4"}, "nodes have 4 and 8 ranks; a cluster's nodes are"),
        ({}, "none of LOCAL_WORLD_SIZE, .* is set"),
    ],
)
def test_a_launcher_that_does_not_say_is_an_error(environ: dict[str, str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Cluster.from_launcher(environ=environ)


def test_the_fastest_level_that_a_group_could_have_counts() -> None:
    """Between nodes under one switch and switches as fast nothing was said of tp over both."""
    node, above = H100.levels
    leaf = replace(node, name="leaf", size=4, bandwidth=above.bandwidth)
    cluster = replace(H100, levels=(node, leaf, above))
    spec = GridSpec.build(tp=64).resolve(64)
    (told,) = warnings(spec, cluster, find_crossings(spec, cluster))
    assert told == (
        "tp spans 8 nodes: each layer's all-reduce goes over 50 GB/s instead of 450; a node has 8 "
        "devices, so that tp=8 stays within one"
    )


@pytest.mark.parametrize(
    ("sizes", "within", "fix"),
    [
        ({"tp": 4}, "dp", "so that tp=4 · dp=2 stays within one"),
        ({"tp": 8}, "dp", "put dp earlier in order"),
        ({"tp": 9}, "tp", "so that tp=8 stays within one"),
        ({"tp": 8, "ranks": "4-11"}, "tp", "list ranks that begin where one does"),
        ({"tp": 4}, "dp_cp", "give dp and cp fewer ranks"),
    ],
)
def test_what_leaves_a_node_says_how_it_stays(sizes: Any, within: str, fix: str) -> None:
    spec = GridSpec.build(**sizes, within={within: "node"})
    spec = spec.resolve() if "ranks" in sizes else spec.resolve(72)
    with pytest.raises(SpecError, match=f"{fix}$"):
        check_within(spec, H100)


def test_more_ranks_than_can_be_counted_are_refused_at_once() -> None:
    """Of tp 3 on nodes of 8 each group is looked at; of tp 8 any number of ranks has a place."""
    with pytest.raises(SpecError, match="more than 200,000 ranks are not counted one by one"):
        find_crossings(GridSpec.build(tp=3).resolve(3_000_000), H100)
    found = find_crossings(GridSpec.build(tp=8).resolve(10**9), H100)
    assert found["dp"].spread == (1, 125_000_000)
