"""The README runs as it says, the version is in one place, and signatures change with a notice."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import commgrid
from tests.docs import pages, signatures

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_readme_python_runs(tmp_path: Path) -> None:
    """All blocks in order, as one program in a process that no launcher has started."""
    assert pages.run_python(ROOT / "README.md", tmp_path)


INSTALL = "pip install -U pip && pip install -e . --group test -c .ci/constraints.txt"


def test_readme_names_the_two_commands() -> None:
    for command in (
        "pip install -e . -c .ci/constraints.txt && torchrun --standalone --nproc-per-node 8 "
        "examples/train_gpt.py --config examples/configs/gpt_tp2_dp4.yaml",
        f"{INSTALL} && pytest\n",
    ):
        assert command in README
    assert "`pytest --full` runs" in README
    ci = (ROOT / ".ci" / "run").read_text()
    assert f"\n{INSTALL}\n" in ci
    assert "pytest --full" in ci


def test_version_is_said_once() -> None:
    for file in ("setup.py", "pyproject.toml"):  # which read version.py
        assert commgrid.__version__ not in (ROOT / file).read_text()
    assert f"## {commgrid.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_a_changed_signature_is_in_the_change_log() -> None:
    """Every public one that differs from the last release's, by its name, under Unreleased."""
    version, before = signatures.released()
    assert version == commgrid.__version__, "a release runs `python -m tests.docs.signatures`"
    now = signatures.signatures()
    changed = [name for name, parameters in before.items() if now.get(name) != parameters]
    unreleased = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert unreleased.startswith("Unreleased\n")
    said = set(re.findall(r"\w+", unreleased))
    assert [name for name in changed if name.rpartition(".")[2] not in said] == []


@pytest.mark.full
def test_megatron_names_table() -> None:
    done = run("megatron_adapter", "names")
    assert done.returncode == 0, done.stderr
    assert "get_data_parallel_group(with_context_parallel=True)" in done.stdout
