"""A Hugging Face model on a commgrid grid: Transformers' tensor parallelism, torch's FSDP2.

    torchrun --standalone --nproc-per-node 4 examples/transformers_tp.py --tp 2

Transformers slices the layers by their own plan over the grid's tp group, FSDP2 shards what is left
over dp; neither makes a communicator. The model is a tiny Llama that the first rank draws and saves
to a folder, so that nothing is downloaded; --model takes any folder that save_pretrained has
written. First the logits are compared with those of the whole model, then it trains on Python's own
documentation, as bytes. Needs `pip install --group interop`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import commgrid
from commgrid.collectives import all_reduce, barrier
from commgrid.collectives.objects import gathered
from commgrid.runtime.named_failures import named_failures

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"{error}; pip install --group interop") from error


@contextmanager
def tiny_llama(args: argparse.Namespace, grid: commgrid.HyperCommGrid) -> Iterator[str]:
    """A folder with the model: --model, or one that the first rank makes and takes away again."""
    if args.model:
        yield args.model
        return
    with tempfile.TemporaryDirectory(prefix="tiny-llama-") as own:
        if grid.rank == 0:
            torch.manual_seed(args.seed)
            config = LlamaConfig(
                vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            )  # fmt: skip
            LlamaForCausalLM(config).save_pretrained(own)
        yield gathered(own, grid.get_group("dp_tp"))[0]
        barrier("dp_tp")  # until all have read it


def compare(model: nn.Module, folder: str, grid: commgrid.HyperCommGrid) -> float:
    """The largest difference between its logits and the whole model's, over all ranks."""
    device = next(model.parameters()).device
    whole: Any = AutoModelForCausalLM.from_pretrained(folder).to(device)
    tokens = torch.arange(64, device=device).view(2, 32)
    with torch.no_grad():
        difference = (model(tokens).logits - whole(tokens).logits).abs().max()
    return all_reduce(difference, "dp_tp", op="max", grid=grid).item()


def text_batch(step: int, args: argparse.Namespace) -> Tensor:
    """The step's windows of text, (batch_size, seq_len + 1), the same on every rank."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    raw = "\n".join(topics[key] for key in sorted(topics)).encode()
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.seq_len - 1, (args.batch_size,), generator=generator)
    return text[starts[:, None] + torch.arange(args.seq_len + 1)].long()


def shard(model: Any, grid: commgrid.HyperCommGrid) -> None:
    """FSDP2 over dp: each layer by itself, then the rest."""
    # Its logits are a view, which nothing here changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh = grid.device_mesh("dp")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not torch.cuda.is_available():  # gloo does not average: summed, then divided
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def train(args: argparse.Namespace) -> None:
    grid = commgrid.initialize(tp=args.tp, dp=-1)
    data = grid.size("dp")
    if args.batch_size % data:
        raise SystemExit(
            f"--batch-size {args.batch_size} cannot be shared equally by the {data} ranks of dp; "
            f"expected a multiple of {data}"
        )
    main_rank = grid.rank == 0
    with named_failures(grid), tiny_llama(args, grid) as folder:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, tp_plan="auto", device_mesh=grid.device_mesh("tp")
        )
        difference = compare(model, folder, grid)
    if main_rank:
        print(grid, f"largest difference of a logit: {difference:.1e}", sep="\n", flush=True)
    shard(model, grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    rows: list[dict[str, float]] = [{"difference": difference}]
    for step in range(1, args.steps + 1):
        with named_failures(grid):
            batch = text_batch(step, args).chunk(data)[grid.get_local_rank("dp")]
            batch = batch.to(next(model.parameters()).device)
            logits = model(batch[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()  # FSDP averages the gradients over dp
            optimizer.step()
            optimizer.zero_grad()
            mean = all_reduce(loss.detach(), "dp", op="avg").item()
        rows.append({"step": step, "loss": mean})
        if main_rank:
            print(f"step {step:3}  loss {mean:.4f}", flush=True)
    if args.metrics and main_rank:
        Path(args.metrics).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    commgrid.shutdown()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    add("--model", metavar="DIR", help="saved by save_pretrained (default: a tiny random Llama)")
    add("--batch-size", type=int, default=16, help="sequences a step, in all (default 16)")
    add("--seq-len", type=int, default=32, help="bytes a sequence (default 32)")
    add("--steps", type=int, default=30, help="optimizer steps (default 30)")
    add("--lr", type=float, default=3e-3, help="AdamW's learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and data (default 0)")
    add("--metrics", metavar="FILE", help="write JSON lines: difference, then step and loss")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        train(parse())
    except commgrid.CommGridError as error:
        sys.exit(f"{type(error).__name__}: {error}")
