"""Every error that the source raises on purpose, as the text of its message."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import ROOT

PACKAGES = ("commgrid", "megatron_adapter")


@dataclass(frozen=True)
class Raised:
    """One place that makes an error.

    Args:
        error: the class.
        message: what it says, `…` for what is filled in; empty where it is only handed on.
        where: file and line.
    """

    error: str
    message: str
    where: str


def raised(*errors: str) -> list[Raised]:
    """Every call of these classes, in the order of the files."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found += list(_in_file(path, errors))
    return found


def _in_file(path: Path, errors: tuple[str, ...]) -> Iterator[Raised]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        if "SpecError" in errors and ast.unparse(node.func) == "argparse.ArgumentTypeError":
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            yield Raised("SpecError", f"--… {message(node.args[0])}", where)  # see cli.__init__
        if not isinstance(node.func, ast.Name):
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        if node.func.id in errors:
            yield Raised(node.func.id, message(node.args[0]), where)


def message(node: ast.expr) -> str:
    """The text of a string, with `…` for everything that is filled in.

    >>> message(ast.parse("f'rank {r}: ' + told", mode="eval").body)
    'rank …: …'
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(message, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message(node.left) + message(node.right)
    return "…"
