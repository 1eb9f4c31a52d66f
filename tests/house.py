"""The rooms of the packages, of `rooms.yaml`, and what is out of place in them.

A room is a folder, or a file, and stands on those listed before it: it imports from these alone,
imports for type checkers and within functions included.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = ("commgrid", "megatron_adapter")
MOST_FILES, MOST_LINES, MOST_FUNCTION = 15, 470, 60


class Room(NamedTuple):
    """A room.

    Args:
        name: of its folder or file in `commgrid/`, or of a package of its own.
        noun: what it holds.
        takes, gives: what comes in, and what goes out.
    """

    name: str
    noun: str
    takes: str = ""
    gives: str = ""

    @property
    def package(self) -> str:
        """Its dotted name in imports."""
        return self.name if self.name in PACKAGES else f"commgrid.{self.name}"


FLOORS = {
    floor: tuple(Room(name, *row) for name, row in rooms.items())
    for floor, rooms in yaml.safe_load(Path(__file__).with_name("rooms.yaml").read_text()).items()
}
ROOMS = tuple(room for floor in FLOORS.values() for room in floor)
WITHOUT_TORCH = FLOORS["words and numbers"]
"""Rooms of which no file imports torch."""


@cache
def modules() -> dict[str, Path]:
    """Return every module's file by its dotted name."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = file
    return found


def room_of(module: str) -> Room:
    """Return the room in which a module lies: the longest name that it begins with."""
    inside = [r for r in ROOMS if module == r.package or module.startswith(r.package + ".")]
    return max(inside, key=lambda room: len(room.package))


@cache
def tree_of(module: str) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def imported(module: str) -> frozenset[str]:
    """Return all that a module imports anywhere in it, by dotted name."""
    found: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules() else node.module or "")
    return frozenset(found - {module})


def back_arrows(module: str) -> Iterator[str]:
    """Imports of rooms that stand on the module's own."""
    mine = room_of(module)
    for other in sorted(imported(module) & modules().keys()):
        if ROOMS.index(room_of(other)) > ROOMS.index(mine):
            yield f"{module} imports {other}, whose room {room_of(other).name} is above {mine.name}"


def circle() -> list[str]:
    """Modules that import each other, [] if none; a package counts as importing its files."""
    graph = {name: set(imported(name) & modules().keys()) for name in modules()}
    for name in modules():
        if (package := name.rpartition(".")[0]) in graph and package not in PACKAGES:
            graph[package].add(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def files_of_folders() -> dict[str, int]:
    """Return the number of files in each folder, without their `__init__.py`."""
    files = (f for f in modules().values() if f.name != "__init__.py")
    return Counter(str(f.parent.relative_to(ROOT)) for f in files)


def long_files() -> dict[str, int]:
    """Return the lines of files that are too long."""
    lines = {name: file.read_text("utf-8").count("\n") for name, file in modules().items()}
    return {name: count for name, count in lines.items() if count > MOST_LINES}


def long_functions() -> Iterator[str]:
    """Functions whose bodies are too long, docstrings aside."""
    for name in modules():
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body and (node.end_lineno or 0) - body[0].lineno >= MOST_FUNCTION:
                    yield f"{name}.{node.name}"


def classes_twice() -> dict[str, set[str]]:
    """Return public names of classes that stand in several modules."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in modules():
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(name)
    return {name: where for name, where in found.items() if len(where) > 1}
