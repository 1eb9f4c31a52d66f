"""What collectives cost beside simulations of their messages, and the conversion table beside
torch's own DTensor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from commgrid.cost_model.cluster import CLUSTERS, Cluster, Device, Level
from commgrid.cost_model.collective import (
    COLLECTIVES,
    algorithms,
    bus_bandwidth,
    bus_factor,
    collective_time,
)
from commgrid.cost_model.redistribution import (
    redistribution,
    redistribution_bytes,
    redistribution_time,
)
from commgrid.errors import SpecError
from commgrid.testing import run_on_ranks

ALPHA, BETA = 2e-6, 1e-10  # seconds a hop, seconds a byte
BOX = Cluster("box", Device("any", 1, 1, 1), (Level("node", None, 1 / BETA, ALPHA),), "")


def simulated_ring(links: list[tuple[float, float]], chunk: float, passes: int) -> float:
    """When all ranks of a ring have every chunk: rank r sends over links[r], one chunk after the
    other, each as soon as it has come; a link holds the bytes and then adds its latency."""
    n = len(links)
    has = [[math.inf] * n for _ in range(n)]  # when rank r has chunk c
    for rank in range(n):
        has[rank][rank] = 0.0
    done = 0.0
    for _ in range(passes):
        free = [done] * n
        for step in range(n - 1):
            for rank in range(n):
                which, after = (rank - step) % n, (rank + 1) % n
                latency, per_byte = links[rank]
                free[rank] = max(free[rank], has[rank][which], done) + chunk * per_byte
                has[after][which] = free[rank] + latency
        done = max(max(row) for row in has)
        has = [[done if c == r else math.inf for c in range(n)] for r in range(n)]
    return done


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("size", [64.0, 1e5, 1e9])
def test_a_ring_on_one_level_is_what_its_messages_add_up_to(n: int, size: float) -> None:
    links = [(ALPHA, BETA)] * n
    for collective, passes in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        told = collective_time(collective, size, (n,), BOX, algorithm="ring")
        # A chunk comes alpha after its link is free again: 1 alpha fewer than store and forward.
        assert told == pytest.approx(simulated_ring(links, size / n, passes), rel=1e-9)


@pytest.mark.parametrize("spread", [(4, 2), (2, 4), (8, 4), (1, 8)])
@pytest.mark.parametrize("size", [64.0, 1e9])
def test_a_ring_over_nodes_is_near_its_messages(spread: tuple[int, int], size: float) -> None:
    """Where latency counts, and where bytes do; the links between nodes are all of a node's."""
    h100 = CLUSTERS["h100"]
    node, across = h100.levels
    n = math.prod(spread)
    inside = (node.latency, 1 / node.bandwidth)
    between = (across.latency, 1 / (across.bandwidth * spread[0]))
    links = [between if rank % spread[0] == spread[0] - 1 else inside for rank in range(n)]
    told = collective_time("all_gather", size, spread, h100, algorithm="ring")
    assert told == pytest.approx(simulated_ring(links, size / n, 1), rel=0.2)


@pytest.mark.parametrize("ranks", [range(16), range(0, 64, 4), range(0, 64, 8), range(3, 6)])
def test_an_all_to_all_sends_what_each_pair_exchanges(ranks: range) -> None:
    h100, size = CLUSTERS["h100"], 1e9
    sent = [0.0, 0.0]
    for peer in ranks[1:]:
        level = 0 if h100.unit(0, ranks[0]) == h100.unit(0, peer) else 1
        sent[level] += size / len(ranks)
    expected = max(b / level.bandwidth for b, level in zip(sent, h100.levels, strict=True))
    told = collective_time("all_to_all", size, h100.spread(ranks), h100, algorithm="pairwise")
    latency = collective_time("all_to_all", 0, h100.spread(ranks), h100, algorithm="pairwise")
    assert told - latency == pytest.approx(expected)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", [2, 4, 16])
def test_bus_bandwidth_is_the_links_whatever_the_number_of_ranks(collective: str, n: int) -> None:
    """nccl-tests' reason for it; a tree's factor is 2 and not 2(n−1)/n."""
    level = replace(BOX.levels[0], latency=0.0)
    free = replace(BOX, levels=(level,))
    form = algorithms(collective)[0]
    seconds = collective_time(collective, 1e9, (n,), free, algorithm=form)
    assert bus_bandwidth(collective, 1e9, n, seconds) == pytest.approx(level.bandwidth)


def test_bus_factors_are_those_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md: all-reduce 2(n−1)/n; reduce-scatter, all-gather, all-to-all (n−1)/n."""
    assert [bus_factor(one, 4) for one in COLLECTIVES] == [1.5, 0.75, 0.75, 0.75, 1, 1]
    assert [bus_factor(one, 1) for one in COLLECTIVES] == [1.0] * 6


@pytest.mark.parametrize("n", [2, 7, 8, 512])
@pytest.mark.parametrize("size", [8.0, 1e6, 1e10])
def test_no_form_beats_what_must_be_sent(n: int, size: float) -> None:
    """Patarasuk & Yuan's bound, 2(n−1)/n of the bytes, and ⌈log₂ n⌉ hops."""
    for form in algorithms("all_reduce"):
        told = collective_time("all_reduce", size, (n,), BOX, algorithm=form)
        assert told >= 2 * (n - 1) / n * size * BETA
        assert told >= math.ceil(math.log2(n)) * ALPHA


def test_small_messages_take_a_tree_and_large_ones_a_ring() -> None:
    def best(size: float) -> str:
        return min(
            ("ring", "tree"),
            key=lambda form: collective_time("all_reduce", size, (64,), BOX, algorithm=form),
        )

    assert best(8) == "tree"
    assert best(1e10) == "ring"
    for size in (8, 1e5, 1e10):
        cheapest = collective_time("all_reduce", size, (64,), BOX)
        assert cheapest == collective_time("all_reduce", size, (64,), BOX, algorithm=best(size))


def test_hierarchical_is_the_sum_of_its_levels() -> None:
    h100, size = CLUSTERS["h100"], 1e8
    parts = (
        collective_time("reduce_scatter", size, (8, 1), h100),
        collective_time("all_reduce", size / 8, (1, 4), h100),
        collective_time("all_gather", size, (8, 1), h100),
    )
    told = collective_time("all_reduce", size, (8, 4), h100, algorithm="hierarchical")
    assert told == pytest.approx(sum(parts))
    three = collective_time("all_gather", size, (4, 2, 2), CLUSTERS["gb200"],
                            algorithm="hierarchical")  # fmt: skip
    assert three == pytest.approx(
        collective_time("all_gather", size, (4, 1, 1), CLUSTERS["gb200"])
        + collective_time("all_gather", size / 4, (1, 2, 1), CLUSTERS["gb200"])
        + collective_time("all_gather", size / 8, (1, 1, 2), CLUSTERS["gb200"])
    )


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_bytes_and_higher_levels_never_take_less(collective: str) -> None:
    h100 = CLUSTERS["h100"]
    times = [collective_time(collective, 2.0**k, (8, 4), h100) for k in range(4, 34)]
    assert times == sorted(times)
    inside = collective_time(collective, 1e8, (8, 1), h100)
    assert inside < collective_time(collective, 1e8, (1, 8), h100)
    assert collective_time(collective, 1e8, (1, 1), h100) == 0.0


def test_what_has_no_cost_is_told() -> None:
    h100 = CLUSTERS["h100"]
    for wrong, words in (
        (("all_reduc", 1, (8, 1)), r"did you mean 'all_reduce'"),
        (("all_reduce", -1, (8, 1)), r"size=-1: expected a number of bytes"),
        (("all_reduce", 1, (8,)), r"for each level of cluster 'h100' \(node, cluster\)"),
        (("all_reduce", 1, (0, 1)), r"expected a number from 1 on"),
    ):
        with pytest.raises(SpecError, match=words):
            collective_time(*wrong, h100)
    with pytest.raises(SpecError, match="all_gather has ring, hierarchical"):
        collective_time("all_gather", 1, (8, 1), h100, algorithm="tree")


# -- the conversion table -----------------------------------------------------------------

PLACEMENTS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial())
TABLE = {  # arXiv:2110.15032, table 2, in units of the tensor, for p = 4
    ("S(0)", "S(0)"): 0, ("S(0)", "S(1)"): 3 / 4, ("S(0)", "R"): 3, ("S(0)", "P"): 0,
    ("R", "S(0)"): 0, ("R", "R"): 0, ("R", "P"): 0,
    ("P", "S(0)"): 3, ("P", "R"): 6, ("P", "P"): 0,
}  # fmt: skip
FUNCTIONS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}


def test_bytes_are_those_of_the_table() -> None:
    for (before, after), sent in TABLE.items():
        assert redistribution_bytes(before, after, 1e6, 4) == pytest.approx(sent * 1e6)


def torchs_own() -> dict[tuple[str, str], list[str]]:
    """The collectives that DTensor calls for each pair it knows."""
    mesh = init_device_mesh("cpu", (4,))
    found = {}
    for before in PLACEMENTS:
        local = torch.ones(2, 8) if before == Shard(0) else torch.ones(8, 2)
        local = torch.ones(8, 8) if not isinstance(before, Shard) else local
        tensor = DTensor.from_local(local, mesh, [before], run_check=False)
        for after in PLACEMENTS:
            if isinstance(after, Partial) and before != after:
                continue  # which DTensor does not offer
            with CommDebugMode() as debug:
                tensor.redistribute(mesh, [after])
            calls = {str(call).rpartition(".")[2]: n for call, n in debug.get_comm_counts().items()}
            found[str(before), str(after)] = [FUNCTIONS[name] for name, n in calls.items() if n]
    return found


def test_torch_redistributes_with_the_same_collectives() -> None:
    found = run_on_ranks(torchs_own, 4)[0]
    assert len(found) == 13
    # On the CPU torch has no all-to-all for this: it gathers, and each rank takes its slice.
    for pair in (("S(0)", "S(1)"), ("S(1)", "S(0)")):
        assert found.pop(pair) == ["all_gather"]
        assert redistribution(*pair) == "all_to_all"
    for (before, after), calls in found.items():
        ours = redistribution(before, after)
        assert calls == ([] if ours is None else [ours]), (before, after)


def test_placements_are_known_by_every_spelling() -> None:
    for before in (Shard(0), "Shard(0)", "S(0)", "Shard(dim=0)"):
        for after in (Replicate(), "Replicate", "R", "Replicate()", "B"):
            assert redistribution(before, after) == "all_gather"
    assert redistribution(Partial(), "P") is None
    assert redistribution(Partial("avg"), Shard(2)) == "reduce_scatter"
    with pytest.raises(SpecError, match=r"placement 'split': expected Shard\(dim\)"):
        redistribution("split", "R")


def test_time_is_the_collectives() -> None:
    h100, size = CLUSTERS["h100"], 1e9
    assert redistribution_time("S(0)", "S(1)", size, (8, 1), h100) == collective_time(
        "all_to_all", size / 8, (8, 1), h100
    )
    assert redistribution_time("R", "S(1)", size, (8, 1), h100) == 0.0
    rates = [redistribution_time("P", one, size, (1, 8), h100) for one in ("R", "S(0)")]
    assert rates[0] == pytest.approx(2 * rates[1], rel=0.01)
