"""Accelerate's FSDP2 and HSDP on a commgrid grid: its ParallelismConfig is handed the grid's mesh.

    torchrun --standalone --nproc-per-node 4 examples/clients/with_accelerate.py --dp-shard 4
    torchrun … examples/clients/with_accelerate.py --dp-replicate 2 --dp-shard 2
    torchrun … examples/clients/with_accelerate.py --dp-shard 4 --plain      # without commgrid

Lines marked `# commgrid` are what a user adds. Accelerate shards over `dp_shard_cp` and averages
over `dp_cp`, names that the grid offers with its mesh. Needs `pip install --group clients`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from common import Losses, make_parser

try:
    from accelerate import Accelerator, PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
except ImportError as error:
    raise SystemExit(f"{error}; pip install --group clients") from error

import commgrid  # commgrid


class Block(nn.Module):
    """A norm and an MLP beside what comes in."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, hidden) to the same."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def accelerator_for(config: ParallelismConfig) -> Accelerator:
    """FSDP2 over the config's mesh, each Block by itself."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    cpu = not torch.cuda.is_available()
    if cpu:  # Accelerate knows FSDP on accelerators alone, and would ignore the plugin
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(cpu=cpu, fsdp_plugin=plugin, parallelism_config=config)


def train(args: argparse.Namespace) -> None:
    sizes = {"dp_replicate": args.dp_replicate, "dp_shard": args.dp_shard}
    config = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
    if not args.plain:
        grid = commgrid.initialize(**sizes)  # commgrid
        config.device_mesh = grid.device_mesh(*config.active_mesh_dims)  # commgrid
    accelerator = accelerator_for(config)
    torch.manual_seed(args.seed)
    model: Any = nn.Sequential(*(Block(args.hidden) for _ in range(args.layers)))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = Losses(args.metrics, accelerator.is_main_process)
    for step in range(1, args.steps + 1):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        batch = torch.randn(args.batch_size, args.hidden, generator=generator)
        x = batch.to(accelerator.device).chunk(accelerator.num_processes)[accelerator.process_index]
        loss = (model(x) - x.flip(1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.add(accelerator.reduce(loss.detach(), "mean").item())
    if not args.plain:
        commgrid.shutdown()  # commgrid
    accelerator.end_training()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--dp-replicate", type=int, default=1, help="copies of the sharded model (default 1)")
    add("--dp-shard", type=int, default=1, help="ranks that share one copy (default 1)")
    add("--hidden", type=int, default=32, help="width (default 32)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
