"""Lightning's ModelParallelStrategy on a commgrid grid: FSDP2 and torch's tensor-parallel layers.

    torchrun --standalone --nproc-per-node 4 examples/clients/with_lightning.py --dp 2 --tp 2
    torchrun … examples/clients/with_lightning.py --dp 4
    torchrun … examples/clients/with_lightning.py --dp 2 --tp 2 --plain      # without commgrid

Lines marked `# commgrid` are what a user adds. The strategy makes its mesh where processes have
been set up; a subclass makes it of the grid, whose table has the strategy's names for dp and tp.
Needs `pip install --group clients`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from common import Losses, make_parser

try:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
except ImportError as error:
    raise SystemExit(f"{error}; pip install --group clients") from error

import commgrid  # commgrid


class GridStrategy(ModelParallelStrategy):  # commgrid
    def setup_environment(self) -> None:  # commgrid
        super(ModelParallelStrategy, self).setup_environment()  # commgrid
        self._setup_distributed()  # commgrid
        names = {"data_parallel": "dp", "tensor_parallel": "tp"}  # commgrid
        grid = commgrid.initialize(tp=self._tensor_parallel_size, groups=names)  # commgrid
        self._device_mesh = grid.device_mesh(*names)  # commgrid
        self.lightning_module._device_mesh = self._device_mesh  # commgrid


class Block(nn.Module):
    """A norm and an MLP, whose inner width is shared out over tp."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, hidden) to the same."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Reverser(lightning.LightningModule):
    """Learns to turn its input around."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.losses: list[Tensor] = []
        torch.manual_seed(args.seed)
        self.model: Any = nn.Sequential(*(Block(args.hidden) for _ in range(args.layers)))

    def configure_model(self) -> None:
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        for block in self.model:
            if tensor.size() > 1:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, tensor, plan)
            fully_shard(block, mesh=data)
        if not torch.cuda.is_available():  # gloo does not average: summed, then divided
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (x,) = batch
        loss = (self.model(x) - x.flip(1)).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def train(args: argparse.Namespace) -> None:
    strategy = ModelParallelStrategy if args.plain else GridStrategy  # commgrid: GridStrategy
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=args.dp * args.tp,
        strategy=strategy(data_parallel_size=args.dp, tensor_parallel_size=args.tp),
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(args.seed)
    rows = torch.randn(args.steps * args.batch_size, args.hidden, generator=generator)
    # Lightning hands each data-parallel rank its part.
    data = DataLoader(TensorDataset(rows), batch_size=args.batch_size // args.dp)
    module = Reverser(args)
    trainer.fit(module, data)
    losses = torch.stack(module.losses)
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    told = Losses(args.metrics, trainer.is_global_zero)
    for loss in losses.tolist():
        told.add(loss)
    if not args.plain:
        commgrid.destroy()  # commgrid
    dist.destroy_process_group()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--dp", type=int, default=1, help="data-parallel size (default 1)")
    add("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    add("--hidden", type=int, default=32, help="width (default 32)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
