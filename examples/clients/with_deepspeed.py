"""DeepSpeed's ZeRO on a commgrid grid, beside tensor-parallel layers: the adapter is its `mpu`.

    torchrun --standalone --nproc-per-node 4 examples/clients/with_deepspeed.py --tp 2 --zero 1
    torchrun … examples/clients/with_deepspeed.py --zero 2
    torchrun … examples/clients/with_deepspeed.py --tp 2 --zero 1 --plain    # without commgrid

Lines marked `# commgrid` are what a user adds; `PlainMpu` is what has no place any more. DeepSpeed
asks its mpu for data-parallel and model-parallel groups under Megatron's names. Needs
`pip install --group clients`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common import Losses, make_parser

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
try:
    import deepspeed
except ImportError as error:
    raise SystemExit(f"{error}; pip install --group clients") from error

import megatron_adapter.parallel_state as grid_mpu  # commgrid

if not torch.cuda.is_available():  # else it compiles an all-reduce for minutes; gloo has one
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class PlainMpu:
    """The groups by hand: tp beside each other, dp across, as Megatron lays them out."""

    def __init__(self, tp: int) -> None:
        rank, world, mine = dist.get_rank(), dist.get_world_size(), {}
        lists = {"model": [list(range(i, i + tp)) for i in range(0, world, tp)]}
        lists["data"] = [list(range(i, world, tp)) for i in range(tp)]
        for kind, groups in lists.items():
            made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
            mine[kind] = next(group for ranks, group in made.items() if rank in ranks)
        for name, group in {**mine, "tensor_model": mine["model"]}.items():
            setattr(self, f"get_{name}_parallel_group", lambda g=group: g)
            setattr(self, f"get_{name}_parallel_rank", lambda g=group: dist.get_rank(g))
            setattr(self, f"get_{name}_parallel_world_size", lambda g=group: dist.get_world_size(g))


class Copied(torch.autograd.Function):
    """The same on all tp ranks; its gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """The sum over tp ranks; its gradient is each one's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Block(nn.Module):
    """A norm and an MLP, whose inner width is shared out over the mpu's tp."""

    def __init__(self, hidden: int, mpu: Any) -> None:
        super().__init__()
        self.group = mpu.get_tensor_model_parallel_group()
        rank, size = mpu.get_tensor_model_parallel_rank(), dist.get_world_size(self.group)
        self.norm = nn.LayerNorm(hidden)
        up, down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.up = nn.Parameter(up.weight.chunk(size)[rank].detach().clone())
        self.down = nn.Parameter(down.weight.chunk(size, 1)[rank].detach().clone())
        self.bias = nn.Parameter(down.bias.detach().clone())
        for cut in (self.up, self.down):
            cut.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """(batch, hidden) to the same."""
        inner = F.gelu(F.linear(Copied.apply(self.norm(x), self.group), self.up))
        return x + Summed.apply(F.linear(inner, self.down), self.group) + self.bias


def train(args: argparse.Namespace) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    mpu: Any
    if args.plain:
        mpu = PlainMpu(args.tp)
    else:
        grid_mpu.initialize_model_parallel(tensor_model_parallel_size=args.tp)  # commgrid
        mpu = grid_mpu  # commgrid
    torch.manual_seed(args.seed)
    model = nn.Sequential(*(Block(args.hidden, mpu) for _ in range(args.layers)))
    data = mpu.get_data_parallel_world_size()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), mpu=mpu,
        config={
            "train_batch_size": args.batch_size,
            "train_micro_batch_size_per_gpu": args.batch_size // data,
            "zero_optimization": {"stage": args.zero},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
        },
    )  # fmt: skip
    losses = Losses(args.metrics, dist.get_rank() == 0)
    for step in range(1, args.steps + 1):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        batch = torch.randn(args.batch_size, args.hidden, generator=generator).to(engine.device)
        x = batch.chunk(data)[mpu.get_data_parallel_rank()]
        loss = (engine(x) - x.flip(1)).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mpu.get_data_parallel_group())
        losses.add(mean.item() / data)
    engine.destroy()
    if not args.plain:
        grid_mpu.destroy_model_parallel()  # commgrid
    dist.destroy_process_group()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    add("--zero", type=int, default=1, choices=(0, 1, 2), help="DeepSpeed's stage (default 1)")
    add("--hidden", type=int, default=32, help="width (default 32)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
