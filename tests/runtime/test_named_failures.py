"""A rank whose program is over while another one waits for it is named, with how it ended."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import commgrid
from commgrid import checkpoint
from commgrid.collectives import all_reduce
from commgrid.errors import CommGridError, PeerFailedError
from commgrid.failures import named_failures
from commgrid.runtime.named_failures import _each_other
from commgrid.testing import free_port, run_on_ranks
from tests.killing import KILLED, kill_me, run_killable
from tests.waiting import comes, until, until_waits

LATER = """
import torch
import commgrid
from commgrid.torch_compat import gloo

grid = commgrid.initialize(timeout=60, watch=False, connect=[])
if grid.rank == 1:
    raise ValueError("no data")
input()  # until that program has ended
group = grid.get_group("dp")
store = torch.distributed.distributed_c10d._world.pg_map[group][1]
assert gloo.addresses(group, 1) and store.check(gloo.addresses(group, 1)), "no address"
"""

SCRIPT = """
import sys
import torch
import commgrid
from commgrid.failures import named_failures

grid = commgrid.initialize(timeout=60, watch=False)
one = torch.ones(1)
torch.distributed.all_reduce(one, group=grid.get_group("dp"))
if grid.rank == 1:
    {act}
else:
    with named_failures():
        torch.distributed.all_reduce(one, group=grid.get_group("dp"))
"""


@pytest.mark.parametrize(
    ("act", "how"),
    [
        ("sys.exit(0)", "rank 1 ended without an error, and without this call: rank 0 "),
        ("pass", "rank 1 ended without an error, and without this call: rank 0 "),
        ("raise ValueError('no data')", "rank 1 ended with ValueError: no data: rank 0 "),
    ],
    ids=["exit", "end", "error"],
)
def test_who_waits_is_told_how_the_other_program_ended(act: str, how: str) -> None:
    with two_ranks(SCRIPT.format(act=act)) as ranks:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert f"PeerFailedError: {how}" in said[0], "\n".join(said)


HASTE = {"COMMGRID_TIMEOUTS": "settle=1000 arrive=1000"}
"""Ranks that are waited for after a failure would be waited for till the test ends."""


def one_batch_more(end: str) -> str:
    """Rank 0 gets a batch more than the others, which end their loop."""
    grid = commgrid.initialize(timeout=200, watch=False, backend="gloo")
    try:
        with named_failures():
            for _ in range(4 if grid.rank == 0 else 3):
                all_reduce(torch.ones(1), "dp")
    except PeerFailedError as error:
        return str(error)
    if end == "kill" and grid.rank == 2:
        kill_me()
    if end == "destroy":
        grid.destroy()
    elif end == "shut down":
        commgrid.shutdown()
    return "no error"


@pytest.mark.parametrize("end", ["destroy", "shut down", "end"])
def test_ranks_that_have_left_the_loop_in_order_have_ended(end: str) -> None:
    """Rank 0 said that they were gone or did not answer, after 10 s, if they had shut down."""
    said, *others = run_killable(one_batch_more, 3, end, environ=HASTE, timeout=100)
    assert said.startswith("ranks 1-2 ended without an error, and without this call: rank 0 in "), (
        said
    )
    assert others == ["no error"] * 2


def test_a_rank_that_ended_in_order_is_not_named_beside_one_that_is_gone() -> None:
    """It may have come to the call before it ended."""
    said, _, killed = run_killable(
        one_batch_more, 3, "kill", environ={"COMMGRID_TIMEOUTS": "arrive=2"}, timeout=100
    )
    assert killed == KILLED
    assert said.startswith("rank 2 is gone or does not answer: rank 0 in "), said


def skips_a_load(folder: str) -> str:
    """Rank 2 leaves out a call of all ranks; all end without exit handlers after their error."""
    grid, model = commgrid.initialize(tp=2, timeout=3, backend="gloo"), torch.nn.Linear(2, 2)
    checkpoint.save(folder, 1, model, progress=False)
    try:
        with named_failures():
            if grid.rank != 2:
                checkpoint.load(folder, model, progress=False)
            all_reduce(torch.ones(1), "dp")
    except CommGridError as error:
        return str(error)
    return "no error"


def test_a_rank_that_skips_a_call_is_named_with_its_line(tmp_path: Path) -> None:
    """No rank was named, and rank 0 by those who read too late what it had found out."""
    launched = {"backend": None, "launcher": "torchrun", "check": False}
    for said in run_on_ranks(skips_a_load, 4, str(tmp_path), **launched):
        assert said.startswith(
            "ranks wait for each other: rank 2 in all_reduce on group 'dp' (test_named_failures.py:"
        ), said
        assert "; ranks 0-1, 3 in checkpoint.load, in all_gather on group 'dp_cp_tp' (test_" in said


def report(rank: int, call: str, ranks: list[int], late: bool = True) -> dict[str, Any]:
    at = f" in {call}"
    return {"rank": rank, "at": at, "call": call, "waited_for": ranks, "late": late}


def test_ranks_wait_for_each_other_only_if_no_call_has_all_its_ranks() -> None:
    """Else a connection failed, and the others rightly wait for the ranks of that call."""
    pairs = [report(0, "tp", [0, 1]), report(1, "tp", [0, 1]), report(2, "dp", [0, 2])]
    assert _each_other([*pairs, report(3, "dp", [1, 3])]) == ""
    assert _each_other([report(0, "tp", [0, 1]), report(1, "dp", [0, 1], late=False)]) != ""
    assert _each_other([report(0, "tp", [0, 1], False), report(1, "dp", [0, 1], False)]) == ""
    assert _each_other([report(0, "tp", [0, 1]), report(1, "", [])]) == "", "its call is not known"
    said = _each_other([report(1, "dp", [1, 0]), report(0, "tp", [0, 1]), report(2, "tp", [0, 2])])
    assert said.startswith("ranks wait for each other: rank 0 in tp; rank 1 in dp; rank 2 in tp;")


def server_fails() -> str:
    """Rank 0 serves the store, and ends right after its error, before others come to a call."""
    grid = commgrid.initialize(timeout=200, watch=False, backend="gloo")
    all_reduce(torch.ones(1), "dp")
    try:
        with named_failures():
            if grid.rank == 0:
                comes("rank 0")
                raise ValueError("no data")
            until_waits("rank 0")
            all_reduce(torch.ones(1), "dp")
    except CommGridError as error:
        return str(error)
    except ValueError as error:
        return f"its own {error}"
    return "no error"


def test_the_error_of_the_rank_that_serves_the_store_is_read_before_it_ends() -> None:
    first, *others = run_on_ranks(server_fails, 3, backend=None, launcher="torchrun", check=False)
    assert first == "its own no data"
    for said in others:
        assert said.startswith("rank 0 failed at test_named_failures.py:"), said
        assert "ValueError: no data" in said


def ends_early(folder: str) -> str:
    """Rank 1 destroys the grid before the others have left their last call's block."""
    grid, mark = commgrid.initialize(timeout=200, backend="gloo"), Path(folder, "destroyed")
    with named_failures():
        all_reduce(torch.ones(1), "dp")
        if grid.rank != 1:
            until(mark.exists, f"{mark}")
    grid.destroy()
    if grid.rank == 1:
        mark.touch()
    return "no error"


def test_a_rank_may_end_before_the_others(tmp_path: Path) -> None:
    found = run_on_ranks(ends_early, 3, str(tmp_path), backend=None, launcher="torchrun")
    assert found == ["no error"] * 3


def test_addresses_of_a_program_that_has_ended_stay() -> None:
    """gloo would wait for one at the store, and all of the process's calls of the store behind it.

    A rank that saw the address a moment ago could not know that.
    """
    with two_ranks(LATER) as ranks:
        ended = ranks[1].communicate(timeout=120)[1]
        said = ranks[0].communicate("\n", timeout=120)[1]
        assert ranks[0].returncode == 0, f"{said}\n{ended}"


@contextmanager
def two_ranks(script: str) -> Iterator[list[subprocess.Popen[str]]]:
    given = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**given, "RANK": rank, "LOCAL_RANK": rank},
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
