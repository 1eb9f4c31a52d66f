"""Train a small GPT with tensor, data and pipeline parallelism, from the grid to the checkpoint.

    torchrun --standalone --nproc-per-node 4 examples/gpt.py --tp 2             # tp 2 · dp 2
    torchrun --standalone --nproc-per-node 4 examples/gpt.py --tp 2 --pp 2
    torchrun --standalone --nproc-per-node 4 examples/gpt.py --pp 4 --checkpoint runs/gpt

The same loss on every grid: each of these prints what one process does (`python examples/gpt.py`).
With --checkpoint a run resumes from the last checkpoint, which any grid may have saved.
"""

import argparse
from collections import OrderedDict
from functools import partial
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.collectives import all_reduce, broadcast
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.pipeline import Pipeline, partition_layers
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    initialize_parameters,
    vocab_parallel_cross_entropy,
)

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 256, 64, 64, 4, 4  # the vocabulary is all bytes
BATCH, MICROBATCHES = 16, 4  # sequences in a step, and parts of each replica's share of them
SMALL = partial(nn.init.normal_, std=0.02)  # GPT-2's initial weights


class Embed(nn.Module):
    """Tokens (batch, sequence) to vectors (batch, sequence, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(VOCABULARY, WIDTH, init=SMALL)
        self.positions = nn.Parameter(torch.empty(LENGTH, WIDTH))

    def reset_parameters(self) -> None:
        SMALL(self.positions)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    """Attention and an MLP; a tp rank has some of the heads, and some columns of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = QKVParallelLinear(WIDTH, HEADS, init=SMALL)
        self.out = RowParallelLinear(WIDTH, WIDTH, init=SMALL)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, init=SMALL)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, init=SMALL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(self.norm1(x)))  # heads first
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def head() -> nn.Module:
    """Vectors to this tp rank's part of the logits, (batch, sequence, vocabulary / tp)."""
    return nn.Sequential(nn.LayerNorm(WIDTH), VocabParallelHead(WIDTH, VOCABULARY, init=SMALL))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens of a microbatch; the logits stay in parts."""
    return vocab_parallel_cross_entropy(logits, targets, reduction="mean")


def make_batch(text: Tensor, step: int) -> Tensor:
    """Random windows of the text, (BATCH, LENGTH + 1), the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)].long()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages; dp is what is left")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, in all")
    parser.add_argument("--checkpoint", metavar="DIR", help="resume from it, and save to it")
    args = parser.parse_args(argv)

    # The grid: every rank's place, and all the groups it needs, by name.
    grid = commgrid.initialize(tp=args.tp, pp=args.pp)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.float64)  # so that losses can be compared to many digits

    # The model: this stage's layers, with the names that they have in the whole model.
    layers = [("embed", Embed), *((f"block{i}", Block) for i in range(LAYERS)), ("head", head)]
    own = partition_layers(len(layers), grid.size("pp"))[grid.get_local_rank("pp")]
    stage = nn.Sequential(OrderedDict((layers[i][0], layers[i][1]()) for i in own)).to(device)
    initialize_parameters(stage, seed=0)  # each rank its slice of the same weights

    # The data: Python's own documentation, as bytes.
    text = torch.tensor(list("\n".join(topics[key] for key in sorted(topics)).encode()))

    # Training: gradients averaged over dp while the backward runs, Adam's state sharded over dp.
    reducer = GradientReducer(stage, shard=True)
    pipeline = Pipeline(stage, "1f1b", num_microbatches=MICROBATCHES, loss=loss_of, reducer=reducer)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=2e-3)

    done = 0
    if args.checkpoint and checkpoint.steps(args.checkpoint):
        done = checkpoint.load(args.checkpoint, stage, optimizer).step

    for step in range(done + 1, args.steps + 1):
        mine = make_batch(text, step).chunk(grid.size("dp"))[grid.get_local_rank("dp")]
        microbatches = mine.to(device).chunk(MICROBATCHES)
        losses = pipeline.step([m[:, :-1] for m in microbatches], [m[:, 1:] for m in microbatches])
        reducer.finish(count=MICROBATCHES)  # the mean over microbatches and dp
        reducer.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()

        # The loss: the last stages have it, each of its replica's share of the batch.
        loss = torch.zeros((), device=device) if losses is None else losses.mean()
        loss = broadcast(all_reduce(loss, "dp", op="avg"), "pp", source=grid.size("pp") - 1)
        if grid.rank == 0:
            print(f"step {step:3}  loss {loss.item():.6f}", flush=True)

    if args.checkpoint and done < args.steps:
        checkpoint.save(args.checkpoint, args.steps, stage, optimizer)
    commgrid.shutdown()


if __name__ == "__main__":
    main()
