"""The short run and the full one: what is listed is there, and who asks for it is told."""

import ast
import contextlib
import functools
import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full import LONGEST, UNMATCHED, patterns
from tests.ranks import run_on_ranks

ROOT = Path(__file__).parents[1]


@functools.cache
def functions_of(file: str) -> list[str]:
    nodes = ast.parse((ROOT / file).read_text()).body
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef)]


def test_every_line_of_the_list_is_of_a_test(pytestconfig: pytest.Config) -> None:
    """By name; with the cases in brackets where everything was collected."""
    for line in patterns():
        file, _, name = line.partition("[")[0].partition("::")
        assert name in functions_of(file), (
            f"{line} is listed in tests/full.py, and there is no such test"
        )
    if {ROOT / each for each in pytestconfig.args} == {
        ROOT / each for each in pytestconfig.getini("testpaths")
    }:
        assert pytestconfig.stash[UNMATCHED] == []


def collected(*given: str) -> str:
    """What pytest says that it would run."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        pytest.main(["--collect-only", "--rootdir", str(ROOT), "-p", "no:cacheprovider", *given])
    return said.getvalue()


def test_who_asks_for_what_is_left_out_is_told() -> None:
    cases = "tests/test_plan.py::test_every_dense_spec_equals_enumeration"
    (said,) = run_on_ranks(collected, 1, cases, init=None)
    assert "4 of the tests that were asked for run only with --full" in said
    assert f"{cases}[1]\n" in said
    assert f"{cases}[16]\n" not in said
    (said,) = run_on_ranks(collected, 1, cases, "--full", "-m", "full", init=None)
    assert f"{cases}[16]\n" in said
    assert f"{cases}[1]\n" not in said
    assert "run only with --full" not in said


PURE = [
    "tests/test_layout.py", "tests/test_spec.py", "tests/test_plan.py", "tests/test_layering.py",
    "tests/cli/test_cli.py", "tests/pipeline/test_partition.py",
]  # fmt: skip


def without_megatron(*given: str) -> tuple[int, str]:
    """pytest where importing megatron fails, as where only commgrid is installed."""
    kept = ("tests.conftest", "tests.full", "tests.ranks", __name__)
    for name in list(sys.modules):
        if name.startswith(("megatron", "tests.", "examples")) and name not in kept:
            del sys.modules[name]
            package, _, leaf = name.rpartition(".")
            if package in sys.modules:  # where `from tests import peers` would find it
                vars(sys.modules[package]).pop(leaf, None)
    sys.modules["megatron"] = None  # type: ignore[assignment]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(["--rootdir", str(ROOT), "-p", "no:cacheprovider", *given])
    return int(code), said.getvalue()


def test_only_what_is_about_megatron_needs_it() -> None:
    """Everything is collected without it, and what is pure runs."""
    pure = [*PURE, "-k", "not enumeration"]  # which takes long, and is counting
    for given in (["--collect-only", "-q", "tests"], pure):
        ((code, told),) = run_on_ranks(without_megatron, 1, *given, init=None, timeout=300)
        assert code == 0, told
    # In a process of its own: pytest keeps what it has imported of a file that it has run before.
    about = "import sys, pytest; sys.modules['megatron'] = None; pytest.main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", about, "-rs", "tests/megatron_adapter/test_options.py"], cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "could not import 'megatron.core'" in done.stdout


def test_the_longest_files_are_there() -> None:
    assert len(set(LONGEST)) == len(LONGEST)
    assert [file for file in LONGEST if not (ROOT / file).is_file()] == []
