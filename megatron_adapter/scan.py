"""Where a user's code reads Megatron's global parallel state: file, line and call.

These calls keep two grids from living in one program, since each read answers for
the active grid; `pg_collection=` or a commgrid name is the way out. It reads syntax only:
modules fetched at run time, relative imports, and names handed on are not followed. Calls that
make or end the state are no reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from commgrid.errors import SpecError
from megatron_adapter.parallel_state import getters, oddities

MODULES = ("megatron.core.parallel_state", "megatron.core.mpu", "megatron_adapter.parallel_state")
_READS = ("get_", "is_", "set_", "has_", "model_parallel_is_initialized")
_NOT_STATE = {"get_nccl_options"}


class Read(NamedTuple):
    """One read of the global state.

    Args:
        path: the file.
        line: its line, from 1.
        name: the function or variable of parallel_state.
    """

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}"


def scan(path: str | Path) -> list[Read]:
    """Every read in a file, or in all Python files under a folder, in order.

    Raises:
        SpecError: there is no such path, or a file is no Python.
    """
    top = Path(path)
    if not top.exists():
        raise SpecError(f"{path}: no such file or folder; name one with Python code")
    files = sorted(top.rglob("*.py")) if top.is_dir() else [top]
    return [read for file in files for read in _reads(file)]


def _reads(path: Path) -> list[Read]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read as Python: {error}") from error
    names = _Names(tree)
    found = [
        (node.lineno, node.col_offset, name)
        for node in ast.walk(tree) if isinstance(node, ast.expr)
        for name in names.read_by(node)
    ]  # fmt: skip
    return [Read(path, line, name) for line, _, name in sorted(found)]


class _Names:
    """Names that a file has for the module and its functions."""

    def __init__(self, tree: ast.AST) -> None:
        self.modules: set[str] = set()
        self.functions: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._import_from(node, node.module)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name in MODULES:
                self.modules.add(alias.asname or alias.name)
            elif alias.name in ("megatron", "megatron.core", "megatron_adapter"):
                inner = (m.removeprefix(alias.name) for m in MODULES if m.startswith(alias.name))
                self.modules.update((alias.asname or alias.name) + part for part in inner)

    def _import_from(self, node: ast.ImportFrom, module: str) -> None:
        for alias in node.names:
            full, local = f"{module}.{alias.name}", alias.asname or alias.name
            if full in MODULES:
                self.modules.add(local)
            elif full == "megatron.core":
                self.modules.update({f"{local}.parallel_state", f"{local}.mpu"})
            elif module in MODULES and alias.name == "*":
                self.functions.update((name, name) for name in _PUBLIC)
            elif module in MODULES and _is_state(alias.name):
                self.functions[local] = alias.name

    def read_by(self, node: ast.AST) -> Iterator[str]:
        """The state that one node reads; an import by name is none, its use is."""
        if isinstance(node, ast.Attribute) and _is_state(node.attr):
            if _dotted(node.value) in self.modules:
                yield node.attr
        elif isinstance(node, ast.Name) and node.id in self.functions:
            yield self.functions[node.id]


def _is_state(name: str) -> bool:
    private = name.startswith("_") and name.strip("_").isupper()
    private = private or name == "_global_process_group_list"
    return (name.startswith(_READS) and name not in _NOT_STATE) or private


_PUBLIC = [*getters.__all__, *oddities.__all__]
"""What `from … import *` brings."""


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of nested attributes; nothing for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
