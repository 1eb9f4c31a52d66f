"""A pipeline of 4 stages, against torch.distributed.pipelining and against the simulator.

    python tests/benchmarks/pipeline.py --json
    python tests/benchmarks/pipeline.py --only sleeping      # what 2 cores do not matter for

Step time: forward and backward of 8 microbatches through the same modules, under our schedule and
torch's of the same kind, timed from barrier to barrier, the contestants in turn. `computing` does
matmuls; `sleeping` sleeps as long instead, so that 4 ranks do not share 2 cores.

Idle time: the rest of a sleeping step over the seconds that its busiest stage slept, under our
schedule and under torch's. What is left beside it is the host's time between two actions: messages
that are posted, processes that wake up. The simulator has none of that, and says how small the idle
time of the schedule itself is for the action times of our step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import commgrid
from commgrid.collectives import all_gather
from commgrid.pipeline import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pipeline,
    Times,
    simulate,
)
from tests.benchmarks.race import Build, meet, race
from tests.benchmarks.report import Row, compare, main, run_on_ranks

warnings.simplefilter("ignore")
STAGES, MICROBATCHES, ROWS, WIDTH = 4, 8, 64, 256
SECONDS = 0.08  # that a stage sleeps for each of the three; a chunk takes its share
KINDS = {Forward: 0, Backward: 1, BackwardInput: 1, BackwardWeight: 2}
SCHEDULES: dict[str, tuple[int, type[Any]]] = {
    "gpipe": (1, ScheduleGPipe),
    "1f1b": (1, Schedule1F1B),
    "interleaved": (2, ScheduleInterleaved1F1B),
    "zb-h1": (1, ScheduleInterleavedZeroBubble),
}


# -- the modules ------------------------------------------------------------------------


def computing(part: int, num_chunks: int) -> nn.Module:
    """Two MLPs; a chunk has one of them where there are two chunks."""
    torch.manual_seed(part)
    mlps = [
        [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        for _ in range(2 // num_chunks)
    ]
    return nn.Sequential(*(layer for mlp in mlps for layer in mlp))


class Sleeping(nn.Module):
    """Sleeps for its forward, its input gradient and its weight gradient."""

    def __init__(self, part: int, num_chunks: int) -> None:
        super().__init__()
        self.part, self.share = part, 1 / num_chunks
        self.weight = nn.Parameter(torch.ones(WIDTH))
        # So that the first part, which has no input to find a gradient for, takes as long.
        self.anchor = nn.Parameter(torch.zeros(WIDTH))
        self.slept = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.part == 0:
            x = x + self.anchor
        x = _Sleep.apply(x, self, "F", "I")  # type: ignore[no-untyped-call]
        return x * _Sleep.apply(self.weight, self, "", "W")  # type: ignore[no-untyped-call]

    def sleep(self, kind: str) -> None:
        if kind:
            started = time.perf_counter()
            time.sleep(SECONDS * self.share)
            self.slept += time.perf_counter() - started


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Sleeping, forward: str, backward: str) -> Tensor:
        ctx.module, ctx.backward_kind = module, backward
        module.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.module.sleep(ctx.backward_kind)
        return dy, None, None, None


WORK: dict[str, Callable[[int, int], nn.Module]] = {"computing": computing, "sleeping": Sleeping}


# -- the contestants ----------------------------------------------------------------------


def own_parts(num_chunks: int) -> range:
    stage = commgrid.get_grid().get_local_rank("pp")
    return range(stage, STAGES * num_chunks, STAGES)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH)
    return x, target


def loss(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target, reduction="sum")


def ours(name: str, modules: list[nn.Module]) -> Callable[[], object]:
    pipeline = Pipeline(modules, name, num_microbatches=MICROBATCHES, loss=loss)
    x, target = (tensor.chunk(MICROBATCHES) for tensor in batch())

    def once() -> None:
        nn.ModuleList(modules).zero_grad()
        pipeline.step(x, target)

    return once


def torchs(kind: type[Any], modules: list[nn.Module], num_chunks: int) -> Callable[[], object]:
    grid = commgrid.get_grid()
    parts = own_parts(num_chunks)
    device, group = torch.device("cpu"), grid.get_group("pp")
    stages = [
        PipelineStage(module, part, STAGES * num_chunks, device, group=group)
        for part, module in zip(parts, modules, strict=True)
    ]  # fmt: skip
    schedule = kind(
        stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
        n_microbatches=MICROBATCHES, loss_fn=loss, scale_grads=False,
    )  # fmt: skip
    x, target = batch()

    def once() -> None:
        nn.ModuleList(modules).zero_grad()
        given = (x,) if grid.is_first("pp") else ()
        schedule.step(*given, target=target if grid.is_last("pp") else None)

    return once


def on_a_rank(name: str, work: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each repeat of a contestant, after both found the same gradients."""
    commgrid.initialize(pp=STAGES)
    num_chunks, kind = SCHEDULES[name]
    mine, theirs = (
        [WORK[work](part, num_chunks) for part in own_parts(num_chunks)] for _ in range(2)
    )
    contestants: dict[str, Build] = {
        "ours": partial(ours, name, mine), "torch": partial(torchs, kind, theirs, num_chunks),
    }  # fmt: skip
    spent = race(contestants, repeats, "cpu")
    both = (nn.ModuleList(modules).parameters() for modules in (mine, theirs))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    return spent


def idle_times(name: str, repeats: int) -> dict[str, list[float]]:
    """Each repeat's idle time over its work, ours and torch's, and ours as simulated."""
    grid = commgrid.initialize(pp=STAGES)
    num_chunks, kind = SCHEDULES[name]
    mine, theirs = ([Sleeping(part, num_chunks) for part in own_parts(num_chunks)] for _ in "ab")
    pipeline = Pipeline(mine, name, num_microbatches=MICROBATCHES, loss=loss)
    x, target = (tensor.chunk(MICROBATCHES) for tensor in batch())
    contestants = {
        "ours": (lambda: pipeline.step(x, target), mine),
        "torch": (torchs(kind, theirs, num_chunks), theirs),
    }
    for run, _ in contestants.values():  # which declares shapes
        run()
    transfer = seconds_of_a_transfer(grid, x[0])
    found: dict[str, list[float]] = {"ours": [], "torch": [], "simulated": []}
    for _ in range(repeats):
        for contestant, (run, modules) in contestants.items():
            for module in modules:
                module.slept = 0.0
            meet()
            started = time.perf_counter()
            run()
            meet()
            took = time.perf_counter() - started
            slept = torch.tensor([sum(m.slept for m in modules)], dtype=torch.float64)
            busy = all_gather(slept, "pp").max().item()
            found[contestant].append((took - busy) / busy)
        found["simulated"].append(simulated(pipeline, num_chunks, transfer))
    return found


def simulated(pipeline: Pipeline, num_chunks: int, transfer: float) -> float:
    """The bubble for mean seconds of every kind of action, in each chunk of each stage."""
    mine = torch.zeros(num_chunks, len({*KINDS.values()}), dtype=torch.float64)
    for action, (start, end) in pipeline.spans.items():
        mine[action.chunk, KINDS[type(action)]] += (end - start) / MICROBATCHES
    table = all_gather(mine[None], "pp")
    times = [
        {(s, c): table[s, c, i].item() for s in range(STAGES) for c in range(num_chunks)}
        for i in range(table.shape[-1])
    ]
    return simulate(pipeline.schedule, Times(*times, transfer=transfer)).bubble_fraction


def seconds_of_a_transfer(grid: commgrid.HyperCommGrid, tensor: Tensor, times: int = 50) -> float:
    """From one stage to the next and back, halved; the median."""
    group, tensor, found = grid.get_group("pp"), tensor.clone(), []
    stage = group.rank()
    for _ in range(times if stage < 2 else 0):
        started = time.perf_counter()
        for turn in (0, 1):
            if turn == stage:
                dist.send(tensor, group=group, group_dst=1 - stage)
            else:
                dist.recv(tensor, group=group, group_src=1 - stage)
        found.append((time.perf_counter() - started) / 2)
    told = torch.tensor([statistics.median(found) if found else 0.0], dtype=torch.float64)
    return all_gather(told, "pp")[0].item()


def measure(args: argparse.Namespace) -> Iterator[Row]:
    for work in WORK:
        for name in SCHEDULES:
            case = f"{name}, {work}"
            if args.only and args.only not in case:
                continue
            repeats = args.repeats if work == "computing" else max(args.repeats // 6, 1)
            spent = run_on_ranks(on_a_rank, STAGES, name, work, repeats, timeout=900)[0]
            peer = f"torch {SCHEDULES[name][1].__name__}"
            yield compare(case, "step time", "ms", peer, spent["ours"], spent["torch"])
    for name in SCHEDULES:
        case = f"{name}, sleeping: bubble"
        if args.only and args.only not in case:
            continue
        found = run_on_ranks(idle_times, STAGES, name, max(args.repeats // 6, 1), timeout=900)[0]
        case, peer = f"{name}, sleeping", f"torch {SCHEDULES[name][1].__name__}"
        yield compare(case, "idle time", "of work", peer, found["ours"], found["torch"])
        yield compare(
            case, "idle time", "of work", "simulator, less work: no time between actions",
            found["ours"], found["simulated"],
        )  # fmt: skip


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--repeats", {"type": int, "default": 60, "help": "of each contestant that computes; a "
                       "sixth of them where it sleeps (default 60)"}),
        ("--only", {"metavar": "TEXT", "help": "cases whose name has this in it"}),
    )  # fmt: skip
