"""Audits of a program in forked ranks, also with a bug written into a copy of it."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from commgrid.audit.auditing import observed
from commgrid.audit.compare import Seen, compare
from commgrid.audit.finding import Comparison
from commgrid.data_parallel.step_comparison import StepComparison
from commgrid.launching.script import run_script
from commgrid.planning.audited import VARIABLE, AuditedGrid
from commgrid.testing import run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = EXAMPLES / "gpt_training" / "model.py"
"""The text for train_gpt in these tests."""
TRAIN = "--layers 2 --hidden 16 --heads 4 --seq-len 16 --batch-size 4 --lr 1e-2 --dtype fp64 --data"
MEGATRON = "--layers 2 --microbatches 4"


def seen_on(
    text: str, folder: Path, script: Path, flags: Sequence[str], *, steps: int = 2,
    beginning: Path | None = None,
) -> Seen:  # fmt: skip
    """The records of a program on one grid, which ends by itself."""
    grid = AuditedGrid.parse(text)
    folder.mkdir(parents=True)
    arguments = (folder, steps, beginning, script, [*flags, "--steps", str(steps), *grid.flags])
    run_on_ranks(
        _rank, grid.world_size, *arguments, backend=None, launcher="torchrun",
        environ={VARIABLE: grid.variable}, timeout=120, check=False,  # programs may leave things
    )  # fmt: skip
    return Seen(text, folder)


def _rank(
    folder: Path, steps: int, beginning: Path | None, script: Path, flags: Sequence[str]
) -> None:
    warnings.simplefilter("ignore")  # megatron-core warns of missing packages
    for name in [*sys.modules]:  # as another test of this process may have imported them
        if name.startswith("gpt_"):
            del sys.modules[name]
    StepComparison.compare = lambda self, divisor: None  # type: ignore[method-assign]  # finds some
    observed(folder, steps, beginning, run_script, script, flags)


def part(
    reference: str, other: str, folder: Path, script: Path, flags: Sequence[str], *, steps: int = 2,
    same_weights: bool = False,
) -> Comparison:  # fmt: skip
    """Where the second of two grids parts from the first."""
    first = seen_on(reference, folder / "first", script, flags, steps=steps)
    beginning = first.folder if same_weights else None
    second = seen_on(other, folder / "second", script, flags, steps=steps, beginning=beginning)
    return compare(first, second)


def with_bug(name: str, changes: Mapping[str, tuple[str, str]], folder: Path) -> Path:
    """A copy of an example, with text of its files replaced.

    Args:
        name: of the program, whose modules lie beside it.
        changes: by file, what is replaced by what; it is there once.
        folder: where the copy is made.
    """
    folder.mkdir(parents=True)
    shutil.copy(EXAMPLES / name, folder)
    package = "gpt_training"
    shutil.copytree(EXAMPLES / package, folder / package, ignore=lambda *_: ["__pycache__"])
    for file, (old, new) in changes.items():
        path = folder / file
        text = path.read_text()
        assert text.count(old) == 1, (file, old, text.count(old))
        path.write_text(text.replace(old, new))
    return folder / name
