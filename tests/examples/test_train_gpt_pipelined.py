"""The same curve through every pipeline, on top of tensor and data parallelism."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commgrid.testing import run_on_ranks
from tests.examples.curves import curve, run, same_start, steps_of, without_numpy
from tests.sizes import full

TINY = [
    "--hidden", "16", "--heads", "4", "--kv-heads", "2", "--batch-size", "8", "--seq-len", "4",
    "--steps", "20", "--clip-grad", "1.5", "--dtype", "fp64",
]  # fmt: skip
TIED = {"untied": [], "tied": ["--tie-embeddings"]}
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("gpipe", 2)]
GRIDS = [
    (pp, tp, dp) for pp in (1, 2, 4) for tp in (1, 2) for dp in (1, 2) if pp * tp * dp <= 8
]  # fmt: skip


def train(pp: int, tp: int, dp: int, jobs: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    """What each job's metrics say, all run one after the other on the same ranks."""
    sizes = ["--pp", str(pp), "--tp", str(tp), "--dp", str(dp)]
    given = [[*job, *sizes, "--metrics", str(folder / name)] for name, job in jobs.items()]
    run_on_ranks(run, pp * tp * dp, *given, backend=None, launcher="torchrun", timeout=300)
    return {name: curve(folder / name) for name in jobs}


def job(layers: int, tied: str) -> list[str]:
    return [*TINY, "--layers", str(layers), *TIED[tied]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The single process, for each number of layers, tied and untied."""
    jobs = {f"{n}-{tied}": job(n, tied) for n in ((2, 4, 8) if full() else (2, 4)) for tied in TIED}
    found = train(1, 1, 1, jobs, tmp_path_factory.mktemp("alone"))
    assert any(row["grad_norm"] > 1.5 for row in found["4-tied"])  # so that clipping clips
    return found


def cuts(pp: int, tp: int, dp: int) -> Iterator[tuple[str, int, str, list[str]]]:
    """A name, layers, tied or not, and flags; sharded optimizer and sequence parallelism in turn.

    A block on each chunk, and two where there is one stage.

    Tied and untied take turns, and beside tp and dp, where more ranks share two cores, schedules do
    as well; all of them were run once.
    """
    for i, (schedule, chunks) in enumerate(SCHEDULES):
        for j, tied in enumerate(TIED):
            more = ["--zero1", "--sequence-parallel"] if (i + pp + dp) % 2 else []
            cut = ["--schedule", schedule, "--chunks", str(chunks), "--microbatches", "4", *more]
            mine = pp > 1 or schedule in ("1f1b", "interleaved")
            crowded = pp > 1 and tp * dp > 1
            if mine and (i + j) % 2 == dp % 2 and (not crowded or (i + tp + pp // 4) % 2 == 0):
                yield f"{schedule}-{chunks}-{tied}", max(pp, 2) * chunks, tied, cut


@pytest.mark.full
def test_numpy_is_not_needed() -> None:
    """It comes with what tests need, but not with what commgrid needs."""
    job = ["--pp", "2", "--layers", "2", "--tie-embeddings", *TINY, "--steps", "2"]
    assert "step    2" in without_numpy("tests.examples.curves.run", 2, job)


@pytest.mark.full("1-*", "2-1-2", "2-2-*", "4-*")
@pytest.mark.parametrize(("pp", "tp", "dp"), GRIDS)
def test_same_curve(pp: int, tp: int, dp: int, alone: dict[str, Any], tmp_path: Path) -> None:
    jobs, references = {}, {}
    for name, layers, tied, cut in cuts(pp, tp, dp):
        jobs[name] = [*job(layers, tied), *cut, *steps_of(len(jobs))]
        references[name] = alone[f"{layers}-{tied}"]
    assert len(jobs) >= 2
    for index, (name, rows) in enumerate(train(pp, tp, dp, jobs, tmp_path).items()):
        try:
            same_start(rows, references[name], "fp64", index)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
