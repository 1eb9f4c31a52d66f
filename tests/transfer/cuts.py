"""A model cut in many ways over many grids, with numbers that a formula gives."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import commgrid
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.expert import GroupedExperts
from commgrid.parameters import mark_parameters
from commgrid.resharding.holders import Turns
from commgrid.resharding.item import Item
from commgrid.resharding.model_state import ModelState
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tests.checkpoint.models import formula

BLOCKS, VOCABULARY, HIDDEN, FFN = 4, 10, 8, 12


@dataclass(frozen=True)
class Cut:
    """How a model lies on a grid.

    Args:
        ranks: of the grid.
        axes: its sizes.
        chunks: of a stage.
        way: "layers" of commgrid, which "fsdp" and "hsdp" shard further; "plain": torch's alone.
        dtype: of parameters.
        shard: whether the optimizer is ZeRO-1.
    """

    ranks: tuple[int, ...]
    axes: dict[str, Any] = field(default_factory=dict)
    chunks: int = 1
    way: str = "layers"
    dtype: torch.dtype = torch.float32
    shard: bool = False

    def __str__(self) -> str:
        axes = " ".join(f"{axis} {size}" for axis, size in self.axes.items())
        more = f" x{self.chunks}" if self.chunks > 1 else ""
        how = "" if self.way == "layers" else f" {self.way}"
        zero = " zero" if self.shard else ""
        return f"{axes or 'dp'}{more}{how}{zero} {str(self.dtype)[6:]} on {list(self.ranks)}"


class Block(nn.Module):
    """Every kind of layer: equal, sliced by rows and columns, by heads, by experts; a buffer."""

    def __init__(self, grid: commgrid.HyperCommGrid, experts: bool, plain: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        if plain:
            self.up: nn.Module = nn.Linear(HIDDEN, FFN)
            self.down: nn.Module = nn.Linear(FFN, HIDDEN)
        else:
            self.up = ColumnParallelLinear(HIDDEN, FFN, grid=grid)
            self.down = RowParallelLinear(FFN, HIDDEN, grid=grid)
        if experts:
            self.attention = QKVParallelLinear(HIDDEN, 4, num_kv_heads=2, grid=grid)
            self.experts = GroupedExperts(HIDDEN, FFN, 4, gated=True, grid=grid)
        self.register_buffer("scale", torch.zeros(3))


def grid_of(cut: Cut, name: str) -> commgrid.HyperCommGrid | None:
    """The cut's grid; None on ranks that it leaves out."""
    groups = {"ends": {"of": "pp", "pick": ["first", "last"]}} if cut.axes.get("pp", 1) > 1 else {}
    return commgrid.initialize(**cut.axes, ranks=list(cut.ranks), name=name, groups=groups)


def build(cut: Cut, grid: commgrid.HyperCommGrid | None, experts: bool) -> list[nn.Module] | None:
    """This rank's chunks, with tied embeddings on the first and last one."""
    if grid is None:
        return None
    torch.set_default_dtype(cut.dtype)
    try:
        return [_chunk(cut, grid, number, experts) for number in range(cut.chunks)]
    finally:
        torch.set_default_dtype(torch.float32)


def _chunk(cut: Cut, grid: commgrid.HyperCommGrid, number: int, experts: bool) -> nn.Module:
    stages, stage = grid.size("pp"), grid.get_local_rank("pp")
    parts = stages * cut.chunks
    part = number * stages + stage
    own = [b for b in range(BLOCKS) if b * parts // BLOCKS == part]
    module = nn.Module()
    plain = cut.way == "plain"
    if part in (0, parts - 1):
        if plain:
            module.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        else:
            module.tokens = VocabParallelEmbedding(VOCABULARY, HIDDEN, grid=grid)
        if stages > 1:
            mark_parameters(module.tokens, shared="ends", grid=grid)
    module.blocks = nn.ModuleDict({str(b): Block(grid, experts, plain) for b in own})
    if cut.way in ("fsdp", "hsdp"):
        names = ("dp",) if cut.way == "fsdp" else ("dp_replicate", "dp_shard")
        for block in module.blocks.values():
            fully_shard(block, mesh=grid.device_mesh(*names))
        fully_shard(module, mesh=grid.device_mesh(*names))
    return module


def items(chunks: list[nn.Module], grid: commgrid.HyperCommGrid) -> Iterator[Item]:
    """This rank's tensors, with boxes."""
    found = ModelState(chunks, grid).items(Turns(grid))
    yield from (item for item in found if isinstance(item, Item))


def boxed(full: Tensor, offset: tuple[int, ...], size: Any) -> Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]


def fill(chunks: list[nn.Module], grid: commgrid.HyperCommGrid, salt: float) -> None:
    """Gives every tensor its boxes of the formula's numbers."""
    with torch.no_grad():
        for item in items(chunks, grid):
            full = formula(item.path[-1], item.shape, salt)
            for chunk in item.chunks:
                chunk.data.copy_(boxed(full, chunk.offset, chunk.data.shape))


def wrong(
    chunks: list[nn.Module], grid: commgrid.HyperCommGrid, salt: float, via: torch.dtype
) -> list[str]:
    """The tensors that are not what the formula gives, in the source's dtype and then in theirs."""
    found = []
    for item in items(chunks, grid):
        full = formula(item.path[-1], item.shape, salt).to(via).to(item.dtype)
        for chunk in item.chunks:
            if not torch.equal(chunk.data, boxed(full, chunk.offset, chunk.data.shape)):
                found.append(item.path[-1])
    return found


def wrong_slices(
    chunks: list[nn.Module], grid: commgrid.HyperCommGrid, salt: float, via: torch.dtype
) -> list[str]:
    """The slices of tp that are not `chunk`'s of the full tensor, told apart by layer here."""
    found = []
    count, mine = grid.size("tp"), grid.get_local_rank("tp")
    for chunk in chunks:
        for name, block in chunk.blocks.items():
            for layer, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
                parameter = block.get_parameter(layer).detach()
                if isinstance(parameter, DTensor) or isinstance(block.up, nn.Linear):
                    continue
                shape = list(parameter.shape)
                shape[dim] *= count
                full = formula(f"blocks.{name}.{layer}", tuple(shape), salt).to(via)
                if not torch.equal(parameter, full.to(parameter.dtype).chunk(count, dim)[mine]):
                    found.append(f"blocks.{name}.{layer} is another slice")
    return found


def optimizer_of(
    cut: Cut, chunks: list[nn.Module], grid: commgrid.HyperCommGrid, salt: float
) -> torch.optim.Optimizer:
    """AdamW after a step, whose state depends on the salt."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    if cut.way in ("fsdp", "hsdp"):
        optimizer: Any = torch.optim.AdamW(parameters, lr=salt)
        for parameter in parameters:
            parameter.grad = (parameter.detach() * salt + 0.1).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer  # type: ignore[no-any-return]
    model: nn.Module = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
    reducer = GradientReducer(model, shard=cut.shard, grid=grid)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=salt)
    sum((p.square() * salt + p * 0.1).sum() for p in parameters).backward()
    reducer.finish()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer  # type: ignore[no-any-return]


def state_of(optimizer: Any) -> list[Any]:
    """Everything an optimizer has, in order."""
    inner = getattr(optimizer, "inner", optimizer)
    found: list[Any] = []
    for group in inner.param_groups:
        found.append({key: value for key, value in group.items() if key != "params"})
        for parameter in group["params"]:
            state = inner.state[parameter]
            found += [(key, local(value)) for key, value in sorted(state.items())]
            found.append(local(parameter))
    return found


def local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
