"""torch's own pipeline schedules on a commgrid grid.

    torchrun --standalone --nproc-per-node 4 examples/torch_pipelining.py --pp 2 --schedule 1F1B
    torchrun --standalone --nproc-per-node 4 examples/torch_pipelining.py --pp 4 --schedule Interleaved1F1B

For who prefers torch.distributed.pipelining: its stages talk over the grid's `pp` group, and what
else the job needs (here data parallelism) has its groups in the same grid. The loss of every step
is that of the whole model on one process: --pp 1. (torch's stages need numpy, to tell each other
their shapes.)
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib.util
import sys

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

import commgrid
from commgrid.collectives import all_reduce, broadcast
from commgrid.data_parallel import GradientReducer
from commgrid.pipeline import partition_layers

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
ROWS, WIDTH = 32, 16


def layer(index: int, seed: int) -> nn.Module:
    """One layer, the same on whichever rank it is."""
    torch.manual_seed(seed * 1000 + index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def train(args: argparse.Namespace) -> list[float]:
    if importlib.util.find_spec("numpy") is None:
        raise SystemExit("torch.distributed.pipelining needs numpy here: pip install numpy")
    grid = commgrid.initialize(pp=args.pp, dp=args.dp)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    schedule_class = get_schedule_class(args.schedule)
    is_multi = issubclass(schedule_class, PipelineScheduleMulti)
    if ROWS % (grid.size("dp") * args.microbatches):
        raise SystemExit(
            f"--microbatches {args.microbatches} × {grid.size('dp')} ranks of dp do not divide "
            f"{ROWS} rows"
        )

    # Stage and chunk s + p · c, as torch numbers its stages too.
    num_parts = args.pp * (args.chunks if is_multi else 1)
    parts = partition_layers(args.layers, num_parts)
    own = range(grid.get_local_rank("pp"), num_parts, args.pp)
    modules = [
        nn.Sequential(*(layer(i, args.seed) for i in parts[part])).to(device) for part in own
    ]
    stages = [
        PipelineStage(module, part, num_parts, device, group=grid.get_group("pp"))
        for module, part in zip(modules, own, strict=True)
    ]
    schedule: PipelineScheduleSingle | PipelineScheduleMulti = schedule_class(
        stages if is_multi else stages[0],  # type: ignore[arg-type]
        n_microbatches=args.microbatches,
        loss_fn=mean_square,
        scale_grads=False,  # of `.grad`, from which the reducer has taken them: `finish` does it
    )
    model = nn.ModuleList(modules)
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    losses = []
    for step in range(args.steps):
        torch.manual_seed(args.seed * 1000 + 500 + step)
        x = torch.randn(2, ROWS, WIDTH, dtype=torch.float64).to(device)
        x, target = x.chunk(grid.size("dp"), 1)[grid.get_local_rank("dp")]
        found: list[Tensor] = []
        with reducer.no_sync():  # torch's schedules decide when which backward runs
            schedule.step(
                *([x] if own[0] == 0 else []),
                target=target if own[-1] == num_parts - 1 else None,
                losses=found if own[-1] == num_parts - 1 else None,
            )
        reducer.finish(count=args.microbatches)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(found).mean() if found else torch.zeros((), dtype=x.dtype).to(device)
        loss = broadcast(all_reduce(loss, "dp", op="avg"), "pp", source=args.pp - 1)
        losses.append(loss.item())
        if grid.rank == 0:
            print(f"step {step + 1:3}  loss {losses[-1]:.12f}", flush=True)
    commgrid.shutdown()
    return losses


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pp", type=int, default=1, help="pipeline stages (default 1)")
    add("--dp", type=int, default=-1, help="data-parallel size (default: what the ranks leave)")
    add("--schedule", choices=SCHEDULES, default="1F1B", help="torch's schedule (default 1F1B)")
    add("--chunks", type=int, default=2, help="of the schedules with several, per rank (default 2)")
    add("--microbatches", type=int, default=8, help="a step (default 8)")
    add("--layers", type=int, default=8, help="of the model (default 8)")
    add("--steps", type=int, default=5, help="(default 5)")
    add("--seed", type=int, default=0, help="of weights and data (default 0)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        train(parse())
    except commgrid.CommGridError as error:
        sys.exit(f"{type(error).__name__}: {error}")
