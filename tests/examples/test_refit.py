"""What the other grid writes is what the model writes in one process, whatever both grids are."""

import contextlib
import io
import re

import pytest

from commgrid.testing import run_on_ranks
from tests.examples.curves import load, without_numpy
from tests.sizes import full

TINY = [
    "--layers", "2", "--hidden", "16", "--heads", "4", "--batch-size", "8", "--seq-len", "8",
    "--lr", "1e-2", "--dtype", "fp64", "--steps", "4", "--sample-tokens", "6", "--temperature", "0",
]  # fmt: skip
EXPERTS = ["--experts", "4"]
JOBS: dict[str, tuple[int, list[str]]] = {
    "other_ranks": (6, ["--ranks", "0-3", "--tp", "2", "--generate", "tp=2,ranks=4-5"]),
    "same_ranks": (4, ["--pp", "2", "--chunks", "1", "--generate", "tp=4"]),
    "some_of_both": (4, ["--ranks", "0-2", "--batch-size", "9", "--generate", "pp=2,ranks=1-2"]),
    "fsdp": (4, ["--fsdp", "--generate", "pp=2,tp=2"]),
    "experts": (4, [*EXPERTS, "--ep", "2", "--tp", "2", "--zero1", "--generate", "ep=4"]),
}


def written(job: list[str]) -> list[str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        load("refit/one_program").main(job)
    return said.getvalue().splitlines()


def samples(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r"step +\d+  ['\"]", line)]


@pytest.mark.parametrize("name", JOBS if full() else ["other_ranks"])
def test_samples_are_those_of_one_process(name: str) -> None:
    world, flags = JOBS[name]
    batch = [flag for flag in ("--batch-size", "9") if flag in flags]
    alone = [*TINY, *batch, *(EXPERTS if name == "experts" else [])]
    (expected,) = run_on_ranks(
        written, 1, [*alone, "--every", "2"], backend=None, launcher="torchrun"
    )
    assert len(samples(expected)) == 2
    ranks = run_on_ranks(
        written,
        world,
        [*TINY, *flags, "--every", "2"],
        backend=None,
        launcher="torchrun",
        timeout=300,
    )
    said = [line for lines in ranks for line in lines]
    assert samples(said) == samples(expected)
    moved = [line for line in said if "weights moved in" in line]
    assert len(moved) == 2
    assert "through a checkpoint" in moved[0]
    assert any(re.match(r"\d+ tensors from \d ranks", line) for line in said)


def print_it(job: list[str]) -> None:
    print(*written(job), sep="\n")


@pytest.mark.full
def test_numpy_is_not_needed() -> None:
    job = [*TINY, "--generate", "tp=2", "--every", "2"]
    assert "through a checkpoint" in without_numpy("tests.examples.test_refit.print_it", 2, job)


def test_a_wrong_grid_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("refit/one_program").main([*TINY, "--generate", "hidden=2"])
    assert "--generate hidden=2: 'hidden' is none of tp, dp" in capsys.readouterr().err
