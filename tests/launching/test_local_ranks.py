"""Ranks as processes: results, the first failure first, signals, and nothing left."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import commgrid
from commgrid.testing import Ranks, RanksFailed, run_on_ranks
from tests.killing import KILLED, kill_me, run_killable


def waits_for_the_other(rank: int) -> None:
    if rank == 1:
        raise ValueError("the cause")
    time.sleep(600)  # until it is killed


def test_the_rank_that_failed_first_is_printed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commgrid.launching.local_ranks.GRACE", 1.0)
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(waits_for_the_other, 3, per_rank=[(0,), (1,), (2,)], backend=None)
    said = str(failed.value)
    ranks = [line.split()[2] for line in said.splitlines() if line.startswith("--- rank")]
    assert ranks == ["1", "0", "2"]
    assert "ValueError: the cause" in said
    assert said.count("in waits_for_the_other\n") == 3  # where the killed ones were
    assert said.count("in run_rank\n") == 2
    assert "pytest" not in said  # nor where their parent was when it forked them


def test_a_timeout_shows_where_each_rank_is() -> None:
    with pytest.raises(RanksFailed, match=r"2 of 2 ranks failed \(timeout 2 s\)") as failed:
        run_on_ranks(time.sleep, 2, 600, backend=None, timeout=2)
    assert str(failed.value).count("killed, since it had not ended") == 2


def test_a_rank_that_a_signal_ends_is_a_failure_unless_that_is_allowed() -> None:
    with pytest.raises(RanksFailed, match=r"--- rank 0 \(ended by SIGKILL\)"):
        run_on_ranks(kill_me, 1, backend=None)
    assert run_killable(kill_me, 2) == [KILLED, KILLED]


def test_a_rank_can_be_signalled_from_outside() -> None:
    with Ranks(time.sleep, 2, 600, backend=None, killable=True) as ranks:
        os.kill(ranks.pid(1), signal.SIGTERM)
        while 1 in ranks.living():
            time.sleep(0.01)  # between two looks
        os.kill(ranks.pid(0), signal.SIGKILL)
        ranks.wait()
    assert {rank: end.signal for rank, end in ranks.outcomes.items()} == {
        1: signal.SIGTERM, 0: signal.SIGKILL,
    }  # fmt: skip


def leaves(what: str) -> None:
    if what == "environment":
        os.environ["LEFT"] = "1"
    if what == "group":
        dist.new_group([0])
    if what == "grid":  # which the end of a program destroys
        commgrid.initialize()


def test_a_rank_that_leaves_something_fails() -> None:
    with pytest.raises(RanksFailed, match="environment variable 'LEFT' was set"):
        run_on_ranks(leaves, 1, "environment")
    run_on_ranks(leaves, 1, "environment", check=False)
    run_on_ranks(leaves, 1, "environment", leftovers=["environment"])
    with pytest.raises(RanksFailed, match="environment variable 'LEFT' was set"):
        run_on_ranks(leaves, 1, "environment", leftovers=["threads", "groups"])
    with pytest.raises(RanksFailed, match="process group '1' is still registered"):
        run_on_ranks(leaves, 2, "group", leftovers=[])


def leaves_a_grid_and_fails() -> None:
    commgrid.initialize()
    raise ValueError("its own failure")


def test_a_failure_is_told_before_leftovers() -> None:
    with pytest.raises(RanksFailed, match="ValueError: its own failure") as failed:
        run_on_ranks(leaves_a_grid_and_fails, 2)
    assert "left behind" not in str(failed.value)


def variables(rank: int) -> dict[str, str]:
    return {"NCCL_HOSTID": f"rank{rank}", "RANK": str(10 + rank)}


def read(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_variables_by_rank_are_no_leftovers() -> None:
    names = ("NCCL_HOSTID", "RANK", "WORLD_SIZE")  # they replace the launcher's
    found = run_on_ranks(read, 2, *names, backend=None, launcher="torchrun", environ=variables)
    assert found == [["rank0", "10", "2"], ["rank1", "11", "2"]]
    assert run_on_ranks(read, 2, "MODE", backend=None, environ={"MODE": "fast"}) == [["fast"]] * 2


@pytest.mark.parametrize("what", ["grid", "group"])
def test_grids_and_groups_end_with_the_function(what: str) -> None:
    run_on_ranks(leaves, 2, what)


@pytest.mark.parametrize(
    ("world_size", "how", "said"),
    [
        (0, {}, "world_size is 0; expected at least 1"),
        (2, {"per_rank": [()]}, "per_rank has 1 entries for 2 ranks"),
        (1, {"leftovers": "env"}, "leftovers has 'env'; expected \"ignore\", or a list of grids,"),
        (1, {"leftovers": ["env"], "check": False}, "leftovers has 'env'"),
        (1, {"launcher": "mpirun"}, "launcher is 'mpirun'; expected one of torchrun, slurm"),
    ],
)
def test_wrong_arguments(world_size: int, how: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Ranks(kill_me, world_size, **how)  # type: ignore[arg-type]


def test_ranks_collect_nothing_that_a_test_before_has_left() -> None:
    """A process group would wait for its threads, which a forked process does not have."""
    gc.disable()
    try:
        left: list[object] = [commgrid.initialize().get_group("dp")]
        left.append(left)
        commgrid.shutdown()
        del left
        assert run_on_ranks(collect, 1, backend=None) == [True]
    finally:
        gc.enable()


def collect() -> bool:
    gc.collect()
    return True


def stays(folder: str) -> None:
    child = os.fork()
    Path(folder, "child" if child == 0 else "rank").write_text(str(os.getpid()))
    time.sleep(600)  # until it is killed


@pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")
def test_nothing_is_left_of_a_rank_that_is_killed(tmp_path: Path) -> None:
    with Ranks(stays, 1, str(tmp_path), backend=None) as ranks:
        while {path.name for path in tmp_path.iterdir()} != {"child", "rank"}:
            assert ranks.living()
            time.sleep(0.01)  # between two looks
    for path in tmp_path.iterdir():
        while _runs(path.read_text()):  # a killed process may take a moment to end
            time.sleep(0.01)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def program(how: str, folder: Path) -> None:
    (folder / f"ran_{os.environ['RANK']}").touch()
    print("a line of rank", os.environ["RANK"])
    if os.environ["RANK"] != "1":
        return
    if how == "raises":
        raise ValueError("the cause")
    sys.exit(3) if how == "exits" else os._exit(0)


@pytest.mark.parametrize("how", ["ends", "exits", "raises"])
def test_programs_print_to_files_and_end_by_their_exit_code(how: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    with Ranks(
        program, 4, how, tmp_path, backend=None, launcher="torchrun", output=output, absent=[2],
        at_once=1,
    ) as ranks:  # fmt: skip
        ends = ranks.wait()
    assert (output / "output_00000.txt").read_text() == ends[0].printed == "a line of rank 0\n"
    codes = {rank: end.exitcode for rank, end in ends.items()}
    if how == "ends":
        assert codes == {0: 0, 1: 0, 3: 0}
        assert ranks.failures() == []
        return
    assert codes == {0: 0, 1: 3 if how == "exits" else 1}
    assert not (tmp_path / "ran_3").exists()  # it was not started any more
    (failure,) = ranks.failures()
    assert failure.last_lines.startswith("\n    a line of rank 1\n    Traceback")
    assert ("the cause" in str(failure)) == (how == "raises")
    with pytest.raises(RanksFailed, match="a line of rank 1"):
        ranks.results()


def late(folder: Path) -> None:
    (folder / os.environ["RANK"]).touch()
    if os.environ["RANK"] == "1":
        while not (folder / "0").exists():
            time.sleep(0.01)  # between two looks
        raise ValueError("the cause")
    time.sleep(600)  # until it is killed


def test_once_a_program_fails_the_others_are_killed(tmp_path: Path) -> None:
    """At once, and not after the seconds that ranks of a test have."""
    with Ranks(late, 2, tmp_path, backend=None, launcher="torchrun", output=tmp_path) as ranks:
        ends = list(ranks.wait().values())
    assert [(end.rank, end.late) for end in ends] == [(1, False), (0, True)]
    assert "in late" in ends[1].last_lines
