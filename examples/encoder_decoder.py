"""An encoder and a decoder on two grids of other shape, a bridge between them, one loss curve.

    torchrun --standalone --nproc-per-node 8 examples/encoder_decoder.py \
        --encoder 0-2 --decoder 4-7 --tp 2                      # 3 ranks beside 4, one without work
    torchrun --standalone --nproc-per-node 4 examples/encoder_decoder.py --tp 2  # all ranks, both
    python examples/encoder_decoder.py                          # one process: the same losses

Images are vectors, and their captions tokens that follow from them. The encoder is data parallel;
the decoder reads what it makes of an image before the caption, and predicts that token by token.
Its weights are cut over tp. Each grid has data ranks of its own number, so that the batch is cut in
two ways; the bridge takes what the encoder's ranks have to where the decoder's need it, and the
gradients back. Losses are divided by the whole batch, so gradients are summed over data ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import commgrid
from commgrid.bridge import Bridge
from commgrid.collectives import all_reduce
from commgrid.layout.ranks import parse_ranks
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    initialize_parameters,
)
from gpt_training.flags import last_words

PIXELS, LENGTH, VOCABULARY = 12, 6, 16

Grid = commgrid.HyperCommGrid


class Block(nn.Module):
    """A norm and an MLP, whose inner width is shared out over a grid's tp."""

    def __init__(self, hidden: int, grid: Grid) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = ColumnParallelLinear(hidden, 4 * hidden, grid=grid)
        self.down = RowParallelLinear(4 * hidden, hidden, grid=grid)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden) to the same."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    """Images (rows, PIXELS) to (rows, hidden)."""

    def __init__(self, args: argparse.Namespace, grid: Grid) -> None:
        super().__init__()
        self.into = nn.Linear(PIXELS, args.hidden)
        self.blocks = nn.Sequential(*(Block(args.hidden, grid) for _ in range(args.layers)))

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks(self.into(images))


class Decoder(nn.Module):
    """What the encoder made of images, and their captions, to the loss of each token.

    Every token is predicted from the image and the mean of the tokens before it.
    """

    def __init__(self, args: argparse.Namespace, grid: Grid) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.hidden)
        self.places = nn.Embedding(LENGTH, args.hidden)
        self.blocks = nn.Sequential(*(Block(args.hidden, grid) for _ in range(args.layers)))
        self.out = nn.Linear(args.hidden, VOCABULARY)

    def forward(self, seen: Tensor, captions: Tensor) -> Tensor:
        """seen (rows, hidden) and captions (rows, LENGTH) to losses (rows, LENGTH)."""
        known = self.tokens(captions).cumsum(1)[:, :-1]
        known = nn.functional.pad(known, (0, 0, 1, 0))  # the first token has none before it
        count = torch.arange(1, LENGTH + 1, device=seen.device, dtype=seen.dtype)
        x = seen.unsqueeze(1) + known / count[:, None] + self.places.weight
        logits = self.out(self.blocks(x))
        return nn.functional.cross_entropy(logits.mT, captions, reduction="none")


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """All images and captions of each step, the same on every rank."""
    rule = _drawn(args.seed, PIXELS, LENGTH)
    for step in range(1, args.steps + 1):
        images = _drawn(args.seed * 1_000_003 + step, args.batch_size, PIXELS)
        captions = (images @ rule).sigmoid().mul(VOCABULARY).long().clamp(max=VOCABULARY - 1)
        yield images, captions


def _drawn(seed: int, *shape: int) -> Tensor:
    """Random numbers that are the same on CUDA."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def own(rows: Tensor, grid: Grid) -> Tensor:
    """What a data rank of a grid has of a batch; of rows that cannot be equal the first have more,
    as a bridge cuts them."""
    return rows.tensor_split(grid.size("dp"))[grid.get_local_rank("dp")]


class Side:
    """One grid's model and optimizer, on one of its ranks."""

    def __init__(self, model: nn.Module, args: argparse.Namespace, grid: Grid) -> None:
        initialize_parameters(model, args.seed)  # the same full weights on any grid
        self.model, self.grid = model, grid
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(self) -> None:
        """Sums gradients over the data ranks and updates."""
        for parameter in self.model.parameters():
            parameter.grad = all_reduce(parameter.grad, "dp", grid=self.grid)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64 if args.dtype == "fp64" else torch.float32)
    # A rank that a grid leaves out gets None; torch.distributed is up once all have called.
    first = commgrid.initialize(name="encoder", ranks=args.encoder, tp=args.encoder_tp)
    second = commgrid.initialize(name="decoder", ranks=args.decoder, tp=args.tp)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = Side(Encoder(args, first), args, first) if first else None
    decoder = Side(Decoder(args, second), args, second) if second else None
    bridge = Bridge(first, second, dim=0) if first or second else None
    writes = second is not None and second.rank == second.spec.grid_ranks[0]
    if args.metrics and writes:
        Path(args.metrics).write_text("")
    for step, (images, captions) in enumerate(batches(args) if bridge else (), 1):
        crossed = bridge(encoder.model(own(images, first)) if encoder else None)
        if decoder:
            losses = decoder.model(crossed, own(captions, second))
            loss = losses.sum() / (args.batch_size * LENGTH)
            loss.backward()
        else:
            crossed.backward()
        for side in (encoder, decoder):
            if side:
                side.step()
        if decoder:
            mean = all_reduce(loss.detach(), "dp", grid=second).item()
        if writes:
            print(f"step {step:3}  loss {mean:.5f}", flush=True)
            if args.metrics:
                with Path(args.metrics).open("a") as lines:
                    print(json.dumps({"step": step, "loss": mean}), file=lines)
    commgrid.shutdown()


def ranks(text: str) -> list[int]:
    """The ranks that `0-3` or `0-2,5` names."""
    return list(parse_ranks(text))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--encoder", type=ranks, metavar="RANKS", help="as 0-3; its data ranks (default all)")
    add("--decoder", type=ranks, metavar="RANKS", help="as 4-7, also the same ones (default all)")
    add("--encoder-tp", type=int, default=1, help="tensor-parallel size there (default 1)")
    add("--tp", type=int, default=1, help="the decoder's (default 1)")
    add("--layers", type=int, default=2, help="blocks of each (default 2)")
    add("--hidden", type=int, default=32, help="width of both (default 32)")
    add("--batch-size", type=int, default=50, help="images a step, in all (default 50)")
    add("--steps", type=int, default=20, help="optimizer steps (default 20)")
    add("--seed", type=int, default=0, help="of weights and data (default 0)")
    add("--dtype", choices=("fp32", "fp64"), default="fp32", help="of weights (default fp32)")
    add("--metrics", metavar="FILE", help="write a JSON line a step: step, loss")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        train(parse())
    except commgrid.CommGridError as error:
        sys.exit(last_words(error))
