"""train_gpt's loss curves: run in processes that are up already, read, and compared."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import commgrid
from commgrid.runtime.torch_groups import group_count
from commgrid.testing import run_on_ranks

ROOT = Path(__file__).parents[2]


def load(example: str = "train_gpt") -> ModuleType:
    """An example as a module."""
    path = ROOT / "examples" / f"{example}.py"
    spec = importlib.util.spec_from_file_location(example, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as a script has it, to find what lies beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


load()  # what it imports takes 0.5 s: once here, not once in each rank


def run(*jobs: list[str]) -> list[int]:
    """train_gpt's training, once for each list of arguments; as `run_example`."""
    return run_example(load(), *jobs)


def undisturbed(flags: list[str], metrics: Path) -> list[dict[str, float]]:
    """The curve of one process to which nothing happens.

    Args:
        flags: of train_gpt.
        metrics: the file to keep it in.
    """
    run_on_ranks(run, 1, [*flags, "--metrics", str(metrics)], backend=None, launcher="torchrun")
    return curve(metrics)


def run_example(example: Any, *jobs: list[str]) -> list[int]:
    """Trains once for each list of arguments, in one process group after the other.

    Args:
        example: a module with `train` and `parse`.
        jobs: the arguments.

    Returns:
        How many process groups each job has beyond WORLD and its grid's.
    """
    made = []

    def end() -> None:
        made.append(group_count() - 1 - len(commgrid.get_grid().communicators))
        commgrid.destroy()

    down, commgrid.shutdown = commgrid.shutdown, end
    try:
        for job in jobs:
            example.train(example.parse(job))
    finally:
        commgrid.shutdown = down
    down()
    return made


def curve(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


PROMISED, SOME = 20, 8


def steps_of(index: int) -> list[str]:
    """20 steps, as promise 6 says it, for the first job on so many ranks; 8 for each other one.

    What a cut changes is in the first loss and gradient norm, and what it changes of an optimizer
    in those of the second and third.
    """
    return ["--steps", str(PROMISED if index == 0 else SOME)]


def same_start(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], dtype: str, index: int
) -> None:
    """As `same_curve`, where the job of that index had `steps_of` it and the other PROMISED."""
    assert len(ours) == int(steps_of(index)[1])
    assert len(theirs) == PROMISED
    same_curve(ours, theirs[: len(ours)], dtype)


def same_curve(ours: list[dict[str, float]], theirs: list[dict[str, float]], dtype: str) -> None:
    # The bound of promise 6: sums in another order differ by some ulps, which 20 steps of Adam
    # amplify by a few orders of magnitude and no more.
    bound = {"fp64": 1e-9, "fp32": 1e-4}[dtype]
    for mine, reference in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(reference[key], rel=bound), (key, mine["step"])


WITHOUT_NUMPY = """
import pkgutil, sys
sys.modules["numpy"] = None  # importing it fails, as where only commgrid is installed
from commgrid.testing import run_on_ranks
run_on_ranks(
    pkgutil.resolve_name(sys.argv[1]), int(sys.argv[2]), sys.argv[3:], backend=None,
    launcher="torchrun",
)
"""


def without_numpy(function: str, world: int, job: list[str]) -> str:
    """What so many ranks print that run a function, by its full name, with a list of arguments."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, function, str(world), *job], cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
