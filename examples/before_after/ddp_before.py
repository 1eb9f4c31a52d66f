"""Plain DDP: every rank has the whole model.

torchrun --standalone --nproc-per-node 4 examples/before_after/ddp_before.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 128, bias=False)
        self.down = nn.Linear(128, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


def train(share: int, shares: int) -> list[float]:
    """Train on this rank's share of each batch; return the mean losses of the whole batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(MLP())
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
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


def main() -> list[float]:
    dist.init_process_group("gloo")
    losses = train(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
