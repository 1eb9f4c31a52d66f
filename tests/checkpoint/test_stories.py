"""Stories of users: changes between two calls, and unusual optimizers, models and tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import prune

import commgrid
from commgrid import checkpoint
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer

HIDDEN, INNER = 8, 16


class Net(nn.Module):
    """Two layers in fp64, cut over tp or whole."""

    def __init__(self, *, cut: bool = False) -> None:
        super().__init__()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(3)
        self.up = (ColumnParallelLinear if cut else nn.Linear)(HIDDEN, INNER)
        self.down = (RowParallelLinear if cut else nn.Linear)(INNER, HIDDEN)
        torch.set_default_dtype(torch.float32)
        if cut:
            initialize_parameters(self, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.tanh(self.up(x)))
        return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Train on batches that depend on the step alone; return the last loss."""
    loss = torch.zeros(())
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, HIDDEN, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
    return loss.item()


# -- between two calls -----------------------------------------------------------------------


class Logged(nn.Module):
    """A module whose extra state is a list that it appends to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.log = nn.Parameter(torch.ones(200, 200)), {"log": [1]}

    def get_extra_state(self) -> Any:
        return self.log

    def set_extra_state(self, state: Any) -> None:
        self.log = state


class Listed(torch.optim.Optimizer):
    """An optimizer with lists in its state and among its options."""

    def __init__(self, model: Logged) -> None:
        super().__init__(model.parameters(), {"lr": 0.1, "seen": [1]})
        self.state[model.weight]["history"] = [1, {"of": [2]}]

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def lists_grow(folder: str, way: str) -> Any:
    """Append to lists after a call, and return the lists that come back."""
    commgrid.initialize()
    model = Logged()
    optimizer = Listed(model)
    extra: dict[str, Any] = {"tokens": [1], "tensor": torch.ones(3)}
    own: dict[str, Any] = {"read": [1]}
    more = {"extra": extra, "extra_per_rank": own}
    if way == "background":
        checkpoint.save(folder, 1, model, optimizer, background=True, progress=False, **more)
    else:
        checkpoint.keep(1, model, optimizer, **more)
    model.log["log"].append(2)
    optimizer.state[model.weight]["history"][1]["of"].append(3)
    optimizer.param_groups[0]["seen"].append(2)
    extra["tokens"].append(2)
    extra["tensor"].zero_()
    own["read"].append(2)
    model.weight.data.zero_()
    found = []
    for _ in range(2):  # the lists of the first time are changed, too
        other = Logged()
        fresh = Listed(other)
        fresh.state.clear()
        fresh.param_groups[0]["seen"] = []
        if way == "background":
            checkpoint.wait()
            restored: Any = checkpoint.load(folder, other, fresh, progress=False)
        else:
            restored = commgrid.recover(None, other, fresh)
        history, seen = fresh.state[other.weight]["history"], fresh.param_groups[0]["seen"]
        tensor = restored.extra["tensor"]
        found.append([
            [*other.log["log"]], [history[0], [*history[1]["of"]]], [*seen],
            [*restored.extra["tokens"]], tensor.tolist(), str(restored.extra_per_rank),
            bool(other.weight.eq(1).all()),
        ])  # fmt: skip
        for each in (other.log["log"], history[1]["of"], seen, restored.extra["tokens"]):
            each.append(9)
        tensor.zero_()
        restored.extra_per_rank[0]["read"].append(9)
    commgrid.shutdown()
    return found


@pytest.mark.full("memory")
@pytest.mark.parametrize("way", ["background", "memory"])
def test_lists_that_grow_after_the_call(way: str, tmp_path: Path) -> None:
    right = [[1], [1, [2]], [1], [1], [1.0] * 3, "[{'read': [1]}]", True]
    for found in run_on_ranks(lists_grow, 2, str(tmp_path), way):
        assert found == [right, right]


def moves_on(folder: str) -> list[list[int]]:
    """Change the folder, or end the grid, while a save is under way."""
    os.chdir(folder)
    for step in range(2):
        commgrid.initialize()
        checkpoint.save("runs", step, nn.Linear(300, 300), copies="first", background=True,
                        progress=False)  # fmt: skip
        commgrid.destroy()
    commgrid.initialize()
    (Path(folder) / "elsewhere").mkdir(exist_ok=True)
    checkpoint.save("runs", 2, Net(), background=True, progress=False)
    os.chdir("elsewhere")
    checkpoint.wait()
    found = [checkpoint.steps(f"{folder}/runs"), [*map(len, os.listdir())]]
    commgrid.shutdown()
    return found


@pytest.mark.full
def test_the_folder_and_the_grid_of_a_save_in_the_background_change(tmp_path: Path) -> None:
    assert run_on_ranks(moves_on, 2, str(tmp_path)) == [[[0, 1, 2], []]] * 2


def three_models(folder: str) -> list[list[int]]:
    """Models of three grids, of which every rank is in two, each saved at its own times."""
    rank = dist.get_rank()
    grids = {"all": commgrid.initialize(name="all")}
    pair = [1, 2] if rank in (1, 2) else [3, 0]
    grids[f"of {pair[0]}"] = commgrid.initialize(name=f"of {pair[0]}", ranks=pair)
    model = Net()
    for step in range(3):
        for name, grid in grids.items():
            later = name == "all" or step % 2 == 0
            checkpoint.save(f"{folder}/{name}", step, model, grid=grid, background=later,
                            progress=False)  # fmt: skip
    for grid in grids.values():
        checkpoint.wait(grid=grid)
    found = [checkpoint.steps(f"{folder}/{name}") for name in grids]
    commgrid.shutdown()
    return found


@pytest.mark.full
def test_grids_that_share_ranks_save_in_the_background(tmp_path: Path) -> None:
    assert run_on_ranks(three_models, 4, str(tmp_path)) == [[[0, 1, 2]] * 2] * 4


# -- optimizers ----------------------------------------------------------------------------------


class Numbered(torch.optim.Optimizer):
    """Momentum and counts, under keys that are no texts."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state[0] = state.get(0, torch.zeros_like(parameter)) * 0.5 + parameter.grad
                state["n", 1] = state.get(("n", 1), 0) + 1
                parameter -= group["lr"] * state[0] / state["n", 1]


def second_round(folder: str) -> tuple[float, float]:
    """A run that was loaded is saved and loaded again, on another grid."""
    commgrid.initialize(tp=2)
    model = Net(cut=True)
    optimizer = Numbered(model.parameters())
    train(model, optimizer, range(2))
    checkpoint.save(folder, 2, model, optimizer, progress=False)
    model = Net(cut=True)
    optimizer = Numbered(model.parameters())
    checkpoint.load(folder, model, optimizer, progress=False)
    train(model, optimizer, range(2, 4))
    checkpoint.save(folder, 4, model, optimizer, progress=False)
    expected = train(model, optimizer, range(4, 6))
    commgrid.destroy()
    commgrid.initialize()
    plain = Net()
    fresh = Numbered(plain.parameters())
    checkpoint.load(folder, plain, fresh, progress=False)
    loss = train(plain, fresh, range(4, 6))
    commgrid.shutdown()
    return loss, expected


@pytest.mark.full
def test_keys_that_are_no_texts_in_a_second_round(tmp_path: Path) -> None:
    for loss, expected in run_on_ranks(second_round, 2, str(tmp_path)):
        assert loss == pytest.approx(expected, rel=1e-9)


def unfrozen_late(folder: str) -> tuple[float, float, list[int]]:
    """A layer that was frozen for two steps has other step counts, and other bias corrections."""
    commgrid.initialize(tp=2)
    model = Net(cut=True)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    model.down.requires_grad_(False)
    train(model, optimizer, range(2))
    model.down.requires_grad_(True)
    train(model, optimizer, range(2, 3))
    checkpoint.save(folder, 3, model, optimizer, progress=False)
    expected = train(model, optimizer, range(3, 6))
    commgrid.destroy()
    commgrid.initialize()
    plain = Net()
    fresh = torch.optim.NAdam(plain.parameters(), lr=0.01)
    checkpoint.load(folder, plain, fresh, progress=False)
    loss = train(plain, fresh, range(3, 6))
    counts = [int(fresh.state[p]["step"]) for p in plain.parameters()]
    commgrid.shutdown()
    return loss, expected, counts


@pytest.mark.full
def test_parameters_that_have_trained_for_other_numbers_of_steps(tmp_path: Path) -> None:
    for loss, expected, counts in run_on_ranks(unfrozen_late, 2, str(tmp_path)):
        assert loss == pytest.approx(expected, rel=1e-9)
        assert counts == [6, 6, 4, 4]


# -- models --------------------------------------------------------------------------------------


def sharded(model: nn.Module, way: str, grid: commgrid.HyperCommGrid) -> None:
    mesh = grid.device_mesh("dp")
    if way == "by columns":
        # torch cuts a dim other than the first in equal parts only.
        fully_shard(
            model,
            mesh=mesh,
            shard_placement_fn=lambda p: Shard(1) if p.shape[1:] == (HIDDEN,) else None,
        )
    elif way == "but one layer":
        ignored = {*model[1].parameters()}  # type: ignore[index]
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    else:
        for layer in model.children():
            fully_shard(layer, mesh=mesh, reshard_after_forward=way != "left whole")
        fully_shard(model, mesh=mesh)


def by_fsdp(folder: str, way: str) -> tuple[float, float]:
    """FSDP2 of odd shapes, a row for one of two ranks, to one process's model."""
    grid = commgrid.initialize()

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(HIDDEN, 3), nn.Linear(3, 1)).to(torch.float64)

    model = made()
    sharded(model, way, grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(3))
    if way == "left whole":
        model(torch.ones(1, HIDDEN, dtype=torch.float64))
    checkpoint.save(folder, 3, model, optimizer, progress=False)
    expected = train(model, optimizer, range(3, 6))
    plain = made()
    fresh = torch.optim.AdamW(plain.parameters(), lr=0.5)
    checkpoint.load(folder, plain, fresh, progress=False)
    loss = train(plain, fresh, range(3, 6))
    commgrid.shutdown()
    return loss, expected


@pytest.mark.full
@pytest.mark.parametrize("way", ["by rows", "by columns", "but one layer", "left whole"])
def test_fsdp_continues_in_one_process(way: str, tmp_path: Path) -> None:
    for loss, expected in run_on_ranks(by_fsdp, 2, str(tmp_path), way):
        assert loss == pytest.approx(expected, rel=1e-9)


def by_torch(folder: str) -> bool:
    """13 rows that torch's own tensor parallelism has cut in two."""
    grid = commgrid.initialize(tp=2)
    torch.manual_seed(0)
    plain = nn.ModuleDict({"up": nn.Linear(HIDDEN, 13), "down": nn.Linear(13, HIDDEN)})
    numbers = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(plain, grid.device_mesh("tp"), plan)
    assert all(isinstance(tensor, DTensor) for tensor in plain.state_dict().values())
    checkpoint.save(folder, 1, plain, progress=False)
    commgrid.destroy()
    commgrid.initialize()
    whole = nn.ModuleDict({"up": nn.Linear(HIDDEN, 13), "down": nn.Linear(13, HIDDEN)})
    checkpoint.load(folder, whole, progress=False)
    found = all(torch.equal(tensor, numbers[name]) for name, tensor in whole.state_dict().items())
    commgrid.shutdown()
    return found


@pytest.mark.full
def test_uneven_slices_of_torchs_tensor_parallelism(tmp_path: Path) -> None:
    assert run_on_ranks(by_torch, 2, str(tmp_path)) == [True, True]


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)


REPARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: torch.nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "pruned": pruned,
    "average": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(4, 4)),
}


def reparametrized(folder: str) -> list[str]:
    """Return the layers that compute something else after a load or a transfer."""
    grid, wrong = commgrid.initialize(), []
    for number, (name, make) in enumerate(REPARAMETRIZED.items()):
        torch.manual_seed(0)
        model = make()
        expected = model.eval()(torch.eye(4))
        checkpoint.save(f"{folder}/{number}", 1, model, progress=False)
        torch.manual_seed(1)
        loaded, moved = make().eval(), make().eval()
        checkpoint.load(f"{folder}/{number}", loaded, progress=False)
        Transfer(model, moved, source_grid=grid, target_grid=grid, timeout=60).run()
        for other in (loaded, moved):
            if not torch.equal(other(torch.eye(4)), expected):
                wrong.append(name)
    commgrid.shutdown()
    return wrong


@pytest.mark.full
def test_layers_whose_weights_are_made_of_other_tensors(tmp_path: Path) -> None:
    assert run_on_ranks(reparametrized, 2, str(tmp_path)) == [[], []]


class Tensors(nn.Module):
    """Buffers that are given."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(f"{name}_", tensor)


def bits() -> dict[str, Tensor]:
    """A tensor of every dtype, none of whose bytes is that of another."""
    names = [
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    ]
    size = {name: getattr(torch, name).itemsize for name in names}
    numbers = {
        name: torch.arange(1, 1 + 8 * size[name], dtype=torch.uint8).view(getattr(torch, name))
        for name in names
    }
    complexes = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    return numbers | {
        "bool": torch.tensor([True, False, True]),
        "conjugate": complexes.conj(),
        "negative": complexes.conj().imag,
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "columns": torch.arange(12.0).view(3, 4)[:, ::2],
        "pixels": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "number": torch.tensor(3.5),
    }


def every_bit(folder: str) -> list[str]:
    """The tensors that are not, to the bit, what was saved, kept or moved."""
    grid = commgrid.initialize()
    model = Tensors(**bits())
    checkpoint.save(folder, 1, model, progress=False)
    checkpoint.keep(1, model)
    wrong = []
    for way in ("load", "recover", "transfer"):
        # As the source's lie in memory, so that conjugates and transposes are written to.
        other = Tensors(**{name: tensor.clone() for name, tensor in bits().items()})
        for name in ("conjugate", "negative", "transposed"):
            setattr(other, f"{name}_", bits()[name])
        for buffer in other.buffers():
            buffer.copy_(torch.zeros(buffer.shape, dtype=torch.uint8).to(buffer.dtype))
        if way == "load":
            checkpoint.load(folder, other, progress=False)
        elif way == "recover":
            commgrid.recover(None, other)
        else:
            Transfer(model, other, source_grid=grid, target_grid=grid, timeout=60).run()
        for name, buffer in other.named_buffers():
            right = bits()[name.removesuffix("_")]
            if not torch.equal(*(_bytes(each) for each in (buffer, right))):
                wrong.append(f"{way}: {name}")
    commgrid.shutdown()
    return wrong


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_and_stride_to_the_last_bit(tmp_path: Path) -> None:
    assert run_on_ranks(every_bit, 2, str(tmp_path)) == [[], []]


def in_inference_mode(folder: str) -> list[bool]:
    """An engine that builds, loads and gets its model under `torch.inference_mode`."""
    grid = commgrid.initialize()
    model, found = Net(), []
    checkpoint.save(folder, 1, model, progress=False)
    with torch.inference_mode():
        loaded, moved = Net(), Net()
        for parameter in (*loaded.parameters(), *moved.parameters()):
            parameter.zero_()
        checkpoint.load(folder, loaded, progress=False)
        Transfer(model, moved, source_grid=grid, target_grid=grid, timeout=60).run()
        for other in (loaded, moved):
            found.append(torch.equal(other.up.weight, model.up.weight))
        checkpoint.save(folder, 2, moved, progress=False)
    checkpoint.load(folder, model, progress=False)
    commgrid.shutdown()
    return found


@pytest.mark.full
def test_an_engine_in_inference_mode(tmp_path: Path) -> None:
    assert run_on_ranks(in_inference_mode, 2, str(tmp_path)) == [[True, True]] * 2
