"""The same curve with FSDP2 and HSDP as in one process, and no communicator beyond the grid's."""

from pathlib import Path
from typing import Any

import pytest

from commgrid.testing import run_on_ranks
from tests.examples.curves import curve, load, run, same_start, steps_of
from tests.sizes import some

TINY = [
    "--layers", "2", "--hidden", "16", "--heads", "4", "--batch-size", "8", "--seq-len", "4",
    "--steps", "20", "--clip-grad", "1.5", "--lr", "1e-2",
]  # fmt: skip
DENSE, MIXED = [*TINY, "--dtype", "fp64"], [*TINY, "--dtype", "fp64", "--experts", "4"]

CUTS: dict[int, list[list[str]]] = {
    2: [
        [*DENSE, "--microbatches", "2"],
        [*TINY, "--dtype", "fp32", "--dp-replicate", "2"],
        [*MIXED, "--ep", "2"],  # one rank has each expert
    ],
    4: [
        [*DENSE, "--dp-replicate", "2", "--tie-embeddings"],
        [*DENSE, "--tp", "2", "--sequence-parallel"],
        [*MIXED, "--ep", "2", "--tp", "2", "--sequence-parallel", "--etp", "1"],
        [*MIXED, "--ep", "2"],
    ],
    8: [
        [*MIXED, "--tp", "2", "--ep", "2", "--etp", "2", "--dp-replicate", "2"],
    ],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    jobs = {
        "fp64": DENSE, "fp32": [*TINY, "--dtype", "fp32"], "experts": MIXED,
        "tied": [*DENSE, "--tie-embeddings"],
    }  # fmt: skip
    given = [[*job, "--metrics", str(folder / name)] for name, job in jobs.items()]
    run_on_ranks(run, 1, *given, backend=None, launcher="torchrun", timeout=300)
    return {name: curve(folder / name) for name in jobs}


@pytest.mark.full("2", "8")
@pytest.mark.parametrize("world", CUTS)
def test_same_curve_as_one_process(world: int, alone: dict[str, Any], tmp_path: Path) -> None:
    jobs = some(CUTS[world], 2)
    given = [
        [*job, "--fsdp", *steps_of(index), "--metrics", str(tmp_path / str(index))]
        for index, job in enumerate(jobs)
    ]
    for made in run_on_ranks(run, world, *given, backend=None, launcher="torchrun", timeout=300):
        assert made == [0] * len(jobs)
    for index, job in enumerate(jobs):
        dtype = "fp32" if "fp32" in job else "fp64"
        kind = "tied" if "--tie-embeddings" in job else "experts" if "--experts" in job else dtype
        try:
            same_start(curve(tmp_path / str(index)), alone[kind], dtype, index)
        except AssertionError as error:
            raise AssertionError(f"{job}: {error}") from error


def test_fsdp_says_what_it_does_not_go_with(capsys: pytest.CaptureFixture[str]) -> None:
    parse = load().parse
    for flags, told in {
        ("--fsdp", "--pp", "2"): "without --zero1 and --pp",
        ("--fsdp", "--zero1"): "without --zero1 and --pp",
        ("--dp-replicate", "2"): "is about --fsdp",
        ("--fsdp", "--dp", "3", "--dp-replicate", "2"): "2 does not divide --dp 3",
        ("--keep", "2"): "are about --save",
    }.items():
        with pytest.raises(SystemExit):
            parse(list(flags))
        assert told in capsys.readouterr().err
