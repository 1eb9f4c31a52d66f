"""A rank whose program is over while another one waits for it is named, with how it ended."""

import os
import subprocess
import sys

import pytest

from commgrid.testing import free_port

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
    given = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT.format(act=act)]
    ranks = []
    for rank in ("0", "1"):
        own = {**given, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True))
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert f"PeerFailedError: {how}" in said[0], "\n".join(said)
