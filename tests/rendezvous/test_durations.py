"""Where durations are written: in `Timeouts` alone, and protocols have no clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "commgrid"
MEETING = ("runtime", "transfer", "bridge")
"""Folders whose code waits for other ranks, beside `rendezvous`."""
BESIDE_TIMEOUTS = {"recording/order_check.py": 1}
"""Durations that are not in `Timeouts`: one of `verify="order"`, which waits on one host alone."""
WAITS = {"sleep", "join", "wait", "is_over", "acquire", "create_connection", "timedelta", "select"}


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


def literals(module: ast.Module) -> Iterator[str]:
    """Numbers of seconds: those with a name, and those that a call which waits is given."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and target.id.endswith(("_SECONDS", "_PAUSE")):
                    yield target.id
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            given = [
                *node.args,
                *(k.value for k in node.keywords if k.arg in ("seconds", "timeout")),
            ]
            if name in WAITS:
                yield from (ast.unparse(node) for each in given if is_number(each))


def is_number(node: ast.expr) -> bool:
    """Whether it is a number other than 0, perhaps within a sum or a product of numbers."""
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value != 0


def test_durations_are_found() -> None:
    source = "A_SECONDS = 1\ntime.sleep(0.1)\ntimedelta(seconds=2 * 3)\nx.wait(0.0)\nx.wait(t)"
    found = ["A_SECONDS", "time.sleep(0.1)", "timedelta(seconds=2 * 3)"]
    assert sorted(literals(ast.parse(source))) == found


def test_no_duration_is_written_beside_timeouts() -> None:
    for folder in MEETING:
        for name, module in modules(folder):
            found = list(literals(module))
            assert len(found) == BESIDE_TIMEOUTS.get(name, 0), (name, found)
