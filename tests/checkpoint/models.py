"""Models of commgrid's layers, the same unsharded, and states that a formula gives."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import commgrid
from commgrid.parameters import own_slice, placements
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    initialize_parameters,
)

VOCABULARY, HIDDEN = 10, 8  # 10 rows are padded on 3 and on 4 ranks


class Block(nn.Module):
    """A norm, an MLP, and a buffer; commgrid's layers or torch's, of the same names."""

    def __init__(self, *, parallel: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        if parallel:
            self.up: nn.Module = ColumnParallelLinear(HIDDEN, 12)
            self.down: nn.Module = RowParallelLinear(12, HIDDEN)
        else:
            self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens (batch, length) to the sum of squared logits."""

    def __init__(self, *, parallel: bool = True) -> None:
        super().__init__()
        self.parallel = parallel
        if parallel:
            self.tokens: Any = VocabParallelEmbedding(VOCABULARY, HIDDEN)
        else:
            self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([Block(parallel=parallel) for _ in range(2)])
        if parallel:
            self.head: nn.Module = VocabParallelHead(HIDDEN, VOCABULARY, gather_output=True)
        else:
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def made(*, parallel: bool = True, dtype: torch.dtype = torch.float64) -> Model:
    torch.set_default_dtype(dtype)
    try:
        model = Model(parallel=parallel)
    finally:
        torch.set_default_dtype(torch.float32)
    if parallel:
        initialize_parameters(model, 1)
    return model


def batch(step: int, grid: commgrid.HyperCommGrid | None) -> Tensor:
    """The step's tokens, this rank's share of 8 sequences of 4."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (8, 4), generator=generator)
    if grid is None:
        return tokens
    return tokens.chunk(grid.size("dp"))[grid.get_local_rank("dp")]


def formula(name: str, shape: tuple[int, ...], salt: float = 0.0) -> Tensor:
    """A full tensor whose every element is another number."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) + len(name) + salt).sin().view(shape)


def differences(model: nn.Module, salt: float) -> Iterator[str]:
    """The parameters that are not this rank's slices of the formula's numbers."""
    for placement in placements(model):
        if not torch.equal(placement.parameter, expected(placement, salt)):
            yield placement.name


def fill(model: nn.Module, salt: float) -> None:
    """Gives every parameter its slices of the formula's numbers."""
    with torch.no_grad():
        for placement in placements(model):
            placement.parameter.copy_(expected(placement, salt))


def expected(placement: Any, salt: float) -> Tensor:
    part = formula(placement.name, placement.shape, salt)
    for dim, group in placement.shards:
        part = own_slice(part, dim, group, placement.parameter.shape[dim])
    return part.to(placement.parameter.dtype)


class Stage(nn.Module):
    """A layer of a pipeline stage: attention of its own, under any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, QKVParallelLinear(HIDDEN, 4, num_kv_heads=2))
