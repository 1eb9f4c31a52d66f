"""A rank whose program is over while another one waits for it is named, with how it ended."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from commgrid.testing import free_port

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
