"""train_gpt's model: a GPT-2 over bytes, cut over tp, cp, pp, ep and the sequence.

Activations are (sequence, batch, hidden). Every rank draws the same weights from the seed, whatever
part of them it keeps.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import commgrid
from commgrid.collectives import all_reduce
from commgrid.context_parallel import SequenceSharding, attention
from commgrid.expert import MoELayer
from commgrid.parameters import mark_parameters, placements
from commgrid.pipeline import partition_layers
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    sharded_rng,
)

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    """Causal self-attention whose heads are shared out over tp, and whose positions over cp."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.dropout, self.way = args.dropout, args.cp_comm
        options = {"sequence_parallel": args.sequence_parallel, "dtype": args.weights}
        self.qkv = QKVParallelLinear(
            args.hidden, args.heads, num_kv_heads=args.kv_heads, init=weights(), **options
        )
        self.out = RowParallelLinear(args.hidden, args.hidden, init=weights(args.layers), **options)

    def forward(self, x: Tensor, sharding: SequenceSharding | None) -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in self.qkv(x))
        y = self.alone(q, k, v) if sharding is None else self.shared(q, k, v, sharding)
        return self.out(y.permute(2, 0, 1, 3).flatten(2))

    def alone(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of sequences that this rank has whole, each one text."""
        dropout = self.dropout if self.training else 0.0
        with sharded_rng("tp") if dropout else nullcontext():  # each rank has other heads
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True
            )

    def shared(self, q: Tensor, k: Tensor, v: Tensor, sharding: SequenceSharding) -> Tensor:
        """Of this rank's positions of sequences that cp shares, or that are packs of documents."""
        return attention(q, k, v, sharding=sharding, way=self.way)


class MLP(nn.Module):
    """A column-parallel layer and a row-parallel one."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        hidden, dtype = args.hidden, args.weights
        options = {"sequence_parallel": args.sequence_parallel, "dtype": dtype}
        self.up = ColumnParallelLinear(hidden, 4 * hidden, init=weights(), **options)
        self.down = RowParallelLinear(4 * hidden, hidden, init=weights(args.layers), **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def experts(args: argparse.Namespace) -> MoELayer:
    """What stands in an MLP's place with --experts."""
    return MoELayer(
        args.hidden, 4 * args.hidden, args.experts, args.top_k,
        capacity_factor=args.capacity_factor, aux_loss=args.aux_loss_coef, summed_loss=True,
        sequence_parallel=args.sequence_parallel, init=weights(), init_down=weights(args.layers),
        dtype=args.weights,
    )  # fmt: skip


class Block(nn.Module):
    """Attention, and an MLP or experts."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(args), norm(args)
        self.attention = Attention(args)
        self.mlp = experts(args) if args.experts else MLP(args)
        self.drop = Dropout(args)

    def forward(self, x: Tensor, sharding: SequenceSharding | None) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), sharding))
        return x + self.drop(self.mlp(self.norm2(x)))


class Dropout(nn.Module):
    """Dropout of what all tp ranks hold, or under sequence parallelism of this rank's slice."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.probability, self.sharded = args.dropout, args.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if not self.probability:
            return x
        with sharded_rng("tp") if self.sharded else nullcontext():
            return F.dropout(x, self.probability, self.training)


class Positions(nn.Embedding):
    """nn.Embedding with GPT-2's initial scale."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Part(nn.Module):
    """Consecutive blocks of a GPT-2 over bytes; the first part embeds, the last has the head.

    Its modules have the names they have in the whole model, so that their weights are drawn alike.

    Args:
        args: the command line's.
        layers: which blocks.
        tokens: the first part's embedding, where the tied head is on the same rank.
    """

    def __init__(
        self, args: argparse.Namespace, layers: range, tokens: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__()
        self.sequence_parallel = args.sequence_parallel
        self.is_first, self.is_last = layers.start == 0, layers.stop == args.layers
        options = {"sequence_parallel": args.sequence_parallel, "dtype": args.weights}
        tied = self.is_last and args.tie_embeddings
        if self.is_first or tied:
            self.tokens = tokens or VocabParallelEmbedding(
                VOCABULARY, args.hidden, init=weights(), **options
            )
        if self.is_first:
            self.positions = Positions(args.seq_len, args.hidden, dtype=args.weights)
            if args.sequence_parallel:  # each rank sees its slice of the sequence only
                mark_parameters(self.positions, partial="tp")
            self.drop = Dropout(args)
        self.blocks = nn.ModuleDict({str(layer): Block(args) for layer in layers})
        if self.is_last:
            self.norm = norm(args)
            weight = self.tokens.weight if tied else None
            self.head = VocabParallelHead(
                args.hidden, VOCABULARY, init=weights(), weight=weight, **options
            )
        if args.tie_embeddings:  # first and last stage each have the table, and use it differently
            for name in ("tokens", "head"):
                if hasattr(self, name):
                    mark_parameters(getattr(self, name), shared="embedding")

    def forward(
        self, x: Tensor, positions: Tensor, sharding: SequenceSharding | None = None
    ) -> Tensor:
        """To the next part's input, or this rank's part of the logits (sequence, batch, part).

        Args:
            x: tokens (sequence, batch), or what the part before returned (sequence, batch, hidden).
            positions: of the tokens in their text, (sequence,).
            sharding: whose rows these are; None: each sequence is one text, whole on this rank.
        """
        if self.is_first:
            x = self.drop(self.embed(x, positions))
        for block in self.blocks.values():
            x = block(x, sharding)
        return self.head(self.norm(x)) if self.is_last else x

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens)
        first = commgrid.get_grid().get_local_rank("tp") * len(x) if self.sequence_parallel else 0
        return x + self.positions(positions[first : first + len(x)])[:, None]


def build(args: argparse.Namespace, grid: commgrid.HyperCommGrid) -> list[Part]:
    """This stage's chunks of the model."""
    stages, stage = grid.size("pp"), grid.get_local_rank("pp")
    head = VOCABULARY / (12 * args.hidden)  # of a block's multiplications
    layers = partition_layers(args.layers, stages * args.chunks, head=head)
    parts: list[Part] = []
    for own in layers[stage::stages]:
        parts.append(Part(args, own, parts[0].tokens if parts and stages == 1 else None))
    return parts


def norm(args: argparse.Namespace) -> nn.LayerNorm:
    """A LayerNorm; under sequence parallelism its gradients are partial sums over tp."""
    made = nn.LayerNorm(args.hidden, dtype=args.weights)
    return mark_parameters(made, partial="tp") if args.sequence_parallel else made


def weights(layers: int = 0) -> partial[Tensor]:
    """GPT-2's initial weights; those that add to the residual stream shrink with depth."""
    return partial(nn.init.normal_, std=0.02 / (2 * layers) ** 0.5 if layers else 0.02)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Those of the whole model, each once, and the most that a stage's rank holds, which is right
    on the grid's first rank; on all ranks at once."""
    whole = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for placement in placements(model):
        copies = placement.shared.size if placement.shared is not None else 1
        whole += torch.Size(placement.shape).numel() / copies
    held = torch.tensor(sum(local(p).numel() for p in model.parameters()), device=whole.device)
    return round(all_reduce(whole, "pp").item()), int(all_reduce(held, "pp", op="max"))


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter that FSDP2 may have sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
