"""`commgrid bench` on ranks: what it runs, how it counts, what it prints and writes. Nothing here
is timed; tests/benchmarks/bench_vs_torch.py compares its times with a plain loop's."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import commgrid
from commgrid.bench import Effort, Measured, bench
from commgrid.cli import main
from commgrid.cli.commands.bench import as_table
from commgrid.cost_model.cluster import CLUSTERS, find_cluster
from commgrid.cost_model.collective import COLLECTIVES, collective_time
from commgrid.errors import SpecError, UnknownGroupError
from commgrid.testing import run_on_ranks
from tests.benchmarks import fit_cluster

BOX = CLUSTERS["h100"]
QUICK = Effort(iters=2, warmup=1, repeats=3)


def measured() -> list[Measured]:
    grid = commgrid.initialize(tp=2)
    rows = bench(grid, [], COLLECTIVES, [10, 4096], cluster=BOX, effort=QUICK)
    commgrid.destroy()
    return rows


def test_every_communicator_has_rows_that_are_the_same_on_all_ranks() -> None:
    first, *others = run_on_ranks(measured, 4)
    assert all(theirs == first for theirs in others)
    names = list(dict.fromkeys(one.group for one in first))
    assert names == ["tp", "dp", "dp_tp"]
    assert {one.group: one.names for one in first} == {
        "tp": ("tp", "cp_tp", "pp_tp", "pp_cp_tp"),
        "dp": ("dp", "dp_cp", "pp_dp", "pp_dp_cp"),
        "dp_tp": ("dp_tp", "dp_cp_tp", "pp_dp_tp", "pp_dp_cp_tp"),
    }
    assert [(one.ranks, one.groups) for one in first[::12]] == [(2, 2), (2, 2), (4, 1)]
    assert [one.collective for one in first[:12:2]] == list(COLLECTIVES)
    assert {one.spread for one in first if one.group == "dp_tp"} == {(4, 1)}
    for one in first:
        assert 0 < one.least <= one.seconds <= one.most
        part = one.collective in ("all_gather", "reduce_scatter", "all_to_all")
        # nccl-tests: size in whole elements that the ranks share equally, count a rank's part
        assert one.size in (8 if not part or one.ranks == 2 else 16, 4096)
        assert one.count == one.size // 4 // (one.ranks if part else 1)
        factor = {"all_reduce": 2 * (one.ranks - 1) / one.ranks, "broadcast": 1, "send_recv": 1}
        expected = one.size / one.seconds * factor.get(one.collective, (one.ranks - 1) / one.ranks)
        assert one.bus_bandwidth == pytest.approx(expected)


def counted(alone: bool) -> dict[tuple[int, ...], int]:
    """How often this rank calls an all-reduce on a group of tp, by its ranks."""
    grid = commgrid.initialize(tp=2)
    calls: Counter[tuple[int, ...]] = Counter()
    plain = dist.all_reduce

    def counting(*args: Any, **more: Any) -> Any:
        if more.get("group") is grid.get_group("tp"):
            calls[grid.get_ranks("tp")] += 1
        return plain(*args, **more)

    dist.all_reduce = counting
    effort = Effort(iters=3, warmup=2, repeats=4, seconds=1e6)
    rows = bench(grid, ["tp"], ["all_reduce"], [64], cluster=BOX, effort=effort, alone=alone)
    dist.all_reduce = plain
    assert [(one.group, one.ranks, one.groups) for one in rows] == [("tp", 2, 1 if alone else 2)]
    commgrid.destroy()
    return dict(calls)


@pytest.mark.parametrize("alone", [False, True])
def test_groups_of_a_name_communicate_at_once_or_the_first_alone(alone: bool) -> None:
    connecting, warmup, loops = 2, 2, 4 * 3
    each = connecting + warmup + loops
    assert run_on_ranks(counted, 4, alone) == [
        {(0, 1): each}, {(0, 1): each},
        {} if alone else {(2, 3): each}, {} if alone else {(2, 3): each},
    ]  # fmt: skip


def uneven() -> list[tuple[str, int, int, float]]:
    grid = commgrid.initialize(config={"axes": {"dp": -1}, "groups": {
        "odd": {"ranks": [[0, 1, 2], [3, 4]]}, "some": {"ranks": [[4, 1]]}}})  # fmt: skip
    rows = bench(
        grid, ["odd", "some"], ["all_reduce", "send_recv"], [64], cluster=BOX, effort=QUICK
    )
    commgrid.destroy()
    return [(one.group, one.ranks, one.groups, one.seconds) for one in rows]


def test_groups_of_several_sizes_and_ranks_in_none_do_not_stop_it() -> None:
    found = run_on_ranks(uneven, 5)
    assert all(theirs == found[0] for theirs in found)
    assert [row[:3] for row in found[0]] == [("odd", 3, 2)] * 2 + [("some", 2, 1)] * 2


def refused() -> list[str]:
    grid = commgrid.initialize(tp=2)
    said = []
    for names, collectives in ((["tq"], ["all_reduce"]), (["tp"], ["allreduce"]), (["cp"], [])):
        try:
            bench(grid, names, collectives, [64], cluster=BOX, effort=QUICK)
        except (UnknownGroupError, SpecError) as error:
            said.append(str(error))
    commgrid.destroy()
    return said


def test_what_cannot_be_measured_is_told_on_every_rank() -> None:
    for said in run_on_ranks(refused, 2):
        assert "did you mean 'tp'" in said[0]
        assert said[1].startswith("collective 'allreduce': expected one of all_reduce")
        assert said[2].startswith("nothing to measure: each of these groups has one rank")


# -- the command --------------------------------------------------------------------------

SMALL = ["--sizes", "1K,64K", "--iters", "2", "--repeats", "2"]


def said(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["bench", *argv])
    return status, out.getvalue(), err.getvalue()


def printed() -> tuple[int, str, str]:
    argv = ["--tp", "2", "--groups", "tp,dp_tp", "--collectives", "all_reduce,all-to-all"]
    return said(*argv, *SMALL, "--json")


def test_a_cluster_is_fitted_to_the_json_of_the_command(tmp_path: Path) -> None:
    first, *others = run_on_ranks(printed, 4, backend=None, launcher="torchrun")
    assert others == [(0, "", "")] * 3  # one rank prints, also progress
    status, out, progress = first
    assert status == 0
    assert out.count("\n") == 1
    said = [line.partition(":")[0] for line in progress.splitlines()]
    assert said == [
        "[1/2] tp all_reduce", "[1/2] tp all_to_all",
        "[2/2] dp_tp all_reduce", "[2/2] dp_tp all_to_all",
    ]  # fmt: skip
    found = json.loads(out)
    assert (found["world_size"], found["backend"], found["alone"]) == (4, "gloo", False)
    assert len(found["rows"]) == 8
    for row in found["rows"]:
        assert row["type"] == "float"
        assert row["spread"] == [row["ranks"]]
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
    file, costs = tmp_path / "bench.json", tmp_path / "costs.svg"
    file.write_text(out)
    assert fit_cluster.main([str(file), "-o", f"{tmp_path}/cluster.yaml", "-o", str(costs)]) == 0
    assert costs.read_text().startswith("<?xml")
    cluster = find_cluster(str(tmp_path / "cluster.yaml"))
    assert cluster.per_node == 4
    assert cluster.device.name == "CPU"
    assert {one.collective for one in cluster.fits} == {"all_reduce", "all_to_all"}
    for collective in ("all_reduce", "all_to_all"):  # no other factor has smaller squares
        ratios = [
            collective_time(collective, row["size"], row["spread"], cluster) * 1e6 / row["time_us"]
            for row in found["rows"]
            if row["collective"] == collective
        ]
        assert sum(ratio * ratio for ratio in ratios) == pytest.approx(sum(ratios), rel=1e-3)


def test_no_cluster_is_fitted_to_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    for text, words in {
        '{"alone": true}': "a cluster is fitted to groups that communicate at once",
        "{}": "expected what `commgrid bench --json` prints",
        "tp (also cp_tp)": "expected what `commgrid bench --json` prints",
    }.items():
        file.write_text(text)
        assert fit_cluster.main([str(file), "-o", f"{tmp_path}/cluster.yaml"]) == 2
        assert words in capsys.readouterr().err


def test_the_table_has_nccl_tests_columns() -> None:
    def one(size: int, seconds: float, group: str = "tp", groups: int = 4) -> Measured:
        return Measured(
            group, (group, "cp_tp"), "all_reduce", size, size // 4, 2, groups, (2,), seconds,
            seconds, seconds,
        )  # fmt: skip

    rows = [one(1024, 1e-5), one(1 << 20, 1e-3), one(1024, 2e-5, "dp", 1)]
    lines = as_table(rows, alone=False).splitlines()
    assert lines[0] == "tp (also cp_tp): 4 groups of 2 ranks, all at once"
    assert lines[1].split() == ["collective", "size", "count", "type", "time", "algbw", "busbw"]
    assert lines[2].split() == ["(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)"]
    assert lines[3].split() == ["all_reduce", "1024", "256", "float", "10.0", "0.102", "0.102"]
    assert lines[4].split()[-3:] == ["1000.0", "1.049", "1.049"]
    assert lines[6] == "dp (also cp_tp): one group of 2 ranks"
    assert lines[-2].split() == ["tp", "all_reduce", "10.0", "1.049", "1048576"]
    assert as_table(rows[2:], alone=True).startswith("dp (also cp_tp): the first group of 2 ranks")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sizes", "1K,big"], "--sizes big: expected bytes, such as 65536, 64K or 1M"),
        (["--sizes", "0"], "--sizes 0: expected bytes"),
        (["--sizes", "1K", "--factor", "2"], "--factor 2: would change nothing"),
        (["--min-bytes", "1M", "--max-bytes", "1K"], "--min-bytes 1048576: above --max-bytes 1024"),
        (["--factor", "1"], "--factor 1: expected a whole number from 2 on"),
        (["--iters", "0"], "--iters 0: expected a whole number from 1 on"),
        (["--seconds", "soon"], "--seconds soon: expected a number above 0"),
        (["--collectives", "all_redu"], "did you mean 'all_reduce'"),
        (["--cluster", "h10"], "did you mean 'h100'"),
        ([], "one rank alone measures nothing"),
    ],
)
def test_wrong_flags_are_told_before_anything_starts(
    argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    status, out, err = said(*argv)
    assert (status, out) == (2, "")
    assert words in err
    assert "torchrun --standalone" in err if not argv else err.count("\n") == 1


def spare() -> tuple[int, str]:
    status, out, _ = said("--tp", "2", "--ranks", "2,0", "--groups", "tp", *SMALL)
    return status, out


def test_a_rank_that_the_grid_leaves_out_ends_without_a_word() -> None:
    """The grid's first rank prints, here 2."""
    found = run_on_ranks(spare, 3, backend=None, launcher="torchrun")
    assert [status for status, _ in found] == [0, 0, 0]
    assert found[0][1] == found[1][1] == ""
    assert "one group of 2 ranks" in found[2][1]


@pytest.mark.full
def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "commgrid", "bench", "--tp", "2", "--collectives", "broadcast", *SMALL],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tp (also ")
    assert done.stdout.count("broadcast") == 3
    assert "[1/1] tp broadcast: up to" in done.stderr
    assert "Warning" not in done.stderr
