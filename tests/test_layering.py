"""The house: every file in its room, one floor above the other, as `tests/rooms.yaml` lists."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import house
from tests.house import MOST_FILES, ROOMS, ROOT, WITHOUT_TORCH, modules, room_of

PACKAGE = ROOT / "commgrid"
FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_is_in_a_room_and_every_room_has_files() -> None:
    used = {room_of(module).name for module in modules()}
    assert used == {room.name for room in ROOMS}
    beside = {m for m in modules() if room_of(m).package == "commgrid" and m.count(".")}
    assert beside == {"commgrid.__main__", "commgrid.earlier"}, (
        "give a new room its place in tests/rooms.yaml"
    )


@pytest.mark.parametrize("module", modules())
def test_no_room_imports_one_that_stands_on_it(module: str) -> None:
    assert list(house.back_arrows(module)) == []


def test_no_files_import_each_other() -> None:
    assert house.circle() == []


def test_folders_files_and_functions_are_small() -> None:
    assert {f: n for f, n in house.files_of_folders().items() if n > MOST_FILES} == {}
    assert house.long_files() == {}
    assert list(house.long_functions()) == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    assert house.classes_twice() == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from commgrid.runtime.grid import HyperCommGrid", "whose room runtime is above layout"),
        ("def late():\n    import commgrid.cli", "whose room cli is above layout"),
        (
            "if TYPE_CHECKING:\n    from commgrid.planning.spec import GridSpec",
            "whose room planning is above layout",
        ),
    ],
)
def test_a_back_arrow_is_seen(source: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "commgrid.layout.ranks"
    trees = {m: house.tree_of(m) for m in modules()} | {module: ast.parse(source)}
    monkeypatch.setattr(house, "tree_of", trees.__getitem__)
    house.imported.cache_clear()
    try:
        (arrow,) = house.back_arrows(module)
    finally:
        house.imported.cache_clear()
    assert arrow.startswith(module)
    assert found in arrow


def test_a_circle_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from commgrid.layout.rank_layout import RankLayout"
    trees = {m: house.tree_of(m) for m in modules()}
    trees |= {"commgrid.layout.ranks": ast.parse(source)}
    monkeypatch.setattr(house, "tree_of", trees.__getitem__)
    house.imported.cache_clear()
    try:
        assert {"commgrid.layout.ranks", "commgrid.layout.rank_layout"} <= {*house.circle()}
    finally:
        house.imported.cache_clear()


def test_rooms_without_torch_load_none() -> None:
    pure = [module for module in modules() if room_of(module) in WITHOUT_TORCH]
    for module in pure:
        torch = [name for name in house.imported(module) if name.partition(".")[0] == "torch"]
        assert torch == [], f"{module} imports torch"
    code = f"import sys, {', '.join(pure)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_what_is_planned_loads_no_torch() -> None:
    """Public names of rooms that have torch, but for what runs."""
    names = (
        "commgrid, commgrid.cli, commgrid.bridge, commgrid.context_parallel, commgrid.pipeline, "
        "commgrid.transfer"
    )
    code = f"import sys, {names}; commgrid.GroupPlan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


DOOR = (
    "torch_compat/world.py", "torch_compat/groups.py", "torch_compat/ended_groups.py",
    "launching/process.py",
)  # fmt: skip


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
    "runtime/signals.py", "recording/dump.py",
)  # fmt: skip
"""Files that start threads, beside checkpoints and tests. CONTRIBUTING.md has their ends."""
STORE = ("store/driver.py", "store/key_wait.py", "store/client.py")
"""Files that carry out operations of a store."""
COMPARES = "recording/order_store.py"
"""The keys of `verify="order"`."""
GATE = "store/gate.py"
"""A store itself, which passes on what torch asks."""


def called(path: Path) -> set[str]:
    """Last parts of the names that a file calls."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {ast.unparse(call.func).rpartition(".")[2] for call in calls}


def test_few_files_start_threads() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        if name.split("/")[0] not in ("checkpoint", "launching"):
            starts = called(path) & {"Thread", "Timer", "start_new_thread", "ThreadPoolExecutor"}
            assert bool(starts) == (name in THREADS), f"{name} starts threads: {starts}"
    assert all(f"commgrid/{name}" in page for name in THREADS)


def test_one_driver_asks_the_store() -> None:
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        asked = called(path) & {"compare_set", "multi_get", "delete_key"}
        assert not asked or name in (*STORE, COMPARES, GATE), f"{name} asks the store: {asked}"
