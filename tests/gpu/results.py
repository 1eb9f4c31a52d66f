"""Results of GPU tests: JSON lines of a run, and the table of all runs in RESULTS.md."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("RESULTS.md")
LINES, KEPT = 30, 300
"""Last lines of a failure's text that are printed, and kept in the file."""
FOLDER = "tests/gpu/"
COLUMNS = ("check", "date", "GPU", "torch", "NCCL", "result")
HEAD = """# GPU test results

The last result of each check. `python tests/gpu/run.py --write-results` writes this table.

"""


@dataclass(frozen=True)
class Result:
    """Result of one test.

    Args:
        check: its node id.
        outcome: "passed", "failed" or "skipped".
        seconds: that it took.
        found: what it reports, or why it was skipped.
        lines: the end of a failure's text, after the output of its ranks.
        date, gpu, torch, nccl: when and where it ran.
    """

    check: str
    outcome: str
    seconds: float
    found: str
    lines: tuple[str, ...]
    date: str
    gpu: str
    torch: str
    nccl: str

    def __str__(self) -> str:
        name = self.check.removeprefix(FOLDER)
        head = f"{self.outcome:8} {self.seconds:5.1f} s  {name}"
        return "\n".join([f"{head}: {self.found}" if self.found else head, *self.lines[-LINES:]])


def machine(emulated: bool) -> dict[str, str]:
    """Date, GPU and versions of this run."""
    import torch

    gpu = nccl = "none"
    if not emulated and torch.cuda.is_available():
        gpu = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "date": str(date.today()), "gpu": gpu, "torch": str(torch.__version__), "nccl": nccl
    }  # fmt: skip


def _written(path: Path) -> Iterator[dict[str, Any]]:
    """What a file of JSON lines has, but for a last line that was cut off."""
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def read(path: Path) -> list[Result]:
    """Return the results in a file of JSON lines."""
    found = [row for row in _written(path) if "check" in row]
    return [Result(**{**row, "lines": tuple(row["lines"])}) for row in found]


def unfinished(path: Path, pid: int) -> str | None:
    """Return the test that a process was at when it was killed."""
    last = None
    for row in _written(path):
        if row.get("pid") == pid:
            last = row["begun"]
        elif row.get("check") == last:
            last = None
    return last


def append(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(vars(result)) + "\n")


_ERROR = re.compile(r"E +[\w.]*(Error|Exception|Failed)\b")
"""Line of a failure's text with the class and the message of an error."""

Row = tuple[str, str, str, str, str, str]
"""A row of the table: check, date, GPU, torch, NCCL, result."""


def rows(results: Iterable[Result]) -> list[Row]:
    """Return a row for each test, its cases together; the last result of a case counts."""
    cases: dict[str, dict[str, Result]] = {}
    for result in results:
        if "::" not in result.check:  # a file that could not be read
            continue
        name = result.check.removeprefix(FOLDER)
        cases.setdefault(name.partition("[")[0], {})[name] = result
    return [_row(name, list(each.values())) for name, each in cases.items()]


def _row(name: str, cases: list[Result]) -> Row:
    by = {how: [each for each in cases if each.outcome == how] for how in ("failed", "passed")}
    how, shown = next(((how, each) for how, each in by.items() if each), ("skipped", cases))
    seconds = f"{sum(each.seconds for each in cases):.0f} s"
    many = f"{len(shown)} of {len(cases)} cases, " if len(cases) > 1 else ""
    one = shown[-1]
    errors = [line for line in one.lines if _ERROR.match(line)]
    said = one.found or (errors[-1].removeprefix("E ") if errors else "")
    text = f"{how} ({many}{seconds})" if how != "skipped" else how
    said = " ".join(said.split()).replace("|", "/")[:160]
    return (name, one.date, one.gpu, one.torch, one.nccl, f"{text}: {said}" if said else text)


def table(path: Path = TABLE) -> dict[str, Row]:
    """Return the rows of a table, by check."""
    found: dict[str, Row] = {}
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells != [*COLUMNS]:
            check, day, gpu, torch, nccl, result = cells
            found[check.strip("`")] = (check.strip("`"), day, gpu, torch, nccl, result)
    return found


def write(new: Iterable[Row], path: Path = TABLE) -> None:
    """Write a table with these rows in place of those of the same checks."""
    known = (table(path) if path.exists() else {}) | {row[0]: row for row in new}
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| `{row[0]}` | {' | '.join(row[1:])} |" for _, row in sorted(known.items())]
    path.write_text(HEAD + "\n".join(lines) + "\n")
