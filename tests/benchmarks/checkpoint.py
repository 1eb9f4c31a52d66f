"""Saving and loading a model with AdamW's state, against torch's own way to do it.

    python tests/benchmarks/checkpoint.py --json
    python tests/benchmarks/checkpoint.py --only "8 ranks" --folder /fast/disk

tp 2, copies over dp, with gloo. The peer is what torch's documentation shows: a model of
parallelize_module's DTensors, get_model_state_dict and get_optimizer_state_dict (flattened),
torch.distributed.checkpoint.save and load, and setting what was loaded. Both write the same numbers
to a new folder of one disk each time, and wait until they are on it. Model and optimizer state are
in fp32; names are those of four parameters a layer.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[2]))

import commgrid
from commgrid import checkpoint
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.benchmarks.race import meet
from tests.benchmarks.report import Row, compare, main, run_on_ranks

PEER = "torch.distributed.checkpoint"
FLAT = torch_state.StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Case:
    """How many ranks, and what the model is of."""

    ranks: int
    layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.layers} layers of {self.width}"


CASES = [Case(4, 16, 512), Case(8, 16, 512), Case(8, 48, 128)]


class Layer(nn.Module):
    """An MLP of commgrid's layers, or of torch's."""

    def __init__(self, width: int, *, ours: bool) -> None:
        super().__init__()
        kinds: Any = (ColumnParallelLinear, RowParallelLinear) if ours else (nn.Linear, nn.Linear)
        self.up, self.down = kinds[0](width, 4 * width), kinds[1](4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def trained(case: Case, grid: commgrid.HyperCommGrid, *, ours: bool) -> Any:
    """The model and its optimizer, after a step, which makes its state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(case.width, ours=ours) for _ in range(case.layers)))
    if not ours:
        for layer in model:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, grid.device_mesh("tp"), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, case.width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def torch_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": torch_state.get_model_state_dict(model),
        "optimizer": torch_state.get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def contestants(
    case: Case, grid: commgrid.HyperCommGrid
) -> dict[str, tuple[Callable[[str], object], Callable[[str], object]]]:
    """What saves, and what loads, each given a folder."""
    model, optimizer = trained(case, grid, ours=True)
    other, its = trained(case, grid, ours=False)

    def torch_load(folder: str) -> None:
        states = torch_states(other, its)
        dcp.load(states, checkpoint_id=folder)
        torch_state.set_model_state_dict(other, states["model"])
        torch_state.set_optimizer_state_dict(other, its, states["optimizer"], options=FLAT)

    return {
        "ours": (
            lambda folder: checkpoint.save(folder, 1, model, optimizer, progress=False),
            lambda folder: checkpoint.load(folder, model, optimizer, progress=False),
        ),
        PEER: (
            lambda folder: dcp.save(torch_states(other, its), checkpoint_id=folder),
            torch_load,
        ),
    }


def on_a_rank(case: Case, repeats: int, folder: str) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of saving and loading, each contestant in turn."""
    warnings.simplefilter("ignore")
    grid = commgrid.initialize(tp=2)
    found = contestants(case, grid)
    spent: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
    for repeat in range(repeats + 1):
        for name, actions in sorted(found.items(), reverse=bool(repeat % 2)):
            place = f"{folder}/{repeat}-{name}"
            for what, action in zip(("save", "load"), actions, strict=True):
                meet()
                started = time.perf_counter()
                action(place)
                meet()
                if repeat:  # the first one makes what is made once
                    took = (time.perf_counter() - started) * 1e3
                    spent[what].setdefault(name, []).append(took)
            if grid.rank == 0:
                shutil.rmtree(place)
    commgrid.shutdown()
    return spent


def measure(args: argparse.Namespace) -> Iterator[Row]:
    for case in CASES:
        if args.only and args.only not in str(case):
            continue
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            ranks = run_on_ranks(
                on_a_rank, case.ranks, case, args.repeats, folder, backend=None,
                launcher="torchrun", timeout=900,
            )  # fmt: skip
        for what in ("save", "load"):
            mine, theirs = (
                [statistics.mean(one) for one in zip(*(r[what][n] for r in ranks), strict=True)]
                for n in ("ours", PEER)
            )
            yield compare(str(case), what, "ms", PEER, mine, theirs)


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--repeats", {"type": int, "default": 15, "help": "of each contestant (default 15)"}),
        ("--folder", {"metavar": "DIR", "help": "where to write (default: the temporary folder)"}),
        ("--only", {"metavar": "TEXT", "help": "cases whose name has this in it"}),
    )  # fmt: skip
