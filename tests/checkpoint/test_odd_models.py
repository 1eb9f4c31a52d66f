"""Models and optimizers that are not as one would think, each once lost or mixed up."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid import checkpoint
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.parameters import mark_parameters
from commgrid.testing import run_on_ranks
from tests.checkpoint.models import HIDDEN, batch, differences, fill, made


def raised(action: Any, *given: Any, **options: Any) -> str:
    with pytest.raises(commgrid.CommGridError) as error:
        action(*given, **options, progress=False)
    return str(error.value)


def wrapped(folder: str) -> dict[str, bool]:
    """Activation checkpointing, torch.compile and DDP put something into the names."""
    grid = commgrid.initialize(tp=2, dp=-1)
    found = {}
    plain = made()
    fill(plain, 0.5)
    checkpoint.save(folder, 1, plain, progress=False)
    checked = made()
    checked.blocks[1] = checkpoint_wrapper(checked.blocks[1])
    compiled = torch.compile(made())
    replicated = DistributedDataParallel(made(), process_group=grid.get_group("dp"))
    for name, model in {"ac": checked, "compile": compiled, "ddp": replicated}.items():
        checkpoint.load(folder, model, progress=False)
        inner = getattr(model, "module", getattr(model, "_orig_mod", model))
        right = {p: formula_of(plain, p) for p, _ in plain.named_parameters()}
        found[name] = all(
            torch.equal(p, right[key.replace("_checkpoint_wrapped_module.", "")])
            for key, p in inner.named_parameters()
        )
        checkpoint.save(folder, 2, model, progress=False)
        again = made()
        checkpoint.load(folder, again, progress=False)
        found[f"{name} saved"] = not list(differences(again, 0.5))
    sharded = made()
    for block in sharded.blocks:
        fully_shard(checkpoint_wrapper(block), mesh=grid.device_mesh("dp"))
    checkpoint.load(folder, sharded, progress=False)
    found["fsdp"] = not [
        key for key, p in sharded.named_parameters()
        if isinstance(p, DTensor) and not torch.equal(p.full_tensor(), formula_of(plain, key))
    ]  # fmt: skip
    commgrid.shutdown()
    return found


def formula_of(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name.replace("_checkpoint_wrapped_module.", ""))


def test_wrappers_are_not_in_the_names(tmp_path: Path) -> None:
    for found in run_on_ranks(wrapped, 4, str(tmp_path), backend=None, launcher="torchrun"):
        assert len(found) == 7
        assert all(found.values()), found


def padded(folder: str) -> bool:
    """A vocabulary of 10 on 3 ranks, of which the last has padding: its fp32 copies stay zero."""
    commgrid.initialize(tp=3)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    model = made(dtype=torch.bfloat16)
    optimizer = ShardedOptimizer(GradientReducer(model, shard=True), torch.optim.AdamW)
    checkpoint.save(folder, 1, model, optimizer, progress=False)
    checkpoint.load(folder, model, optimizer, progress=False)
    finite = all(bool(tensor.isfinite().all()) for _, tensor, _ in optimizer.parts())
    commgrid.shutdown()
    return finite


def test_padding_of_fp32_copies_stays_zero(tmp_path: Path) -> None:
    # The ranks change torch's defaults.
    ranks = run_on_ranks(padded, 3, str(tmp_path), backend=None, launcher="torchrun", check=False)
    assert ranks == [True] * 3


class Stateful(nn.Module):
    """Has a tensor as extra state, a buffer, and a parameter without elements."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.scales = torch.full((3,), float(number))
        self.register_buffer("count", torch.tensor(number))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.strict = False

    def get_extra_state(self) -> Tensor:
        return self.scales

    def set_extra_state(self, state: Tensor) -> None:
        if self.strict:
            raise ValueError("of another version")
        self.scales = state


def states(folder: str) -> list[Any]:
    grid = commgrid.initialize(dp=2)
    chunks = [Stateful(7), Stateful(7)]
    chunks[1].nothing = chunks[0].nothing
    checkpoint.save(folder, 1, chunks, progress=False)
    for chunk in chunks:
        chunk.scales, chunk.count = torch.zeros(3), torch.tensor(0)
    checkpoint.load(folder, chunks, progress=False)
    found: list[Any] = [(chunk.scales.tolist(), int(chunk.count)) for chunk in chunks]
    chunks[0].strict = grid.rank == 1
    found.append(raised(checkpoint.load, folder, chunks))
    commgrid.shutdown()
    return found


def test_extra_states_and_buffers_of_every_chunk(tmp_path: Path) -> None:
    for first, second, told in run_on_ranks(
        states, 2, str(tmp_path), backend=None, launcher="torchrun"
    ):
        assert first == second == ([7.0, 7.0, 7.0], 7)
        assert "the model is not to be used" in told
        assert "rank 1: ValueError: of another version" in told


def refused(folder: str) -> dict[str, str]:
    grid = commgrid.initialize(dp=2, pp=2, groups={"ends": {"of": "pp", "pick": ["first", "last"]}})
    stage, told = grid.get_local_rank("pp"), {}
    tied = nn.Module()
    if stage == 1:  # the first stage, which writes it, has none
        layer = mark_parameters(nn.Linear(2, 2, bias=False), shared="ends")
        tied.add_module("head", layer)
    told["no copy"] = raised(checkpoint.save, folder, 1, tied)
    model: Any = nn.Sequential()
    model.add_module(f"layer{stage}", nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    if grid.get_local_rank("dp") == 0:
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    told["state"] = raised(checkpoint.save, folder, 1, model, optimizer)
    with warnings.catch_warnings():  # of what torch itself deprecates
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=grid.get_group("dp")
    )
    told["zero"] = raised(checkpoint.save, folder, 1, model, zero)
    told["meta"] = raised(checkpoint.save, folder, 1, copy.deepcopy(model).to("meta"))
    checkpoint.save(folder, 1, model, torch.optim.AdamW(model.parameters()), progress=False)
    told["adam"] = raised(checkpoint.load, folder, model, torch.optim.Adam(model.parameters()))
    few = torch.optim.AdamW([model.get_parameter(f"layer{stage}.bias")])
    told["fewer"] = raised(checkpoint.load, folder, model, few)
    different = nn.Module()
    different.add_module(f"own{stage}", nn.Linear(1, 1))
    different.register_buffer("table", torch.zeros(2 + stage))
    told["buffers"] = raised(checkpoint.save, folder, 2, different)
    commgrid.shutdown()
    return told


REFUSED = {
    "no copy": "rank 2 is marked as shared with ranks [0, 2], of which rank 0 has no such weight",
    "state": "'dp_cp' should have copies are not the same ones: 19 on rank 0 and 13 on rank 1",
    "zero": "use commgrid.data_parallel.ShardedOptimizer",
    "meta": "is on the meta device, without numbers; call to_empty(device=…) first",
    "adam": "its optimizer is AdamW, and here is Adam",
    "fewer": "it also has optimizer.param_groups.layer",
    "buffers": "each have a model.table of their own",
}


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    for told in run_on_ranks(refused, 4, str(tmp_path), backend=None, launcher="torchrun"):
        for case, text in REFUSED.items():
            assert text in told[case], (case, told[case])


def named_and_frozen(folder: str) -> None:
    """A stage that has nothing to train has no optimizer; names of parameters are no option."""
    grid = commgrid.initialize(pp=2)
    stage = grid.get_local_rank("pp")
    layer: Any = nn.Module()
    layer.add_module(f"layer{stage}", nn.Linear(HIDDEN, 2))
    optimizer = torch.optim.AdamW(layer.named_parameters())
    checkpoint.save(folder, 1, layer, optimizer, progress=False)
    checkpoint.load(folder, layer, optimizer, progress=False)
    if stage == 0:
        layer.requires_grad_(False)
    mine = None if stage == 0 else optimizer
    checkpoint.save(Path(folder) / "frozen", 1, layer, mine, progress=False)
    checkpoint.load(Path(folder) / "frozen", layer, mine, progress=False)
    commgrid.shutdown()


def both_stages(folder: str) -> list[str]:
    commgrid.initialize()
    model: Any = nn.Module()
    for stage in range(2):
        model.add_module(f"layer{stage}", nn.Linear(HIDDEN, 2))
    optimizer = torch.optim.AdamW(model.named_parameters())
    checkpoint.load(folder, model, optimizer, progress=False)
    names: list[str] = optimizer.param_groups[0]["param_names"]
    commgrid.shutdown()
    return names


def test_named_parameters_and_frozen_stages(tmp_path: Path) -> None:
    run_on_ranks(named_and_frozen, 2, str(tmp_path), backend=None, launcher="torchrun")
    names = [f"layer{stage}.{key}" for stage in range(2) for key in ("weight", "bias")]
    assert run_on_ranks(both_stages, 1, str(tmp_path), backend=None) == [names]


def replicated_buffer(folder: str) -> bool:
    grid = commgrid.initialize(dp=2)
    model = nn.BatchNorm1d(3)
    model.running_mean = DTensor.from_local(torch.ones(3), grid.device_mesh("dp"), [Replicate()])
    checkpoint.save(folder, 1, model, progress=False)
    plain = nn.BatchNorm1d(3)
    checkpoint.load(folder, plain, progress=False)
    commgrid.shutdown()
    assert plain.running_mean is not None
    return bool((plain.running_mean == 1).all())


def test_a_buffer_that_is_a_dtensor(tmp_path: Path) -> None:
    ranks = run_on_ranks(replicated_buffer, 2, str(tmp_path), backend=None, launcher="torchrun")
    assert ranks == [True, True]


def folders(folder: str) -> dict[str, Any]:
    """Links, names of one's own, and going on from an earlier step."""
    commgrid.initialize()
    model, runs = nn.Linear(2, 2), Path(folder) / "runs"
    for step in (20, 40, 60):
        checkpoint.save(runs, step, model, progress=False)
    found: dict[str, Any] = {}
    (Path(folder) / "latest").symlink_to(runs / "step_00000040")
    found["link"] = checkpoint.load(Path(folder) / "latest", model, progress=False).step
    (runs / "step_00000060").rename(Path(folder) / "best")
    found["own name"] = checkpoint.load(Path(folder) / "best", model, progress=False).step
    (runs / "step_00000060").symlink_to(Path(folder) / "best")
    found["other step"] = raised(checkpoint.load, runs / "step_00000020", model, step=40)
    with pytest.warns(UserWarning, match="later steps than 30: 40, 60; load takes the last step"):
        checkpoint.save(runs, 30, model, keep=1, progress=False)
    found["kept"] = checkpoint.steps(runs)
    checkpoint.save(runs, 70, model, keep=1, progress=False)  # deletes a link, not what it is to
    found["at last"] = checkpoint.steps(runs)
    found["best"] = checkpoint.load(Path(folder) / "best", model, progress=False).step
    commgrid.shutdown()
    return found


def test_links_and_earlier_steps(tmp_path: Path) -> None:
    (found,) = run_on_ranks(folders, 1, str(tmp_path), backend=None)
    assert "is a checkpoint, and not of step 40" in found.pop("other step")
    assert found == {
        "link": 40, "own name": 60, "kept": [30, 40, 60], "at last": [70], "best": 60,
    }  # fmt: skip


def trains_on(folder: str) -> bool:
    """A model with a reducer trains on after a load; so does a part of the grid."""
    grid = commgrid.initialize(dp=2)
    model = made()
    reducer = GradientReducer(model)
    checkpoint.save(folder, 1, model, progress=False)
    checkpoint.load(folder, model, progress=False)
    model(batch(1, grid)).backward()
    reducer.finish()
    commgrid.shutdown()
    return all(p.grad is not None for p in model.parameters())


def test_a_reducer_does_not_mind(tmp_path: Path) -> None:
    ranks = run_on_ranks(trains_on, 2, str(tmp_path), backend=None, launcher="torchrun")
    assert ranks == [True, True]
