"""The layers, the reducer and the sharded optimizer over NCCL, against the unsharded model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid.collectives import all_gather, all_reduce
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    initialize_parameters,
    vocab_parallel_cross_entropy,
)
from tests.gpu.on_gpus import on_gpus

# bf16 keeps 8 bits, and a sum over tp rounds once more for every rank.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}
VOCABULARY = 13  # padded to 16


class Model(nn.Module):
    """Embedding, column → gelu → row; the loss of the states against the embedding's own table."""

    def __init__(self, sequence_parallel: bool, dtype: torch.dtype) -> None:
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "dtype": dtype}
        self.embedding = VocabParallelEmbedding(VOCABULARY, 16, **options)
        self.up = ColumnParallelLinear(16, 32, **options)
        self.down = RowParallelLinear(32, 16, **options)
        self.head = VocabParallelHead(16, VOCABULARY, weight=self.embedding.weight, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of each token, given (sequence, batch) tokens."""
        x = self.down(F.gelu(self.up(self.embedding(tokens))))
        return vocab_parallel_cross_entropy(self.head(x), tokens, vocabulary=VOCABULARY)


def unsharded(model: Model, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of the same model on one rank, by torch alone."""
    full = {}
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        dim = module.shard_dims.get(name.rpartition(".")[2])
        whole = parameter if dim is None else all_gather(parameter, "tp", dim=dim)
        full[name] = whole.detach().clone().requires_grad_()
    table = full["embedding.weight"]
    x = F.gelu(F.linear(F.embedding(tokens, table), full["up.weight"], full["up.bias"]))
    x = F.linear(x, full["down.weight"], full["down.bias"])
    logits = F.linear(x, table[:VOCABULARY]).flatten(0, 1)
    exact = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(logits.to(exact), tokens.flatten(), reduction="none")
    gradients = torch.autograd.grad(loss.sum(), list(full.values()))
    return loss.view_as(tokens).detach(), dict(zip(full, gradients, strict=True))


def parity(device: str) -> int:
    """How many tensors were compared."""
    compared = 0
    grid = commgrid.initialize(tp=4)
    me, tp = grid.get_local_rank("tp"), grid.size("tp")
    for dtype, tolerance in TOLERANCE.items():
        for sequence_parallel in (False, True):
            model = Model(sequence_parallel, dtype).to(device)
            initialize_parameters(model, seed=0)
            generator = torch.Generator().manual_seed(1)
            tokens = torch.randint(VOCABULARY, (8, 3), generator=generator).to(device)
            loss = model(tokens)
            loss.sum().backward()
            expected, gradients = unsharded(model, tokens)
            case = f"{dtype}, sequence_parallel={sequence_parallel}"
            close(loss.detach(), expected, tolerance, f"{case}: loss")
            for name, parameter in model.named_parameters():
                module = model.get_submodule(name.rpartition(".")[0])
                leaf = name.rpartition(".")[2]
                whole, found = gradients[name], parameter.grad
                if leaf in module.shard_dims:
                    whole = whole.chunk(tp, module.shard_dims[leaf])[me]
                elif leaf in module.partial:
                    found = all_reduce(found, "tp")
                close(found, whole, tolerance, f"{case}: {name}")
                compared += 1
    return compared


def close(found: Tensor | None, expected: Tensor, tolerance: float, what: str) -> None:
    """Within a share of the largest expected number."""
    assert found is not None, what
    worst = (found.double() - expected.double()).abs().max()
    assert worst <= tolerance * expected.double().abs().max(), f"{what}: off by {worst}"


def test_layers_equal_the_unsharded_model() -> None:
    assert on_gpus(parity, 4, "cuda") == [30] * 4  # 5 parameters, 3 dtypes, 2 ways


def stepped(device: str) -> int:
    """Five steps of AdamW over dp, as sharded state and as torch's on all the data."""
    compared = 0
    grid = commgrid.initialize()
    me, dp = grid.get_local_rank("dp"), grid.size("dp")
    for dtype in (torch.float64, torch.bfloat16):
        ours, theirs = (
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)) for _ in range(2)
        )
        for model in (ours, theirs):
            initialize_parameters(model, seed=2)
        ours.to(device, dtype)
        # bf16 weights with fp32 copies stay within rounding of weights kept in fp32.
        theirs.to(device, torch.promote_types(dtype, torch.float32))
        reducer = GradientReducer(ours, shard=True, bucket_bytes=1024)
        optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-2)
        reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        for step in range(5):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)
            ours(x.to(dtype).chunk(dp)[me]).square().sum().backward()
            reducer.finish(count=8 // dp)
            optimizer.step()
            optimizer.zero_grad()
            reference.zero_grad()
            theirs(x.to(next(theirs.parameters()).dtype)).square().sum().div(8).backward()
            reference.step()
        optimizer.wait()
        # Adam's step does not shrink with the gradient: bf16 noise turns signs near zero.
        tolerance = 1e-10 if dtype == torch.float64 else 0.1
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            close(mine.detach(), other.detach(), tolerance, f"{dtype}: {name}")
            compared += 1
    return compared


def test_the_sharded_optimizer_equals_the_unsharded_one() -> None:
    assert on_gpus(stepped, 4, "cuda") == [8] * 4  # 4 parameters, 2 dtypes
