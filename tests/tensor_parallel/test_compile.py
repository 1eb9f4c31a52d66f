"""torch.compile(fullgraph=True) of layers and of a model in training, against no compiling."""

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid import CommGridError
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.expert import MoELayer
from commgrid.parameters import mark_parameters
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    initialize_parameters,
    vocab_parallel_cross_entropy,
)
from commgrid.testing import run_on_ranks

# Only forked ranks compile: a child hangs if its parent has.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # fp64, and sums of some 100 numbers around 1
VOCABULARY = 29  # is padded


class Attention(nn.Module):
    """Causal attention of x (sequence, batch, hidden)."""

    def __init__(self, hidden: int, kv_heads: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.qkv = QKVParallelLinear(
            hidden, 4, num_kv_heads=kv_heads, sequence_parallel=sequence_parallel
        )
        self.out = RowParallelLinear(hidden, hidden, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in self.qkv(x))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        # Not scaled_dot_product_attention, which torch 2.11's inductor cannot do in fp64.
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        y = (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.out(y.permute(2, 0, 1, 3).flatten(2))


class MLP(nn.Module):
    """column → gelu → row."""

    def __init__(self, hidden: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(hidden, 4 * hidden, sequence_parallel=sequence_parallel)
        self.down = RowParallelLinear(4 * hidden, hidden, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """A small one, with its embedding tied to its head; returns the mean loss."""

    def __init__(self, layers: int, sequence_parallel: bool, **loss: bool | float) -> None:
        super().__init__()
        hidden = 8
        self.embedding = VocabParallelEmbedding(
            VOCABULARY, hidden, sequence_parallel=sequence_parallel
        )
        self.blocks = nn.ModuleList(
            part
            for _ in range(layers)
            for part in (Attention(hidden, 2, sequence_parallel), MLP(hidden, sequence_parallel))
        )
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2 * layers + 1))
        if sequence_parallel:
            mark_parameters(self.norms, partial="tp")
        self.head = VocabParallelHead(
            hidden, VOCABULARY, sequence_parallel=sequence_parallel, weight=self.embedding.weight
        )
        self.loss = partial(
            vocab_parallel_cross_entropy, vocabulary=VOCABULARY, reduction="mean", **loss
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=False):
            x = x + block(norm(x))
        loss: Tensor = self.loss(self.head(self.norms[-1](x)), targets)
        return loss


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    """Of shape (sequence, batch), and targets of which one is ignored."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(VOCABULARY, (2, 8, 3), generator=generator)
    found[1, 0, 0] = -100
    return found[0], found[1]


def fp64(model: nn.Module) -> nn.Module:
    initialize_parameters(model, seed=0)
    return model.double()


def of_layers() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for sp in (False, True):
        yield f"MLP {sp}", partial(MLP, 8, sp)
        for kv_heads in (4, 1):
            yield f"attention {kv_heads} {sp}", partial(Attention, 8, kv_heads, sp)
    yield "no layers", partial(GPT, 0, False)
    yield "smoothed", partial(GPT, 0, True, label_smoothing=0.1)
    yield "overwritten", partial(GPT, 0, False, overwrite_logits=True)


def layers() -> None:
    grid = commgrid.initialize(tp=2)
    for name, make in of_layers():
        torch._dynamo.reset()
        model = fp64(make())
        if isinstance(model, GPT):
            inputs = tokens(0)
        else:
            seed = grid.rank if name.endswith("True") else 0
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(4, 2, 8, dtype=torch.float64, generator=generator)
            inputs = (x.requires_grad_(),)
        found = []
        for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            model.zero_grad()
            inputs[0].grad = None
            y = function(*inputs)
            y.square().sum().backward()
            gradients = [p.grad for p in (*inputs, *model.parameters()) if p.grad is not None]
            found.append([y.detach(), *gradients])
        assert len(found[0]) > 1
        for eager, fused in zip(*found, strict=True):
            torch.testing.assert_close(
                fused, eager, **CLOSE, msg=lambda m, name=name: f"{name}: {m}"
            )
        with torch.no_grad():
            torch.testing.assert_close(function(*inputs), found[0][0], **CLOSE)


@pytest.mark.nightly
def test_compiled_layers_equal_themselves() -> None:
    run_on_ranks(layers, 2, timeout=600)


def experts() -> None:
    warnings.simplefilter("ignore")  # torch's own, at a break in the graph
    grid = commgrid.initialize(ep=2)
    for options in ({}, {"capacity_factor": 1.0}):
        torch._dynamo.reset()
        layer = fp64(MoELayer(8, 16, 4, 2, **options))
        generator = torch.Generator().manual_seed(grid.rank)
        x = torch.randn(6, 2, 8, dtype=torch.float64, generator=generator).requires_grad_()
        found = []
        for function in (layer, torch.compile(layer, backend="aot_eager")):
            layer.zero_grad()
            x.grad = None
            y = function(x)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        for eager, fused in zip(*found, strict=True):
            torch.testing.assert_close(fused, eager, **CLOSE)


@pytest.mark.nightly
def test_experts_whose_counts_break_the_graph_keep_their_gradients() -> None:
    run_on_ranks(experts, 2, timeout=300)


def start(model: nn.Module, overlap: bool) -> tuple[GradientReducer, ShardedOptimizer]:
    reducer = GradientReducer(model, shard=True, bucket_bytes=2048)
    return reducer, ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-2, overlap=overlap)


def train(
    run: Callable[..., Tensor], reducer: GradientReducer, optimizer: ShardedOptimizer
) -> list[float]:
    """Losses and gradient norms of a few steps, and a last loss without gradients."""
    grid = commgrid.get_grid()
    found = []
    for step in range(3):
        loss = run(*tokens(10 * step + grid.get_local_rank("dp")))
        loss.backward()
        reducer.finish()
        found += [loss.item(), reducer.clip_gradients(0.5).item()]
        if (step + grid.rank) % 2:
            time.sleep(0.05)  # the others' forward begins before this rank has sent its part
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(run(*tokens(7)).item())
    return found


def trained(backend: str, overlap: bool, sequence_parallel: bool, tp: int) -> None:
    commgrid.initialize(tp=tp)
    if backend == "inductor":
        # Scalar kernels, which are compiled in half the time: vectors are between torch and C++.
        torch._inductor.config.cpp.simdlen = 1

    def make() -> nn.Module:
        return fp64(GPT(1, sequence_parallel))

    model = make()
    eager = train(model, *start(model, overlap))
    # A second model of one class runs the code that was compiled for the first.
    for _ in range(2):
        model = make()
        run = torch.compile(model, fullgraph=True, backend=backend)
        assert train(run, *start(model, overlap)) == pytest.approx(eager, rel=1e-12, abs=0)


@pytest.mark.nightly("*inductor-*")
@pytest.mark.full("4-2-*")
@pytest.mark.parametrize(
    ("world", "tp", "backend", "overlap", "sequence_parallel"),
    [  # each rank compiles for itself; inductor's 41 kernels take the C++ compiler half a minute
        (4, 2, "aot_eager", False, True),
        (2, 1, "aot_eager", True, False),
        (2, 2, "inductor", False, True),
    ],
)
def test_a_compiled_model_trains_like_itself(
    world: int, tp: int, backend: str, overlap: bool, sequence_parallel: bool
) -> None:
    run_on_ranks(trained, world, backend, overlap, sequence_parallel, tp, timeout=600)


def compiled_before() -> None:
    commgrid.initialize()
    x = torch.ones(2, 4, dtype=torch.float64)
    for overlap in (False, True):
        torch._dynamo.reset()
        model = fp64(nn.Sequential(nn.Linear(4, 4)))
        reducer = GradientReducer(model, shard=True)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def run(x: Tensor, model: nn.Module = model) -> Tensor:
            y: Tensor = model(x)
            return y.sum()

        run(x)  # torch does not look for hooks that come later
        optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1, overlap=overlap)
        for step in range(2):
            if overlap and step:
                with pytest.raises(CommGridError, match="was read before it was gathered"):
                    run(x).backward()
                break
            run(x).backward()
            reducer.finish()
            optimizer.step()
        optimizer.wait()


def test_code_compiled_before_the_optimizer_cannot_read_what_is_not_there_yet() -> None:
    run_on_ranks(compiled_before, 2)
