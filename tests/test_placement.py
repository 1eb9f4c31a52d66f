"""`within` and `place`: kept or refused, against a cluster and against the hosts of real ranks."""

from __future__ import annotations

import logging
import os
import random
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commgrid
from commgrid import GridSpec, PeerFailedError, SpecError
from commgrid.planning.cluster import CLUSTERS, nodes_of
from commgrid.planning.constraints import order_by_host
from commgrid.planning.crossing import check_within
from commgrid.planning.rank_lists import pack_order, unpack_order
from commgrid.runtime.hosts import conclude
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import run_on_ranks
from commgrid.torch_compat.world import world_store
from tests.process_groups import group_count

IN_ORDER, SCATTERED = "aaaabbbb", "abababab"
"""The host of each of eight ranks: two hosts of four."""
CUT: dict[str, Any] = {"tp": 4, "create": ["tp", "dp"]}


def live_on(hosts: str) -> None:
    os.environ["COMMGRID_HOST"] = f"host-{hosts[dist.get_rank()]}"


# -- as it is written -------------------------------------------------------------------


def test_a_spec_keeps_its_constraints() -> None:
    rows = {"fsdp": {"of": "dp_cp", "within": "rack"}, "halves": {
        "of": "dp", "split": {"outer": -1, "inner": 2}, "within": "node"}}  # fmt: skip
    spec = GridSpec.build(tp=2, within={"tp": "node", "pp_tp": "rack"}, place="by_host",
                          groups=rows)  # fmt: skip
    for each in (spec, spec.resolve(8)):
        assert GridSpec.from_dict(each.to_dict()) == each
        assert each.constraints == {
            "tp": "node", "pp_tp": "rack", "fsdp": "rack", "outer": "node", "inner": "node",
        }  # fmt: skip
        assert each.place == "by_host"
    plain = GridSpec.build(tp=2)
    assert "within" not in plain.to_dict()
    assert "place" not in plain.to_dict()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"within": {"tpp": "node"}}, "within.tpp='node': no group is named 'tpp'; did you mean"),
        ({"within": {"tp": 8}}, "within.tp=8: expected the name of a level, such as node"),
        ({"within": "node"}, "within='node': expected a mapping of groups to levels"),
        ({"within": {"tp": "node"}, "groups": {"tp": {"within": "rack"}}},
         "groups.tp.within='rack': group 'tp' is to stay within a node too; give one of them"),
        ({"within": {"cp_dp": "node", "dp_cp": "rack"}},
         "within.dp_cp='rack': group 'dp_cp' is to stay within a node too"),
        ({"place": "by_hosts"}, "place='by_hosts': expected by_rank or by_host; did you mean"),
        ({"place": "by_host", "ranks": [1, 0]}, "place='by_host' beside ranks that do not rise"),
    ],
)  # fmt: skip
def test_what_contradicts_is_an_error(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as raised:
        GridSpec.build(**given)
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("given", "cluster", "said"),
    [
        ({"tp": 8, "within": {"tp": "node"}}, "h100", None),
        ({"tp": 8, "within": {"tp": "rack"}}, "gb200", None),
        ({"tp": 16, "within": {"tp": "node"}}, "h100",
         "within.tp='node': ranks 0-15, a group of tp, lie on 2 nodes of 8 devices; a node has 8 "
         "devices, so that tp=8 stays within one"),
        ({"tp": 8, "within": {"tp": "node"}}, "gb200",
         "within.tp='node': ranks 0-7, a group of tp, lie on 2 nodes of 4 devices; a node has 4 "
         "devices, so that tp=4 stays within one"),
        ({"dp": 4, "tp": 36, "order": "dp-tp-pp", "within": {"dp": "node", "tp": "cluster"}},
         "gb200", None),
        ({"tp": 4, "order": "dp-tp-pp", "within": {"tp": "node"}}, "h100",
         "within.tp='node': ranks 0, 36, 72, 108, a group of tp, lie on 4 nodes of 8 devices; 4 "
         "ranks fit a node of 8 devices: put tp earlier in order"),
        ({"tp": 8, "within": {"tp": "rack"}}, "h100",
         "within.tp='rack': level 'rack': cluster 'h100' has node, cluster"),
    ],
)  # fmt: skip
def test_planning_checks_them_on_a_cluster(
    given: dict[str, Any], cluster: str, said: str | None
) -> None:
    spec = GridSpec.build(**given).resolve(144)
    if said is None:
        check_within(spec, CLUSTERS[cluster])
        return
    with pytest.raises(SpecError) as raised:
        check_within(spec, CLUSTERS[cluster])
    assert str(raised.value) == said


def test_every_group_of_a_name_is_looked_at() -> None:
    """Of 3 on nodes of 8 the first two groups fit, the third does not."""
    spec = GridSpec.build(tp=3, within={"tp": "node"}).resolve(24)
    with pytest.raises(SpecError, match=r"ranks 6-8, a group of tp, .* tp=2 or 4 does"):
        check_within(spec, nodes_of(8))


# -- against hosts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "order"),
    [
        ("aaabbb", []), ("ababab", [0, 2, 4, 1, 3, 5]), ("babbaa", [0, 2, 3, 1, 4, 5]),
        ("abcabc", [0, 3, 1, 4, 2, 5]), ("aaaaaa", []),
    ],
)  # fmt: skip
def test_ranks_of_a_host_come_together_in_their_order(hosts: str, order: list[int]) -> None:
    named = dict(enumerate(hosts))
    assert order_by_host(range(6), named) == (order or list(range(6)))
    spec = GridSpec.build(tp=2, place="by_host").resolve(6)
    found = conclude(spec, named)
    assert found["refused"] == ""
    assert (unpack_order(found["order"]) if order else []) == order
    assert ("have another place" in found["said"]) == bool(order)


@pytest.mark.parametrize(
    ("given", "hosts", "said"),
    [
        ({"tp": 8}, "aaaabbbb", "no host has more than 4 of the grid's ranks, and tp 8"),
        ({"tp": 2}, "abababab", "place='by_host' would order the ranks by host"),
        ({"tp": 2}, "abbbbbbb", "put tp earlier in order, or take equally many ranks of each host"),
        ({"tp": 2, "place": "by_host"}, "abbbbbbb", "ranks 0, 1, a group of tp, run on hosts a"),
        ({"tp": 2, "within": {"tp": "rack"}}, "abababab", "initialize knows hosts, not which rack"),
        ({"tp": 2, "place": "by_host"}, "abababab", ""),
        ({"tp": 2, "within": {"tp": "rack"}}, "aaaabbbb", ""),  # a host is in one rack
        ({"tp": 8}, "abcdefgh", "hosts a (rank 0), b (rank 1), c (rank 2), d (rank 3) and 4 more"),
    ],
)  # fmt: skip
def test_a_refusal_names_group_hosts_and_fix(given: dict[str, Any], hosts: str, said: str) -> None:
    spec = GridSpec.build(**{"within": {"tp": "node"}, **given}).resolve(8)
    refused = conclude(spec, dict(enumerate(hosts)))["refused"]
    assert said in refused
    assert bool(said) == bool(refused)
    assert refused.startswith("within.tp=") or not refused


def test_the_order_of_16384_ranks_is_a_short_text() -> None:
    """All of them read it: dealt out to 2,048 hosts one by one, and in any order at all."""
    dealt = {rank: f"host-{rank % 2048}" for rank in range(16384)}
    found = conclude(GridSpec.build(place="by_host").resolve(16384), dealt)
    assert unpack_order(found["order"]) == sorted(range(16384), key=lambda rank: rank % 2048)
    assert len(found["order"]) < 200
    assert len(found["said"]) < 250
    for seed in range(20):
        order = random.Random(seed).sample(range(seed * 7 + 1), seed * 7 + 1)
        assert unpack_order(pack_order(order)) == order


def kept_and_broken() -> None:
    live_on(IN_ORDER)
    commgrid.initialize(**CUT)
    commgrid.destroy()
    dist.barrier()
    before = world_store().num_keys()
    dist.barrier()
    grid = commgrid.initialize(**CUT, within={"tp": "node"})
    assert grid.get_ranks("tp") in ((0, 1, 2, 3), (4, 5, 6, 7))
    grid.check()
    commgrid.destroy()
    live_on(SCATTERED)
    told = (
        r"^grid 'default': within\.tp='node': ranks 0-3, a group of tp, run on hosts "
        r"host-a \(ranks 0, 2\), host-b \(ranks 1, 3\); place='by_host' would order"
    )
    with pytest.raises(SpecError, match=told):
        commgrid.initialize(**CUT, within={"tp": "node"}, startup_timeout=60)
    assert group_count() == 1
    rows = {"pair": {"of": "tp", "pick": ["first", "last"], "within": "node"}}
    with pytest.raises(SpecError, match=r"within\.pair='node': ranks 0, 3, a group of pair"):
        commgrid.initialize(**CUT, groups=rows, startup_timeout=60)
    dist.barrier()
    commgrid.initialize(**CUT)  # what the failures have left goes with the next good start
    commgrid.destroy()
    dist.barrier()
    assert world_store().num_keys() == before
    dist.barrier()


def test_within_is_kept_or_refused_on_every_rank() -> None:
    # The ranks set variables of the environment.
    run_on_ranks(kept_and_broken, 8, check=False)


def losses_of(grid: commgrid.HyperCommGrid | None) -> list[float]:
    """Of a few steps of a small model; cut over a grid, or whole in this process."""
    torch.manual_seed(5)
    up, down = (nn.Linear(*shape, bias=False).double() for shape in ((6, 16), (16, 6)))
    layers: tuple[nn.Module, nn.Module] = (up, down)
    inputs, targets = torch.randn(2, 8, 6, dtype=torch.float64)
    if grid is not None:
        layers = (
            ColumnParallelLinear(6, 16, bias=False, dtype=torch.float64, grid=grid),
            RowParallelLinear(16, 6, bias=False, dtype=torch.float64, grid=grid),
        )
        cut, size = grid.get_local_rank("tp"), grid.size("tp")
        for layer, whole, dim in zip(layers, (up, down), (0, 1), strict=True):
            with torch.no_grad():
                layer.get_parameter("weight").copy_(whole.weight.chunk(size, dim)[cut])
        part, parts = grid.get_local_rank("dp"), grid.size("dp")
        inputs, targets = inputs.chunk(parts)[part], targets.chunk(parts)[part]
    model = nn.Sequential(layers[0], nn.GELU(), layers[1])
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    found = []
    for _ in range(4):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach().clone()
        if grid is not None:
            for tensor in (mean, *(p.grad for p in model.parameters())):
                assert tensor is not None
                dist.all_reduce(tensor, group=grid.get_group("dp"))
                tensor /= grid.size("dp")
        optimizer.step()
        found.append(mean.item())
    return found


def placed() -> list[str]:
    live_on(SCATTERED)
    said: list[str] = []
    logger = logging.getLogger("commgrid")
    logger.addFilter(lambda record: said.append(record.getMessage()) or False)  # type: ignore[func-returns-value]
    expected = losses_of(None)
    as_listed = losses_of(commgrid.initialize(**CUT, name="listed"))
    assert not said
    grid = commgrid.initialize(**CUT, within={"tp": "node"}, place="by_host", name="placed")
    assert grid.get_all_ranks("tp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert grid.get_ranks("dp") in ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.spec.place == "by_rank"
    assert list(grid.spec.grid_ranks) == [0, 2, 4, 6, 1, 3, 5, 7]
    by_host = losses_of(grid)
    # Sums in another order differ by some ulps, which four steps do not amplify.
    assert as_listed == pytest.approx(expected, rel=1e-12)
    assert by_host == pytest.approx(expected, rel=1e-12)
    assert expected[-1] < expected[0]
    live_on(IN_ORDER)
    commgrid.initialize(**CUT, place="by_host", name="nothing to do")
    return said


def test_place_by_host_puts_groups_inside_hosts_with_the_same_curve() -> None:
    # The ranks set variables of the environment.
    said = run_on_ranks(placed, 8, check=False)
    assert said == [
        ["grid 'placed': place='by_host' has ordered the ranks by their 2 hosts: ranks 0, 2, 4, "
         "6, 1, 3, 5, 7; 6 of 8 have another place"],
        *([] for _ in range(7)),
    ]  # fmt: skip


def by_name() -> None:
    os.environ.pop("COMMGRID_HOST", None)
    grid = commgrid.initialize(config={"axes": {"tp": 2}, "within": {"tp": "node"}})
    assert grid.get_ranks("tp") == (0, 1)
    commgrid.destroy()
    os.environ["COMMGRID_HOST"] = f"another-{dist.get_rank()}" if dist.get_rank() else ""
    with pytest.raises(SpecError, match=rf"hosts {socket.gethostname()} \(rank 0\), another-1"):
        commgrid.initialize(config={"axes": {"tp": 2}, "within": {"tp": "node"}})


def test_without_the_variable_the_host_has_its_own_name() -> None:
    # The ranks set variables of the environment.
    run_on_ranks(by_name, 2, check=False)


def one_has_no_name() -> None:
    def nameless() -> str:
        raise OSError("the name of this host cannot be found")

    os.environ.pop("COMMGRID_HOST", None)
    if dist.get_rank() == 1:
        socket.gethostname = nameless
        with pytest.raises(OSError, match="cannot be found"):
            commgrid.initialize(tp=2, within={"tp": "node"}, startup_timeout=60)
    else:
        with pytest.raises(PeerFailedError, match=r"rank 1 failed: OSError: the name of this host"):
            commgrid.initialize(tp=2, within={"tp": "node"}, startup_timeout=60)


def test_a_rank_that_cannot_say_its_host_is_named_by_the_others() -> None:
    run_on_ranks(one_has_no_name, 4)


def without() -> int:
    """How often a plain start asks for this host's name."""
    asked: list[str] = []
    real = socket.gethostname
    socket.gethostname = lambda: asked.append("host") or real()  # type: ignore[func-returns-value]
    commgrid.initialize(tp=2)
    return len(asked)


def test_a_grid_without_constraints_asks_nobody_where_it_runs() -> None:
    assert run_on_ranks(without, 2) == [0, 0]
