"""Train a small byte-level GPT with tensor and data parallelism.

    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --tp 2
    python examples/train_gpt.py --steps 20                  # one process, no launcher

Every rank draws the same weights and the same batches from --seed, so the loss curve does
not depend on --tp and --dp. The text is Python's own documentation, unless --data names a file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import commgrid
from commgrid.collectives import all_reduce
from commgrid.data_parallel import average_gradients, gradient_norm
from commgrid.names import nearest
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    initialize_parameters,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
VOCABULARY = 256  # bytes


# -- the model --------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention whose heads are shared out over the tp group."""

    def __init__(self, hidden: int, heads: int, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_size = hidden // heads
        init, last = weights(), weights(layers)
        # Output features run (head, q/k/v, head_size), so that a slice holds whole heads.
        self.qkv = ColumnParallelLinear(hidden, 3 * hidden, init=init, dtype=dtype)
        self.out = RowParallelLinear(hidden, hidden, init=last, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_size)).transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP, each a column-parallel layer and a row-parallel one."""

    def __init__(self, hidden: int, heads: int, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, dtype=dtype)
        self.attention = Attention(hidden, heads, layers, dtype)
        self.norm2 = nn.LayerNorm(hidden, dtype=dtype)
        self.up = ColumnParallelLinear(hidden, 4 * hidden, init=weights(), dtype=dtype)
        self.down = RowParallelLinear(4 * hidden, hidden, init=weights(layers), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Embedding(nn.Embedding):
    """nn.Embedding with GPT-2's initial scale."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Head(nn.Linear):
    """nn.Linear with GPT-2's initial scale."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class GPT(nn.Module):
    """GPT-2's shape over bytes; embeddings, norms and the head are equal on all ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        hidden, dtype = args.hidden, DTYPES[args.dtype]
        self.tokens = Embedding(VOCABULARY, hidden, dtype=dtype)
        self.positions = Embedding(args.seq_len, hidden, dtype=dtype)
        self.blocks = nn.ModuleList(
            Block(hidden, args.heads, args.layers, dtype) for _ in range(args.layers)
        )
        self.norm = nn.LayerNorm(hidden, dtype=dtype)
        self.head = Head(hidden, VOCABULARY, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def weights(layers: int = 0) -> partial[Tensor]:
    """GPT-2's initial weights; those that add to the residual stream shrink with depth."""
    return partial(nn.init.normal_, std=0.02 / (2 * layers) ** 0.5 if layers else 0.02)


# -- the data ---------------------------------------------------------------------------


def read_text(path: str | None, seq_len: int) -> Tensor:
    """The training text as bytes: a file, or Python's documentation topics."""
    if path is None:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        raw = "\n".join(topics[key] for key in sorted(topics)).encode()
    else:
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise SystemExit(f"--data {path}: {error}") from error
    if len(raw) < seq_len + 2:
        source = f"--data {path}" if path else "the default text"
        raise SystemExit(f"{source}: {len(raw)} bytes are less than --seq-len + 2 = {seq_len + 2}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def global_batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """The step's windows of text, (batch_size, seq_len + 1), the same on every grid."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.seq_len - 1, (args.batch_size,), generator=generator)
    return text[starts[:, None] + torch.arange(args.seq_len + 1)].long()


# -- training ---------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    grid = commgrid.initialize(tp=args.tp, dp=args.dp)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(args, grid)
    main_rank = grid.rank == 0
    if main_rank:
        print(grid, f"on {device.type}", flush=True)

    text = read_text(args.data, args.seq_len)
    model = GPT(args)
    initialize_parameters(model, args.seed)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    share = args.batch_size // grid.size("dp")
    mine = slice(grid.get_local_rank("dp") * share, (grid.get_local_rank("dp") + 1) * share)
    if args.metrics and main_rank:
        Path(args.metrics).write_text("")
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        for parameters in optimizer.param_groups:
            parameters["lr"] = args.lr * min(1.0, step / args.warmup)
        batch = global_batch(text, step, args)[mine].to(device)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model.parameters())
        norm = gradient_norm(model)
        optimizer.step()

        whole_loss = all_reduce(loss.detach().double(), "dp_cp", op="avg").item()
        speed = args.batch_size * args.seq_len / (time.perf_counter() - started)
        if main_rank:
            print(f"step {step:4}  loss {whole_loss:.4f}  {speed:,.0f} tokens/s", flush=True)
        if args.metrics and main_rank:
            row = {"step": step, "loss": whole_loss, "grad_norm": norm.item(),
                   "tokens_per_s": speed}  # fmt: skip
            with Path(args.metrics).open("a") as lines:
                print(json.dumps(row), file=lines)
    sample = generate(model, args, device)
    if main_rank:
        print(f"--- a sample\n{sample}")
    commgrid.shutdown()


@torch.no_grad()
def generate(model: GPT, args: argparse.Namespace, device: torch.device, length: int = 120) -> str:
    """Text sampled from the model; every rank takes part, and draws the same bytes."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([list(b"The ")], device=device)
    for _ in range(length):
        logits = model(tokens[:, -args.seq_len :])[0, -1].double().cpu()
        drawn = torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(device)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


# -- the command line -------------------------------------------------------------------


def check(args: argparse.Namespace, grid: commgrid.HyperCommGrid) -> None:
    """Refuses sizes that the grid cannot share out, naming the flag."""
    for flag, value, by in (
        ("--heads", args.heads, "tp"),
        ("--batch-size", args.batch_size, "dp"),
    ):
        if value % grid.size(by):
            raise SystemExit(
                f"{flag} {value} cannot be shared equally by the {grid.size(by)} ranks of {by}; "
                f"expected a multiple of {grid.size(by)}"
            )
    if args.hidden % args.heads:
        raise SystemExit(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")


def positive(text: str) -> int:
    """argparse's type of a count or size."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return int(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML with any of these flags, as batch_size: 32")
    add("--tp", type=positive, default=1, help="tensor-parallel size (default 1)")
    add("--dp", type=int, default=-1, help="data-parallel size (default: what the ranks leave)")
    add("--steps", type=positive, default=200, help="optimizer steps (default 200)")
    add("--seed", type=int, default=0, help="of weights, batches and the sample (default 0)")
    add(
        "--batch-size",
        type=positive,
        default=16,
        help="sequences a step, in all (default 16)",
    )
    add("--seq-len", type=positive, default=64, help="bytes a sequence (default 64)")
    add("--layers", type=positive, default=4, help="transformer blocks (default 4)")
    add("--hidden", type=positive, default=128, help="model width (default 128)")
    add("--heads", type=positive, default=8, help="attention heads (default 8)")
    add("--lr", type=float, default=2e-3, help="AdamW's learning rate (default 2e-3)")
    add("--warmup", type=positive, default=20, help="steps over which it rises (default 20)")
    add("--dtype", choices=list(DTYPES), default="fp32", help="of weights (default fp32)")
    add("--data", metavar="FILE", help="text to train on (default: Python's documentation)")
    add("--metrics", metavar="FILE", help="write a JSON line a step: step, loss, grad_norm, …")
    first = parser.parse_args(argv)
    if first.config:
        parser.set_defaults(**read_config(first.config, parser))
    return parser.parse_args(argv)


def read_config(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The flags that a YAML file sets, checked as if they had been typed."""
    try:
        given = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--config {path}: {error}")
    if not isinstance(given, dict):
        parser.error(f"--config {path}: expected a mapping of flags such as tp: 2")
    known = {action.dest: action for action in parser._actions}
    for key, value in given.items():
        if key not in known or key in ("config", "help"):
            parser.error(f"--config {path}: unknown key {key!r}{nearest(str(key), known)}")
        action = known[key]
        try:
            # As if it had been typed; YAML reads 2e-3 as a string, and so does the command line.
            given[key] = parser._get_values(action, [str(value)])
        except argparse.ArgumentError as error:
            parser.error(f"--config {path}: {key}: {value!r}: {error.message}")
    return given


if __name__ == "__main__":
    try:
        train(parse())
    except commgrid.CommGridError as error:
        sys.exit(f"{type(error).__name__}: {error}")
