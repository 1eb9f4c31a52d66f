"""A small checkpoint of every kind of value, and the formula that gives each of its numbers.

`python -m tests.checkpoint.made_by_release` writes tests/data/checkpoint_<version>.tar.xz. One is
kept for each release: run it before the version rises, and add the version to `RELEASES`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.expert import GroupedExperts
from commgrid.parameters import own_slice, placements
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from commgrid.testing import run_on_ranks
from tests.checkpoint.models import formula

DATA = Path(__file__).parents[1] / "data"
RELEASES = ("0.2.0",)
STEP, UPDATES, CALLS = 7, 5.0, 11
EXTRA = {"tokens": 81_920, "order": [3, 1, 2], "state": {"name": "cosine", "rate": 0.25}}
GRID = {"tp": 2, "dp": 2, "ep": 2}
STATES = {"exp_avg": 0.25, "exp_avg_sq": 0.75}
"""Tensors of AdamW's state, and what tells each one's numbers from the parameter's."""

PARTS = ("tokens", "up", "norm", "down", "experts")


def made(parts: tuple[str, ...] = PARTS) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """Some parts of the model, as a pipeline stage has them, and an optimizer with its state."""
    make = {
        "tokens": lambda: VocabParallelEmbedding(5, 4),  # padded on 2 ranks
        "up": lambda: ColumnParallelLinear(4, 6),
        "norm": lambda: nn.BatchNorm1d(4),  # has buffers
        "down": lambda: RowParallelLinear(6, 4, bias=False),
        "experts": lambda: GroupedExperts(4, 2, 2),
    }
    model = nn.ModuleDict({part: make[part]() for part in parts})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def values(
    model: nn.ModuleDict, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each tensor of the state, by name, and this rank's part of the formula's tensor."""
    for placement in placements(model):
        state: dict[str, Any] = optimizer.state[placement.parameter]
        for kind, salt in ({"weight": 0.0} | STATES).items():
            part = formula(placement.name, placement.shape, salt).float()
            for dim, group in placement.shards:
                part = own_slice(part, dim, group, placement.parameter.shape[dim])
            held = placement.parameter if kind == "weight" else state[kind]
            yield f"{placement.name} {kind}", held, part
        yield f"{placement.name} step", state["step"], torch.tensor(UPDATES)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            yield name, buffer, formula(name, tuple(buffer.shape)).float()
        else:
            yield name, buffer, torch.tensor(CALLS)


def write(folder: str) -> None:
    commgrid.initialize(**GRID)
    model, optimizer = made()
    with torch.no_grad():
        for _, held, part in values(model, optimizer):
            held.copy_(part)
    checkpoint.save(folder, STEP, model, optimizer, extra=EXTRA, progress=False)
    commgrid.shutdown()


def archive(version: str) -> Path:
    """Where a release's checkpoint is kept: packed, a tenth of its size."""
    return DATA / f"checkpoint_{version}.tar.xz"


def main() -> None:
    """Write the checkpoint of the present version."""
    packed = archive(commgrid.__version__)
    with TemporaryDirectory() as folder:
        run_on_ranks(write, 4, folder)
        shutil.make_archive(str(packed).removesuffix(".tar.xz"), "xztar", folder)
    print(f"{packed}: {packed.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
