"""Megatron-core's layers on a grid, whose groups its parallel state then gives.

torchrun --standalone --nproc-per-node 4 examples/before_after/megatron_after.py
"""

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn

import megatron_adapter


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
        cut = {"config": config, "init_method": nn.init.xavier_uniform_, "bias": True}
        self.up = ColumnParallelLinear(32, 128, gather_output=False, **cut)
        self.down = RowParallelLinear(128, 32, input_is_parallel=True, skip_bias_add=False, **cut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)[0]))[0]
        return y


def main() -> list[float]:
    """Trains on the data-parallel rank's share of each batch; the losses, as means over all."""
    dist.init_process_group("gloo")
    megatron_adapter.install()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    dp = parallel_state.get_data_parallel_group()
    torch.manual_seed(0)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(10):
        x = batch.chunk(dp.size())[dp.rank()]
        loss = (model(x) - x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=dp)
            parameter.grad /= dp.size()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dp.size()
        dist.all_reduce(mean, group=dp)
        losses.append(float(mean))
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
