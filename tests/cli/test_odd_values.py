"""Values that are given twice, too large, or of no use: an error of one line, on every command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from commgrid.cli import main
from commgrid.cost_model.cluster import CLUSTERS
from commgrid.planning.spec import GridSpec
from tests.cli.test_flags_and_files import JOB, refused

PLAN = ["plan", "--world-size", "4"]
MEGATRON = [*PLAN, "--preset", "megatron"]
LONG = "n" * 300


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*PLAN, "--axis", "ranks=2", "--order", "ranks-dp"], "ranks is an argument of its own"),
        ([*PLAN, "--axis", "cls=2", "--order", "cls-dp"], "cls is an argument of its own"),
        ([*MEGATRON, "--axis", "name=2"], "name is an argument of its own"),
        ([*MEGATRON, "--set", "axes=3"], "axes=3: expected a mapping"),
        ([*MEGATRON, "--set", "axes=null"], "axes=None: expected a mapping"),
        ([*MEGATRON, "--set", "groups=3"], "groups=3: expected a mapping"),
        ([*PLAN, "--preset", "kempnerforge", "--set", "axes=[tp]"], "expected a mapping"),
        ([*MEGATRON, "--tp", "2", "--set", "axes.tp=4"], "axes.tp=4 beside axes.tp: give one of"),
        ([*MEGATRON, "--tp", "2", "--set", "axes={dp: -1}"], "beside axes.tp: give one of them"),
        ([*MEGATRON, "--ep", "2", "--set", "regions.expert.axes.ep=4"], "beside axes.ep: give one"),
        ([*MEGATRON, "--set", "axes.ep=2", "--set", "regions.expert.axes.ep=4"], "give one of"),
        ([*MEGATRON, "--share", "all", "--set", "share=all"], "--share beside --set share"),
        ([*MEGATRON, "--set", "axes.tp=2", "--set", "axes.tp=4"], "axes.tp is set already"),
        ([*MEGATRON, "--ranks", "0-3", "--set", "ranks=4-7"], "--ranks 0-3 beside --set ranks"),
        ([*PLAN, "--dp-shard", "2", "--dp-replicate", "2", "--order", "dp-dp_shard-dp_replicate"],
         "dp stands for dp_shard and dp_replicate"),
        (["diff", "hsdp", LONG, "--world-size", "16"], "neither a file nor a preset"),
        ([*PLAN, "-o", f"{LONG}/b.yaml"], "there is no such folder"),
        (["trace", LONG], "there is no such folder"),
        (["show", "--tp", "2", "--world-size", "4", "--groups", ""], "expected names with commas"),
        (["bench", "--sizes", ","], "expected bytes"),
        (["plan", "--dp-shard", "7", "--dp-replicate", "8", "--ep", "2", "--world-size", "56",
          "--model", "mixtral-8x7b", "--batch", "112", "--cluster", "h100"],
         "dp_replicate=8: does not divide the 28 ranks"),
        (["plan", "--dp-shard", "2", "--ep", "8", "--world-size", "16", "--model", "mixtral-8x7b",
          "--cluster", "h100"], "dp_replicate=8: does not divide the 2 ranks"),
        ([*PLAN, *JOB, "--etp", "1"], "--etp 1: model llama3-8b has no experts"),
        (["presets", "hsdp", "--dp-shard", "0", "--json"], "dp_shard=0: expected a positive"),
        (["presets", "megatron", "--tp", "-3", "--json"], "tp=-3: expected a positive"),
    ],
)  # fmt: skip
def test_it_is_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, *argv)
    assert said in told
    assert told.count("\n") == 1


HUGE = "1" * 400
GRIDS = {
    f"axes: {{tp: '{HUGE * 13}'}}": "expected a positive integer",
    f"axes: {{tp: {hex(10**5000)}}}": "a number of more than 30 digits",
    "axes: {ep: 2, dp: -1}\nregions: 3": "regions=3: expected a mapping",
    "axes: {ep: 2, dp: -1}\nregions: expert": "regions='expert': expected a mapping",
    "axes: {ep: true}": "axes.ep=True: expected a positive integer",
    "axes: {ep: 1.0}": "axes.ep=1.0: expected a positive integer",
    "axes: {tp: 2, dpp: -1}": "order: missing; needed to place axis 'dpp'; did you mean",
    "axes: {etp: pp}": "etp='pp': expected a positive integer",
    "axes: {" + ", ".join(f"a{n}: 1" for n in range(24)) + "}\norder: "
    + "-".join(f"a{n}" for n in range(24)): "expected at most 16",
}  # fmt: skip


@pytest.mark.parametrize("text", GRIDS, ids=[f"grid {n}" for n in range(len(GRIDS))])
def test_a_grids_file_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    assert GRIDS[text] in refused(capsys, "plan", str(path), "--world-size", "8")


LEVEL = "{name: node, size: 8, gb_per_s: 450, latency_us: 1}"
CLUSTER = """
name: mine
device: {name: one, peak_tflops: 1.0, memory_gb: 80, memory_gb_per_s: 3000}
levels: [LEVEL, {name: all, gb_per_s: 50, latency_us: 10}]
"""
CLUSTER_CHANGES = {
    ("size: 8", f"size: {HUGE}"): "a number of more than 30 digits",
    ("size: 8", "size: null"): "levels[0].size=None: expected a whole number",
    ("gb_per_s: 450", "gb_per_s: 1.0e+305"): "gb_per_s=1e+305: expected a number above 0 (1e-15",
    ("gb_per_s: 450", "gb_per_s: 1.0e-320"): "expected a number above 0 (1e-15 to 1e+15)",
    ("peak_tflops: 1.0", "peak_tflops: 1.0e-320"): "expected a number above 0 (1e-15 to",
}


@pytest.mark.parametrize("change", CLUSTER_CHANGES, ids=[new[:24] for _, new in CLUSTER_CHANGES])
def test_a_clusters_file_is_refused(
    change: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.replace("LEVEL", LEVEL).replace(*change))
    told = refused(capsys, "plan", "--tp", "2", "--world-size", "8", "--cluster", str(path))
    assert CLUSTER_CHANGES[change] in told


def test_null_is_no_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--preset", "torchtitan", "--set", "groups=null"]) == 0


def test_a_presets_experts_are_set_as_their_flag_does(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for given in (["--ep", "2"], ["--set", "axes.ep=2"]):
        assert main(["plan", "--preset", "megatron", "--world-size", "8", *given]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


def test_the_preset_of_one_part_of_dp_takes_its_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other part has no place in its order, and was to be filled."""
    assert main(["plan", "--preset", "fsdp", "--dp-shard", "8", "--world-size", "8"]) == 0
    assert main(["presets", "fsdp", "--dp-shard", "8"]) == 0


COUNTED = {
    "axes: {tp: 2, pp: 2, dp: -1}\ngroups: {tail: {of: pp, pick: [last]}}":
        "        1        8  never     cp, tail\n",
    "axes: {tp: 1, dp: -1}\ncreate: [tp]\nconnect: [c]\n"
    "groups: {a: {ranks: [[0, 1]]}, b: {ranks: [[0, 2]]}, c: {ranks: [[3, 4]]}}":
        "  3 communicators, 1 of which connect",
    "axes: {tp: 4, dp: -1}\ncreate: [tp]\n"
    "groups: {emb: {of: dp, pick: [1, last]}, odd: {ranks: [[5, 2, 0]]}}":
        "  3 communicators, 2 of which connect",
}  # fmt: skip
"""A name of the last stage alone, with others of one rank; connections of ranks that hold fewer
communicators than others; a rank that is in a pick and in a list."""


@pytest.mark.parametrize("text", COUNTED, ids=["names", "connections", "pick and list"])
def test_a_plan_counts_what_any_rank_has(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    assert main(["plan", str(path), "--world-size", "8"]) == 0
    assert COUNTED[text] in capsys.readouterr().out


def test_experts_alone_are_axes(tmp_path: Path) -> None:
    """As the flags `--ep 2` alone are; and without pp there is none to share."""
    path = tmp_path / "grid.yaml"
    path.write_text("axes: {ep: 2}\n")
    assert GridSpec.from_yaml(path).resolve(8) == GridSpec.build(ep=2).resolve(8)
    path.write_text("axes: {sp: 2, dp2: -1, ep: 2}\norder: sp-dp2\n")
    assert GridSpec.from_yaml(path).resolve(8).shape == {
        "sp": 2, "dp2": 4, "etp": 1, "ep": 2, "edp": 4,
    }  # fmt: skip


@pytest.mark.parametrize("quoted", ["a b/m.yaml", "m.yaml"])
def test_a_line_to_paste_is_quoted(
    quoted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / quoted
    path.parent.mkdir(exist_ok=True)
    path.write_text("{name: m, layers: 4, hidden: 64, heads: 4, vocabulary: 64, sequence: 64, "
                    "batch: 64}")  # fmt: skip
    argv = ["plan", "--auto", "--model", quoted, "--cluster", "h100", "--world-size", "8"]
    assert main(argv) == 0
    (line,) = [
        each for each in capsys.readouterr().out.splitlines() if each.startswith("commgrid plan")
    ]
    assert main(shlex.split(line)[1:]) == 0


def test_a_flag_of_two_lines_stays_in_the_comment(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    argv = ["plan", "--preset", "hsdp", "--set", "groups={a:\n dp}", "--world-size", "16"]
    assert main([*argv, "-o", str(path)]) == 0
    assert "a" in GridSpec.from_yaml(path).definitions


def test_ranks_beyond_the_devices_are_not_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.replace("LEVEL", LEVEL).replace("{name: all,", "{name: all, size: 2,"))
    argv = ["explain", "--tp", "2", "--ranks", "100-103", "--rank", "101", "--cluster", str(path)]
    assert "rank 103 is beyond the 16 devices" in refused(capsys, *argv)
    assert CLUSTERS["h100"].levels[-1].size is None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["explain", "--tp", "4", "--rank", "5"], "(50,000,000 ranks)"),
        (["explain", "--tp", "4", "--rank", "5", "--cluster", "h100"], "on node 0 of 25,000,000"),
        (["diff", "megatron", "torchtitan"], "200000000 ranks"),
        (["plan", "--tp", "4", "--place", "by_host"], "200,000,000 ranks"),
    ],
)
def test_200_million_ranks_are_no_more_work(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks are not listed one by one: a test of minutes and gigabytes, if they were."""
    assert main([*argv, "--world-size", "200000000"]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["show", "--tp", "4"], "more than 200,000 ranks are not shown"),
        (["explain", "--tp", "4", "--rank", "5", "--json"], "at most 20,000,000 are listed"),
        (["diff", "megatron", "--set", "axes.tp=4"], "not compared one by one"),
        (["plan", "--tp", "3", "--cluster", "h100", "--model", "llama3-8b"], "no grid is valid"),
        (["plan", "--tp", "6", "--cluster", "h100"], "not counted one by one"),
    ],
)
def test_what_would_take_minutes_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *argv, "--world-size", "199999992")


def test_a_split_of_many_ranks_is_no_more_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("axes: {tp: 4, dp: -1}\ngroups: {h: {of: dp, split: {outer: -1, inner: 2}}}\n")
    assert main(["plan", str(path), "--world-size", "200000000"]) == 0
    assert "25,000,000        8  connects  outer" in capsys.readouterr().out
