"""Saves and loads that are refused: an error on every rank, and nothing is partly written."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.parameters import mark_parameters
from commgrid.tensor_parallel import ColumnParallelLinear
from commgrid.testing import run_on_ranks
from tests.checkpoint.models import HIDDEN, Stage, fill, made


def raised(action: Any, *given: Any, **options: Any) -> str:
    """Return the error of an action that must fail, with its type."""
    with pytest.raises((commgrid.CommGridError, ValueError)) as error:
        action(*given, **options)
    return f"{type(error.value).__name__}: {error.value}"


def trained(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = made()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.arange(8).view(2, 4)).backward()
    optimizer.step()
    return model, optimizer


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of all that loading could change."""
    state = [one for entries in optimizer.state.values() for one in entries.values()]
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups])
    return [tensor.clone() for tensor in [*model.state_dict().values(), *state, rates]]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def loads(folder: str, *damages: str) -> dict[str, str]:
    """Damages a checkpoint in each way on one rank, and tries to load it on all."""
    grid = commgrid.initialize(tp=2)
    whole = Path(folder) / "whole"
    model, optimizer = trained()
    checkpoint.save(whole, 5, model, optimizer, progress=False)
    fill(model, 1.5)
    before, told = snapshot(model, optimizer), {}
    for damage in damages:
        broken = Path(folder) / damage
        if grid.rank == 0:
            shutil.copytree(whole, broken)
            inside = broken / "step_00000005"
            file = inside / "__1_0.distcp"
            data = file.read_bytes()
            if damage == "truncated":
                file.write_bytes(data[: len(data) // 2])
            elif damage == "missing":
                file.unlink()
            elif damage == "flipped":  # a byte in the middle of every kilobyte
                flipped = bytearray(data)
                for place in range(512, len(data), 1024):
                    flipped[place] ^= 0x55
                file.write_bytes(flipped)
            elif damage == "no metadata":
                (inside / ".metadata").unlink()
            elif damage == "metadata":
                (inside / ".metadata").write_bytes(b"not a pickle")
            elif damage == "only a rest":
                inside.rename(broken / ".step_00000005.partial")
        torch.distributed.barrier()
        told[damage] = raised(checkpoint.load, broken, model, optimizer, progress=False)
        assert same(snapshot(model, optimizer), before), damage
    checkpoint.load(whole, model, optimizer, progress=False)
    assert not same(snapshot(model, optimizer), before)
    commgrid.shutdown()
    return told


DAMAGES = {
    "truncated": "half a checkpoint: .*__1_0.distcp has [0-9,]+ of [0-9,]+ bytes",
    "missing": "half a checkpoint: .*__1_0.distcp is missing",
    "flipped": "step_00000005: .* is damaged: the checksum of .*; load an earlier step",
    "no metadata": "no .metadata, which is written last",
    "metadata": ".metadata cannot be read",
    "only a rest": "no complete checkpoint .only what a crash while saving has left",
}


def test_half_a_checkpoint_loads_nothing(tmp_path: Path) -> None:
    told = run_on_ranks(loads, 4, str(tmp_path), *DAMAGES, backend=None, launcher="torchrun")
    for damage, pattern in DAMAGES.items():
        for text in (found[damage] for found in told):
            assert text.startswith("CheckpointError: nothing was loaded"), text
            with pytest.raises(AssertionError, match=pattern):
                raise AssertionError(text)


class Other(nn.Module):
    """A part of the model that was saved, or more than that."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def other_models(folder: str) -> dict[str, str]:
    commgrid.initialize(tp=2)
    saved = Other(one=ColumnParallelLinear(HIDDEN, 4), two=nn.Linear(3, 2))
    checkpoint.save(folder, 1, saved, torch.optim.AdamW(saved.parameters()), progress=False)
    one, two = ColumnParallelLinear(HIDDEN, 4), nn.Linear(3, 2)
    told = {
        "less": raised(checkpoint.load, folder, Other(one=one), progress=False),
        "three": raised(
            checkpoint.load, folder, Other(one=one, two=two, three=nn.Linear(1, 1)), progress=False
        ),
        "shape": raised(
            checkpoint.load, folder, Other(one=ColumnParallelLinear(HIDDEN, 8), two=two),
            progress=False,
        ),
        "no step": raised(checkpoint.load, folder, saved, step=2, progress=False),
        "sgd": raised(
            checkpoint.load, folder, saved, torch.optim.SGD(saved.parameters(), lr=1.0),
            progress=False,
        ),
        "strangers": raised(
            checkpoint.load, folder, saved, torch.optim.AdamW(nn.Linear(1, 1).parameters()),
            progress=False,
        ),
    }  # fmt: skip
    two_rates = [
        {"params": list(saved.one.parameters())},
        {"params": list(saved.two.parameters()), "lr": 0.5},
    ]
    checkpoint.save(folder, 2, saved, torch.optim.AdamW(two_rates), progress=False)
    told["grouped"] = raised(
        checkpoint.load, folder, saved, torch.optim.AdamW(saved.parameters()), progress=False
    )
    checkpoint.save(folder, 3, saved, progress=False)
    told["alone"] = raised(
        checkpoint.load, folder, saved, torch.optim.AdamW(saved.parameters()), progress=False
    )
    # A second name of one tensor is not counted twice.
    checkpoint.load(folder, Other(one=one, two=two, three=two), step=1, progress=False)
    commgrid.shutdown()
    return told


OTHERS = {
    "less": "of another model: it also has model.two.weight, model.two.bias, which no rank has",
    "three": "of another model: it has no model.three.weight, model.three.bias",
    "shape": "of another model, whose shapes differ: model.one.weight is (4, 8), here (8, 8)",
    "no step": "has no checkpoint of step 2; it has 1",
    "sgd": "but SGD needs dampening, differentiable, foreach, fused, lr, maximize, momentum",
    "strangers": "the optimizer updates a parameter of shape (1, 1) that the model does not have",
    "grouped": "its optimizer has lr=0.001 for one.weight and 0.5 for two.weight",
    "alone": "it has no optimizer state; load the model alone, or save with optimizer=",
}


def test_another_model_or_optimizer(tmp_path: Path) -> None:
    for told in run_on_ranks(other_models, 2, str(tmp_path), backend=None, launcher="torchrun"):
        for case, text in OTHERS.items():
            assert text in told[case], case


class Slow:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("a socket cannot be pickled")


def saves(folder: str) -> dict[str, str]:
    grid = commgrid.initialize(pp=2, tp=2)
    stage = grid.get_local_rank("pp")
    told = {}
    good = Stage(f"layer{stage}")
    checkpoint.save(folder, 1, good, progress=False)
    told["one name"] = raised(checkpoint.save, folder, 2, Stage("layer"), progress=False)
    told["chunks"] = raised(
        checkpoint.save, folder, 2, [Stage("layer"), Stage("layer")], progress=False
    )
    extra = {"pipe": Slow()} if grid.rank == 0 else {}
    told["pickle"] = raised(checkpoint.save, folder, 2, good, extra=extra, progress=False)
    bare = Other(one=ColumnParallelLinear(HIDDEN, 4, group=grid.get_group("tp")))
    told["extra"] = raised(checkpoint.save, folder, 2, good, extra={1: 2}, progress=False)
    told["bare"] = raised(checkpoint.save, folder, 2, bare, progress=False)
    told["step"] = raised(checkpoint.save, folder, -1, good, progress=False)
    told["keep"] = raised(checkpoint.save, folder, 2, good, keep=0, progress=False)
    lbfgs = torch.optim.LBFGS(good.parameters())
    lbfgs.state[next(good.parameters())] = {"d": torch.zeros(3)}  # as a step would leave it
    told["lbfgs"] = raised(checkpoint.save, folder, 2, good, lbfgs, progress=False)
    told["a model"] = raised(checkpoint.save, folder, 2, good.state_dict(), progress=False)
    told["an optimizer"] = raised(checkpoint.save, folder, 2, good, [good], progress=False)
    told["file"] = raised(
        checkpoint.save, Path(folder) / "step_00000001" / ".metadata", 2, good, progress=False
    )
    assert checkpoint.steps(folder) == [1]
    assert [path.name for path in Path(folder).iterdir()] == ["step_00000001"]
    checkpoint.load(folder, good, progress=False)
    commgrid.shutdown()
    return told


SAVES = {
    "one name": "ranks 0 and 2 each have a model.layer.q_weight of their own",
    "chunks": "two chunks have different parameters named 'layer.q_weight'",
    "pickle": "step 2 was not saved to {folder}: rank 0: TypeError: a socket cannot be pickled",
    "extra": "expected names as keys",
    "bare": "which was not given as a name of grid 'default'; give the layer the group's name",
    "step": "step=-1: expected a whole number from 0",
    "keep": "keep=0: expected a whole number from 1",
    "lbfgs": "the optimizer's 'd' of shape",
    "a model": "expected a module, or a list of a stage's chunks",
    "an optimizer": "expected one of torch.optim",
    "file": "step 2 was not saved",
}


def test_what_cannot_be_saved_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "runs")
    for told in run_on_ranks(saves, 4, folder, backend=None, launcher="torchrun"):
        for case, text in SAVES.items():
            assert text.format(folder=folder) in told[case], (case, told[case])


def different_calls(folder: str) -> list[str]:
    grid = commgrid.initialize(dp=2)
    model, optimizer = trained()
    mine = optimizer if grid.rank == 0 else None
    told = [
        raised(checkpoint.save, folder, 1, model, mine, progress=False),
        raised(checkpoint.save, folder, 1 + grid.rank, model, progress=False),
    ]
    checkpoint.save(folder, 3, model, optimizer, progress=False)
    told.append(raised(checkpoint.load, folder, model, mine, progress=False))
    commgrid.shutdown()
    return told


def test_ranks_that_call_for_different_things(tmp_path: Path) -> None:
    for told in run_on_ranks(different_calls, 2, str(tmp_path), backend=None, launcher="torchrun"):
        no_state, other_step, not_loaded = told
        assert "optimizer=AdamW on the grid's rank 0, and optimizer=None on its rank 1" in no_state
        assert "step=1 on the grid's rank 0, and step=2 on its rank 1" in other_step
        assert "nothing was loaded: rank 0: optimizer=AdamW" in not_loaded


def few_groups(folder: str) -> str:
    commgrid.initialize(tp=2, dp=2, create=["tp", "dp"])
    told = raised(checkpoint.save, folder, 1, nn.Linear(2, 2), progress=False)
    commgrid.shutdown()
    return told


def experts_without_numbers(folder: str) -> str:
    commgrid.initialize(ep=2)
    local = mark_parameters(nn.Linear(2, 2), region="expert")
    told = raised(checkpoint.save, folder, 1, local, progress=False)
    commgrid.shutdown()
    return told


def test_groups_and_names_that_a_checkpoint_needs(tmp_path: Path) -> None:
    for told in run_on_ranks(few_groups, 4, str(tmp_path), backend=None, launcher="torchrun"):
        assert "meet in the group of all of them, 'dp_tp'; leave create= out" in told
    for told in run_on_ranks(
        experts_without_numbers, 2, str(tmp_path), backend=None, launcher="torchrun"
    ):
        assert "weight is marked as of the expert region" in told
        assert "but not as sliced over ep, so that all have one name" in told


def marked(folder: str) -> list[int]:
    """The same name on both stages is right for copies that are marked as such."""
    grid = commgrid.initialize(pp=2, groups={"ends": {"of": "pp", "pick": ["first", "last"]}})
    both = mark_parameters(nn.Linear(2, 2), shared="ends")
    model = Other(both=both, **{f"own{grid.get_local_rank('pp')}": nn.Linear(2, 2)})
    reducer = GradientReducer(model)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW)
    checkpoint.save(folder, 1, model, optimizer, progress=False)
    checkpoint.load(folder, model, optimizer, progress=False)
    commgrid.shutdown()
    return checkpoint.steps(folder)


def test_copies_on_stages_are_one_parameter(tmp_path: Path) -> None:
    assert run_on_ranks(marked, 2, str(tmp_path), backend=None, launcher="torchrun") == [[1], [1]]


HALVES = {
    "metadata is missing": "step_00000060 has no .metadata, which is written last",
    "metadata ends early": "step_00000060/.metadata cannot be read: ",
    "file is missing": "step_00000060/__1_0.distcp is missing",
    "file ends early": "step_00000060/__1_0.distcp has ",
}


def steps_half_copied(folder: str, how: str) -> dict[str, Any]:
    """Step 40 is whole, and a copy of step 60 ended before its last file."""
    grid = commgrid.initialize()
    model, found = nn.Linear(2, 2), {}
    for step in (20, 40):
        with torch.no_grad():
            model.weight.fill_(step)
            model.bias.fill_(step)
        checkpoint.save(folder, step, model, progress=False)
    if grid.rank == 0:
        half = Path(folder, "step_00000060")
        shutil.copytree(Path(folder, "step_00000040"), half)
        file = half / (".metadata" if how.startswith("metadata") else "__1_0.distcp")
        if how.endswith("missing"):
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-9])
    torch.distributed.barrier()

    def told(action: Any) -> tuple[Any, list[str]]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            given = action()
        texts = [str(one.message) for one in seen]
        assert all(HALVES[how] in text for text in texts if "later steps" not in text), texts
        return given, texts

    found["steps"], warned = told(lambda: checkpoint.steps(folder))
    assert len(warned) == 1
    restored, warned = told(lambda: checkpoint.load(folder, model, progress=False))
    assert len(warned) == (grid.rank == 0), warned
    recovered, warned = told(lambda: commgrid.recover(folder, model, progress=False))
    assert len(warned) == (grid.rank == 0), warned
    found["loaded"] = restored.step, recovered.step
    with pytest.raises(commgrid.CheckpointError) as error:
        checkpoint.load(folder, model, step=60, progress=False)
    found["half"] = str(error.value)
    told(lambda: checkpoint.save(folder, 50, model, keep=2, progress=False))
    found["there"] = Path(folder, "step_00000060").is_dir()  # it may become whole
    found["kept"], _ = told(lambda: checkpoint.steps(folder))
    checkpoint.save(folder, 60, model, keep=2, progress=False)
    found["after"] = checkpoint.steps(folder)
    commgrid.shutdown()
    return found


@pytest.mark.parametrize("how", HALVES)
@pytest.mark.full("metadata ends early", "file ends early")
def test_a_step_that_was_copied_in_part_does_not_count(how: str, tmp_path: Path) -> None:
    for found in run_on_ranks(steps_half_copied, 2, str(tmp_path), how):
        half = found.pop("half")
        assert "half a checkpoint: " in half or HALVES[how] in half
        assert found == {
            "steps": [20, 40], "loaded": (40, 40), "kept": [40, 50], "after": [50, 60],
            "there": True,
        }  # fmt: skip


def keeps_beside_halves(folder: str) -> list[int]:
    """The steps left by a save that keeps two, where the one before is short of a file."""
    commgrid.initialize()
    model = nn.Linear(2, 2)
    for step in (20, 40, 60):
        checkpoint.save(folder, step, model, progress=False)
    Path(folder, "step_00000060", "__0_0.distcp").unlink()
    checkpoint.save(folder, 80, model, keep=2, progress=False)
    commgrid.shutdown()
    return checkpoint.steps(folder)


def test_a_half_does_not_count_as_kept(tmp_path: Path) -> None:
    assert run_on_ranks(keeps_beside_halves, 1, str(tmp_path)) == [[40, 80]]
