"""What every benchmark prints: rows of ours against a peer's, measured in the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from commgrid import testing


@dataclass(frozen=True)
class Row:
    """One comparison; lower is better. `spread` is the ratio's min and max over repeats."""

    case: str
    metric: str
    unit: str
    ours: float
    peer: str
    peer_value: float | None
    ratio: float | None
    spread: tuple[float, float] | None


def compare(
    case: str, metric: str, unit: str, peer: str, ours: Sequence[float], theirs: Sequence[float]
) -> Row:
    """A row of medians; the n-th values of both come from the n-th interleaved repeat.

    Without values of the peer, because it cannot do the case, the row stands alone.
    """
    middle = statistics.median(ours)
    if not theirs:
        return Row(case, metric, unit, middle, peer, None, None, None)
    other = statistics.median(theirs)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
    ratio = middle / other if other else None
    return Row(
        case, metric, unit, middle, peer, other, ratio,
        (min(ratios), max(ratios)) if ratios else None,
    )  # fmt: skip


def main(description: str | None, measure: Callable[[argparse.Namespace], Iterable[Row]],
         *options: tuple[str, dict[str, Any]]) -> None:  # fmt: skip
    """Runs a benchmark from the command line and prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for flag, settings in options:
        parser.add_argument(flag, **settings)
    args = parser.parse_args()
    rows = []
    for row in measure(args):
        rows.append(row)
        print(_line(row), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        found = {"machine": machine(), "versions": versions(), "rows": [asdict(r) for r in rows]}
        print(json.dumps(found))


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, **how: Any) -> Any:
    """commgrid.testing's, without its check: peers leave groups and settings behind."""
    return testing.run_on_ranks(function, world_size, *args, **{"check": False, **how})


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {cores} cores, {device}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("commgrid", "torch", "megatron-core"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _line(row: Row) -> str:
    theirs = f"{row.peer} {row.peer_value:,.4g}" if row.peer_value is not None else row.peer
    ratio = f"ratio {row.ratio:.3g}" if row.ratio is not None else ""
    spread = f"({row.spread[0]:.3g} to {row.spread[1]:.3g})" if row.spread else ""
    return (
        f"{row.case:34} {row.metric:34} {row.ours:12,.4g} {row.unit:9} {theirs:28} {ratio} {spread}"
    )
