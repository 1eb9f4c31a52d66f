"""Drawn models with buffers of any dtype and optimizer state of a user's own, on drawn grids.

The oracle is a formula: every full tensor has its numbers, a slice is what `chunk` makes of it, and
an optimizer keeps functions of single elements, which are the same in any part of a parameter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import commgrid
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.parameters import mark_buffers
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.checkpoint.models import formula

BLOCKS, HIDDEN, INNER, COLUMNS = 2, 8, 24, 12
WIDER = {
    torch.bfloat16: (torch.bfloat16, torch.float32, torch.float64),
    torch.float16: (torch.float16, torch.float32, torch.float64),
    torch.float32: (torch.float32, torch.float64),
    torch.float64: (torch.float64,),
}
BUFFERS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
KEYS: tuple[Any, ...] = (
    "momentum", "ema.fast", "master", "a..b", "[0]", "", "ü x", 0, 7, -1.5, True, b"key", None,
    ("ema", 0.9), (1, (2, "x")),
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where and how one side lies.

    Args:
        ranks: of the grid.
        axes: their sizes, and `order`.
        cut, data: the axes along which layers are cut, and along which ranks have other data;
            of a user's own names, or tp and dp.
        way: "plain"; "fsdp" of torch over `data`; "zero", commgrid's sharded optimizer over it.
        dtype: of parameters.
    """

    ranks: tuple[int, ...]
    axes: dict[str, Any]
    cut: str
    data: str
    way: str
    dtype: torch.dtype

    @property
    def has_copies(self) -> bool:
        """Whether the optimizer updates copies in fp32."""
        return self.way == "zero" and self.dtype.itemsize < 4

    def __str__(self) -> str:
        sizes = " ".join(f"{k} {v}" for k, v in self.axes.items() if k != "order")
        return f"{sizes} {self.way} {str(self.dtype)[6:]} on {list(self.ranks)}"


@dataclass(frozen=True)
class Draw:
    """Two sides, the dtypes of the model's buffers, and what the optimizer keeps.

    Args:
        source, target: the sides.
        buffers: dtypes, of every block.
        entries: by key, what is kept of a parameter: a dtype of a tensor of its shape (None: the
            parameter's), or the name of another kind of value.
    """

    source: Place
    target: Place
    buffers: tuple[torch.dtype, ...]
    entries: dict[Any, torch.dtype | str | None]

    def __str__(self) -> str:
        return f"{self.source} → {self.target}: {self.buffers}, {self.entries}"


def drawn(seed: str, world: int) -> Draw:
    draw = random.Random(seed)
    source = _place(draw, world, draw.choice(list(WIDER)))
    target = _place(draw, world, draw.choice(WIDER[source.dtype]))
    tensors = [None, torch.float32, torch.float64, torch.int8, torch.uint8, torch.bool]
    kinds = [*tensors, "number", "text", "one", "list", "nested", "none"]
    keys = draw.sample(KEYS, draw.randint(1, 5))
    entries = {key: draw.choice(kinds) for key in keys}
    return Draw(source, target, tuple(draw.sample(BUFFERS, draw.randint(1, 4))), entries)


def _place(draw: random.Random, world: int, dtype: torch.dtype) -> Place:
    count = draw.choice([1, 2, 2, 3, *[world] * 3])
    first = draw.randint(0, world - count)
    ranks = list(range(first, first + count))
    cut = draw.choice([size for size in (1, 2, 3, 4) if count % size == 0])
    stages = draw.choice([size for size in (1, 2) if count // cut % size == 0])
    copies = count // cut // stages
    names = draw.choice(["tp", "width"]), draw.choice(["dp", "batch"])
    own = [name for name in names if name not in ("tp", "dp")]
    axes: dict[str, Any] = {names[0]: cut, "pp": stages, names[1]: copies}
    if "dp" not in axes:
        axes["dp"] = 1
    if own:
        order = ["tp", "cp", "ep", "dp", "pp"]
        for name in own:
            order.insert(draw.randint(0, len(order)), name)
        axes["order"] = "-".join(order)
    ways = ["plain", *(["zero"] if copies > 1 else []), *(["fsdp"] if copies > 1 == stages else [])]
    if draw.random() < 0.3:
        draw.shuffle(ranks)
    return Place(tuple(ranks), axes, *names, draw.choice(ways), dtype)


def grid_of(place: Place, name: str) -> commgrid.HyperCommGrid | None:
    return commgrid.initialize(**place.axes, ranks=list(place.ranks), name=name)


class Block(nn.Module):
    """Slices by rows and by columns, copies, and buffers, of which one is cut."""

    def __init__(
        self, place: Place, grid: commgrid.HyperCommGrid, buffers: tuple[torch.dtype, ...]
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = ColumnParallelLinear(HIDDEN, INNER, group=place.cut, grid=grid)
        self.down = RowParallelLinear(INNER, HIDDEN, group=place.cut, grid=grid)
        for number, dtype in enumerate(buffers):
            shape = [(2, COLUMNS // grid.size(place.cut)), (), (2, 5), (3,)][number]
            name = f"{'as' if number else 'cut'}_{str(dtype)[6:]}"
            self.register_buffer(name, torch.zeros(shape).to(dtype))
        mark_buffers(self, "cut_*", cut={place.cut: 1}, grid=grid)


def built(draw: Draw, place: Place, grid: commgrid.HyperCommGrid, salt: float) -> nn.Module:
    """This rank's stage, with the formula's numbers."""
    torch.set_default_dtype(place.dtype)
    try:
        stages, stage = grid.size("pp"), grid.get_local_rank("pp")
        own = range(stage * BLOCKS // stages, (stage + 1) * BLOCKS // stages)
        model = nn.Module()
        model.blocks = nn.ModuleDict({str(b): Block(place, grid, draw.buffers) for b in own})
    finally:
        torch.set_default_dtype(torch.float32)
    if place.way == "fsdp":
        for block in model.blocks.values():
            fully_shard(block, mesh=grid.device_mesh(place.data))
        fully_shard(model, mesh=grid.device_mesh(place.data))
    with torch.no_grad():
        for _, held, numbers in expected(model, place, grid, salt):
            if isinstance(held, DTensor):
                held.copy_(distribute_tensor(numbers.to(held.dtype), held.device_mesh,
                                             held.placements))  # fmt: skip
            else:
                held.copy_(numbers)
    return model


def expected(
    model: nn.Module, place: Place, grid: commgrid.HyperCommGrid, salt: float
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every parameter and buffer, its name, and the numbers that it should have, in their dtype."""
    count, mine = grid.size(place.cut), grid.get_local_rank(place.cut)
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for name, held in [*model.named_parameters(), *model.named_buffers()]:
        layer = name.split(".", 2)[2]
        shape, dim = list(held.shape), 1 if layer.startswith("cut_") else dims.get(layer)
        if dim is not None:
            shape[dim] *= count
        full = formula(name, tuple(shape), salt)
        if not held.is_floating_point() and not held.is_complex():
            full = full.abs() * 100
        yield name, held, full if dim is None else full.chunk(count, dim)[mine]


def wrong_numbers(
    model: nn.Module, place: Place, grid: commgrid.HyperCommGrid, salt: float, via: torch.dtype
) -> list[str]:
    """Return the tensors whose numbers are not the formula's, rounded to the source's dtype."""
    found = []
    for name, held, numbers in expected(model, place, grid, salt):
        whole = held.full_tensor() if isinstance(held, DTensor) else held
        if isinstance(held, nn.Parameter):
            numbers = numbers.to(via)
        if not torch.equal(whole.detach(), numbers.to(held.dtype)):
            found.append(name)
    return found


# -- optimizer state ------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """An optimizer whose state tests set."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (lr, 0.5)})


def optimizer_of(place: Place, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if place.way != "zero":
        return Own(model.parameters(), lr)
    reducer = GradientReducer(model, group=place.data, shard=True, grid=commgrid.get_grid())
    own: Any = Own
    return ShardedOptimizer(reducer, own, element_wise=True, lr=lr)


def tensors_of(optimizer: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that have state, and of which parameter each is, or is a part."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if isinstance(optimizer, ShardedOptimizer):
        for piece, tensor, _ in optimizer.parts():
            yield names[id(piece.slot.parameter)], tensor
    else:
        for parameter in model.parameters():
            yield names[id(parameter)], parameter


def kept(draw: Draw, key: Any, name: str, tensor: Tensor) -> Any:
    """Return the entry of a key in the state of the parameter `name`, or of a part of it.

    A tensor in the dtype of the source's parameter is converted to that of the target's.
    """
    number, entry = sum(map(ord, name)) / 7, draw.entries[key]
    others: dict[str, Callable[[], Any]] = {
        "number": lambda: int(number),
        "text": lambda: name,
        "one": lambda: torch.tensor(int(number)),
        "list": lambda: [torch.full((5,), int(number)), (name, 2)],
        "nested": lambda: {"of": {"a": [number, None]}, 3: torch.ones(5).bool()},
        "none": lambda: None,
    }
    if isinstance(entry, str):
        return others[entry]()
    before = torch.float32 if draw.source.has_copies else draw.source.dtype
    numbers = (tensor.detach().to(draw.source.dtype).double() * 50 + number).to(entry or before)
    return numbers.to(tensor.dtype) if entry in (None, before) else numbers


def set_state(draw: Draw, optimizer: Any, model: nn.Module) -> None:
    inner = getattr(optimizer, "inner", optimizer)
    for name, tensor in tensors_of(optimizer, model):
        inner.state[tensor] = {key: kept(draw, key, name, tensor) for key in draw.entries}


def wrong_state(draw: Draw, optimizer: Any, model: nn.Module, lr: float) -> list[str]:
    """Return the entries and options that differ from the source's."""
    inner, found = getattr(optimizer, "inner", optimizer), []
    for options in inner.param_groups:
        if (options["lr"], tuple(options["betas"])) != (lr, (lr, 0.5)):
            found.append(f"options {options}")
    for name, tensor in tensors_of(optimizer, model):
        state = inner.state.get(tensor, {})
        if {*map(repr, state)} != {*map(repr, draw.entries)}:
            found.append(f"{name}: keys {[*state]}")
            continue
        for key in draw.entries:
            right = kept(draw, key, name, tensor)
            if not _same(right, state[key]):
                found.append(f"{name}: {key!r} is {state[key]}, expected {right}")
    return found


def _same(right: Any, held: Any) -> bool:
    if isinstance(right, Tensor) and isinstance(held, Tensor):
        one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (right, held))
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(right, dict) and isinstance(held, dict):
        return right.keys() == held.keys() and all(_same(right[k], held[k]) for k in right)
    if isinstance(right, list | tuple) and type(right) is type(held):
        return len(right) == len(held) and all(map(_same, right, held))
    return bool(type(right) is type(held) and right == held)
