"""examples/gpt.py: the same losses on every grid, across a checkpoint, and short enough to read."""

import ast
import contextlib
import importlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commgrid.testing import run_on_ranks
from tests.docs.public import PUBLIC, names_in
from tests.examples.curves import ROOT, load

SCRIPT = ROOT / "examples" / "gpt.py"


def on_a_rank(flags: list[str]) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        load("gpt").main(flags)
    torch.set_default_dtype(torch.float32)  # which the script has changed, and a rank checks
    return out.getvalue().splitlines()


def printed(ranks: int, *flags: str) -> list[str]:
    """The lines of a run; all of them are the first rank's."""
    first, *others = run_on_ranks(on_a_rank, ranks, list(flags), backend=None, launcher="torchrun")
    assert others == [[]] * (ranks - 1)
    return first


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """The lines of one process."""
    lines = printed(1, "--steps", "4")
    assert [line.split()[:2] for line in lines] == [["step", str(step)] for step in range(1, 5)]
    losses = [float(line.split()[-1]) for line in lines]
    assert losses == sorted(losses, reverse=True)  # it learns
    return lines


@pytest.mark.parametrize("cut", ["--tp 2", "--tp 2 --pp 2", "--pp 4"])
def test_every_grid_prints_the_same_losses(cut: str, alone: list[str]) -> None:
    assert printed(4, *cut.split(), "--steps", "4") == alone


def test_another_grid_goes_on_from_a_checkpoint(alone: list[str], tmp_path: Path) -> None:
    folder = ["--checkpoint", str(tmp_path / "saved")]
    first = printed(4, "--tp", "2", *folder, "--steps", "2")
    assert first + printed(2, "--pp", "2", *folder, "--steps", "4") == alone


@pytest.mark.full
def test_under_torchrun(alone: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         SCRIPT, "--tp", "2", "--steps", "4"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == alone


def test_it_is_read_in_five_minutes() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 150
    assert text.count("    torchrun --standalone") == 3


def test_it_imports_public_names_only() -> None:
    tree = ast.parse(SCRIPT.read_text())
    used = {
        (node.module, alias.name)
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } | {
        ("commgrid", node.attr)
        for node in ast.walk(tree) if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name) and node.value.id == "commgrid"
    }  # fmt: skip
    ours = {(module, name) for module, name in used if module and module.startswith("commgrid")}
    assert {("commgrid", "initialize"), ("commgrid.pipeline", "Pipeline")} <= ours
    for module, name in ours:
        listed = module in PUBLIC and name in names_in(importlib.import_module(module))
        assert listed or f"{module}.{name}" in PUBLIC, (module, name)
