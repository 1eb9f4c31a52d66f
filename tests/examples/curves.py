"""train_gpt's loss curves: on ranks, in one process, and how both are compared."""

import functools
import importlib.util
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import commgrid
from commgrid.runtime.registry import live_grids
from commgrid.testing import run_on_ranks
from tests.process_groups import group_count

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
        (grid,) = live_grids()
        made.append(group_count() - 1 - len(grid.communicators))
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


BOUNDS = {"fp64": 1e-9, "fp32": 1e-4}
"""Relative, as promise 6 says. Sums in another order differ by some ulps, which 20 steps of Adam
amplify by a few orders of magnitude and no more."""


def same_curve(ours: list[dict[str, float]], theirs: list[dict[str, float]], dtype: str) -> None:
    """Fail unless every step's loss and gradient norm are the same, up to rounding."""
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for mine, reference in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(reference[key], rel=BOUNDS[dtype]), (
                key,
                mine["step"],
            )


@dataclass
class Record:
    """Record of one job on a rank: the values its log received, with all digits.

    Args:
        parameters: of the whole model, and the most that a rank holds.
        rows: step, loss and grad_norm of each step.
        evaluations: steps, and the losses on text held out.
        sample: the text.
        groups: how many process groups there were beyond WORLD and the grid's.
    """

    parameters: tuple[int, int] = (0, 0)
    rows: list[dict[str, float]] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    sample: str | None = None
    groups: int = 0


def records(*jobs: list[str]) -> list[Record]:
    """Train once for each list of arguments."""
    train_gpt: Any = load()
    found: list[Record] = []

    class Watched(train_gpt.Log):  # type: ignore[misc]
        def begin(self, parameters: int, held: int) -> None:
            super().begin(parameters, held)
            found.append(Record((parameters, held)))

        def step(self, step: int, loss: float, norm: float, *more: float) -> None:
            super().step(step, loss, norm, *more)
            found[-1].rows.append({"step": step, "loss": loss, "grad_norm": norm})

        def evaluated(self, loss: float) -> None:
            super().evaluated(loss)
            found[-1].evaluations[self.last] = loss

        def sample(self, text: str) -> None:
            super().sample(text)
            found[-1].sample = text

    train_gpt.Log = Watched
    for one, groups in zip(found, run_example(train_gpt, *jobs), strict=True):
        one.groups = groups
    return found


def on_ranks(ranks: int, *jobs: str) -> list[Record]:
    """Train each job on ranks, and check that all of them record the same."""
    given = [shlex.split(job) for job in jobs]
    first, *others = run_on_ranks(
        records, ranks, *given, backend=None, launcher="torchrun", timeout=300
    )
    for other in others:
        for one, same in zip(other, first, strict=True):
            one.parameters = same.parameters  # the count is right on the first rank
            assert one == same
    return list(first)


@functools.cache
def alone(job: str) -> Record:
    """Reference: one process, where torch's attention over all pairs has a mask for documents."""
    (found,) = run_on_ranks(by_masks, 1, shlex.split(job), backend=None, launcher="torchrun")[0]
    return found


def by_masks(*jobs: list[str]) -> list[Record]:
    def masked(q: Tensor, k: Tensor, v: Tensor, *, sharding: Any, way: str) -> Tensor:
        ids = torch.repeat_interleave(torch.tensor(sharding.document_lengths))
        mask = (ids[:, None] == ids).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    sys.modules["gpt_training.model"].attention = masked  # type: ignore[attr-defined]
    return records(*jobs)


def agree(ours: Record, theirs: Record, dtype: str) -> None:
    """Fail unless two records agree, curves up to rounding."""
    same_curve(ours.rows, theirs.rows, dtype)
    assert ours.evaluations.keys() == theirs.evaluations.keys()
    assert ours.evaluations == pytest.approx(theirs.evaluations, rel=BOUNDS[dtype])
    assert ours.sample == theirs.sample
    assert ours.parameters[0] == theirs.parameters[0]
    assert ours.groups == 0


WITHOUT_NUMPY = """
import pkgutil, sys
sys.modules["numpy"] = None  # importing it fails, as where only commgrid is installed
from commgrid.testing import run_on_ranks
run_on_ranks(
    pkgutil.resolve_name(sys.argv[1]), int(sys.argv[2]), sys.argv[3:], backend=None, check=False,
    launcher="torchrun",
)
"""


def without_numpy(function: str, world: int, job: list[str]) -> str:
    """Output of ranks that call a function, given by its full name, where numpy is missing."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, function, str(world), *job], cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
