"""What is to be run first on a GPU runs over gloo as well, so that it can be trusted there."""

import subprocess
import sys
from pathlib import Path

import pytest

FIRST = Path(__file__).parent / "gpu" / "first.py"


@pytest.mark.full
def test_all_checks_pass_over_gloo() -> None:
    done = subprocess.run(
        [sys.executable, str(FIRST), "--emulate"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["passed"] * 10, done.stdout


def test_a_check_that_does_not_fit_in_the_time_is_said() -> None:
    done = subprocess.run(
        [sys.executable, str(FIRST), "--emulate", "--minutes", "0.1"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.count("not run") == 10
