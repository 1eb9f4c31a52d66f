"""A checkpoint is data: loading one runs no code of its author."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

import commgrid
from commgrid import CheckpointError, checkpoint
from commgrid.testing import run_on_ranks


class Runs:
    """Unpickled, it makes a folder: what it would do if it ran."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._mark,)


def plant(folder: Path, where: str, mark: Path) -> None:
    """Puts it into a checkpoint, in place of something that is there."""
    inside = folder / "step_00000003"
    path = inside / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    if where == ".metadata":
        metadata.planner_data = Runs(mark)
    else:
        found = next(i for i in metadata.storage_data if i.fqn == where)
        place = metadata.storage_data[found]
        file = inside / place.relative_path
        evil = io.BytesIO()
        torch.save(Runs(mark), evil)
        start, data = file.stat().st_size, evil.getvalue()
        file.write_bytes(file.read_bytes() + data)
        place.offset, place.length = start, len(data)
    path.write_bytes(pickle.dumps(metadata))


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def refused(folder: str, where: str) -> str:
    """The error of every rank, with nothing loaded and no code run."""
    grid = commgrid.initialize()
    model, optimizer = parts()
    checkpoint.save(folder, 3, model, optimizer, extra={"tokens": 7}, progress=False)
    mark = Path(folder) / "it ran"
    if grid.rank == 0:
        plant(Path(folder), where, mark)
    dist.barrier()
    with torch.no_grad():
        model.weight.fill_(5.0)
    with pytest.raises(CheckpointError) as told:
        checkpoint.load(folder, model, optimizer, progress=False)
    assert not mark.exists()
    assert bool((model.weight == 5.0).all())
    commgrid.shutdown()
    return str(told.value)


WHERE = {
    ".metadata": r"it names posix\.mkdir, which is nothing that a checkpoint's metadata",
    "optimizer.param_groups.weight.lr": r"optimizer\.param_groups\.weight\.lr is more than",
    "model.weight": r"model\.weight holds no tensor, but a pickle",
}


@pytest.mark.parametrize("where", WHERE)
def test_a_pickle_that_would_run_code_is_refused_by_its_key(where: str, tmp_path: Path) -> None:
    for told in run_on_ranks(refused, 2, str(tmp_path), where, backend=None, launcher="torchrun"):
        assert told.startswith("nothing was loaded"), told
        with pytest.raises(AssertionError, match=WHERE[where]):
            raise AssertionError(told)


@dataclass
class Clock:
    """A type of the job's own."""

    hours: float


PLAIN: dict[str, Any] = {
    "none": None, "flag": True, "count": 81_920, "rate": 3e-4, "name": "gelu", "raw": b"\x00\xff",
    "betas": (0.9, 0.95), "list": [1, [2.0, "three"]], "dict": {"a": {"b": 1}},
    "ordered": OrderedDict(a=1), "shape": torch.Size((2, 3)), "dtype": torch.bfloat16,
    "tensor": torch.arange(3.0), "set": {1, 2},
}  # fmt: skip


@pytest.fixture
def grid() -> Any:
    yield commgrid.initialize()
    commgrid.shutdown()


def test_plain_values_load_as_they_are(grid: Any, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, nn.Linear(2, 1), extra=PLAIN, progress=False)
    found = checkpoint.load(tmp_path, nn.Linear(2, 1), progress=False).extra
    assert torch.equal(found.pop("tensor"), PLAIN["tensor"])
    assert found == {key: value for key, value in PLAIN.items() if key != "tensor"}


def test_other_types_load_where_they_are_trusted_or_known_to_torch(
    grid: Any, tmp_path: Path
) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    extra = {"clock": Clock(3.5), "tokens": 7}
    with pytest.warns(
        UserWarning, match=r"leave out what is saved here: extra\.clock is .*Clock.*trusted=True"
    ):
        checkpoint.save(tmp_path, 1, model, extra=extra, progress=False)
    with pytest.warns(UserWarning, match=r"weights are loaded, without extra\.clock is more than"):
        untrusted = checkpoint.load(tmp_path, other, progress=False)
    assert untrusted.extra == {"tokens": 7}
    assert torch.equal(other.weight, model.weight)
    trusted = checkpoint.load(tmp_path, nn.Linear(2, 1), trusted=True, progress=False)
    assert trusted.extra == extra
    with torch.serialization.safe_globals([Clock]):
        known = checkpoint.load(tmp_path, nn.Linear(2, 1), progress=False)
    assert known.extra == extra


def planted_extra(folder: str) -> tuple[bool, dict[str, Any], bool]:
    """Whether the weights are there, the other extras, and whether the code has run."""
    grid = commgrid.initialize()
    model, _ = parts()
    checkpoint.save(folder, 3, model, extra={"tokens": 7, "epoch": 1}, progress=False)
    mark = Path(folder) / "it ran"
    if grid.rank == 0:
        plant(Path(folder), "extra.tokens", mark)
    dist.barrier()
    right = model.weight.clone()
    with torch.no_grad():
        model.weight.fill_(5.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = checkpoint.load(folder, model, progress=False)
    told = [str(one.message) for one in seen if "extra.tokens" in str(one.message)]
    assert len(told) == (grid.rank == 0), told
    commgrid.shutdown()
    return torch.equal(model.weight, right), found.extra, mark.exists()


def test_weights_load_without_an_extra_that_would_run_code(tmp_path: Path) -> None:
    assert run_on_ranks(planted_extra, 2, str(tmp_path)) == [(True, {"epoch": 1}, False)] * 2


def test_one_object_as_an_option_and_as_the_jobs_is_refused_as_the_option(
    grid: Any, tmp_path: Path
) -> None:
    """Weights load without an extra, and an optimizer not without an option."""
    model, optimizer = parts()
    optimizer.param_groups[0]["clock"] = optimizer.defaults["clock"] = clock = Clock(1.0)
    with pytest.warns(UserWarning, match=r"extra\.clock"):
        checkpoint.save(tmp_path, 3, model, optimizer, extra={"clock": clock}, progress=False)
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\..*\.clock is more than"):
        checkpoint.load(tmp_path, model, optimizer, progress=False)
    assert optimizer.param_groups[0]["clock"] is clock
    with pytest.warns(UserWarning, match="without extra"):
        assert checkpoint.load(tmp_path, model, progress=False).extra == {}


def test_an_option_at_the_place_of_an_extra_is_refused_as_the_option(
    grid: Any, tmp_path: Path
) -> None:
    model, optimizer = parts()
    with pytest.warns(UserWarning, match=r"extra\.clock"):
        checkpoint.save(tmp_path, 3, model, optimizer, extra={"clock": Clock(1.0)}, progress=False)
    path = tmp_path / "step_00000003" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    places = {index.fqn: index for index in metadata.storage_data}
    for key in [key for key in places if key.endswith(".lr")]:
        metadata.storage_data[places[key]] = metadata.storage_data[places["extra.clock"]]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"is more than tensors and plain values"):
        checkpoint.load(tmp_path, model, optimizer, progress=False)
    assert optimizer.param_groups[0]["lr"] == parts()[1].param_groups[0]["lr"]


def test_values_that_are_one_object_load_as_several(grid: Any, tmp_path: Path) -> None:
    model, both = parts()[0], [1, 2]
    checkpoint.save(tmp_path, 3, model, extra={"one": both, "other": both}, progress=False)
    found = checkpoint.load(tmp_path, model, progress=False).extra
    assert found["one"] == found["other"] == both
    assert found["one"] is not found["other"]


def test_numpys_numbers_are_saved_as_pythons(grid: Any, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    extra = {"best": numpy.float64(0.5), "seen": [numpy.int32(3), {"on": numpy.bool_(True)}]}
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=numpy.float32(0.25))
    own = {"at": (numpy.int64(5),)}
    checkpoint.save(tmp_path, 1, model, optimizer, extra=extra, extra_per_rank=own,
                    progress=False)  # fmt: skip
    found = checkpoint.load(tmp_path, model, optimizer, progress=False)
    assert found.extra == {"best": 0.5, "seen": [3, {"on": True}]}
    assert type(found.extra["best"]) is float
    assert found.extra_per_rank == [{"at": (5,)}]
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("value", [Fraction(1, 2), [Clock(1.0)]], ids=["fraction", "own"])
@pytest.mark.parametrize("what", ["extra", "extra_per_rank"])
def test_a_save_says_what_a_load_will_leave_out(
    what: str, value: Any, grid: Any, tmp_path: Path
) -> None:
    model = nn.Linear(2, 1)
    with pytest.warns(UserWarning, match=rf"load will leave out what is saved here: {what}\."):
        checkpoint.save(tmp_path, 1, model, **{what: {"given": value}}, progress=False)
    with pytest.warns(UserWarning, match="the weights are loaded, without"):
        found = checkpoint.load(tmp_path, model, progress=False)
    assert (found.extra, found.extra_per_rank) == ({}, [])


def test_metadata_that_is_something_else(grid: Any, tmp_path: Path) -> None:
    inside = checkpoint.save(tmp_path, 1, nn.Linear(2, 1), progress=False)
    (inside / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="it holds a dict, no metadata"):
        checkpoint.load(tmp_path, nn.Linear(2, 1), progress=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_all_that_torch_writes_is_known(tmp_path: Path) -> None:
    """All dtypes and layouts of torch's own checkpoints."""
    from commgrid.checkpoint.trust import read_metadata

    dtypes = [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn]
    given: dict[str, Any] = {str(each): torch.zeros(2, 2, dtype=each) for each in dtypes}
    last = torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last)
    given |= {"last": last, "nested": OrderedDict(a=[torch.zeros(1), {"b": 2}]), "path": tmp_path}
    dcp.save(given, checkpoint_id=tmp_path / "d", no_dist=True)
    metadata = read_metadata(tmp_path / "d" / ".metadata", trusted=False)
    assert MetadataIndex("last", torch.Size((0, 0, 0, 0)), 0) in metadata.storage_data
