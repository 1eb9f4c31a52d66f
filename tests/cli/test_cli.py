"""The command line: its JSON, its tables, and what it says of wrong input."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commgrid import GridSpec, GroupPlan
from commgrid.cli import main
from commgrid.testing import run_on_ranks


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_explain_json_is_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tp", "2", "--pp", "2", "--world-size", "16", "--rank", "5", "--json"]
    found = json.loads(output(capsys, "explain", *flags))
    plan = GroupPlan.for_rank(GridSpec.build(tp=2, pp=2).resolve(16), 5)
    assert found == {
        "version": 1,
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
    assert "  1, 3, … [37], … 63, step 2 (32 ranks)\n" in text


def test_explain_says_which_groups_the_rank_is_not_in(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("axes: {pp: 4}\ngroups: {embedding: {of: pp, pick: [first, last]}}")
    text = output(capsys, "explain", str(path), "--world-size", "4", "--rank", "1")
    assert "not in: embedding" in text


@pytest.mark.parametrize(
    ("flag", "ranks"),
    [
        ("0,1,2,4,5,7", (0, 1, 2, 4, 5, 7)), ("0-2,4-5,7", (0, 1, 2, 4, 5, 7)),
        ("5,2,0,7", (5, 2, 0, 7)), ("0-14/2", tuple(range(0, 15, 2))), ("8-11", (8, 9, 10, 11)),
    ],
)  # fmt: skip
def test_ranks_are_lists_and_spans(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, ranks: tuple[int, ...]
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("axes: {tp: 2}")
    listing = tmp_path / "listing.yaml"
    listing.write_text(f"axes: {{tp: 2}}\nranks: {flag}")
    plan = GroupPlan.for_rank(GridSpec.build(tp=2, ranks=ranks).resolve(), ranks[-1])
    for grid in (["--tp", "2", "--ranks", flag], [str(path), "--ranks", flag], [str(listing)]):
        found = json.loads(output(capsys, "explain", *grid, "--rank", str(ranks[-1]), "--json"))
        assert found["world_size"] == len(ranks)
        assert found["groups"] == {name: list(group) for name, group in plan.groups.items()}
        found = json.loads(output(capsys, "plan", *grid, "--world-size", "16", "--json"))
        assert GridSpec.from_dict(found["spec"]).grid_ranks == plan.spec.grid_ranks
        assert found["groups"]["tp"] == {"size": 2, "count": len(ranks) // 2}


def test_listed_ranks_are_shown_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "plan", "--tp", "2", "--ranks", "0-2,4,5,7")
    assert text.startswith("6 ranks: 0-2, 4-5, 7\n")
    text = output(capsys, "explain", "--tp", "2", "--pp", "2", "--ranks", "5,2,0,7", "--rank", "7")
    assert text.startswith("rank 7 of 4: tp 1, cp 0, dp 0, pp 1\n")
    assert "  pp, also pp_cp, pp_dp, pp_dp_cp" in text
    assert "  5 2 0 [7]\n" in text
    assert "ranks" in output_of_help("plan")
    assert "0-14/2 (every second)" in " ".join(output_of_help("explain").split())


def output_of_help(command: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        main([command, "--help"])
    return text.getvalue()


def test_plan_shows_groups_of_listed_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(
        "axes: {tp: 2}\ngroups: {some: {ranks: [[4, 2, 1, 0], [3, 5], [6, 7]]}, "
        "ends: {of: some, pick: [first]}}"
    )
    text = output(capsys, "plan", str(path), "--world-size", "8")
    assert "        4        1  connects  some\n        2        2  connects  some\n" in text
    found = json.loads(output(capsys, "plan", str(path), "--world-size", "8", "--json"))
    assert found["groups"]["some"] == {"size": 4, "count": 3}  # of the largest, and of all
    assert found["per_rank"]["communicators"] == 15  # a rank in ends has one more than others
    text = output(capsys, "explain", str(path), "--world-size", "8", "--rank", "2")
    assert re.search(r"^  some +4 \[2\] 1 0$", text, re.M)
    assert "not in: ends" in text


def test_plan_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tp", "8", "--pp", "4", "--cp", "2", "--ep", "8", "--etp", "1"]
    found = json.loads(output(capsys, "plan", *flags, "--world-size", "1024", "--json"))
    assert found["groups"]["tp"] == {"size": 8, "count": 128}
    assert found["per_rank"] == {"communicators": 29, "connect": 6}
    assert found["nccl_gb"] == pytest.approx([2.4, 4.2])
    assert GridSpec.from_dict(found["spec"]).world_size == 1024
    assert found["savings"][0]["change"] == "connect=none"
    changes = {row["change"]: row for row in found["savings"]}
    assert changes["share=region"] == {"change": "share=region", "communicators": 23, "connect": 6}


def test_plan_ends_with_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tp", "2", "--dp", "4", "--pp", "2", "--connect", "all"]
    text = output(capsys, "plan", *flags)
    assert "16 ranks" in text
    assert "Start-up, per rank:\n  15 communicators, 14 of which connect" in text
    assert "\n  connect=none saves most: 15 communicators" in text
    text = output(capsys, "plan", *flags, "--share", "region")
    assert "Start-up, per rank:\n  8 communicators, 7 of which connect" in text


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
    # dp and pp in 4 names each, 4 with both, those of one rank, and tail or mid
    assert found["per_rank"] == {"communicators": 14, "connect": 3}


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
        ("plan --share some --world-size 4", "share='some': expected aliases, region, all"),
        ("plan --share none --world-size 4", "share='none': this is now called 'aliases'"),
        (
            "explain --world-size 4 --rank 4",
            "rank 4 is not in this grid, which covers",
        ),
        ("explain --world-size 4 --rank -1", "--rank -1: expected a whole number from 0 on"),
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
    """The output of each of several ranks."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["check", "--tp", "2", "--json"]) == 0
    return said.getvalue()


def test_check_tells_of_every_communicator_once() -> None:
    first, *others = run_on_ranks(checked, 4, backend=None, launcher="torchrun")
    found = json.loads(first)
    assert found["ok"]
    # tp, cp of one rank, dp, and their combinations with cp and pp, which are none's aliases
    assert [row["size"] for row in found["rows"]] == [2, 1, 2, 2, 4, 2, 2, 2, 4, 2, 4, 2, 4]
    assert others == [""] * 3


@pytest.mark.full
def test_check_under_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "commgrid", "check", "--tp", "2", "--json"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    # tp, axes of one rank, and the combinations of both, which are none's aliases
    assert [row["size"] for row in found["rows"]] == [2, 1, *[2] * 7]
