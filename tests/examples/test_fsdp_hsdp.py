"""FSDP2 and HSDP on the grid's communicators: the single process's curve, and no group besides."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import commgrid
from commgrid.testing import run_on_ranks
from tests.examples.curves import ROOT, load, run_example
from tests.sizes import some

SMALL = ["--layers", "2", "--hidden", "16", "--steps", "10", "--dtype", "fp64"]
CUTS = {
    4: [
        [], ["--dp-replicate", "2"], ["--tp", "2"], ["--cp", "2"], ["--tp", "2", "--native"],
        ["--dp-replicate", "2", "--tp", "2"],
    ],
    8: [
        ["--tp", "2", "--dp-replicate", "2", "--native"], ["--tp", "2", "--cp", "2"],
    ],
}  # fmt: skip


def run(*jobs: list[str]) -> list[int]:
    return run_example(load("fsdp_hsdp"), *jobs)


def losses(world: int, jobs: list[list[str]], folder: Path) -> list[list[float]]:
    paths = [folder / f"{world}-{index}" for index in range(len(jobs))]
    given = [[*SMALL, *job, "--metrics", str(path)] for job, path in zip(jobs, paths, strict=True)]
    # The ranks change torch's defaults.
    for made in run_on_ranks(
        run, world, *given, backend=None, launcher="torchrun", timeout=300, check=False
    ):
        assert made == [0] * len(jobs)
    return [[json.loads(line)["loss"] for line in path.read_text().splitlines()] for path in paths]


@pytest.mark.full
@pytest.mark.parametrize("world", CUTS)
def test_same_curve_as_one_process(world: int, tmp_path: Path) -> None:
    ours, native = losses(1, [[], ["--native"]], tmp_path)  # torch's layers draw other weights
    for alone in (ours, native):
        assert len(alone) == 10
        assert alone[-1] < alone[0]
    jobs = some(CUTS[world], 3)
    for job, found in zip(jobs, losses(world, jobs, tmp_path), strict=True):
        # Promise 6's bound: sums in another order differ by some ulps, which Adam amplifies.
        assert found == pytest.approx(native if "--native" in job else ours, rel=1e-9), job


@pytest.mark.full
def test_it_runs_by_itself() -> None:
    command = [sys.executable, "examples/fsdp_hsdp.py", "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step   1  loss ")


def refused() -> str:
    with pytest.raises(commgrid.SpecError) as error:
        run(["--steps", "2", "--tp", "2"])
    return str(error.value)


def test_what_does_not_fit_is_named() -> None:
    (said,) = run_on_ranks(refused, 1, backend=None)
    assert "tp=2" in said
    assert "does not divide 1 ranks" in said
