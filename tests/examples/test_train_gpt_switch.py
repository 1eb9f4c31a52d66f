"""A job that goes on on another grid, in the same processes, as if it had never changed."""

from pathlib import Path
from typing import Any

import pytest

import commgrid
from commgrid.runtime.registry import live_grids
from commgrid.testing import run_on_ranks
from tests.examples.curves import curve, load, run, same_curve
from tests.sizes import full

TINY = [
    "--layers", "4", "--hidden", "16", "--heads", "4", "--batch-size", "8", "--seq-len", "4",
    "--clip-grad", "1.5", "--lr", "1e-2", "--dtype", "fp64", "--steps", "15",
]  # fmt: skip
EXPERTS = [*TINY, "--experts", "8", "--tie-embeddings"]
JOBS: dict[str, tuple[int, list[str], list[str]]] = {
    "dense": (
        8,
        [*TINY, "--tp", "2", "--pp", "2", "--dp", "2"],
        ["3:tp=4,dp=2,zero1", "6:fsdp,dp-replicate=2", "9:tp=2,pp=2,chunks=2,sequence-parallel",
         "12:cp=2,tp=2"],
    ),
    "experts": (
        8,
        [*EXPERTS, "--ep", "4", "--tp", "2"],
        ["3:ep=2,etp=1,zero1", "6:pp=2,ep=2,schedule=gpipe", "9:fsdp,ep=4,etp=1", "12:tp=2"],
    ),
    "few": (4, [*TINY, "--dp", "4"], ["5:tp=2,zero1", "9:pp=4,schedule=zb-h1", "10:tp=4"]),
}  # fmt: skip


def switches(after: list[str]) -> list[str]:
    return [word for one in after for word in ("--switch", f"step={one}")]


@pytest.mark.parametrize("name", JOBS if full() else ["few"])
def test_the_curve_of_a_run_that_never_changed(name: str, tmp_path: Path) -> None:
    world, given, after = JOBS[name]
    alone = EXPERTS if name == "experts" else TINY
    files = {each: tmp_path / each for each in ("alone", "switched")}
    run_on_ranks(
        run, 1, [*alone, "--metrics", str(files["alone"])], backend=None, launcher="torchrun"
    )
    job = [*given, *switches(after), "--metrics", str(files["switched"])]
    run_on_ranks(switched, world, job, backend=None, launcher="torchrun", timeout=300)
    same_curve(curve(files["switched"]), curve(files["alone"]), "fp64")


def switched(job: list[str]) -> None:
    """Trains, and one grid is left at the end."""
    down, commgrid.shutdown = commgrid.shutdown, lambda: None
    example = load()
    example.train(example.parse(job))
    commgrid.shutdown = down
    (last,) = live_grids()
    assert last.name == f"after step {max(example.parse(job).switches)}"
    down()


@pytest.mark.full
def test_a_resumed_job_is_on_the_grid_of_its_step(tmp_path: Path) -> None:
    made: Any = run_on_ranks(
        saved_and_resumed, 4, str(tmp_path / "saved"), str(tmp_path / "metrics"),
        backend=None, launcher="torchrun", timeout=300,
    )  # fmt: skip
    assert made == [{"dp": 1, "tp": 4}] * 4
    alone = tmp_path / "alone"
    run_on_ranks(run, 1, [*TINY, "--metrics", str(alone)], backend=None, launcher="torchrun")
    same_curve(curve(tmp_path / "metrics"), curve(alone)[10:], "fp64")


def saved_and_resumed(folder: str, metrics: str) -> dict[str, int]:
    example = load()
    job = [*TINY, "--dp", "4", *switches(["4:tp=2", "8:tp=4"])]
    down, commgrid.shutdown = commgrid.shutdown, commgrid.destroy
    example.train(example.parse([*job, "--steps", "10", "--save", folder]))
    found: dict[str, int] = {}
    commgrid.shutdown = lambda: found.update(
        {axis: live_grids()[0].size(axis) for axis in ("dp", "tp")}
    )
    example.train(example.parse([*job, "--resume", folder, "--metrics", metrics]))
    commgrid.shutdown = down
    down()
    return found


WRONG = {
    "tp=4": "expected step=N:FLAGS, such as step=10:tp=4,dp=2,zero1",
    "step=ten:tp=4": "expected step=N:FLAGS",
    "step=15:tp=4": "expected a step from 1 to 14",
    "step=5:hidden=4": "'hidden' is none of tp, dp, pp, cp",
    "step=5:tp": "tp needs a value, as tp=2",
    "step=5:tp=none": "tp: none: expected a whole number, 1 or more",
    "step=5:zero1=2": "zero1 takes no value",
    "step=5:fsdp,pp=2": "--fsdp shards the optimizer too, and is without --zero1 and --pp",
}


@pytest.mark.parametrize("given", WRONG)
def test_a_switch_that_says_nothing_is_refused(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load().parse([*TINY, "--switch", given])
    assert f"--switch {given}: {WRONG[given]}" in capsys.readouterr().err


def test_two_switches_after_one_step_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load().parse([*TINY, "--switch", "step=5:tp=2", "--switch", "step=5:dp=2"])
    assert "there is one after step 5 already" in capsys.readouterr().err


def does_not_fit() -> str:
    example = load()
    with pytest.raises(commgrid.SpecError, match=r"--switch after step 5: .*tp=3") as refused:
        example.train(example.parse([*TINY, "--switch", "step=5:tp=3"]))
    commgrid.shutdown()
    return str(refused.value)


def test_a_grid_that_does_not_fit_is_refused_before_the_first_step() -> None:
    run_on_ranks(does_not_fit, 2, backend=None, launcher="torchrun")
