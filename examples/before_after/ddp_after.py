"""DDP on a grid: two ranks share each layer, and DDP averages over the ranks with equal halves.

torchrun --standalone --nproc-per-node 4 examples/before_after/ddp_after.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def as_linear(weight: torch.Tensor) -> None:
    nn.init.kaiming_uniform_(weight, a=5**0.5)  # what nn.Linear draws: the losses stay the same


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(32, 128, bias=False, init=as_linear)
        self.down = RowParallelLinear(128, 32, bias=False, init=as_linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


def train(share: int, shares: int) -> list[float]:
    """Train on this rank's share of each batch; return the mean losses of the whole batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(MLP(), process_group=commgrid.get_group("dp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(10):
        x = batch.chunk(shares)[share]
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / shares
        dist.all_reduce(mean, group=commgrid.get_group("dp"))
        losses.append(float(mean))
    return losses


def main() -> list[float]:
    grid = commgrid.initialize(tp=2)
    losses = train(grid.get_local_rank("dp"), grid.size("dp"))
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    commgrid.shutdown()
    return losses


if __name__ == "__main__":
    main()
