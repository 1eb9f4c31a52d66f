"""Programs without bugs differ nowhere, on any grid."""

from __future__ import annotations

from pathlib import Path

import pytest

from commgrid.audit.compare import Seen, compare
from tests.audit.audited import EXAMPLES, MEGATRON, TEXT, TRAIN, seen_on

DENSE = (
    "tp=2", "tp=2 --sequence-parallel", "dp=2 --zero1", "dp=2 --fsdp", "cp=2", "dp=2 cp=2",
    "pp=2 --schedule zb-h1 --microbatches 4", "pp=2 --chunks 2 --microbatches 2",
)  # fmt: skip
TIED = ("pp=2", "tp=2 pp=2 --sequence-parallel")
EXPERTS = ("dp=2 ep=2", "tp=2 ep=2 etp=1", "dp=4 ep=2 --zero1")
MEGATRON_DENSE = (
    "tp=2 --sequence-parallel", "pp=2", "pp=2 --vpp 2", "tp=2 --groups collection",
    "dp=2 --microbatches 2 --distributed-optimizer",
)  # fmt: skip
MEGATRON_EXPERTS = ("dp=2 ep=2 --microbatches 2", "tp=2 ep=2 etp=1 --sequence-parallel")


def parts_nowhere(
    script: str, flags: str, grids: tuple[str, ...], folder: Path, *, same_weights: bool = False
) -> None:
    first = seen_on("dp=1", folder / "first", EXAMPLES / script, flags.split())
    assert not compare(first, first).findings
    for number, grid in enumerate(grids):
        beginning = first.folder if same_weights else None
        seen = seen_on(
            grid, folder / str(number), EXAMPLES / script, flags.split(), beginning=beginning
        )
        found = compare(first, seen)
        assert not found.findings, "\n".join(each.text for each in found.findings[:5])
        count = len(first.parameters)
        assert found.steps == 2
        # Before the first step and after both, and in both.
        assert found.compared["weights"] == 3 * count
        assert found.compared["gradients"] == 2 * count
        assert found.compared["losses"] == 2


@pytest.mark.full("*")
@pytest.mark.parametrize(
    ("flags", "grids"),
    [("", DENSE), ("--tie-embeddings --clip-grad 0.5", TIED), ("--experts 4", EXPERTS)],
    ids=["dense", "tied", "experts"],
)
def test_train_gpt_parts_nowhere(flags: str, grids: tuple[str, ...], tmp_path: Path) -> None:
    usual = TRAIN.replace("--layers 2", "--layers 4").replace("--batch-size 4", "--batch-size 8")
    parts_nowhere("train_gpt.py", f"{usual} {TEXT} {flags}", grids, tmp_path)


def test_train_gpt_parts_nowhere_on_two_ranks(tmp_path: Path) -> None:
    parts_nowhere("train_gpt.py", f"{TRAIN} {TEXT}", ("tp=2 --sequence-parallel",), tmp_path)


@pytest.mark.full("*")
@pytest.mark.parametrize(
    ("flags", "grids"), [("", MEGATRON_DENSE), ("--experts 2", MEGATRON_EXPERTS)],
    ids=["dense", "experts"],
)  # fmt: skip
def test_a_megatron_gpt_parts_nowhere(flags: str, grids: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    usual = MEGATRON.replace("--layers 2", "--layers 4")
    parts_nowhere("megatron_gpt.py", f"{usual} {flags}", grids, tmp_path, same_weights=True)


@pytest.mark.full
def test_what_was_not_reached_is_not_compared(tmp_path: Path) -> None:
    """Two grids of other numbers of steps are compared over the steps of both."""
    flags = f"{TRAIN} {TEXT}".split()
    one = seen_on("dp=1", tmp_path / "1", EXAMPLES / "train_gpt.py", flags, steps=1)
    two = seen_on("dp=1", tmp_path / "2", EXAMPLES / "train_gpt.py", flags)
    assert compare(one, two).steps == 1
    assert Seen("dp=1", tmp_path / "2").steps == 2
