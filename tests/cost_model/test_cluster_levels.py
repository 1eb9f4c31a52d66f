"""Clusters whose lowest level is not the node: domains of devices, nodes of domains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commgrid.cost_model.cluster import CLUSTERS, Cluster
from commgrid.cost_model.collective import COLLECTIVES, collective_time
from commgrid.cost_model.crossing import check_within, find_crossings
from commgrid.errors import SpecError
from commgrid.planning.spec import GridSpec

NODE, ABOVE = CLUSTERS["h100"].levels


def cluster(domain: int = 4, domains: int = 2) -> Cluster:
    """Domains of devices, in nodes, in a cluster."""
    levels = (replace(NODE, name="domain", size=domain), replace(NODE, size=domains), ABOVE)
    return replace(CLUSTERS["h100"], levels=levels)


def test_a_node_is_the_level_of_that_name() -> None:
    assert cluster().per_node == 8
    wide = cluster().with_node(16)
    assert [level.size for level in wide.levels] == [4, 4, None]
    assert wide.per_node == 16
    assert CLUSTERS["gb200"].per_node == 4
    with pytest.raises(SpecError, match=r"gpus_per_node=6: .*, in whole domains of 4"):
        cluster().with_node(6)


def test_racks_keep_their_devices() -> None:
    """Nodes of 8 made racks of 128."""
    wide = CLUSTERS["gb200"].with_node(8)
    assert [level.size for level in wide.levels] == [8, 8, None]
    with pytest.raises(SpecError, match="gpus_per_node=24: does not divide the 64 devices of a ra"):
        CLUSTERS["gb200"].with_node(24)


def test_the_trays_of_a_rack_are_one_fabric() -> None:
    """A collective over 8 trays takes as long as one in a node of 32; `within` a node as well."""
    gb200 = CLUSTERS["gb200"]
    node, _, cluster = gb200.levels
    flat = replace(gb200, levels=(replace(node, size=64), cluster))
    for collective in COLLECTIVES:
        told = collective_time(collective, 1e8, (4, 8, 2), gb200)
        assert told == collective_time(collective, 1e8, (32, 2), flat)
    check_within(GridSpec.build(tp=16, within={"tp": "node"}).resolve(64), gb200)
    with pytest.raises(SpecError, match="ranks 0-127, a group of tp, lie on 2 racks of 64 devices"):
        check_within(GridSpec.build(tp=128, within={"tp": "node"}).resolve(128), gb200)


def test_hosts_are_nodes() -> None:
    """Ranks of a host fill one domain after another, for any numbers of ranks."""
    hosts = [rank % 2 for rank in range(16)]
    assert cluster().spread([0, 2, 4, 6], hosts) == (4, 1, 1)
    assert cluster().spread(range(0, 16, 2), hosts) == (4, 2, 1)
    assert cluster().spread([0, 1], hosts) == (1, 1, 2)
    spec = GridSpec.build(tp=4).resolve(16)
    found = find_crossings(spec, cluster(), hosts)
    assert found["tp"].spread == (2, 1, 2)
    assert find_crossings(spec, cluster())["tp"].spread == (4, 1, 1)


def test_what_a_group_leaves_is_named() -> None:
    found = find_crossings(GridSpec.build(tp=8).resolve(16), cluster())["tp"]
    assert found.describe() == "4 ranks of each of 2 domains; 1 group at once on a domain's link"
