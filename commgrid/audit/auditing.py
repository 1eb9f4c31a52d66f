"""Run a program on several grids, and compare each with the first."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from commgrid.audit.compare import Seen, compare
from commgrid.audit.finding import Comparison, Divergence
from commgrid.audit.observer import Observer
from commgrid.errors import CommGridError, SpecError
from commgrid.launching.local_ranks import Ranks
from commgrid.launching.script import may_exit, run_script
from commgrid.planning.audited import VARIABLE, AuditedGrid

_SHOWN = 8
_NAMED = 4


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Args:
        script: the program.
        dtype: of most of its weights.
        comparisons: the first grid's with itself, and of every other with it.
    """

    script: str
    dtype: str
    comparisons: tuple[Comparison, ...]

    @property
    def parts(self) -> bool:
        """Whether any grid does."""
        return any(each.parts for each in self.comparisons)

    @property
    def complete(self) -> bool:
        """Whether all weights could be compared by name, on every grid."""
        return all(each.complete for each in self.comparisons)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "script": self.script, "dtype": self.dtype, "parts": self.parts,
            "grids": [each.as_dict() for each in self.comparisons],
        }  # fmt: skip

    @property
    def text(self) -> str:
        """A paragraph for each grid."""
        reference = self.comparisons[0]
        lines = [
            f"{self.script}: {len(self.comparisons)} grids of {self.dtype} weights, tolerance "
            f"{reference.tolerance:g}, beside {reference.grid}"
        ]
        for each in self.comparisons:
            lines += ["", *_paragraph(each, reference)]
        if self.dtype not in ("", "float64"):
            lines += ["", f"in {self.dtype} rounding hides small faults; fp64 would show more"]
        return "\n".join(lines)


def _paragraph(comparison: Comparison, reference: Comparison) -> list[str]:
    counted = ", ".join(f"{n:,} {what}" for what, n in comparison.compared.items()) or "nothing"
    is_reference = comparison is reference
    if not comparison.parts:
        how = "its copies agree" if is_reference else f"agrees with {reference.grid}"
        if not comparison.complete:
            how = "its copies agree, but it is not compared as a whole"
        if not comparison.compared:
            how = "not checked; nothing is compared"
        lines = [
            f"{comparison.grid}: {how} in {comparison.steps} steps, to {comparison.largest:.1e}",
            f"    compared {counted}",
        ]
    else:
        step = comparison.findings[0].step
        when = f"at step {step}" if step else "before step 1"
        whom = "copies differ" if is_reference else f"differs from {reference.grid}"
        lines = [f"{comparison.grid} {whom} {when}"]
        alike: dict[tuple[str, ...], list[Divergence]] = {}
        for finding in comparison.findings:
            key = (finding.what, finding.kind, *finding.axes)
            alike.setdefault(key, []).append(finding)
        for same in list(alike.values())[:_SHOWN]:
            lines += [f"  {line}" for line in same[0].text.splitlines()]
            if len(same) > 1:
                others = ", ".join(each.name for each in same[1:_NAMED])
                more = "" if len(same) <= _NAMED else ", …"
                lines.append(f"      and {len(same) - 1} more: {others}{more}")
    return [*lines, *(f"    note: {note}" for note in comparison.notes[:_SHOWN])]


def audit(
    script: Path,
    grids: Sequence[AuditedGrid],
    flags: Sequence[str] = (),
    *,
    steps: int = 3,
    tolerance: float | None = None,
    timeout: float = 600.0,
    same_weights: bool = False,
    keep: Path | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Audit:
    """Run a script on several grids, and compare what it computes.

    Args:
        script: the program, unchanged.
        flags: of the program, on every grid.
        keep: a folder for all records; None: they are removed.
        grids, steps, tolerance, timeout, same_weights, tell: as for `compare_grids`.

    Raises:
        SpecError: the folder holds something.
        CommGridError: the program failed on a grid.
    """
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
            full = any(keep.iterdir())
        except OSError as error:
            raise SpecError(
                f"--keep {keep}: cannot be made: {error.strerror or error}; give a new folder"
            ) from error
        if full:
            raise SpecError(f"--keep {keep}: it is not empty; give a new folder")

    def ended(grid: AuditedGrid, ranks: Ranks) -> None:
        ranks.wait()
        for end in ranks.failures():
            if end.late:
                raise CommGridError(
                    f"grid {grid.text!r}: {script.name} has not done {steps} steps in "
                    f"{timeout:g} s, and was killed; give it fewer or smaller steps, or a longer "
                    f"--timeout{end.last_lines}"
                )
            raise CommGridError(
                f"grid {grid.text!r}: {script.name} failed with {end.end} on rank {end.rank}; it "
                f"printed{end.last_lines}"
            )

    with tempfile.TemporaryDirectory(prefix="commgrid-audit-") as temporary:
        return compare_grids(
            script.name, lambda grid: partial(run_script, script, (*flags, *grid.flags)), grids,
            (keep or Path(temporary)).absolute(), ended, steps=steps, tolerance=tolerance,
            timeout=timeout, same_weights=same_weights, tell=tell,
            method="spawn" if torch.cuda.device_count() else "fork",
        )  # fmt: skip


def compare_grids(
    name: str,
    program: Callable[[AuditedGrid], Callable[[], object]],
    grids: Sequence[AuditedGrid],
    folder: Path,
    ended: Callable[[AuditedGrid, Ranks], object],
    *,
    steps: int,
    tolerance: float | None,
    timeout: float,
    same_weights: bool,
    tell: Callable[[str], object] = lambda _: None,
    method: str = "fork",
) -> Audit:
    """Run a program on grids, one after the other, and compare each with the first.

    Args:
        name: of the program.
        program: what each rank of a grid calls.
        grids: the first is what the others are compared with.
        folder: of all records.
        ended: waits for a grid's ranks, and raises where one has failed.
        steps: of the optimizer.
        tolerance: relative, of norms; None: 1e-9 for fp64 weights, 1e-4 for fp32 ones.
        timeout: seconds for each grid.
        same_weights: all begin with the weights of the first, as programs need that draw others
            on other grids.
        tell: called with a line for each grid.
        method: how ranks are started, as for `Ranks`.
    """
    found: list[Comparison] = []
    first: Seen | None = None
    for index, grid in enumerate(grids):
        tell(f"{index + 1}/{len(grids)} {grid.text}: {grid.world_size} ranks")
        own = folder / f"grid_{index}"
        own.mkdir()
        beginning = first.folder if first is not None and same_weights else None
        with Ranks(
            observed, grid.world_size, own, steps, beginning, program(grid),
            backend=None, launcher="torchrun", environ={VARIABLE: grid.variable}, output=own,
            timeout=timeout, method=method,
        ) as ranks:  # fmt: skip
            ended(grid, ranks)
        seen = Seen(grid.text, own)
        first = first or seen
        found.append(compare(first, seen, tolerance))
    assert first is not None
    return Audit(name, first.dtype, tuple(found))


def observed(
    folder: Path, steps: int, beginning: Path | None, function: Callable[..., object], *args: Any
) -> None:
    """Call a function with an observer, until it ends or has taken its steps.

    Args:
        folder: where this rank's records are written.
        steps: of the optimizer; the process ends in the next one.
        beginning: the folder of a grid whose weights it begins with; None: its own.
        function, args: the program.
    """
    observer = Observer(folder, steps, beginning)
    observer.start()
    with may_exit():
        function(*args)
    observer.finish()
