"""Loads of a part, under other names, and odd arguments of saves: right, or an error that fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.swa_utils import AveragedModel

import commgrid
from commgrid import checkpoint
from commgrid.equality.digest import digest
from commgrid.errors import CheckpointError, SpecError
from commgrid.replicas import Copy, differing
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer


@pytest.fixture
def grid() -> Iterator[Any]:
    yield commgrid.initialize()
    commgrid.shutdown()


class Counting(nn.Linear):
    """A layer with extra state."""

    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def load(folder: Path, model: nn.Module, *given: Any, **options: Any) -> checkpoint.Restored:
    return checkpoint.load(folder, model, *given, progress=False, **options)


def save(folder: Path, step: Any, model: nn.Module, *given: Any, **options: Any) -> Path:
    return checkpoint.save(folder, step, model, *given, progress=False, **options)


def test_extra_state_that_is_not_there_stays(grid: Any, tmp_path: Path) -> None:
    plain, counting = nn.Linear(2, 2), Counting(2, 2)
    save(tmp_path, 1, plain)
    counting.count = 7
    restored = load(tmp_path, counting, strict=False)
    assert (restored.missing, counting.count) == (("_extra_state",), 7)
    assert torch.equal(counting.weight, plain.weight)


def test_an_optimizer_of_fewer_parameters_is_another_optimizer(grid: Any, tmp_path: Path) -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    save(tmp_path, 1, model, torch.optim.AdamW(model.parameters()))
    head = torch.optim.AdamW(model["head"].parameters())
    with pytest.raises(CheckpointError, match="of another optimizer: it also has") as told:
        load(tmp_path, model, head)
    assert "strict=False leaves it alone" in str(told.value)
    load(tmp_path, model, head, strict=False)


@pytest.mark.parametrize("step", ["20", 1.0, -1], ids=str)
def test_a_step_is_a_whole_number(step: Any, grid: Any, tmp_path: Path) -> None:
    save(tmp_path, 20, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=re.escape(f"step={step!r}: expected a whole number")):
        load(tmp_path, nn.Linear(2, 2), step=step)


def test_a_step_may_be_numpys(grid: Any, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    save(tmp_path, numpy.int64(20), nn.Linear(2, 2)).rename(tmp_path / "best")
    assert load(tmp_path / "best", nn.Linear(2, 2)).step == 20


def test_names_of_optimizer_state_that_is_left_alone(grid: Any, tmp_path: Path) -> None:
    """A table of the model's names has none for numbers, by which torch's state goes."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp")
    other = nn.ModuleDict({"new": nn.Linear(2, 2)})
    names = {"weight": "new.weight", "bias": "new.bias"}
    load(tmp_path / "dcp", other, rename=names.__getitem__)
    assert torch.equal(other["new"].weight, model.weight)


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        (lambda name: None, "rename= leaves out all of its names, such as model.weight"),
        ({"weight": 3}, "rename['weight'] is 3: expected a name, or None"),
        (lambda name: 3, "rename('weight') returned 3: expected a name, or None"),
    ],
)
def test_a_rename_that_gives_no_names(rename: Any, told: str, grid: Any, tmp_path: Path) -> None:
    save(tmp_path, 1, nn.Linear(2, 2, bias=False))
    with pytest.raises((CheckpointError, SpecError), match=re.escape(told)):
        load(tmp_path, nn.Linear(2, 2, bias=False), rename=rename)


def test_progress_in_the_background_goes_to_the_callable_alone(
    grid: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard: list[tuple[int, int]] = []
    hear: Callable[[int, int], object] = lambda done, total: heard.append((done, total))  # noqa: E731
    checkpoint.save(tmp_path, 1, nn.Linear(2, 2), background=True, progress=hear)
    checkpoint.wait()
    assert heard
    assert heard[-1][0] == heard[-1][1] > 0
    assert "saved" not in capfd.readouterr().err


def test_options_of_a_scheduler_are_no_other_optimizers(grid: Any, tmp_path: Path) -> None:
    """Also where the checkpoint's torch had an option less."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    save(tmp_path, 1, model, optimizer)
    load(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_a_digest_of_a_conjugate_is_of_its_numbers() -> None:
    x = torch.complex(torch.randn(4), torch.randn(4))
    assert digest(x.conj()) == digest(x.conj().resolve_conj())
    assert digest(x.conj()) != digest(x)


def shapes_that_differ() -> list[str | None]:
    grid = commgrid.initialize()
    group = grid.get_group("dp")
    x = torch.tensor([1.0, 2.0])
    more = torch.cat([x, torch.zeros(2)]) if grid.rank else x  # of equal digests
    other = x.view(torch.int32) if grid.rank else x
    found = [differing([Copy("x", each, (group,))]) for each in (x, more, other)]
    commgrid.shutdown()
    return found


def test_tensors_of_other_shapes_or_types_are_no_copies() -> None:
    told = "x differs between rank 0 and rank 1 of group 'dp'"
    assert run_on_ranks(shapes_that_differ, 2) == [[None, told, told]] * 2


def averaged() -> AveragedModel:
    """An average of models, which is in a module of its own."""
    torch.manual_seed(0)
    average = AveragedModel(nn.Sequential(nn.Linear(2, 2)))
    for _ in range(2):
        average.update_parameters(nn.Sequential(nn.Linear(2, 2)))
    return average


@pytest.mark.parametrize(
    "how", [{"prefix": "model.module."}, {"rename": lambda name: name.removeprefix("module.")}]
)
def test_an_average_goes_into_the_plain_model(how: Any, grid: Any, tmp_path: Path) -> None:
    average, plain = averaged(), nn.Sequential(nn.Linear(2, 2))
    save(tmp_path, 1, average)
    load(tmp_path, plain, **how)
    assert torch.equal(plain[0].weight, average.module[0].weight)
    again = averaged()
    again.n_averaged.fill_(7)
    load(tmp_path, again)  # which counts on
    assert int(again.n_averaged) == 2


def test_an_average_is_transferred_to_the_plain_model(grid: Any) -> None:
    average, plain = averaged(), nn.Sequential(nn.Linear(2, 2))
    sides = {"source_grid": grid, "target_grid": grid, "timeout": 60}
    Transfer(average, plain, **sides, rename=lambda name: name.removeprefix("module.")).run()
    assert torch.equal(plain[0].weight, average.module[0].weight)
    average.register_buffer("scale", torch.ones(()))
    with pytest.raises(commgrid.TransferError, match=r"scale on rank 0 of the source is on no"):
        Transfer(average, plain, **sides, rename=lambda name: name.removeprefix("module.")).run()


def test_one_of_two_models_is_named_by_its_prefix(grid: Any, tmp_path: Path) -> None:
    """A file with a model and its average, under names that are alike without prefix."""
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    dcp.save({"model": model.state_dict(), "ema": average.state_dict()}, checkpoint_id=tmp_path)
    for prefix, right in (("ema.", average), ("model.", model)):
        loaded = nn.Linear(2, 2)
        load(tmp_path, loaded, prefix=prefix)
        assert torch.equal(loaded.weight, right.weight), prefix
    with pytest.raises(CheckpointError, match=r"of another model: it also has model.bias"):
        load(tmp_path, nn.Linear(2, 2, bias=False), prefix="ema.")
