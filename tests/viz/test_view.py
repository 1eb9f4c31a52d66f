"""Data of pictures, against counting by hand."""

import json
from pathlib import Path

import pytest

from commgrid import GridSpec, SpecError, UnknownGroupError
from commgrid.cli import main
from commgrid.cost_model.cluster import CLUSTERS
from commgrid.planning.plan import GroupPlan
from commgrid.viz.page import page_data
from commgrid.viz.view import GridView

CUTS = [
    {"tp": 2, "pp": 2}, {"tp": 2, "cp": 2, "ep": 4, "etp": 1}, {"tp": 3, "dp": 2},
    {"dp_replicate": 2, "dp_shard": -1, "tp": 2, "order": "tp-dp_shard-dp_replicate"},
]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_groups_and_nodes_are_those_of_the_plan(cut: dict[str, int]) -> None:
    spec = GridSpec.build(**cut).resolve(6 if "dp" in cut else 16)
    for per_node in (1, 3, 8):
        view = GridView(spec, per_node)
        assert [r for held in view.nodes.values() for r in held] == list(range(spec.world_size))
        assert all(r // per_node == node for node, held in view.nodes.items() for r in held)
        for name in spec.definitions:
            numbers = view.numbers(name)
            for rank in range(spec.world_size):
                members = GroupPlan.for_rank(spec, rank).groups[name]
                same = {r for r in numbers if numbers[r] == numbers[rank]}
                assert same == set(members)
            spread = max(
                len({r // per_node for r in GroupPlan.for_rank(spec, rank).groups[name]})
                for rank in range(spec.world_size)
            )
            assert view.nodes_of(name) == spread


def test_ranks_in_no_group_and_listed_ranks(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(
        "axes: {pp: 4}\nranks: [9, 2, 0, 17]\n"
        "groups: {ends: {of: pp, pick: [first, last]}, odd: {ranks: [[2, 9], [17]]}}"
    )
    view = GridView(GridSpec.from_yaml(path).resolve(), 8)
    assert view.nodes == {0: (0, 2), 1: (9,), 2: (17,)}
    assert view.numbers("ends") == {9: 0, 17: 0}
    assert view.numbers("odd") == {2: 0, 9: 0, 17: 1}
    assert view.shown == ("pp", "ends", "odd")
    assert view.describe("odd") == "odd: 2 groups of 1 to 2, over 2 nodes each"


def test_wrong_input_is_named() -> None:
    spec = GridSpec.build(tp=2).resolve(4)
    for size in (0, -1, "8", 2.5):
        with pytest.raises(SpecError, match=r"gpus_per_node=.*expected how many"):
            GridView(spec, size)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"rank 4 is not in this grid, which covers ranks 0-3"):
        GridView(spec, rank=4)
    with pytest.raises(SpecError, match="open sizes"):
        GridView(GridSpec.build(tp=2))
    with pytest.raises(UnknownGroupError, match=r"no group is named 'tpp'; did you mean 'tp'"):
        _ = GridView(spec, names=["tpp"]).shown


def test_what_is_not_created_is_not_shown() -> None:
    view = GridView(GridSpec.build(tp=2, pp=2, create=["dp"]).resolve(8))
    assert view.shown == ("dp",)
    assert GridView(GridSpec.build(tp=2, create=["dp_tp"]).resolve(4)).shown == ("dp_tp",)
    assert page_data(view)["shown"] in page_data(view)["names"]


def test_one_rank_shows_the_whole_grid() -> None:
    view = GridView(GridSpec.build().resolve(1))
    assert view.shown == ("pp_dp_cp_tp",)
    assert view.as_text().endswith("pp_dp_cp_tp: 1 group of 1, within a node")


def test_a_cluster_says_how_fast_the_links_are_that_names_cross() -> None:
    """tp 16 leaves nodes of 8 and has a node's link to itself, dp's 8 groups share it."""
    spec = GridSpec.build(tp=16, pp=2).resolve(64)
    view = GridView(spec, 8, cluster=CLUSTERS["h100"])
    assert view.describe("tp") == (
        "tp: 4 groups of 16, over 2 nodes each; 50 GB/s, 1 group on a node's link"
    )
    assert view.describe("dp").endswith("over 2 nodes each; 50 GB/s, 8 groups on a node's link")
    assert (
        GridView(spec, 16, cluster=CLUSTERS["h100"].with_node(16))
        .describe("tp")
        .endswith("within a node; 450 GB/s")
    )
    assert GridView(spec, 8).describe("tp").endswith("over 2 nodes each")


def test_a_model_says_what_a_step_sends_on_each_name(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tp", "8", "--pp", "4", "--world-size", "64", "--cluster", "h100"]
    assert main(["show", *flags, "--model", "gpt-175b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["plan", *flags, "--model", "gpt-175b", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    tp = next(line for line in lines if line.startswith("  tp:"))
    assert tp.endswith(f"450 GB/s; {step['sent_gb']['tp']:.3g} GB a step from each rank")
    dp = next(line for line in lines if line.startswith("  dp:"))
    sent, link = step["sent_gb"]["dp_cp"], step["link_gb"]["dp_cp"]
    assert dp.endswith(f"; {sent:.3g} GB a step from each rank, {link:.3g} over a node's link")
    assert main(["show", "--tp", "8", "--world-size", "64", "--model", "gpt-175b"]) == 2
    assert "--model gpt-175b: goes with --cluster" in capsys.readouterr().err
