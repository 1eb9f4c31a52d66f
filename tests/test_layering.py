"""Data flows down one list of rooms: a file imports only from its own room and those above it.

A room is a folder of `commgrid`, or a file beside them. Some rooms have a pure half, which plans on
plain numbers, above everything that has torch.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "commgrid"

PURE = (
    "errors", "version", "on_demand", "planning", "advisor", "rendezvous", "pipeline",
    "context_parallel", "resharding", "bridge", "observe", "viz",
)  # fmt: skip
"""Rooms, or pure halves of rooms, from the top; none of them imports torch."""
ROOMS = (
    "torch_compat", "runtime", "failures", "sharding", "collectives", "replicas", "inputs",
    "parameters", "tensor_parallel", "data_parallel", "context_parallel", "bridge", "resharding",
    "checkpoint", "transfer", "recovery", "pipeline", "expert", "observe", "testing", "cli",
    "__main__",
)  # fmt: skip
"""Rooms that have torch, below all of `PURE`."""
PURE_HALVES = {
    "pipeline": "schedule partition simulator exchange",
    "context_parallel": ("balance ranges tiles drawing plans"),
    "resharding": "traffic layouts shares pools plan",
    "bridge": "plan pipelines",
    "observe": (
        "operations call cycles ring processes traces programs findings order trace_files recorded "
        "flight_recorder ledger mismatches slowness waiting astray circles diagnosis verify "
        "stages priced audit.grids"
    ),
}
DOOR = (
    "torch_compat/world.py", "torch_compat/groups.py", "torch_compat/ended_groups.py",
    "launching/process.py",
)  # fmt: skip
EARLIER_NAMES = tuple(
    f"planning/{name}.py" for name in ("cluster", "crossing", "cost", "model_zoo", "redistribution")
)
"""Of files that are in `advisor` now; they go with the next release."""
FILES = sorted(
    path for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).as_posix() not in EARLIER_NAMES
)  # fmt: skip


def module(path: Path) -> str:
    """Its name below commgrid: `pipeline.schedule`; of an `__init__.py` the package's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module(path): path for path in FILES if module(path)}  # without the public names


def is_pure(name: str) -> bool:
    room, _, file = name.partition(".")
    return room in PURE and (room not in PURE_HALVES or file in PURE_HALVES[room].split())


def place(name: str) -> int:
    """Position of its room in the list of all rooms."""
    room = name.partition(".")[0]
    return PURE.index(room) if is_pure(name) else len(PURE) + ROOMS.index(room)


@cache
def imports(name: str) -> list[str]:
    """Absolute names of the modules a file imports when it runs, TYPE_CHECKING blocks aside."""
    tree = ast.parse(MODULES[name].read_text())
    typed = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("commgrid.")
                found.append(f"commgrid.{inner}" if inner in MODULES else node.module or "")
    return found


def imported(name: str) -> Iterator[str]:
    """The modules of commgrid among them, without its public names."""
    for other in imports(name):
        inner = other.removeprefix("commgrid.")
        if other.startswith("commgrid.") and inner in MODULES:
            yield inner


def test_every_room_has_its_place() -> None:
    rooms = {name.partition(".")[0] for name in MODULES}
    assert rooms == {*PURE, *ROOMS}, "give a new room its place in PURE or ROOMS"
    halves = {f"{room}.{file}" for room, files in PURE_HALVES.items() for file in files.split()}
    assert halves <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_up_the_list(name: str) -> None:
    for other in imported(name):
        assert place(other) <= place(name), f"{name} imports {other}, whose room is below its own"
    if is_pure(name):
        torch = [other for other in imports(name) if other.partition(".")[0] == "torch"]
        assert torch == [], f"{name} is pure and imports torch"


def test_no_files_import_each_other() -> None:
    """Nor around a longer circle; a package's `__init__.py` counts as below its files."""
    graph = {name: set(imported(name)) for name in MODULES}
    for name in MODULES:
        package = name.rpartition(".")[0]
        if package:
            graph[package].add(name)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_pure_rooms_load_no_torch() -> None:
    pure = [f"commgrid.{name}" for name in MODULES if is_pure(name)]
    names = ["commgrid", *pure, "commgrid.cli"]
    code = f"import sys, {', '.join(names)}; commgrid.GroupPlan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_only_the_door_creates_and_destroys_groups() -> None:
    makers = {
        "new_group", "init_process_group", "destroy_process_group", "_new_process_group_helper",
    }  # fmt: skip
    for path in FILES:
        if path.relative_to(PACKAGE).as_posix() in DOOR:
            continue
        used = {
            node.attr for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }  # fmt: skip
        assert not used & makers, f"{path} calls {used & makers}; only {DOOR} may"


THREADS = (
    "store/client.py", "health/channel.py", "recording/remote.py", "health/mailbox.py",
    "runtime/signals.py",
)  # fmt: skip
"""Files that start threads, beside checkpoints and tests. docs/architecture.md has their ends."""
STORE = ("store/driver.py", "store/key_wait.py", "store/client.py")
"""Files that carry out operations of a store."""
COMPARES = "recording/live.py"
"""`verify="order"`, which asks the store itself."""


def called(path: Path) -> set[str]:
    """Last parts of the names that a file calls."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {ast.unparse(call.func).rpartition(".")[2] for call in calls}


def test_few_files_start_threads() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        if name.split("/")[0] not in ("checkpoint", "testing"):
            starts = called(path) & {"Thread", "Timer", "start_new_thread", "ThreadPoolExecutor"}
            assert bool(starts) == (name in THREADS), f"{name} starts threads: {starts}"
    assert all(f"commgrid/{name}" in page for name in THREADS)


def test_one_driver_asks_the_store() -> None:
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        asked = called(path) & {"compare_set", "multi_get", "delete_key"}
        assert not asked or name in (*STORE, COMPARES), f"{name} asks the store: {asked}"
