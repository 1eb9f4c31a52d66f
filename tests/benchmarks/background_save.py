"""Training steps while a checkpoint is written beside them, and what starting to write it costs.

    python tests/benchmarks/background_save.py --json
    python tests/benchmarks/background_save.py --folder /fast/disk --ranks 4

tp 2, copies over dp, with gloo; AdamW's state, fp32. Rows:

- `step`: a step with a save under way, over one of the same run with none.
- `step, torch`: a step with a save under way, over one with `torch.distributed.checkpoint`'s
  async_save under way.
- `start`: the call that starts it, over a plain copy of what it has to copy to new memory. All but
  the first save of a job copy to the memory of the one before; the first repeat is left out.
- `start, torch`: the same, over `torch.distributed.checkpoint.async_save` of torch's model of
  DTensors, which gathers its plans in the call.
- `processor time`: a whole save in the background, over one that waits; of a rank's process, with
  nothing beside it.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import commgrid
from commgrid import checkpoint
from commgrid.checkpoint import background
from tests.benchmarks.checkpoint import Case, torch_states, trained
from tests.benchmarks.race import meet
from tests.benchmarks.report import Row, compare, main, run_on_ranks


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    """Milliseconds of one."""
    started = time.perf_counter()
    model(x).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=commgrid.get_grid().get_group("dp"))
    optimizer.step()
    optimizer.zero_grad()
    return (time.perf_counter() - started) * 1e3


def beside(
    under_way: Callable[[], bool], model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor
) -> list[float]:
    """Milliseconds of each step until no rank has a save under way; the last one is left out."""
    spent = []
    while True:
        writes = under_way()
        spent.append(step(model, optimizer, x))
        going = torch.tensor([float(writes)])
        dist.all_reduce(going)
        if not going:
            return spent[:-1] or spent


def copied(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors: list[Any] = [*model.parameters()]
    tensors += [each for state in optimizer.state.values() for each in state.values()]
    return [each.detach().clone() for each in tensors]


def on_a_rank(case: Case, repeats: int, rows: int, folder: str) -> dict[str, list[float]]:
    """Milliseconds by what was done: the medians of each repeat's steps, and each call."""
    warnings.simplefilter("ignore")
    grid = commgrid.initialize(tp=2)
    model, optimizer = trained(case, grid, ours=True)
    other, its = trained(case, grid, ours=False)
    spare = dist.new_group(backend="gloo")  # async_save asks for one of its own
    x = torch.randn(
        rows, case.width, generator=torch.Generator().manual_seed(grid.coordinate["dp"])
    )
    spent: dict[str, list[float]] = {
        name: []
        for name in ("quiet", "busy", "torch busy", "copy", "start", "torch", "beside", "waits")
    }
    for repeat in range(repeats + 1):
        quiet = [step(model, optimizer, x) for _ in range(10)]
        meet()
        started = time.perf_counter()
        held = copied(model, optimizer)
        took = {"copy": (time.perf_counter() - started) * 1e3}
        del held
        meet()
        started = time.perf_counter()
        checkpoint.save(f"{folder}/{repeat}", 1, model, optimizer, background=True, progress=False)
        took["start"] = (time.perf_counter() - started) * 1e3
        busy = beside(
            lambda: any(each._thread.is_alive() for each in background._under_way),
            model, optimizer, x,
        )  # fmt: skip
        checkpoint.wait()
        meet()
        started = time.perf_counter()
        saving: Any = dcp.async_save(
            torch_states(other, its), checkpoint_id=f"{folder}/{repeat}-torch",
            process_group=spare,
        )  # fmt: skip
        took["torch"] = (time.perf_counter() - started) * 1e3
        torch_busy = beside(lambda it=saving: not it.done(), model, optimizer, x)
        saving.result()
        for name in ("beside", "waits") if repeat % 2 else ("waits", "beside"):
            meet()
            since = time.process_time()
            checkpoint.save(f"{folder}/{repeat}-{name}", 1, model, optimizer,
                            background=name == "beside", progress=False)  # fmt: skip
            checkpoint.wait()
            took[name] = (time.process_time() - since) * 1e3
        meet()
        if grid.rank == 0:
            for each in Path(folder).iterdir():
                shutil.rmtree(each)
        if repeat:
            took |= {
                "quiet": statistics.median(quiet),
                "busy": statistics.median(busy),
                "torch busy": statistics.median(torch_busy),
            }
            for name, each in took.items():
                spent[name].append(each)
    commgrid.shutdown()
    return spent


def measure(args: argparse.Namespace) -> Iterator[Row]:
    case = Case(args.ranks, args.layers, args.width)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        ranks = run_on_ranks(
            on_a_rank, case.ranks, case, args.repeats, args.rows, folder, backend=None,
            launcher="torchrun", timeout=900,
        )  # fmt: skip
    mean = {
        name: [statistics.mean(one) for one in zip(*(r[name] for r in ranks), strict=True)]
        for name in ranks[0]
    }
    yield compare(str(case), "step", "ms", "no save under way", mean["busy"], mean["quiet"])
    yield compare(str(case), "step, torch", "ms", "async_save", mean["busy"], mean["torch busy"])
    yield compare(str(case), "start", "ms", "a copy of the state", mean["start"], mean["copy"])
    yield compare(str(case), "start, torch", "ms", "async_save", mean["start"], mean["torch"])
    yield compare(
        str(case), "processor time", "ms", "a save that waits", mean["beside"], mean["waits"]
    )


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--ranks", {"type": int, "default": 2, "help": "an even number (default 2)"}),
        ("--layers", {"type": int, "default": 8, "help": "of the model (default 8)"}),
        ("--width", {"type": int, "default": 512, "help": "of it (default 512)"}),
        ("--rows", {"type": int, "default": 512, "help": "of a rank's batch (default 512)"}),
        ("--repeats", {"type": int, "default": 7, "help": "saves (default 7)"}),
        ("--folder", {"metavar": "DIR", "help": "where to write (default: the temporary folder)"}),
    )  # fmt: skip
