"""Sizes of the test run: which tests each includes, and what a smaller run says it left out."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from commgrid.testing import run_on_ranks
from tests.sizes import size_of, unmatched

ROOT = Path(__file__).parents[1]


def collected(*given: str) -> str:
    """Output of pytest --collect-only."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        pytest.main(["--collect-only", "--rootdir", str(ROOT), "-p", "no:cacheprovider", *given])
    return said.getvalue()


CASES = """
    import pytest

    @pytest.mark.full("2", "x-*")
    @pytest.mark.nightly("x-9")
    @pytest.mark.parametrize("case", ["1", "2", "x-1", "x-9"])
    def test_case(case): ...

    @pytest.mark.nightly
    def test_long(): ...

    @pytest.mark.full("gone")
    @pytest.mark.parametrize("case", ["1"])
    def test_renamed(case): ...
"""


def test_a_marker_gives_each_case_its_size(pytester: pytest.Pytester) -> None:
    items = pytester.getitems(CASES)
    assert {item.name: size_of(item) for item in items} == {
        "test_case[1]": "short", "test_case[2]": "full", "test_case[x-1]": "full",
        "test_case[x-9]": "nightly", "test_long": "nightly", "test_renamed[1]": "short",
    }  # fmt: skip
    (wrong,) = unmatched(items)
    assert "test_renamed: @pytest.mark.full('gone') matches no case" in wrong


def test_a_smaller_run_says_what_it_left_out() -> None:
    cases = "tests/planning/test_plan.py::test_every_dense_spec_equals_enumeration"
    # The ranks set variables of the environment.
    (said,) = run_on_ranks(collected, 1, cases, backend=None, check=False)
    assert "of the selected tests run only with --full" in said
    assert f"{cases}[1]\n" in said
    assert f"{cases}[16]\n" not in said
    # The ranks set variables of the environment.
    (said,) = run_on_ranks(collected, 1, cases, "--full", "-m", "full", backend=None, check=False)
    assert f"{cases}[16]\n" in said
    assert "run only with --full" not in said


PURE = [
    "tests/layout/test_rank_layout.py", "tests/planning/test_spec.py",
    "tests/planning/test_plan.py", "tests/test_layering.py", "tests/cli/test_cli.py",
    "tests/pipeline_schedules/test_partition.py",
]  # fmt: skip


def without_megatron(*given: str) -> tuple[int, str]:
    """pytest where importing megatron fails, as where only commgrid is installed."""
    kept = ("tests.conftest", "tests.sizes", __name__)
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


@pytest.mark.full
def test_only_what_is_about_megatron_needs_it() -> None:
    """Everything is collected without it, and what is pure runs."""
    pure = [*PURE, "-k", "not enumeration"]  # which takes long, and is counting
    for given in (["--collect-only", "-q", "tests"], pure):
        # The ranks set variables of the environment.
        ((code, told),) = run_on_ranks(
            without_megatron, 1, *given, backend=None, timeout=300, check=False
        )
        assert code == 0, told
    # In a process of its own: pytest keeps what it has imported of a file that it has run before.
    about = "import sys, pytest; sys.modules['megatron'] = None; pytest.main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", about, "-rs", "tests/megatron_adapter/test_options.py"], cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "could not import 'megatron.core'" in done.stdout
