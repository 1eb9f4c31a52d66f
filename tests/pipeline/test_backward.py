"""A backward in two halves adds up to the whole, for any module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import commgrid
from commgrid.pipeline.backward import backward_input
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import run_on_ranks


class Tied(nn.Module):
    """One weight used twice, and one output that does not depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(torch.tanh(self.linear(x))), (self.bias * self.linear.bias).exp()


class Deep(nn.Module):
    """Weights reached through functions of their own, two inputs, an unused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mixed = x * torch.softmax(self.scale, 0) + self.norm(y)
        return mixed + self.attention(mixed, mixed, mixed, need_weights=False)[0]


class Hooked(nn.Module):
    """Hooks change gradients on their way, at forks and elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        y.register_hook(lambda gradient: gradient * 2)
        z = self.second(torch.tanh(y))
        z.register_hook(lambda gradient: gradient + 1)
        alone = self.first.bias * 3  # which leads to no input
        alone.register_hook(lambda gradient: gradient * 5)
        return z, alone


class Checkpointed(nn.Module):
    """Recomputes its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            self.runs += 1
            return self.block(x)

        return checkpoint(run, x, use_reentrant=False).square()


CASES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "linear": (lambda: nn.Linear(4, 3), [(2, 4)]),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)),
        [(3, 4)],
    ),
    "tied": (Tied, [(2, 4)]),
    "deep": (Deep, [(2, 3, 4), (2, 3, 4)]),
    "hooked": (Hooked, [(2, 4)]),
    "checkpointed": (Checkpointed, [(2, 4)]),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3)), [(2, 2, 5)]),
    "no weights": (nn.Tanh, [(2, 4)]),
    "identity": (nn.Identity, [(2, 4)]),
    "no inputs": (lambda: nn.Embedding(5, 4), []),
}


@pytest.mark.parametrize("case", CASES)
def test_two_halves_are_the_whole(case: str) -> None:
    build, shapes = CASES[case]
    torch.manual_seed(0)
    module = build().double()
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    whole, halves = (gradients(module, inputs, split) for split in (False, True))
    assert whole.keys() == halves.keys()
    for name, expected in whole.items():
        # The same nodes compute the same numbers: only sums of several uses may be reordered.
        torch.testing.assert_close(halves[name], expected, rtol=1e-14, atol=1e-15, msg=name)


def gradients(module: nn.Module, inputs: list[Tensor], split: bool) -> dict[str, Tensor]:
    """Gradients of inputs and parameters, without None."""
    module.zero_grad()
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = module(*(leaves or [torch.tensor([1, 1, 3])]))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    edges = [get_gradient_edge(y) for y in outputs]
    given = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) for y in outputs]
    if split:
        weights = backward_input(edges, given, leaves)
        early = {n for n, p in module.named_parameters() if p.grad is not None}
        if leaves and not isinstance(module, Tied | Hooked):
            assert not early, f"weights' gradients in the first half: {early}"
            assert all(leaf.grad is not None for leaf in leaves)
        weights()
        weights()  # which has nothing left to do
    else:
        torch.autograd.backward(edges, given)
    found = {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)}
    found |= {name: p.grad for name, p in module.named_parameters()}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def test_what_was_checkpointed_is_recomputed_once_in_each_half() -> None:
    module = Checkpointed().double()
    gradients(module, [torch.randn(2, 4, dtype=torch.float64)], split=True)
    assert module.runs == 3


class Counting(torch.autograd.Function):
    """y = x w, which counts what each half computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return dy * w, dy * x


def test_microbatches_may_be_finished_in_any_order() -> None:
    w = torch.ones(3, requires_grad=True)
    halves = []
    for i in range(3):
        x = torch.full((3,), float(i), requires_grad=True)
        edge = get_gradient_edge(Counting.apply(x, w))  # type: ignore[no-untyped-call]
        halves.append(backward_input([edge], [torch.ones(3)], [x]))
        assert x.grad is not None
    assert w.grad is None
    for i in (2, 0, 1):
        halves[i]()
    assert w.grad is not None
    assert w.grad.tolist() == [3.0, 3.0, 3.0]


def layers(sequence_parallel: bool) -> None:
    """commgrid's own layers, whose nodes also communicate, compute each gradient once."""
    commgrid.initialize(tp=2)
    torch.manual_seed(0)
    options = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    up, down = ColumnParallelLinear(4, 8, **options), RowParallelLinear(8, 4, **options)
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    found = []
    for split in (False, True):
        for p in (*up.parameters(), *down.parameters()):
            p.grad = None
        leaf = x.clone().requires_grad_()
        edge = get_gradient_edge(down(F.gelu(up(leaf))))
        upstream = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
        if split:
            weights = backward_input([edge], [upstream], [leaf])
            for layer in (up, down):
                assert layer.weight.grad is None
            weights()
        else:
            torch.autograd.backward([edge], [upstream])
        found.append([leaf.grad, *(p.grad for p in (*up.parameters(), *down.parameters()))])
    for whole, halves in zip(*found, strict=True):
        torch.testing.assert_close(halves, whole, rtol=0, atol=0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_over_a_group(sequence_parallel: bool) -> None:
    run_on_ranks(layers, 2, sequence_parallel)
