"""Where durations are written: protocols have none of their own, and other files no new one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "commgrid"
MEETING = ("runtime", "transfer", "bridge")
"""Folders whose code waits for other ranks, beside `rendezvous`."""
BESIDE_TIMEOUTS = {
    "bridge": 0,
    "runtime": 30,
    "transfer": 1,
}
"""Durations that are not in `Timeouts`; fewer are welcome, and are counted here."""


def modules(folder: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def test_protocols_have_no_clock_and_no_thread() -> None:
    for name, module in modules("rendezvous"):
        imported = {
            alias.name
            for node in ast.walk(module)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not imported & {"time", "threading", "socket", "torch"}, name


def test_no_duration_is_added_beside_timeouts() -> None:
    for folder in MEETING:
        found = [
            (name, target.id)
            for name, module in modules(folder)
            for node in module.body
            if isinstance(node, ast.Assign)
            for target in ast.walk(node)
            if isinstance(target, ast.Name) and target.id.endswith(("_SECONDS", "_LOOK", "_PAUSE"))
        ]
        assert len(found) == BESIDE_TIMEOUTS[folder], found
