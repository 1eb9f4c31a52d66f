"""Tied weights that a file has once: every copy of the model gets them, or the error names both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.parameters import mark_parameters
from commgrid.testing import run_on_ranks

ENDS = {"ends": {"of": "pp", "pick": ["first", "last"]}}


def stage_of(grid: Any, marked: bool) -> nn.Module:
    """The first of two stages has the embedding, the last the head, and each a layer."""
    stage, first = nn.Module(), grid.get_local_rank("pp") == 0
    name = "tokens" if first else "head"
    stage.add_module(name, nn.Linear(4, 4, bias=False))
    stage.add_module(f"layer{grid.get_local_rank('pp')}", nn.Linear(2, 2, bias=False))
    if marked:
        mark_parameters(stage.get_submodule(name), shared="ends")
    return stage


def loads_tied(folder: str, rename: Any, strict: bool) -> Any:
    safetensors = pytest.importorskip("safetensors.torch")
    grid = commgrid.initialize(pp=2, groups=ENDS)
    tied = torch.arange(16.0).view(4, 4)
    if grid.rank == 0:
        stored = {"embed.weight": tied, "layer0.weight": torch.ones(2, 2),
                  "layer1.weight": torch.ones(2, 2)}  # fmt: skip
        safetensors.save_file(stored, f"{folder}/model.safetensors")
    torch.distributed.barrier()
    stage = stage_of(grid, marked=True)
    found: Any
    try:
        restored = checkpoint.load(folder, stage, prefix="", rename=rename, strict=strict,
                                   progress=False)  # fmt: skip
        found = restored.missing
        assert torch.equal(next(stage.parameters()), tied) == ("tokens.weight" not in found)
    except commgrid.CheckpointError as error:
        found = str(error)
    commgrid.shutdown()
    return found


BOTH = {"embed.weight": ["tokens.weight", "head.weight"]}


@pytest.mark.parametrize("strict", [True, False])
def test_one_stored_name_fills_several_of_the_model(strict: bool, tmp_path: Path) -> None:
    assert run_on_ranks(loads_tied, 2, str(tmp_path), BOTH, strict) == [()] * 2


def test_a_copy_that_would_keep_its_own_numbers_is_refused(tmp_path: Path) -> None:
    one = {"embed.weight": "tokens.weight"}
    for told in run_on_ranks(loads_tied, 2, str(tmp_path), one, False):
        assert "model.head.weight is a copy of another stage's model.tokens.weight" in told
        assert "rename={name: ['tokens.weight', 'head.weight']}" in told


def test_a_tied_weight_of_which_the_file_has_no_copy_is_missing(tmp_path: Path) -> None:
    left_out = {"embed.weight": []}
    for found in run_on_ranks(loads_tied, 2, str(tmp_path), left_out, False):
        assert sorted(found) == ["head.weight", "tokens.weight"]


def optimizer_too(folder: str) -> bool:
    """A plain model's optimizer state goes to both names of a tied weight."""
    commgrid.initialize()
    once = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False)})
    optimizer = torch.optim.AdamW(once.parameters())
    once["embed"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, 1, once, optimizer, progress=False)
    twice = nn.ModuleDict({key: nn.Linear(2, 2, bias=False) for key in ("tokens", "head")})
    fresh = torch.optim.AdamW(twice.parameters())
    checkpoint.load(folder, twice, fresh, rename=BOTH, progress=False)
    right = optimizer.state[once["embed"].weight]["exp_avg"]
    commgrid.shutdown()
    return all(
        torch.equal(layer.weight, once["embed"].weight)
        and torch.equal(fresh.state[layer.weight]["exp_avg"], right)
        for layer in twice.values()
    )


def test_optimizer_state_fills_several_names_too(tmp_path: Path) -> None:
    assert run_on_ranks(optimizer_too, 1, str(tmp_path)) == [True]


def test_names_that_are_none_are_refused(tmp_path: Path) -> None:
    commgrid.initialize()
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, 1, model, progress=False)
    for given in ({"weight": 3}, {"weight": ["a", 3]}, len):
        with pytest.raises(commgrid.CommGridError, match="expected a name, or None"):
            checkpoint.load(tmp_path, model, rename=given, progress=False)  # type: ignore[arg-type]
    commgrid.shutdown()


# -- folders that are none -----------------------------------------------------------------


@pytest.mark.parametrize("folder", ["s3://bucket/run", Path("gs://bucket/run"), "file:///tmp/a"])
def test_a_url_is_no_folder(folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commgrid.initialize()
    model = nn.Linear(2, 2)
    checkpoint.save("runs", 1, model, progress=False)
    for action in (
        lambda: checkpoint.save(folder, 1, model, progress=False),
        lambda: checkpoint.save(folder, 1, model, progress=False, background=True),
        lambda: checkpoint.load(folder, model, progress=False),
        lambda: checkpoint.steps(folder),
        lambda: checkpoint.export("runs", folder),
        lambda: commgrid.recover(folder, model),
    ):
        with pytest.raises(commgrid.CommGridError, match=r"is none that is mounted here.*fsspec"):
            action()
    commgrid.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("name", ["a:b", "2026-11-28T10:00:00", "c:", "lr=1e-3"])
def test_a_colon_in_a_folders_name_is_right(name: str, tmp_path: Path) -> None:
    commgrid.initialize()
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / name, 1, model, progress=False)
    checkpoint.load(tmp_path / name, model, progress=False)
    commgrid.shutdown()
