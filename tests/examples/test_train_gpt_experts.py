"""The same curve however experts, tensors, stages and data are shared out."""

from pathlib import Path
from typing import Any

import pytest

from commgrid.testing import run_on_ranks
from tests.examples.curves import curve, run, same_start, steps_of
from tests.sizes import some

TINY = [
    "--layers", "2", "--hidden", "16", "--heads", "4", "--batch-size", "8", "--seq-len", "4",
    "--steps", "20", "--clip-grad", "1.5", "--dtype", "fp64", "--experts", "8", "--lr", "1e-2",
]  # fmt: skip

# ep, etp, tp, pp, dp, and further flags. Regions that do not factor into each other: ep above dp,
# etp above or below tp, ep across tp and dp.
GRIDS: dict[int, list[tuple[int, int, int, int, int, list[str]]]] = {
    2: [
        (2, 1, 2, 1, 1, ["--sequence-parallel"]),
        (2, 1, 1, 1, 2, ["--zero1"]),
        (1, 2, 1, 1, 2, []),
    ],
    4: [
        (4, 1, 2, 1, 2, ["--sequence-parallel", "--zero1"]),
        (2, 2, 4, 1, 1, []),
        (2, 2, 1, 1, 4, ["--grad-accum", "2"]),
        (2, 1, 2, 2, 1, ["--schedule", "zb-h1", "--microbatches", "4"]),
        (1, 4, 2, 1, 2, ["--zero1"]),
    ],
    8: [
        (8, 1, 2, 1, 4, ["--sequence-parallel"]),
        (4, 2, 1, 1, 8, ["--zero1"]),
        (2, 2, 2, 2, 2, ["--schedule", "1f1b", "--microbatches", "2", "--tie-embeddings"]),
        (4, 1, 1, 2, 4, ["--microbatches", "2", "--zero1"]),
    ],
}


def curves(world: int, jobs: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    given = [[*job, "--metrics", str(folder / name)] for name, job in jobs.items()]
    run_on_ranks(run, world, *given, backend=None, launcher="torchrun", timeout=300)
    return {name: curve(folder / name) for name in jobs}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, untied and tied."""
    jobs = {"untied": TINY, "tied": [*TINY, "--tie-embeddings"]}
    found = curves(1, jobs, tmp_path_factory.mktemp("alone"))
    assert any(row["grad_norm"] > 1.5 for row in found["untied"])  # so that clipping clips
    assert found["untied"][-1]["loss"] < found["untied"][0]["loss"] - 1
    return found


@pytest.mark.full("4", "8")
@pytest.mark.parametrize("world", GRIDS)
def test_same_curve_however_experts_are_shared(
    world: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    jobs = {}
    for ep, etp, tp, pp, dp, more in some(GRIDS[world], 2):
        sizes = {"--ep": ep, "--etp": etp, "--tp": tp, "--pp": pp, "--dp": dp}
        flags = [str(one) for pair in sizes.items() for one in pair]
        name = "-".join(map(str, (ep, etp, tp, pp, dp)))
        jobs[name] = [*TINY, *flags, *more, *steps_of(len(jobs))]
    for index, (name, rows) in enumerate(curves(world, jobs, tmp_path).items()):
        reference = alone["tied" if "--tie-embeddings" in jobs[name] else "untied"]
        try:
            same_start(rows, reference, "fp64", index)
        except AssertionError as error:
            raise AssertionError(f"ep-etp-tp-pp-dp {name}: {error}") from error


def test_capacity_and_balance_train(tmp_path: Path) -> None:
    job = [*TINY, "--capacity-factor", "1", "--aux-loss-coef", "0.01", "--ep", "2", "--dp", "2"]
    rows = curves(2, {"balanced": job}, tmp_path)["balanced"]
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
