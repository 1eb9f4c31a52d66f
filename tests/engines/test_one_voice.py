"""A job that is stopped by a signal says so once, in one line."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commgrid.testing import free_port
from tests.engines.said import LONG, killed_after, tracebacks, wait_for_step
from tests.examples.curves import ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OWN = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.full
def test_sizes_that_do_not_fit_under_torchrun(tmp_path: Path) -> None:
    """A plain script: each rank raises the error; torchrun may end some before they print it."""
    script = tmp_path / "plain.py"
    script.write_text("import commgrid\ncommgrid.initialize(tp=3)\n")
    command = [*TORCHRUN, "--tee", "3", str(script)]  # --tee marks each line with its rank
    done = subprocess.run(command, env=OWN, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    said = re.findall(r"^\[default(\d)\]:.*SpecError: axes: ", done.stderr, re.M)
    assert {*said} & {"0", "1"}, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_of_plain_processes_is_one_line(stop: signal.Signals) -> None:
    port = str(free_port())
    ranks = []
    with contextlib.ExitStack() as started:
        for rank in ("0", "1"):
            place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_PORT": port}
            one = subprocess.Popen(
                [sys.executable, "examples/train_gpt.py", *LONG],
                cwd=ROOT,
                text=True,
                env={**OWN, **place, "MASTER_ADDR": "127.0.0.1"},
                start_new_session=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            ranks.append(started.enter_context(killed_after(one)))
        wait_for_step(ranks[0], 3)
        for each in ranks:
            each.send_signal(stop)
        said = [each.communicate(timeout=100) for each in ranks]
    assert [each.returncode for each in ranks] == [128 + stop] * 2
    out, err = ("".join(texts) for texts in zip(*said, strict=True))
    assert out.count(f"stopped by {stop.name}: ") == 1
    assert tracebacks(err) == 0, err
