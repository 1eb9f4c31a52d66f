"""Nothing reads what is still under way: the device is held up before every collective, and CUDA's
sanitizer watches who touches which memory on which stream."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid.collectives import asynchronous
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.parameters import mark_parameters
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    initialize_parameters,
    matmul,
)
from tests.gpu.on_gpus import on_gpus

CYCLES = 20_000_000  # about 10 ms
DELAYED = ("_all_gather_single", "_reduce_scatter_single")


class Block(nn.Module):
    """A norm and an MLP under sequence parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = mark_parameters(nn.LayerNorm(32), partial="tp")
        self.up = ColumnParallelLinear(32, 64, sequence_parallel=True)
        self.down = RowParallelLinear(64, 32, sequence_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


def train(delay: bool, shard: bool, overlap: bool) -> list[Tensor]:
    """The weights after four steps; on CUDA where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if delay and device.type == "cuda":
        _delay_collectives()
    if not commgrid.is_initialized():
        commgrid.initialize(tp=2)
    grid = commgrid.get_grid()
    model = nn.Sequential(*(Block() for _ in range(4)))
    initialize_parameters(model, seed=0)
    model.to(device)
    reducer = GradientReducer(model, shard=shard, bucket_bytes=4096)
    optimizer: Any = (
        ShardedOptimizer(
            reducer, torch.optim.AdamW, lr=1e-2, overlap=overlap,
            units=list(model) if overlap else None,
        )
        if shard
        else torch.optim.AdamW(model.parameters(), lr=1e-2)
    )  # fmt: skip
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + grid.get_local_rank("dp"))
        for i in range(2):
            x = torch.randn(8, 2, 32, generator=generator)
            own = x.chunk(2)[grid.get_local_rank("tp")].to(device)
            with reducer.no_sync() if i == 0 else nullcontext():
                model(own).square().sum().backward()
        reducer.finish(count=torch.tensor(32.0, device=device))
        reducer.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
    if shard:
        optimizer.wait()
    found = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    reducer.close()
    return found


def _delay_collectives() -> None:
    """Holds the stream up before everything that communicates, and a moment after it is waited for:
    what is read too early is then not there, and what is freed too early is somebody else's."""

    def late(call: Any) -> Any:
        def calling(*given: Any, **more: Any) -> Any:
            torch.cuda._sleep(CYCLES)
            return call(*given, **more)

        return calling

    for name in DELAYED:
        setattr(asynchronous, name, late(getattr(asynchronous, name)))
    for name in ("all_reduce", "all_to_all_single", "all_gather", "broadcast"):
        setattr(dist, name, late(getattr(dist, name)))
    matmul.weight_gradient = late(matmul.weight_gradient)


@pytest.mark.parametrize(("shard", "overlap"), [(False, False), (True, False), (True, True)])
def test_the_same_weights_however_late_collectives_are(shard: bool, overlap: bool) -> None:
    prompt = on_gpus(train, 4, False, shard, overlap)
    late = on_gpus(train, 4, True, shard, overlap)
    for one, other in zip(prompt, late, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            # The same kernels in the same order; sums over ranks may differ in their order.
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shard", "overlap"), [(False, False), (True, True)])
def test_the_sanitizer_finds_no_race(
    shard: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")  # read when a spawned rank imports torch
    on_gpus(train, 2, True, shard, overlap)
