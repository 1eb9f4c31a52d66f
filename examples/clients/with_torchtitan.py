"""torchtitan's Llama on a commgrid grid: ParallelDims with meshes of the grid.

    torchrun --standalone --nproc-per-node 4 examples/clients/with_torchtitan.py --tp 2 --dp-shard 2
    torchrun … examples/clients/with_torchtitan.py --dp-shard 4
    torchrun … examples/clients/with_torchtitan.py --dp-shard 4 --plain      # without commgrid

Lines marked `# commgrid` are what a user adds; the rest is what torchtitan's trainer does for a
dense model. Its meshes `batch`, `loss` and `fsdp` are combinations of axes, which the groups table
gives those names. Needs `pip install --group clients`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from common import Losses, make_parser

try:
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer
except ImportError as error:
    raise SystemExit(f"{error}; pip install --group clients") from error

import commgrid  # commgrid


class GridDims(ParallelDims):  # commgrid
    def build_mesh(self) -> DeviceMesh:  # commgrid
        axes = {
            a: getattr(self, a) for a in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        }  # commgrid
        names = {"batch": "dp", "loss": "dp_cp", "fsdp": "dp_shard_cp"}  # commgrid
        grid = commgrid.initialize(**axes, groups=names)  # commgrid
        dense = grid.device_mesh("pp", "dp_replicate", "fsdp", "tp")  # commgrid
        data = grid.device_mesh("pp", "batch", "cp", "tp")  # commgrid
        self._global_meshes = {"dataloading": data, "dense": dense}  # commgrid
        self._meshes = {name: grid.device_mesh(name) for name in (*axes, *names)}  # commgrid
        self._world_mesh = grid.device_mesh()  # commgrid
        return self._world_mesh  # commgrid


def build(args: argparse.Namespace, dims: ParallelDims) -> Any:
    """The model, its weights drawn alike on every rank, then cut and sharded by torchtitan."""
    job = JobConfig()
    job.training.seq_len = args.seq_len
    job.training.mixed_precision_param = job.training.mixed_precision_reduce = "float32"
    job.activation_checkpoint.mode = "none"
    job.parallelism.disable_loss_parallel = True
    torch.manual_seed(args.seed)
    model: Any = Transformer(
        TransformerModelArgs(
            dim=64, n_layers=args.layers, n_heads=4, vocab_size=256, multiple_of=64,
            max_seq_len=args.seq_len,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.init_weights()
    parallelize_llama(model, dims, job)
    if not torch.cuda.is_available():  # gloo does not average: summed, then divided
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":  # which torchtitan takes for cuda
        parallel_dims.device_type = "cpu"
    kind = ParallelDims if args.plain else GridDims  # commgrid: GridDims
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    dims = kind(
        dp_replicate=args.dp_replicate, dp_shard=args.dp_shard, cp=1, tp=args.tp, pp=1, ep=1, etp=1,
        world_size=dist.get_world_size(),
    )  # fmt: skip
    dims.build_mesh()
    model = build(args, dims).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = dims.get_optional_mesh("batch")
    parts, part = (1, 0) if batch is None else (batch.size(), batch.get_local_rank())
    losses = Losses(args.metrics, dist.get_rank() == 0)
    for step in range(1, args.steps + 1):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        shape = args.batch_size, args.seq_len
        tokens = torch.randint(16, shape, generator=generator).cumsum(1).remainder(256).to(device)
        mine = tokens.chunk(parts)[part]
        logits = model(mine)[:, :-1]
        # torchtitan leaves FSDP's sum of gradients as it is and divides the loss.
        loss = F.cross_entropy(logits.flatten(0, 1).float(), mine[:, 1:].flatten()) / parts
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if batch is not None:
            dist.all_reduce(total, group=dims.get_mesh("loss").get_group())
        losses.add(total.item())
    if not args.plain:
        commgrid.destroy()  # commgrid
    dist.destroy_process_group()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, batch_size=16)
    add = parser.add_argument
    add("--dp-replicate", type=int, default=1, help="copies of the sharded model (default 1)")
    add("--dp-shard", type=int, default=1, help="ranks that share one copy (default 1)")
    add("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    add("--seq-len", type=int, default=32, help="tokens a sequence (default 32)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
