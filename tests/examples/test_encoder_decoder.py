"""An encoder and a decoder on two grids: the single process's curve, wherever they are."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import commgrid
from commgrid.testing import run_on_ranks
from tests.examples.curves import ROOT, load, without_numpy
from tests.sizes import some

SMALL = ["--layers", "1", "--hidden", "8", "--batch-size", "11", "--dtype", "fp64"]
CUTS = [
    ["--encoder", "0-2", "--decoder", "4-7", "--tp", "2"],
    ["--encoder", "0-7", "--decoder", "0-7", "--tp", "2", "--encoder-tp", "4"],
    ["--encoder", "0-4", "--decoder", "2-7", "--tp", "2"],
    ["--encoder", "0-1", "--decoder", "5-7"],
]


def run(*jobs: list[str]) -> None:
    """Trains once for each list of arguments, in one process group after the other."""
    example: Any = load("encoder_decoder")
    down = commgrid.shutdown

    def end() -> None:
        for grid in commgrid.runtime.registry.live_grids():
            commgrid.destroy(grid.name)
        dist.barrier()  # a rank without work does not come to the next job's grids before the rest

    for job in jobs:
        commgrid.shutdown = end
        try:
            example.train(example.parse(job))
        finally:
            commgrid.shutdown = down
    down()


def losses(world: int, jobs: list[list[str]], folder: Path) -> list[list[float]]:
    paths = [folder / f"{world}-{index}" for index in range(len(jobs))]
    given = [[*SMALL, *job, "--metrics", str(path)] for job, path in zip(jobs, paths, strict=True)]
    # The ranks change torch's defaults.
    run_on_ranks(run, world, *given, backend=None, launcher="torchrun", timeout=300, check=False)
    return [[json.loads(line)["loss"] for line in path.read_text().splitlines()] for path in paths]


def test_same_curve_as_one_process(tmp_path: Path) -> None:
    (alone,) = losses(1, [[]], tmp_path)
    assert len(alone) == 20
    assert sum(alone[-5:]) < 0.96 * sum(alone[:5])
    jobs = some(CUTS, 1)
    for job, found in zip(jobs, losses(8, jobs, tmp_path), strict=True):
        # Promise 6's bound: sums in another order differ by some ulps, which Adam amplifies.
        assert found == pytest.approx(alone, rel=1e-9), job


@pytest.mark.full
def test_numpy_is_not_needed() -> None:
    job = [*SMALL, "--encoder", "0-1", "--decoder", "2-3", "--steps", "2"]
    assert "step   2" in without_numpy("tests.examples.test_encoder_decoder.run", 4, job)


@pytest.mark.full
def test_it_runs_by_itself() -> None:
    command = [sys.executable, "examples/encoder_decoder.py", "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step   1  loss ")
