"""Another grid loads the numbers that one saved, and so does torch alone."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commgrid
from commgrid import checkpoint
from commgrid.collectives import all_gather
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.parameters import placements
from commgrid.tensor_parallel import ColumnParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks
from tests.checkpoint.models import batch, differences, fill, made

SHAPES = [{"tp": 4}, {"dp": 4}, {"tp": 2, "dp": 2}, {"tp": 3}, {}]


def with_optimizer(
    grid: commgrid.HyperCommGrid, *, shard: bool, dtype: torch.dtype = torch.float64
) -> tuple[Any, GradientReducer, torch.optim.Optimizer]:
    model = made(dtype=dtype)
    reducer = GradientReducer(model, shard=shard)
    return model, reducer, ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-2)


def train(model: Any, reducer: GradientReducer, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step, commgrid.get_grid()))
        loss.backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_filled(folder: str, shape: dict[str, int]) -> None:
    commgrid.initialize(**shape)
    model = made()
    fill(model, 0.5)
    for block in model.blocks:
        block.count.fill_(7)
    checkpoint.save(folder, 3, model, progress=False)
    commgrid.shutdown()


def load_filled(folder: str, shape: dict[str, int]) -> list[str]:
    commgrid.initialize(**shape)
    model = made()
    assert list(differences(model, 0.5))
    assert checkpoint.load(folder, model, progress=False).step == 3
    wrong = list(differences(model, 0.5))
    wrong += [str(block.count) for block in model.blocks if block.count != 7]
    commgrid.shutdown()
    return wrong


@pytest.mark.full("{'dp': 4}", "{'tp': 4}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_is_where_it_belongs(shape: dict[str, int], tmp_path: Path) -> None:
    """Vocabulary 10 is padded on 3 and 4 ranks, differently."""

    def world(sizes: dict[str, int]) -> int:
        return torch.Size(sizes.values()).numel()

    torchrun: dict[str, Any] = {"backend": None, "launcher": "torchrun"}
    run_on_ranks(save_filled, world(shape), str(tmp_path), shape, **torchrun)
    for other in SHAPES:
        for wrong in run_on_ranks(load_filled, world(other), str(tmp_path), other, **torchrun):
            assert wrong == [], other


def save_trained(folder: str, more: int) -> list[float]:
    grid = commgrid.initialize(tp=2)
    model, reducer, optimizer = with_optimizer(grid, shard=True)
    train(model, reducer, optimizer, range(5))
    checkpoint.save(folder, 5, model, optimizer, extra={"who": [1, 2]}, progress=False)
    losses = train(model, reducer, optimizer, range(5, 5 + more))
    commgrid.shutdown()
    return losses


def read_by_torch_alone(folder: str, file: str, more: int) -> list[float]:
    """Only torch: its own modules, its own optimizer, its own readers."""
    model = made(parallel=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(
        model, optimizer, options=flat
    )}  # fmt: skip
    with warnings.catch_warnings():  # of being one process
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=flat)
    dcp_to_torch_save(folder, file)
    whole = torch.load(file)
    assert whole["extra"] == {"who": [1, 2]}
    for name, parameter in model.named_parameters():
        assert torch.equal(whole["model"][name], parameter)
    losses = []
    for step in range(5, 5 + more):
        loss = model(batch(step, None))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_torch_alone_reads_it_and_goes_on(tmp_path: Path) -> None:
    """An unsharded torch model and optimizer continue what tp 2 · dp 2 · ZeRO-1 began."""
    saved = run_on_ranks(
        save_trained, 4, str(tmp_path / "runs"), 5, backend=None, launcher="torchrun"
    )
    folder = tmp_path / "runs" / "step_00000005"
    (read,) = run_on_ranks(
        read_by_torch_alone, 1, str(folder), str(tmp_path / "file.pt"), 5, backend=None
    )
    mean = [(saved[0][i] + saved[2][i]) / 2 for i in range(5)]  # ranks 0 and 2 have other data
    # Sums over tp and dp in another order: some ulps, which ten steps of Adam amplify.
    assert read == pytest.approx(mean, rel=1e-9)


def written_once(folder: str) -> tuple[int, int]:
    grid = commgrid.initialize(dp=4)
    model, reducer, optimizer = with_optimizer(grid, shard=False)
    train(model, reducer, optimizer, range(1))
    checkpoint.save(folder, 1, model, optimizer, progress=False)
    held = sum(p.nbytes for p in model.parameters())
    commgrid.shutdown()
    return held, grid.rank


def test_copies_are_written_once_and_every_rank_writes(tmp_path: Path) -> None:
    ((held, _), *_) = run_on_ranks(
        written_once, 4, str(tmp_path), backend=None, launcher="torchrun"
    )  # fmt: skip
    metadata = dcp.FileSystemReader(tmp_path / "step_00000001").read_metadata()
    sizes: dict[str, int] = {}
    for index, place in metadata.storage_data.items():
        stored = metadata.state_dict_metadata[index.fqn]
        if getattr(stored, "size", None):
            chunk = next(c for c in stored.chunks if c.offsets == index.offset)
            count = torch.Size(chunk.sizes).numel() * stored.properties.dtype.itemsize
            sizes[place.relative_path] = sizes.get(place.relative_path, 0) + count
    assert sum(sizes.values()) == 3 * held  # weights, exp_avg, exp_avg_sq
    assert len(sizes) == 4
    assert max(sizes.values()) < 1.5 * min(sizes.values())


def mixed_precision(folder: str) -> dict[str, Any]:
    """bf16 with fp32 copies: loaded over other cuts, and into other precisions."""
    grid = commgrid.initialize(dp=2, tp=1)
    model, reducer, optimizer = with_optimizer(grid, shard=True, dtype=torch.bfloat16)
    train(model, reducer, optimizer, range(3))
    checkpoint.save(folder, 3, model, optimizer, progress=False)
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    commgrid.destroy()
    grid = commgrid.initialize(dp=1, tp=2)
    found: dict[str, Any] = {}
    model, reducer, optimizer = with_optimizer(grid, shard=False, dtype=torch.bfloat16)
    checkpoint.load(folder, model, optimizer, progress=False)
    rounded, copied = True, False
    for piece, tensor, _ in optimizer.parts():
        assert tensor.dtype == torch.float32
        rounded &= torch.equal(tensor.bfloat16(), piece.slot.parameter)
        copied |= not torch.equal(tensor, piece.slot.parameter.float())
    found["masters round to the weights"] = rounded
    found["masters are more precise"] = copied
    exact = made(dtype=torch.float64)
    checkpoint.load(folder, exact, progress=False)
    found["wider weights come from the copies"] = all(
        torch.equal(p.bfloat16(), saved[name]) and not torch.equal(p, saved[name].double())
        for name, p in exact.named_parameters()
        if p.shape == saved[name].shape
    )
    checkpoint.save(folder, 4, exact, torch.optim.AdamW(exact.parameters()), progress=False)
    commgrid.shutdown()
    return found


def test_precisions(tmp_path: Path) -> None:
    for found in run_on_ranks(mixed_precision, 2, str(tmp_path), backend=None, launcher="torchrun"):
        assert len(found) == 3
        assert all(found.values()), found


def fp32_into_bf16(folder: str) -> bool:
    """No fp32 copies were saved, so that they begin as the weights, unrounded."""
    grid = commgrid.initialize()
    model = made(dtype=torch.float32)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(folder, 1, model, optimizer, progress=False)
    half, _, optimizer = with_optimizer(grid, shard=False, dtype=torch.bfloat16)
    checkpoint.load(folder, half, optimizer, progress=False)
    full = dict(model.named_parameters())
    right = all(
        torch.equal(tensor, full[piece.slot.placement.name])
        and torch.equal(tensor.bfloat16(), piece.slot.parameter)
        for piece, tensor, _ in optimizer.parts()
    )
    commgrid.shutdown()
    return right


def test_fp32_copies_begin_as_weights_where_none_were_saved(tmp_path: Path) -> None:
    assert run_on_ranks(fp32_into_bf16, 1, str(tmp_path), backend=None) == [True]


class Remembering(nn.Module):
    """Has extra state, a frozen parameter and a scalar one."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(4))

    def get_extra_state(self) -> list[str]:
        return self.notes

    def set_extra_state(self, state: list[str]) -> None:
        self.notes = state

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum() * self.scale


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
    (torch.optim.NAdam, {"lr": 0.1}),
]


def each_optimizer(folder: str) -> list[str]:
    """Two parameter groups, one with a learning rate that a scheduler has changed."""
    commgrid.initialize()
    wrong = []
    for index, (kind, options) in enumerate(OPTIMIZERS):
        pairs: list[tuple[Remembering, torch.optim.Optimizer]] = []
        for _ in range(2):
            model = Remembering()
            model.notes = [] if pairs else ["seen"]
            groups = [{"params": [model.scale], "lr": 0.01}, {"params": [model.weight]}]
            pairs.append((model, kind(groups, **options)))
        (model, optimizer), (other, again) = pairs
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(4.0)).backward()
            optimizer.step()
            scheduler.step()
        checkpoint.save(folder, index, model, optimizer, progress=False)
        checkpoint.load(folder, other, again, progress=False)
        for one in (model, other):
            one.zero_grad()
            one(torch.arange(4.0)).backward()
        optimizer.step()
        again.step()
        same = all(
            torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
        )
        rates = [[g["lr"] for g in one.param_groups] for one in (optimizer, again)]
        if not same or other.notes != ["seen"] or rates[0] != rates[1]:
            wrong.append(f"{kind.__name__} {options}: {rates} {other.notes}")
    commgrid.shutdown()
    return wrong


def test_every_elementwise_optimizer_goes_on(tmp_path: Path) -> None:
    assert run_on_ranks(each_optimizer, 1, str(tmp_path), backend=None) == [[]]


def names_of(folder: str) -> list[str]:
    grid = commgrid.initialize(tp=1)
    model = made()
    model.head.tie_weight(model.tokens.weight)
    shared = [placement.name for placement in placements(model)]
    checkpoint.save(folder, 1, model, progress=False, grid=grid)
    commgrid.shutdown()
    return shared


def test_a_shared_parameter_has_its_first_name(tmp_path: Path) -> None:
    (names,) = run_on_ranks(names_of, 1, str(tmp_path), backend=None)
    metadata = dcp.FileSystemReader(tmp_path / "step_00000001").read_metadata()
    stored = {key for key in metadata.state_dict_metadata if key.startswith("model.")}
    buffers = {f"model.blocks.{index}.count" for index in range(2)}
    assert stored == {f"model.{name}" for name in names} | buffers
    assert "model.head.weight" not in stored


def later_rate(folder: str) -> list[float]:
    """A scheduler's rate counts, although the parts' optimizer has not stepped with it yet."""
    grid = commgrid.initialize(dp=4)
    rates = []
    for _ in range(2):
        model = made()
        reducer = GradientReducer(model, shard=True)
        few = [model.blocks[0].norm.bias]  # of which most ranks have no part
        known = {id(p) for p in few}
        groups = [
            {"params": few, "lr": 0.1},
            {"params": [p for p in model.parameters() if id(p) not in known]},
        ]
        optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, groups=groups)
        if not rates:
            train(model, reducer, optimizer, range(1))
            for group in optimizer.param_groups:
                group["lr"] /= 2
            checkpoint.save(folder, 1, model, optimizer, progress=False)
        else:
            checkpoint.load(folder, model, optimizer, progress=False)
        rates += [group["lr"] for group in optimizer.param_groups]
    assert grid.size("dp") == 4
    commgrid.shutdown()
    return rates


def test_learning_rates_of_every_group_on_every_rank(tmp_path: Path) -> None:
    for rates in run_on_ranks(later_rate, 4, str(tmp_path), backend=None, launcher="torchrun"):
        assert rates == [0.05, 0.0005, 0.05, 0.0005]


def test_a_rate_is_written_once_for_all_parameters(tmp_path: Path) -> None:
    run_on_ranks(later_rate, 4, str(tmp_path), backend=None, launcher="torchrun")
    metadata = dcp.FileSystemReader(tmp_path / "step_00000001").read_metadata()
    rates = [key for key in metadata.state_dict_metadata if key.endswith(".lr")]
    names = [key for key in metadata.state_dict_metadata if key.endswith(".exp_avg")]
    assert len(rates) == len(names)
    places = {
        (info.relative_path, info.offset)
        for index, info in metadata.storage_data.items() if index.fqn in rates
    }  # fmt: skip
    assert len(places) <= 4 * 2  # ranks and groups


def weights_alone(folder: str) -> bool:
    """Weights loaded without the optimizer renew its fp32 copies, which else would undo them."""
    grid = commgrid.initialize()
    model, reducer, optimizer = with_optimizer(grid, shard=False, dtype=torch.bfloat16)
    fill(model, 0.5)
    checkpoint.save(folder, 1, model, progress=False)
    fill(model, 0.7)
    checkpoint.load(folder, model, progress=False)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, reducer, optimizer, range(1))
    wrong = list(differences(model, 0.5))
    commgrid.shutdown()
    return not wrong


def test_weights_alone_renew_the_optimizers_copies(tmp_path: Path) -> None:
    assert run_on_ranks(weights_alone, 1, str(tmp_path), backend=None) == [True]


def native(folder: str, file: str) -> None:
    """torch's own layers: DTensors of parallelize_module, which FSDP2 has cut once more."""
    grid = commgrid.initialize(tp=2, dp=-1)
    torch.manual_seed(3)
    model = made(parallel=False)
    if grid.rank == 0:
        torch.save(model.state_dict(), file)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, grid.device_mesh("tp"), plan)
        fully_shard(block, mesh=grid.device_mesh("dp"))
    fully_shard(model, mesh=grid.device_mesh("dp"))
    checkpoint.save(folder, 1, model, torch.optim.AdamW(model.parameters()), progress=False)
    with torch.no_grad():
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.zero_()
    checkpoint.load(folder, model, progress=False)
    assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
    commgrid.shutdown()


@pytest.mark.full("4")
@pytest.mark.parametrize("world", [4, 8])
def test_dtensors_that_fsdp_has_cut_again(world: int, tmp_path: Path) -> None:
    """On 8 ranks FSDP cuts tp's 6 rows into 2, 2, 2 and none."""
    file = tmp_path / "whole.pt"
    run_on_ranks(native, world, str(tmp_path), str(file), backend=None, launcher="torchrun")
    dcp_to_torch_save(tmp_path / "step_00000001", tmp_path / "read.pt")
    whole, read = (torch.load(path) for path in (file, tmp_path / "read.pt"))
    assert whole.keys() == read["model"].keys()
    for name, tensor in whole.items():
        assert torch.equal(read["model"][name], tensor), name


def cut_along_one_dim(folder: str) -> Tensor:
    """Rows that tensor parallelism has cut, and FSDP2 again; the whole weight before it did."""
    grid = commgrid.initialize(tp=2)
    model = nn.Sequential(ColumnParallelLinear(3, 12, bias=False))
    initialize_parameters(model, seed=1)
    whole = all_gather(model[0].weight.detach(), "tp")
    fully_shard(model, mesh=grid.device_mesh("dp"))
    checkpoint.save(folder, 1, model, progress=False)
    commgrid.shutdown()
    return whole


def test_slices_of_slices_lie_inside_them(tmp_path: Path) -> None:
    whole = run_on_ranks(cut_along_one_dim, 4, str(tmp_path), backend=None, launcher="torchrun")[0]
    dcp_to_torch_save(tmp_path / "step_00000001", tmp_path / "read.pt")
    assert torch.equal(torch.load(tmp_path / "read.pt")["model"]["0.weight"], whole)
