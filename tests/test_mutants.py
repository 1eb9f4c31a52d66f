"""Mutation runner: its table fits the code, and it tells a caught fault from a missed one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent

MODULES = {"replicas", "recovery", "sharding"}
"""Modules beside the folders that have faults of their own."""

FOLDERS = {path.parent.name for path in ROOT.glob("commgrid/*/__init__.py")} - {
    "testing",
    "launching",
}
"""Rooms; `launching` and `testing` run the tests, and a fault in them would be caught by none."""


def test_there_are_sixty_or_more_in_all_rooms() -> None:
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    rooms = [mutant.room for mutant in MUTANTS]
    assert rooms == sorted(rooms), "each stands beside the others of its room"
    assert set(rooms) == FOLDERS | MODULES | {"megatron_adapter"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted_and_its_tests_are_there(mutant: Mutant) -> None:
    sound = (ROOT / mutant.file).read_text()
    assert sound.count(mutant.old) == 1, f"move the mutant to where {mutant.old!r} is now"
    planted = ast.parse(sound.replace(mutant.old, mutant.new))
    assert ast.dump(planted) != ast.dump(ast.parse(sound)), "it changes nothing"
    for listed in mutant.tests:
        file, _, name = listed.partition("[")[0].partition("::")
        text = (ROOT / file).read_text()
        assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), f"no test {listed}"


PRODUCT = """
def count(items):
    return len(items)
"""

TESTS = """
import subprocess
from commgrid.toy import count

def test_count():
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open("{pids}", "a") as pids:
        print(left.pid, file=pids)
    assert count("ab") == 2
"""

PLANTED = """
FILE, TESTS = "commgrid/toy.py", ("tests/test_toy.py",)
MUTANTS = (
    Mutant("one more", FILE, "len(items)", "len(items) + 1", TESTS),
    Mutant("no fault", FILE, "len(items)", "len([*items])", TESTS),
    Mutant("gone", FILE, "sum(items)", "0", TESTS),
    Mutant("hangs", FILE, "    return len(items)", "    while True: pass", TESTS),
    Mutant("no test", FILE, "len(items)", "0", ("tests/test_other.py",)),
)
"""


@pytest.mark.full
def test_what_is_caught_and_what_is_not(tmp_path: Path) -> None:
    for folder in ("commgrid", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "commgrid/toy.py").write_text(PRODUCT)
    (tmp_path / "tests/test_toy.py").write_text(TESTS.format(pids=tmp_path / "pids"))
    (tmp_path / "tests/conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--full', action='store_true')\n"
    )
    for name in ("mutants", "planted"):
        text = (ROOT / f"tests/{name}.py").read_text()
        (tmp_path / f"tests/{name}.py").write_text(text)
    table = (tmp_path / "tests/planted.py").read_text().partition("\nMUTANTS = ")[0]
    (tmp_path / "tests/planted.py").write_text(table + PLANTED)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "--timeout", "20"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = re.findall(r"^(caught|MISSED) .*: (.*)\n +(.*)$", ran.stdout, re.MULTILINE)
    assert found == [
        ("caught", "one more", "tests/test_toy.py::test_count"),
        ("MISSED", "no fault", "no test of it fails (exit code 0):"),
        ("MISSED", "gone", "its text stands 0 times in commgrid/toy.py; expected once"),
        ("MISSED", "hangs", "no test of it fails (it was still running):"),
        ("MISSED", "no test", "its tests fail without it (exit code 4):"),
    ]
    assert "1 of 5 caught" in ran.stdout
    assert (tmp_path / "commgrid/toy.py").read_text() == PRODUCT
    for pid in (tmp_path / "pids").read_text().split():
        assert not Path(f"/proc/{pid}").exists()
