"""Checkpoints on other file systems, by fsspec: the same files, and the same choice of a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.checkpoint.folder import local
from commgrid.testing import run_on_ranks

fsspec = pytest.importorskip("fsspec")
LocalFileSystem = pytest.importorskip("fsspec.implementations.local").LocalFileSystem


@pytest.fixture
def memory() -> Iterator[Any]:
    """A file system in this process's memory, empty."""
    commgrid.initialize()
    system = fsspec.filesystem("memory")
    yield system
    commgrid.shutdown()
    if system.exists("/runs"):
        system.rm("/runs", recursive=True)


def trained(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def files(system: Any, folder: str) -> dict[str, int]:
    return {name.rpartition("/")[2]: system.size(name) for name in system.ls(folder, detail=False)}


def test_it_has_the_files_of_a_local_one(memory: Any, tmp_path: Path) -> None:
    model, optimizer = trained(1.0)
    for folder in ("memory://runs/7", tmp_path):
        path = checkpoint.save(folder, 3, model, optimizer, extra={"a": 1}, progress=False)
    assert path == tmp_path / "step_00000003"
    assert files(memory, "/runs/7") == {"step_00000003": 0}
    here = {path.name: path.stat().st_size for path in path.iterdir()}
    there = files(memory, "/runs/7/step_00000003")
    assert there.keys() == here.keys()
    assert {k: n for k, n in there.items() if k != ".metadata"} == {
        k: n for k, n in here.items() if k != ".metadata"
    }
    loaded = trained(9.0)
    assert checkpoint.load("memory://runs/7", *loaded, progress=False).extra == {"a": 1}
    assert torch.equal(loaded[0].weight, model.weight)
    step = checkpoint.load("memory://runs/7/step_00000003", loaded[0], progress=False).step
    assert (step, commgrid.recover("memory://runs/7", *loaded, progress=False).step) == (3, 3)


def test_steps_are_kept_and_replaced(memory: Any) -> None:
    for step in (1, 2, 3, 3):
        model, _ = trained(float(step))
        checkpoint.save("memory://runs", step, model, keep=2, progress=False)
    assert checkpoint.steps("memory://runs") == [2, 3]
    assert set(files(memory, "/runs")) == {"step_00000002", "step_00000003"}


def test_a_rename_that_a_crash_has_ended_leaves_a_half(memory: Any) -> None:
    model, _ = trained(1.0)
    for step in (1, 2):
        checkpoint.save("memory://runs", step, model, progress=False)
    memory.rm("/runs/step_00000002/__0_0.distcp")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert checkpoint.load("memory://runs", model, progress=False).step == 1
    assert "__0_0.distcp is missing; it is skipped" in str(told[0].message)


def test_what_it_cannot_do_is_refused(memory: Any) -> None:
    model, _ = trained(1.0)
    with pytest.raises(commgrid.CommGridError, match=r"background=True: .*mounted folder"):
        checkpoint.save("memory://runs", 1, model, background=True, progress=False)
    assert not memory.exists("/runs") or files(memory, "/runs") == {}
    with pytest.raises(commgrid.SpecError, match=r"to='memory://a': expected a folder of this"):
        checkpoint.export("memory://runs", "memory://a")
    memory.pipe_file("/runs/model.safetensors", b"{}")
    with pytest.raises(commgrid.CheckpointError, match=r"which are read on this machine's file"):
        checkpoint.load("memory://runs", model, prefix="", progress=False)
    for folder in ("nowhere://a/b", Path("nowhere://a/b")):
        with pytest.raises(commgrid.CommGridError, match=r"nor one that fsspec opens: .*nowhere"):
            checkpoint.save(folder, 1, model, progress=False)
        with pytest.raises(commgrid.SpecError, match=r"nor one that fsspec opens: .*nowhere"):
            checkpoint.steps(folder)


def on_ranks(url: str) -> list[int]:
    """Two ranks write to a file system of fsspec's, which is a folder beneath."""
    commgrid.initialize()
    model, optimizer = trained(1.0)
    for step in (1, 2):
        checkpoint.save(url, step, model, optimizer, progress=False)
    other, fresh = trained(9.0)
    checkpoint.load(url, other, fresh, progress=False)
    commgrid.shutdown()
    assert torch.equal(other.weight, model.weight)
    return checkpoint.steps(url)


class Beneath(LocalFileSystem):  # type: ignore[misc]
    """This machine's file system under another protocol."""

    protocol = "beneath"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("beneath://").strip("/")


def test_several_ranks_write_to_one(tmp_path: Path) -> None:
    fsspec.register_implementation("beneath", Beneath, clobber=True)
    assert run_on_ranks(on_ranks, 2, f"beneath:/{tmp_path}") == [[1, 2]] * 2
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert local(f"file://{tmp_path}") == tmp_path
