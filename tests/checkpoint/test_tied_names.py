"""Tied weights with several names: every copy gets the numbers, which a file has once or twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import commgrid
from commgrid import checkpoint
from commgrid.parameters import mark_parameters
from commgrid.resharding.naming import ties_of
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
@pytest.mark.parametrize(
    "rename", [BOTH, {"embed.weight": "tokens.weight"}, {"embed.weight": "head.weight"}]
)
def test_one_stored_name_fills_all_names_of_a_tied_weight(
    rename: Any, strict: bool, tmp_path: Path
) -> None:
    assert run_on_ranks(loads_tied, 2, str(tmp_path), rename, strict) == [()] * 2


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


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer after a step; equal weights get equal state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def built(grid: Any, tied: bool = True) -> nn.Module:
    """A stage, or all in one process, with numbers by shape."""
    if grid.size("pp") > 1:
        model = stage_of(grid, marked=tied)
    else:
        sizes = {"tokens": 4, "layer0": 2, "layer1": 2, "head": 4}
        model = nn.ModuleDict({key: nn.Linear(n, n, bias=False) for key, n in sizes.items()})
        if tied:
            model["head"].weight = model["tokens"].weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter))
    return model


def numbers(model: nn.Module, optimizer: Any) -> list[Any]:
    """Every parameter by all of its names, with its moment."""
    named = model.named_parameters(remove_duplicate=False)
    return [(name, p.tolist(), optimizer.state[p]["exp_avg"].tolist()) for name, p in named]


def brought(folder: str, stages: int, way: str) -> Any:
    grid = commgrid.initialize(pp=stages, groups=ENDS if stages > 1 else None)
    model = built(grid)
    optimizer = trained(model)
    right = numbers(model, optimizer)
    if way == "keep":
        checkpoint.keep(1, model, optimizer)
    elif way in ("save", "background", "first"):
        options: Any = {"background": way == "background"} if way != "first" else {"copies": way}
        checkpoint.save(folder, 1, model, optimizer, progress=False, **options)
    fresh = built(grid)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    other = torch.optim.AdamW(fresh.parameters())
    if way == "keep":
        commgrid.recover(None, fresh, other)
    else:
        checkpoint.wait()
        checkpoint.load(folder, fresh, other, progress=False)
    same = numbers(fresh, other) == right
    commgrid.shutdown()
    return same


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 2), pytest.param(2, 1, marks=pytest.mark.full), (1, 2)],
)
def test_two_names_on_two_stages_are_saved_and_loaded(
    before: int, after: int, tmp_path: Path
) -> None:
    assert run_on_ranks(brought, before, str(tmp_path), before, "save") == [True] * before
    if after != before:
        assert run_on_ranks(brought, after, str(tmp_path), after, "load") == [True] * after


@pytest.mark.full
@pytest.mark.parametrize("way", ["background", "first", "keep"])
def test_every_way_of_saving_has_both_names(way: str, tmp_path: Path) -> None:
    assert run_on_ranks(brought, 2, str(tmp_path), 2, way) == [True] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_both_names_and_the_numbers_are_there_once(tmp_path: Path) -> None:
    assert run_on_ranks(brought, 2, str(tmp_path), 2, "save") == [True] * 2
    found = {f"{name}.weight": torch.zeros(4, 4) for name in ("tokens", "head")}
    (folder,) = tmp_path.iterdir()
    dcp.load({"model": found}, checkpoint_id=folder, no_dist=True)
    assert torch.equal(found["tokens.weight"], found["head.weight"])
    assert found["head.weight"].any()
    stored = FileSystemReader(folder).read_metadata().storage_data
    places = {key: set() for key in ("model.tokens.weight", "model.head.weight")}
    for index, info in stored.items():
        if index.fqn in places:
            places[index.fqn].add((info.relative_path, info.offset))
    assert len(places["model.head.weight"]) == 1
    assert places["model.tokens.weight"] == places["model.head.weight"]


def untied(folder: str, tied: bool) -> Any:
    """Two weights of other numbers, loaded into one, or into two."""
    grid = commgrid.initialize(pp=2, groups=ENDS)
    model = built(grid, tied=False)
    if grid.rank == 1:
        with torch.no_grad():
            model.get_parameter("head.weight").neg_()
    checkpoint.save(folder, 1, model, progress=False)
    fresh = built(grid, tied=tied)
    told = ""
    try:
        checkpoint.load(folder, fresh, progress=False)
        assert all(map(torch.equal, fresh.parameters(), model.parameters()))
    except commgrid.CommGridError as error:
        told = str(error)
    commgrid.shutdown()
    return told


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_two_weights_do_not_become_one(tied: bool, tmp_path: Path) -> None:
    for told in run_on_ranks(untied, 2, str(tmp_path), tied):
        assert ("are one weight of this model, and differ in the checkpoint" in told) == tied, told
        assert bool(told) == tied


def test_copies_of_the_same_names_are_no_twins_in_any_order() -> None:
    key, names = ((0, 1), (4, 4)), ["a.weight", "b.weight"]
    assert ties_of([{key: names}, {key: names[::-1]}]) == []
    assert ties_of([{key: names}, {key: ["b.weight", "c.weight"]}]) == [{"a.weight", "c.weight"}]


def test_names_that_are_none_are_refused(tmp_path: Path) -> None:
    commgrid.initialize()
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, 1, model, progress=False)
    for given in ({"weight": 3}, {"weight": ["a", 3]}, len):
        with pytest.raises(commgrid.CommGridError, match="expected a name, or None"):
            checkpoint.load(tmp_path, model, rename=given, progress=False)  # type: ignore[arg-type]
    commgrid.shutdown()


# -- folders that are none -----------------------------------------------------------------


@pytest.mark.parametrize("folder", ["of-no-package://bucket/run", Path("of-none://bucket/run")])
def test_a_url_of_no_package_is_no_folder(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commgrid.initialize()
    model = nn.Linear(2, 2)
    checkpoint.save("runs", 1, model, progress=False)
    for action in (
        lambda: checkpoint.save(folder, 1, model, progress=False),
        lambda: checkpoint.save(folder, 1, model, progress=False, background=True),
        lambda: checkpoint.load(folder, model, progress=False),
        lambda: checkpoint.steps(folder),
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
