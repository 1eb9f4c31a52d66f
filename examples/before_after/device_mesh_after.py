"""FSDP2 and torch's tensor parallelism on a grid's DeviceMesh.

torchrun --standalone --nproc-per-node 4 examples/before_after/device_mesh_after.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import commgrid

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def main() -> list[float]:
    """Trains on this dp rank's share of each batch; the losses, as means over all of it."""
    grid = commgrid.initialize(tp=2)
    mesh = grid.device_mesh("dp", "tp")
    dp = mesh.get_group("dp")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
    parallelize_module(model, mesh["tp"], PLAN)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(10):
        x = batch.chunk(dp.size())[dp.rank()]
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dp.size()
        dist.all_reduce(mean, group=dp)
        losses.append(float(mean))
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    commgrid.shutdown()
    return losses


if __name__ == "__main__":
    main()
