"""Traces as one HTML page that needs no network: who did what when, and who waited for whom."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from commgrid.call_records import files as trace_files
from commgrid.errors import SpecError
from commgrid.viz.page import filled

MOST_CALLS = 200_000
"""A browser goes through all of them for every picture."""


def draw_trace_page(folder: Path, diagnosis: Mapping[str, Any] | None = None) -> str:
    """The page of the traces in a folder, which were read before and are good.

    Args:
        folder: with their files.
        diagnosis: as `commgrid diagnose --json` prints it; None: none is shown.

    Raises:
        SpecError: more calls than a page shows.
    """
    held = trace_files.held_in(folder)
    calls = sum(len(each["calls"]) for each in held)
    if calls > MOST_CALLS:
        raise SpecError(
            f"{folder}: a page shows at most {MOST_CALLS:,} calls, these are {calls:,}; trace "
            "fewer steps, or write -o trace.json for Perfetto"
        )
    kept = ("rank", "wall", "monotonic", "dropped", "members", "calls")
    traces = [{key: each[key] for key in kept} for each in held]
    template = (files("commgrid.viz") / "trace.html").read_text(encoding="utf-8")
    return filled(template, {"traces": traces, "diagnosis": diagnosis})
