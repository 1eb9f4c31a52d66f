"""The model of a draw, in plain torch and of commgrid's layers; its weights and its data.

Both are one description read with another kit of layers, and have the same names of parameters.
The plain one is the oracle: torch's layers, and a loop over tokens and experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commgrid.expert import MoELayer
from commgrid.parameters import mark_parameters, placements
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)
from tests.data_parallel.random_draws import INNER, LENGTH, VOCABULARY, WIDTH, Block, Draw
from tests.expert.dense import Case, balance, mixture

DTYPE = torch.float64
NUM_EXPERTS = 4

Cuts = tuple[tuple[int, int, int], ...]
"""Along which dims a parameter is sliced: (dim, which slice, of how many)."""


class PlainKit:
    """Layers of torch's own, for one process that has all of the model."""

    def mark(self, module: nn.Module) -> nn.Module:
        """Leaves it as it is."""
        return module

    def embedding(self, plain: bool) -> nn.Module:
        """A table of tokens."""
        return nn.Embedding(VOCABULARY, WIDTH, dtype=DTYPE)

    def head(self, tied: nn.Parameter | None) -> nn.Module:
        """Logits, without a bias."""
        head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=DTYPE)
        head.weight = head.weight if tied is None else tied
        return head

    def up(self, block: Block) -> nn.Module:
        """The first layer of an MLP."""
        return nn.Linear(WIDTH, INNER, bias=block.bias, dtype=DTYPE)

    def down(self, block: Block) -> nn.Module:
        """The second layer."""
        return nn.Linear(INNER, WIDTH, bias=block.bias, dtype=DTYPE)

    def moe(self, block: Block, summed: bool) -> nn.Module:
        """A mixture of experts."""
        return Mixture(dict(block.options), summed)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The sum over the tokens that count."""
        return F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")


class ParallelKit(PlainKit):
    """commgrid's layers, on a rank of the default grid."""

    def __init__(self, sequence_parallel: bool) -> None:
        self._sequence_parallel = sequence_parallel
        self._options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "dtype": DTYPE}

    def mark(self, module: nn.Module) -> nn.Module:
        """Says that it sees a slice of the sequence only."""
        return mark_parameters(module, partial="tp") if self._sequence_parallel else module

    def embedding(self, plain: bool) -> nn.Module:
        if plain:
            return super().embedding(plain)
        return VocabParallelEmbedding(VOCABULARY, WIDTH, **self._options)

    def head(self, tied: nn.Parameter | None) -> nn.Module:
        return VocabParallelHead(WIDTH, VOCABULARY, weight=tied, **self._options)

    def up(self, block: Block) -> nn.Module:
        return ColumnParallelLinear(
            WIDTH, INNER, bias=block.bias, gather_output=block.kind == "gathered", **self._options
        )

    def down(self, block: Block) -> nn.Module:
        return RowParallelLinear(
            INNER, WIDTH, bias=block.bias, skip_bias_add=block.skip_bias,
            input_is_parallel=block.kind != "gathered", **self._options,
        )  # fmt: skip

    def moe(self, block: Block, summed: bool) -> nn.Module:
        options = dict(block.options)
        options["activation"] = F.silu if options["gated"] else F.gelu
        return MoELayer(
            WIDTH, INNER, NUM_EXPERTS, 2, summed_loss=summed, cp=None, **options, **self._options
        )

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, target, vocabulary=VOCABULARY, reduction="sum")


class Mixture(nn.Module):
    """Experts one after the other, token by token, with the names of MoELayer's parameters."""

    def __init__(self, options: dict[str, Any], summed: bool) -> None:
        super().__init__()
        self._summed = summed
        kept = {name: options[name] for name in ("gated", "softmax_over")}
        kept |= {name: options.get(name, 0.0) for name in ("aux_loss", "z_loss")}
        self._case = Case(
            hidden=WIDTH, ffn=INNER, num_experts=NUM_EXPERTS, options=tuple(kept.items())
        )
        halves = (2,) if options["gated"] else ()
        self.router = _Weights(weight=(NUM_EXPERTS, WIDTH))
        self.experts = _Weights(
            up=(NUM_EXPERTS, *halves, INNER, WIDTH), down=(NUM_EXPERTS, WIDTH, INNER)
        )
        self.shared = None
        if "shared_ffn_hidden" in options:
            gate = {"gate": (INNER, WIDTH)} if options["gated"] else {}
            self.shared = _Weights(up=(INNER, WIDTH), down=(WIDTH, INNER), **gate)
        self.losses: list[Tensor] = []
        """The balancing loss of each microbatch since the list was emptied."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        names = ("router.weight", "experts.up", "experts.down")
        full: dict[str, Tensor] = {name: self.get_parameter(name) for name in names}
        if self.training:
            self.losses.append(
                balance(tokens, full, self._case) * (len(tokens) if self._summed else 1)
            )
        y = mixture(tokens, full, self._case).view(x.shape)
        if self.shared is None:
            return y
        inner = F.linear(x, self.shared.get_parameter("up"))
        if self._case.get("gated"):
            inner = F.silu(F.linear(x, self.shared.get_parameter("gate"))) * inner
        else:
            inner = F.gelu(inner)
        return y + F.linear(inner, self.shared.get_parameter("down"))


class _Weights(nn.Module):
    """Parameters by name, without a forward."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=DTYPE)))


class Part(nn.Module):
    """One block: x and what it makes of it."""

    def __init__(self, block: Block, kit: PlainKit, summed: bool) -> None:
        super().__init__()
        self.block = block
        if block.kind in ("mlp", "gathered"):
            self.up, self.down = kit.up(block), kit.down(block)
        elif block.kind == "moe":
            self.moe = kit.moe(block, summed)
        elif block.kind == "norm":
            self.norm = kit.mark(nn.LayerNorm(WIDTH, bias=block.bias, dtype=DTYPE))
        elif block.kind == "linear":
            self.linear = kit.mark(nn.Linear(WIDTH, WIDTH, bias=block.bias, dtype=DTYPE))
        else:
            self.first = kit.mark(nn.Linear(WIDTH, WIDTH, bias=block.bias, dtype=DTYPE))
            self.second: Any = kit.mark(nn.Linear(WIDTH, WIDTH, dtype=DTYPE))
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        act = getattr(F, self.block.activation) if self.block.activation != "tanh" else torch.tanh
        if self.block.kind in ("mlp", "gathered"):
            y = self.down(act(self.up(x)))
            if isinstance(y, tuple):
                y, bias = y
                y = y if bias is None else y + bias
            return x + y
        if self.block.kind == "moe":
            return x + self.moe(x)
        if self.block.kind == "norm":
            return self.norm(x)
        if self.block.kind == "linear":
            return x + act(self.linear(x))
        return x + act(self.second(act(self.first(x))))


class Model(nn.Module):
    """Embedding, blocks and head, or a stage's share of them."""

    def __init__(self, draw: Draw, kit: PlainKit, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.draw, self.kit = draw, kit
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.step = 0
        own = blocks_of(draw, stage, stages)
        if self.is_first or (self.is_last and draw.tied):
            self.embedding = kit.embedding(draw.embedding == "plain")
            if stages > 1 and draw.tied:
                mark_parameters(self.embedding, shared="embedding")
        summed = draw.training.counting == "tokens"
        self.blocks = nn.ModuleDict({str(i): Part(draw.blocks[i], kit, summed) for i in own})
        self.path = [i for i in draw.path if i in own]
        if self.is_last:
            self.head = kit.head(self.embedding.get_parameter("weight") if draw.tied else None)
            if stages > 1 and draw.tied:
                mark_parameters(self.head, shared="embedding")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not is_frozen(draw, name))

    def forward(self, x: Tensor, microbatch: int = -1) -> Tensor:
        if self.is_first:
            x = self.embedding(x)
        for index in self.path:
            block, part = self.draw.blocks[index], self.blocks[str(index)]
            if not block.is_used(self.step, microbatch):
                continue
            again = (
                block.recompute and torch.is_grad_enabled() and isinstance(self.kit, ParallelKit)
            )
            x = checkpoint(part, x, use_reentrant=False) if again else part(x)
        return self.head(x) if self.is_last else x


def blocks_of(draw: Draw, stage: int, stages: int) -> range:
    """The blocks of a stage: equally many, and the rest on the last stage."""
    each = len(draw.blocks) // stages
    return range(stage * each, len(draw.blocks) if stage == stages - 1 else (stage + 1) * each)


def is_frozen(draw: Draw, name: str) -> bool:
    """Whether a parameter is not trained."""
    if name.startswith("blocks."):
        _, index, rest = name.split(".", 2)
        return any(rest.startswith(f"{part}.") for part in draw.blocks[int(index)].frozen)
    return draw.frozen_embedding and name == "embedding.weight"


def full_weights(draw: Draw) -> dict[str, Tensor]:
    """The weights that every run of the draw begins with, by name."""
    found = {}
    with torch.random.fork_rng([]):
        shapes = {n: p.shape for n, p in Model(draw, PlainKit()).named_parameters()}
    for number, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(1000 * draw.seed + number)
        found[name] = torch.randn(shape, generator=generator, dtype=DTYPE)
        if len(shape) > 1:
            found[name] /= shape[-1] ** 0.5
        else:
            found[name] = 0.2 * found[name] + name.endswith("norm.weight")
    return found


def cuts_of(model: nn.Module) -> dict[str, Cuts]:
    """How each parameter of this rank's model is sliced."""
    return {
        placement.name: tuple((dim, group.rank, group.size) for dim, group in placement.shards)
        for placement in placements(model)
    }


def slice_of(full: Tensor, cuts: Cuts) -> Tensor:
    """A rank's slice of a full parameter, with zeros where it is padded."""
    for dim, index, count in cuts:
        size = -(-full.shape[dim] // count)
        missing = size * count - full.shape[dim]
        if missing:
            shape = list(full.shape)
            shape[dim] = missing
            full = torch.cat([full, full.new_zeros(shape)], dim)
        full = full.narrow(dim, index * size, size)
    return full


Batch = tuple[Tensor, Tensor]


def batch_of(draw: Draw, use: str, step: int, data_rank: int, microbatch: int) -> Batch:
    """Tokens and targets of a microbatch, (sequence, batch); some targets are to be ignored.

    Args:
        use: "train", "spoil" (of a step that is not to count), or "evaluate".
    """
    generator = torch.Generator().manual_seed(
        ((len(use) * 1000 + draw.seed) * 100 + step) * 100 + 10 * data_rank + microbatch
    )
    width = 2  # messages between stages have one shape
    if draw.cut.pp == 1:
        width = int(torch.randint(1, 4, (), generator=generator))
    tokens = torch.randint(VOCABULARY, (LENGTH, width), generator=generator)
    targets = torch.randint(VOCABULARY, (LENGTH, width), generator=generator)
    if draw.training.counting == "tokens":
        targets[torch.rand(LENGTH, width, generator=generator) < 0.1] = -100
    return tokens, targets


def probe_of(draw: Draw) -> Tensor:
    """The input for evaluating a single block, (sequence, batch, width)."""
    generator = torch.Generator().manual_seed(draw.seed)
    return torch.randn(LENGTH, 2, WIDTH, generator=generator, dtype=DTYPE)


def group_of(draw: Draw, name: str) -> int | None:
    """Index of a parameter's group, 0 or 1; None: in no group."""
    if draw.training.groups == "one":
        return 0
    small = name.endswith("bias") or ".norm." in name
    if draw.training.groups == "subset":
        return None if small or name == "embedding.weight" else 0
    return 1 if small or name.startswith("blocks.0.") else 0


def parameter_groups(draw: Draw, model: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters as an optimizer takes them; the second group learns otherwise."""
    sorted_out: tuple[list[nn.Parameter], ...] = ([], [])
    for name, parameter in model.named_parameters():
        index = group_of(draw, name)
        if parameter.requires_grad and index is not None:
            sorted_out[index].append(parameter)
    groups: list[dict[str, Any]] = [{"params": sorted_out[0]}]
    if draw.training.groups in ("two", "apart"):
        groups.append({"params": sorted_out[1], "lr": 3e-3, "weight_decay": 0.01})
    return groups


def scheduler_of(
    draw: Draw, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The learning-rate schedule that the draw names."""
    if draw.training.schedule == "decay":
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    if draw.training.schedule == "cycle":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (0.5, 1.0, 0.2)[step % 3])
    return None
