"""Flags that would change nothing, and files that hold nothing, are refused on every command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from commgrid.cli import main
from commgrid.cli.commands.diff import compare
from commgrid.cost_model.cluster import CLUSTERS
from commgrid.planning.spec import GridSpec

NOTHING = "would change nothing; it"
STEP = f"{NOTHING} says how a step of a model is run; give --model NAME"
JOBS = f"{NOTHING} is for a step's time and memory; give --model NAME as well"
JOB = ["--model", "llama3-8b", "--cluster", "h100"]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        *((["plan", "--tp", "8", "--world-size", "64", flag, value], f"{flag} {value}: {STEP}")
          for flag, value in (
              ("--recompute", "full"), ("--batch", "8"), ("--sequence", "1"), ("--top", "3"),
              ("--microbatch", "1"), ("--virtual-stages", "1"), ("--zero-stage", "0"),
              ("--max-memory", "1.0"),
          )),
        (["plan", "--tp", "8", "--world-size", "64", *JOB, "--top", "3"],
         f"--top 3: {NOTHING} goes with --auto"),
        (["plan", "--tp", "8", "--world-size", "64", "--recompute", "nonsense"],
         "--recompute nonsense: expected none, selective or full"),
        (["plan", "--tp", "8", "--world-size", "64", "--batch", "zz"],
         "--batch zz: expected a whole number from 1 on"),
        (["diff", "megatron", "torchtitan", "--world-size", "8", "--gpus-per-node", "nonsense"],
         "--gpus-per-node nonsense: expected a whole number from 1 on"),
        (["diff", "megatron", "torchtitan", "--world-size", "8", "--gpus-per-node", "8"],
         f"--gpus-per-node 8: {JOBS}"),
        (["diff", "megatron", "torchtitan", "--world-size", "8", "--cluster", "h100"],
         f"--cluster h100: {JOBS}"),
        *((["plan", "--tp", "2", "--world-size", "8", *JOB, flag, value],
           f"{flag} {value}: {NOTHING} is about a grid's start")
          for flag, value in (("--create", "tp"), ("--connect", "none"), ("--share", "all"))),
        (["plan", "--tp", "8", "--gpus-per-node", "launcher", "--cluster", "h100", "--world-size",
          "8"], "--gpus-per-node launcher: expected a whole number"),
        (["plan", "--tp", "٣", "--world-size", "9"], "--tp ٣: expected a whole number"),
        (["plan", "--tp", "9" * 400, "--world-size", "9"], "of 15 digits at most"),
        (["plan", "--create", "", "--world-size", "8"], "--create '': expected names"),
        (["plan", ""], "GRID.yaml '': expected the path of a file"),
        (["diff", "megatron", "", "--world-size", "8"], "'': neither a file nor a preset"),
        (["plan", "--tp", "2", "--world-size", "8", "-o", "none/x.yaml"],
         "there is no such folder"),
        (["plan", "--tp", "2", "--world-size", "8", "-o", "x.svg"], "add --model NAME"),
        (["plan", "--tp", "2", "--nodes", "2", "--cluster", "cpu"],
         "add --gpus-per-node N, or give"),
        (["show", "--tp", "16", "--world-size", "16", "--within", "tp=node"], "lie on 2 nodes"),
        (["show", "--schedule", "1f1b", "--stages", "1000000", "--microbatches", "1000000"],
         "forwards are too many to show"),
        (["show", "--schedule", "1f1b", "--stages", "2", "--microbatches", "4", "--rank", "1"],
         f"--rank 1: {NOTHING} goes with a grid, and there is none"),
        (["explain", "--tp", "2", "--world-size", "4", "--rank", "²"],
         "--rank ²: expected a whole number from 0 on"),
    ],
)  # fmt: skip
def test_what_would_change_nothing_is_an_error(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *argv)


def test_a_preset_is_not_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "megatron").mkdir()
    assert main(["diff", "megatron", "torchtitan", "--world-size", "8"]) == 0
    assert "dp_shard" in capsys.readouterr().out


def test_a_grid_without_groups_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("axes: {tp: 2, dp: -1}\ncreate: []\n")
    assert main(["explain", str(path), "--rank", "0", "--world-size", "4"]) == 0
    assert "0 communicators" in capsys.readouterr().out


def test_fits_of_mixed_keys_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = {"collective": "all_reduce", "level": "node", "algorithm": "ring", "latency_us": 1.0,
           "gb_per_s": 1.0, "rest": {2: {1: 1.0}, "x": {1: 1.0}}}  # fmt: skip
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({**CLUSTERS["h100"].to_dict(), "fits": [fit]}))
    said = refused(capsys, "plan", "--tp", "2", "--world-size", "8", "--cluster", str(path))
    assert "fits[0].rest='x': expected a number above 0" in said


def test_a_plan_is_handed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--auto's first choice is the grid in the file."""
    path = tmp_path / "grid.yaml"
    argv = ["plan", "--auto", "--model", "mixtral-8x22b", "--cluster", "h100", "--world-size"]
    assert main([*argv, "256", "-o", str(path), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    spec = GridSpec.from_yaml(path).resolve(256)
    chosen = {**best["axes"], "etp": best["etp"]}
    assert {axis: spec.shape.get(axis, 1) for axis in chosen} == chosen
    assert best["total_gb"] <= 0.9 * 80
    assert main(["diff", str(path), "--set", "axes.tp=2", "--world-size", "256"]) == 0
    capsys.readouterr()
    assert f"microbatch {best['microbatch']}, " in path.read_text().splitlines()[0]
    assert main(["plan", "--tp", "2", "--world-size", "4", "-o", str(tmp_path / "x.json")]) == 2
    assert "expected a file that ends in .yaml, .yml" in capsys.readouterr().err


def test_a_step_keeps_to_within_and_a_refused_one_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.yaml"
    argv = ["plan", "--world-size", "48", *JOB, "-o", str(path)]
    said = refused(capsys, *argv, "--tp", "16", "--within", "tp=node")
    assert "within.tp='node': ranks 0-15, a group of tp, lie on 2 nodes" in said
    assert "does not divide" in refused(capsys, *argv, "--tp", "3")
    assert not path.exists()
    assert main([*argv, "--tp", "8", "--batch", "48"]) == 0
    assert GridSpec.from_yaml(path).shape["tp"] == 8


def test_a_size_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "plan", "--tp", "2", "--axis", "tp=4", "--world-size", "8")
    assert "--axis tp=4: tp is 2 already; give it once" in said
    assert "a size to fill (tp is -1)" in refused(capsys, "plan", "--tp", "-1", "--dp", "4")


def test_nodes_stand_for_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (
        ["plan", "--tp", "8"], ["plan", "--tp", "8", "--model", "llama3-8b"],
        ["explain", "--tp", "8", "--rank", "0"], ["show", "--tp", "8"],
        ["diff", "megatron", "torchtitan"],
    ):  # fmt: skip
        texts = []
        for count in (["--nodes", "4"], ["--world-size", "32"]):
            cluster = ["--cluster", "h100"] if "diff" not in argv or "--nodes" in count else []
            assert main([*argv, *count, *cluster, "--json"]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1], argv
    plan = ["plan", "--tp", "2", "--nodes"]
    assert "--nodes 4: how many devices a node has" in refused(capsys, *plan, "4")
    assert "--nodes 0: expected a whole number from 1 on" in refused(capsys, *plan, "0")
    both = refused(capsys, *plan, "4", "--world-size", "8", "--cluster", "h100")
    assert "--nodes 4 beside --world-size: give one of them" in both


def test_a_preset_is_printed_with_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "megatron", "--tp", "8", "--ep", "4"]) == 0
    (tmp_path / "grid.yaml").write_text(capsys.readouterr().out)
    spec = GridSpec.from_yaml(tmp_path / "grid.yaml").resolve(64)
    assert spec == GridSpec.from_preset("megatron", tp=8, ep=4).resolve(64)
    assert "--tp 8: would change nothing" in refused(capsys, "presets", "--tp", "8")
    assert "no such axis" in refused(capsys, "presets", "ddp", "--tp", "8")


def test_none_that_connect_is_zero() -> None:
    before = GridSpec.build(tp=2).resolve(8)
    text = str(compare(before, GridSpec.build(tp=2, connect="none").resolve(8)))
    assert " → 0 of which connect" in text


@pytest.mark.parametrize("preset", ["tp_sp", "ulysses"])
def test_a_group_of_a_preset_gives_way_to_an_axis(preset: str) -> None:
    first = "tp" if preset == "tp_sp" else "cp"
    changes = {"axes.sp": 2, "order": f"{first}-sp-dp"}
    spec = GridSpec.from_preset(preset, changes=changes).resolve(32)
    assert spec.shape["sp"] == 2
    assert "sp" in GridSpec.from_preset(preset).resolve(32).created_names


def test_ranks_beyond_the_grid_are_checked_too() -> None:
    """A rank that is not in the grid had no grid to check."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
         "-m", "commgrid", "check", "--tp", "2", "--ranks", "0-1"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0: 9 communicators, all with the planned members" in done.stdout


def test_an_axis_of_a_preset_that_is_changed_is_created() -> None:
    for changed in (
        GridSpec.from_preset("kempnerforge", changes={"axes.tp": 2}),
        GridSpec.from_preset("kempnerforge", tp=2),
    ):
        assert {"tp", "dp_shard"} <= set(changed.resolve(16).created_names)
    own = GridSpec.from_preset("kempnerforge", changes={"axes.tp": 2, "create": ["dp_shard"]})
    assert "tp" not in own.resolve(16).created_names
