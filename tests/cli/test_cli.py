"""The command line: its JSON, its tables, and what it says of wrong input."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from commgrid import GridSpec, GroupPlan
from commgrid.cli import main
from tests.ranks import run_on_ranks


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_explain_json_is_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tp", "2", "--pp", "2", "--world-size", "16", "--rank", "5", "--json"]
    found = json.loads(output(capsys, "explain", *flags))
    plan = GroupPlan.for_rank(GridSpec.build(tp=2, pp=2).resolve(16), 5)
    assert found == {
        "rank": 5,
        "world_size": 16,
        "coordinate": {"tp": 1, "cp": 0, "dp": 2, "pp": 0},
        "groups": {name: list(ranks) for name, ranks in plan.groups.items()},
        "communicators": len(plan.communicators),
    }


def test_explain_brackets_this_rank(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "explain", "--tp", "2", "--world-size", "64", "--rank", "37")
    assert "rank 37 of 64: tp 1, cp 0, dp 18, pp 0" in text
    assert " 36 [37]\n" in text
    assert " 19 21 23 … [37] … 63 (32 ranks)" in text


def test_explain_says_which_groups_the_rank_is_not_in(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("axes: {pp: 4}\ngroups: {embedding: {of: pp, pick: [first, last]}}")
    text = output(capsys, "explain", str(path), "--world-size", "4", "--rank", "1")
    assert "not in: embedding" in text


def test_plan_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tp", "8", "--pp", "4", "--cp", "2", "--ep", "8", "--etp", "1"]
    found = json.loads(output(capsys, "plan", *flags, "--world-size", "1024", "--json"))
    assert found["groups"]["tp"] == {"size": 8, "count": 128}
    assert found["per_rank"] == {"communicators": 23, "connect": 6}
    assert found["nccl_gb"] == pytest.approx([2.4, 4.2])
    assert GridSpec.from_dict(found["spec"]).world_size == 1024
    assert found["savings"][0]["change"] == "connect=none"


def test_plan_ends_with_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "plan", "--tp", "2", "--dp", "4", "--pp", "2", "--connect", "all")
    assert "16 ranks" in text
    assert "7 communicators" not in text
    assert "Start-up, per rank:\n  8 communicators, 7 of which connect" in text
    assert text.rstrip().splitlines()[-1].startswith("  connect=none saves most")


def test_plan_counts_picked_groups(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("axes: {tp: 2, pp: 4}\ngroups: {embedding: {of: pp, pick: [first, last]}}")
    found = json.loads(output(capsys, "plan", str(path), "--world-size", "16", "--json"))
    assert found["groups"]["embedding"] == {"size": 2, "count": 4}


def test_plan_shows_what_only_other_ranks_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "grid.yaml"
    rows = "{tail: {of: pp, pick: [last], own: true}, mid: {of: pp, pick: [1, 2]}}"
    path.write_text(f"axes: {{pp: 4, dp: 2}}\ngroups: {rows}")
    found = json.loads(output(capsys, "plan", str(path), "--json"))
    names = [name for row in found["communicators"] for name in row["names"]]
    assert {"tail", "mid"} <= set(names)
    assert found["per_rank"] == {"communicators": 5, "connect": 3}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("plan --tp 3 --world-size 16", "axes: tp=3 · cp=1 · pp=1 = 3 does not divide 16 ranks"),
        ("plan --tp 2", "--world-size: needed"),
        ("plan --tp two --world-size 4", "--tp two: expected a whole number"),
        ("plan nowhere.yaml --world-size 4", "nowhere.yaml: there is no such file"),
        ("plan nowhere.yaml --tp 2", "--tp beside nowhere.yaml"),
        ("plan --axis node --world-size 4", "--axis node: expected NAME=N"),
        ("plan --create dp_cq --world-size 4", "create: no group is named 'dp_cq'"),
        ("plan --share some --world-size 4", "share='some': expected region, all, none"),
        (
            "explain --world-size 4 --rank 4",
            "rank 4 is not in this grid, which covers",
        ),
        ("explain --world-size 4 --rank -1", "--rank -1: expected a rank"),
    ],
)
def test_wrong_input_is_one_line(argv: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert said in captured.err


@pytest.mark.parametrize("command", ["plan", "explain", "check"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "examples:" in capsys.readouterr().out


def checked() -> str:
    """What each of several ranks prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["check", "--tp", "2", "--json"]) == 0
    return said.getvalue()


def test_check_tells_of_every_communicator_once() -> None:
    first, *others = run_on_ranks(checked, 4, init=None, launcher="torchrun")
    found = json.loads(first)
    assert found["ok"]
    assert [row["size"] for row in found["rows"]] == [2, 1, 2, 4]
    assert others == [""] * 3


def test_check_under_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "commgrid", "check", "--tp", "2", "--json"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert [row["size"] for row in found["rows"]] == [2, 1]
