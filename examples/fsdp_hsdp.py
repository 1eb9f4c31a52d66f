"""PyTorch's FSDP2 and HSDP on a commgrid grid, together with tensor-parallel layers.

    torchrun --standalone --nproc-per-node 4 examples/fsdp_hsdp.py                  # FSDP2
    torchrun --standalone --nproc-per-node 8 examples/fsdp_hsdp.py --tp 2 --dp-replicate 2
    torchrun --standalone --nproc-per-node 4 examples/fsdp_hsdp.py --tp 2 --native  # DTensor layers

Parameters are sharded over `fsdp`, which is dp_shard and cp together, and with --dp-replicate
copied over dp_replicate. Layers are commgrid's, or with --native torch's own through
parallelize_module. All of them use the grid's communicators: no further ones are made, and the loss
does not depend on how the job is cut.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commgrid
from commgrid.collectives import all_reduce
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    initialize_parameters,
)


class Block(nn.Module):
    """A norm and an MLP, whose inner width is shared out over tp."""

    def __init__(self, hidden: int, *, native: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        if native:  # made parallel by parallelize_module
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        else:
            self.up = ColumnParallelLinear(hidden, 4 * hidden)
            self.down = RowParallelLinear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, hidden) to the same."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(args: argparse.Namespace, grid: commgrid.HyperCommGrid) -> nn.Sequential:
    """The model, its weights drawn alike on every grid, then sharded."""
    model = nn.Sequential(*(Block(args.hidden, native=args.native) for _ in range(args.layers)))
    initialize_parameters(model, args.seed)
    data = ("dp_replicate", "fsdp") if args.dp_replicate > 1 else ("fsdp",)
    mesh = grid.device_mesh(*data)
    for block in model:
        if args.native:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, grid.device_mesh("tp"), plan)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(args: argparse.Namespace) -> None:
    grid = commgrid.initialize(
        tp=args.tp, cp=args.cp, dp_replicate=args.dp_replicate, dp_shard=-1,
        groups={"fsdp": "dp_shard_cp"},
    )  # fmt: skip
    data = grid.size("dp_cp")
    if args.batch_size % data:
        raise SystemExit(
            f"--batch-size {args.batch_size} cannot be shared equally by the {data} ranks of "
            f"dp_cp; expected a multiple of {data}"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_device(device)
    torch.set_default_dtype(torch.float64 if args.dtype == "fp64" else torch.float32)
    model = build(args, grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.metrics and grid.rank == 0:
        Path(args.metrics).write_text("")
    for step in range(1, args.steps + 1):
        generator = torch.Generator("cpu").manual_seed(args.seed * 1_000_003 + step)
        batch = torch.randn(args.batch_size, args.hidden, generator=generator, device="cpu")
        x = batch.to(device).chunk(data)[grid.get_local_rank("dp_cp")]
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()  # FSDP averages the gradients over the data axes
        optimizer.step()
        optimizer.zero_grad()
        mean = all_reduce(loss.detach(), "dp_cp", op="avg").item()
        if grid.rank == 0:
            print(f"step {step:3}  loss {mean:.5f}", flush=True)
        if args.metrics and grid.rank == 0:
            with Path(args.metrics).open("a") as lines:
                print(json.dumps({"step": step, "loss": mean}), file=lines)
    commgrid.shutdown()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    add("--cp", type=int, default=1, help="context-parallel size, folded into fsdp (default 1)")
    add("--dp-replicate", type=int, default=1, help="copies of the sharded model (default 1)")
    add("--native", action="store_true", help="torch's layers through parallelize_module")
    add("--layers", type=int, default=4, help="blocks (default 4)")
    add("--hidden", type=int, default=64, help="width (default 64)")
    add("--batch-size", type=int, default=32, help="rows a step, in all (default 32)")
    add("--steps", type=int, default=20, help="optimizer steps (default 20)")
    add("--seed", type=int, default=0, help="of weights and data (default 0)")
    add("--dtype", choices=("fp32", "fp64"), default="fp32", help="of weights (default fp32)")
    add("--metrics", metavar="FILE", help="write a JSON line a step: step, loss")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        train(parse())
    except commgrid.CommGridError as error:
        sys.exit(f"{type(error).__name__}: {error}")
