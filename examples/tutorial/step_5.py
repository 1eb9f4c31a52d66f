"""Step 5: the blocks in two stages (tp 2 · pp 2, and on 8 ranks dp 2).

torchrun --standalone --nproc-per-node 4 examples/tutorial/step_5.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid.collectives import all_reduce, broadcast
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.pipeline import Pipeline, partition_layers
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 32, 16, 32, 4, 4
BATCH, STEPS, MICROBATCHES = 16, 10, 4


def small(weight: Tensor) -> None:
    """Draws a weight."""
    nn.init.normal_(weight, std=0.1)


class Linear(nn.Linear):
    """nn.Linear with weights of our own choice."""

    def reset_parameters(self) -> None:
        small(self.weight)
        nn.init.zeros_(self.bias)


class Embed(nn.Module):
    """Tokens (batch, sequence) to vectors (batch, sequence, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (ColumnParallelLinear(WIDTH, WIDTH, init=small) for _ in range(3))
        self.out = RowParallelLinear(WIDTH, WIDTH, init=small)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, init=small)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, init=small)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        heads = (p(h).unflatten(-1, (-1, WIDTH // HEADS)) for p in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Sequential):
    """Vectors to logits of the next token."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), Linear(WIDTH, VOCABULARY))


def make_batch(step: int) -> Tensor:
    """Rows that count up by 1 to 4, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 5, (BATCH, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(grid: commgrid.HyperCommGrid) -> list[float]:
    """Trains; every step's loss, the mean over all ranks."""
    groups = "  ".join(f"{axis} {grid.get_ranks(axis)}" for axis in ("tp", "dp", "pp"))
    print(f"rank {grid.rank}: {groups}", flush=True)
    torch.manual_seed(0)  # the same on every rank
    model = nn.Sequential(Embed(), *(Block() for _ in range(LAYERS)), Head())
    own = partition_layers(len(model), grid.size("pp"))[grid.get_local_rank("pp")]
    stage = model[own.start : own.stop]
    reducer = GradientReducer(stage, shard=True)
    pipeline = Pipeline(stage, "1f1b", num_microbatches=MICROBATCHES, loss=loss_of, reducer=reducer)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=5e-3)
    losses = []
    for step in range(STEPS):
        mine = make_batch(step).chunk(grid.size("dp"))[grid.get_local_rank("dp")]
        microbatches = mine.chunk(MICROBATCHES)
        found = pipeline.step([m[:, :-1] for m in microbatches], [m[:, 1:] for m in microbatches])
        reducer.finish(count=MICROBATCHES)  # the mean over microbatches and dp
        reducer.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.zeros(()) if found is None else found.mean()  # on the last stage alone
        loss = broadcast(loss, "pp", source=grid.size("pp") - 1)
        losses.append(all_reduce(loss, "dp", op="avg").item())
        if grid.rank == 0:
            print(f"step {step}  loss {losses[-1]:.9f}", flush=True)
    return losses


def main() -> list[float]:
    torch.set_default_dtype(torch.float64)  # so that losses can be compared to many digits
    grid = commgrid.initialize(tp=2, pp=2)
    losses = train(grid)
    commgrid.shutdown()
    return losses


if __name__ == "__main__":
    main()
