"""`--cluster` and `--gpus-per-node`: what plan and explain say of where ranks are."""

import json
import re
from pathlib import Path

import pytest

from commgrid import Cluster
from commgrid.cli import main
from commgrid.cost_model.cluster import CLUSTERS
from commgrid.cost_model.crossing import find_crossings
from commgrid.layout.ranks import Mode, RankSet, RankTuple
from commgrid.planning.spec import GridSpec
from commgrid.wording import around


def said(capsys: pytest.CaptureFixture[str], command: str) -> str:
    assert main(command.split()) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], command: str) -> str:
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_plan_says_what_each_name_crosses(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan --tp 16 --world-size 64 --cluster h100")
    assert re.search(r"^ +16 +4  connects  cluster  tp, also cp_tp", text, re.M)
    assert "On h100 a device sends 450 GB/s within a node of 8, 50 GB/s beyond." in text
    assert "  8 ranks of each of 2 nodes; 1 group at once on a node's link: tp, cp_tp" in text
    assert "  slow: tp spans 2 nodes: each layer's all-reduce goes over 50 GB/s" in text
    text = said(capsys, "plan --tp 8 --world-size 8 --cluster cpu")
    assert "On cpu a device sends 1 GB/s within a node." in text
    assert "  every group is within a node\n" in text
    text = said(capsys, "plan --tp 4 --world-size 16 --gpus-per-node 2")
    assert "On nodes of 2 devices:" in text
    assert "GB/s" not in text
    assert "within" not in said(capsys, "plan --tp 4 --world-size 16")


def test_the_json_has_it_where_a_cluster_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --tp 4 --pp 2 --ep 4 --world-size 128 --cluster gb200 --json"
    found = json.loads(said(capsys, command))
    assert Cluster.from_dict(found["cluster"]) == CLUSTERS["gb200"]
    spec = GridSpec.build(tp=4, pp=2, ep=4).resolve(128)
    crossings = find_crossings(spec, CLUSTERS["gb200"])
    assert {name: tuple(one["spread"].values()) for name, one in found["crossings"].items()} == {
        name: one.spread for name, one in crossings.items()
    }
    assert found["crossings"]["pp"] == {
        "within": "cluster", "spread": {"node": 1, "rack": 1, "cluster": 2}, "at_once": 64,
        "gb_per_s": 50.0,
    }  # fmt: skip
    unknown = json.loads(said(capsys, "plan --tp 4 --world-size 8 --gpus-per-node 2 --json"))
    assert unknown["crossings"]["tp"]["gb_per_s"] is None


def test_explain_marks_ranks_on_other_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    command = "explain --tp 2 --pp 2 --world-size 32 --rank 5 --gpus-per-node 8"
    text = said(capsys, command)
    assert "on node 0 of 4; *: on another node" in text
    assert re.search(r"^  tp, also cp_tp +node +4 \[5\]$", text, re.M)
    assert re.search(r"^  dp, also dp_cp +cluster +1 3 \[5\] 7 9\* 11\* 13\* 15\*$", text, re.M)
    assert re.search(
        r"^  dp_tp, also dp_cp_tp +cluster +0-4 \[5\] 6-15 \(16 ranks, 8 on this node\)$",
        text,
        re.M,
    )
    found = json.loads(said(capsys, f"{command} --json"))
    assert (found["node"], found["within"]["tp"], found["within"]["pp"]) == (0, "node", "cluster")
    large = said(capsys, "explain --tp 8 --pp 4 --world-size 16384 --rank 37 --cluster h100")
    assert max(map(len, large.splitlines())) < 120
    assert "32-36 [37] 38-39, 4128-4135, … 12320-12327, step 4096 (32 ranks, 8 on" in large


def test_a_file_says_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "name: ours\nsource: a guess\n"
        "device: {name: any, peak_tflops: 100, memory_gb: 40, memory_gb_per_s: 1000}\n"
        "levels:\n  - {name: node, size: 4, gb_per_s: 100, latency_us: 5}\n"
        "  - {name: cluster, gb_per_s: 10, latency_us: 20}\n"
    )
    text = said(capsys, f"plan --tp 8 --world-size 16 --cluster {path}")
    assert "On ours a device sends 100 GB/s within a node of 4, 10 GB/s beyond." in text
    assert "  numbers: a guess" in text
    text = said(capsys, f"plan --tp 8 --world-size 16 --cluster {path} --gpus-per-node 8")
    assert "100 GB/s within a node of 8" in text


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("plan --tp 2 --world-size 12 --cluster h100", "does not fill nodes of 8 devices"),
        ("explain --tp 2 --world-size 12 --rank 0 --cluster h100", "take 8 or 16"),
        ("plan --tp 2 --world-size 8 --cluster h10", "did you mean 'h100'"),
        ("plan --tp 2 --world-size 8 --gpus-per-node 0", "--gpus-per-node 0: expected"),
        ("plan --tp 2 --world-size 8 --gpus-per-node x", "--gpus-per-node x: expected a whole"),
        ("plan --tp 16 --within tp=node --world-size 64 --cluster h100",
         "within.tp='node': ranks 0-15, a group of tp, lie on 2 nodes of 8 devices; a node has 8"),
        ("explain --tp 4 --within tp=node --rank 0 --world-size 8 --gpus-per-node 2", "tp=2 stays"),
        ("plan --tp 2 --within tp --world-size 8", "--within tp: expected NAME=LEVEL"),
        ("plan --tp 2 --within tp=node --within tp=cluster --world-size 8",
         "--within tp=node --within tp=cluster: says two things of a name"),
        ("plan --tp 2 --place by_node --world-size 8", "place='by_node': expected by_rank or by_h"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(
    command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, command)


def test_a_cluster_without_a_source_still_has_speeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`source` may be left out; plan then hid the speeds that the file gives."""
    config = CLUSTERS["h100"].to_dict()
    del config["source"]
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(config))
    text = said(capsys, f"plan --tp 16 --world-size 64 --cluster {path}")
    assert "On h100 a device sends 450 GB/s within a node of 8, 50 GB/s beyond.\n" in text
    assert "numbers:" not in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected a mapping such as `levels: […]`, found nothing"),
        ("- 1", "expected a mapping such as `levels: […]`, found list"),
        ("a: [1,\n", "not plain YAML (no Python tags): while parsing a flow node expected the"),
        ("{name: , device: {}, levels: [{}]}", "device.name: missing"),
    ],
)
def test_a_file_that_is_no_cluster_is_told_in_one_line(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    error = refused(capsys, f"plan --tp 2 --world-size 8 --cluster {path}")
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("gb_per_s: 1e3", "levels[0].gb_per_s='1e3': expected a number above 0; without quotes"),
        ("gb_per_s: '380'", "levels[0].gb_per_s='380': expected a number above 0; without quotes"),
        ("gb_per_s: fast", "levels[0].gb_per_s='fast': expected a number above 0\n"),
        ("gb_per_s: 1, name: [a]", "levels[0].name=['a']: expected a name"),
        ("gb_per_s: 1, name:", "levels[0].name=None: expected a name"),
    ],
)
def test_numbers_that_yaml_takes_for_text_are_told_how_to_be_written(
    given: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "" if "name" in given else "name: node, "
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "name: ours\ndevice: {name: d, peak_tflops: 1, memory_gb: 1, memory_gb_per_s: 1}\n"
        f"levels: [{{{name}latency_us: 1, {given}}}]\n"
    )
    assert told in refused(capsys, f"plan --tp 2 --world-size 8 --cluster {path}")


def test_constraints_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --tp 8 --within tp=node --within dp=cluster --place by_host --world-size 64"
    found = json.loads(said(capsys, f"{command} --cluster h100 --json"))["spec"]
    assert (found["within"], found["place"]) == ({"tp": "node", "dp": "cluster"}, "by_host")
    found = json.loads(
        said(capsys, "plan --preset hsdp --within dp_shard=node --world-size 16 --json")
    )
    assert found["spec"]["within"] == {"dp_shard": "node"}
    unchecked = said(capsys, "plan --tp 16 --within tp=node --world-size 64")
    assert "within tp=node: checked at start; here with --cluster or --gpus-per-node" in unchecked


def lying(first: int, *modes: tuple[int, int]) -> RankSet:
    return RankSet(first, tuple(Mode(*each) for each in modes))


@pytest.mark.parametrize(
    "members",
    [
        lying(3), lying(0, (2, 1), (40, 4)), lying(5, (30, 7)), lying(0, (4, 1), (3, 8), (3, 64)),
        lying(0, (4096, 1)), RankTuple((*range(30, 60), *range(10))),
        RankTuple((9, 7, 5, 3, 1, 0, 2, 4, 6, 8, 10, 12, 14, 16)),
    ],
)  # fmt: skip
def test_a_line_shows_how_many_ranks_lie(members: RankSet | RankTuple) -> None:
    """Every rank of the line is a member, its own in brackets, and steps are those there are."""
    for rank in {members[0], members[len(members) // 2], members[-1]}:
        text = around(members, rank)
        assert len(text) < 90
        assert f"[{rank}]" in text
        shown = re.split(r", step| \(", text)[0]
        spans = re.findall(r"(\d+)(?:-(\d+))?", shown)
        listed = [r for a, b in spans for r in range(int(a), int(b or a) + 1)]
        assert set(listed) <= set(members)
        assert len(listed) == len(set(listed))
        if "…" not in text:
            assert listed == list(members)
        if len(members) > 12:
            assert f"({len(members):,} ranks)" in text
