"""CUDA's attention kernels on rectangles, in the layouts they are given, against plain softmax."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from commgrid.context_parallel import SequenceSharding
from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.kernels import Kernel, _Efficient, _Flash, _Products, kernel_for
from commgrid.context_parallel.online_softmax import OnlineSoftmax, SoftmaxBackward
from commgrid.context_parallel.plans import ring_steps
from commgrid.context_parallel.tiles import Tile, needed
from commgrid.context_parallel.varlen import varlen_calls
from tests.context_parallel.test_kernel import TILES, mask_of, softmax

# As parts of the largest number: bf16 keeps 8 bits and TF32, which fp32 may multiply in, 11; each
# of scores, weights and results is rounded once.
BOUNDS = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-3, torch.float64: 1e-12}
LARGER = [
    Tile(0, 300, 0, 130),
    Tile(0, 129, 0, 129, offset=0),
    Tile(0, 200, 0, 150, offset=20),
    Tile(0, 32, 0, 71, offset=39, window=40),
    Tile(0, 32, 0, 39, offset=39, window=40),
    Tile(0, 39, 0, 32, offset=1, window=40),
    Tile(0, 128, 0, 300, offset=172, window=150),
    Tile(0, 1, 0, 40, offset=39, window=40),
    Tile(0, 1, 0, 90),
    Tile(0, 139, 0, 20, offset=0, window=120),
]
CASES: list[tuple[torch.dtype, int, type[Kernel]]] = [
    (torch.bfloat16, 16, _Flash), (torch.bfloat16, 64, _Flash), (torch.bfloat16, 128, _Flash),
    (torch.float16, 64, _Flash), (torch.float32, 16, _Efficient), (torch.float32, 64, _Efficient),
    (torch.float32, 128, _Efficient), (torch.float64, 16, _Products),
    (torch.bfloat16, 20, _Products),
]  # fmt: skip


def drawn(tile: Tile, size: int) -> list[Tensor]:
    """q, k, v and the gradient of the output: 6 query heads on 2 of keys."""
    made = torch.Generator().manual_seed(tile.q_stop)
    shapes = [(2, n, rows, size) for n, rows in ((6, tile.q_stop), (2, tile.k_stop))]
    return [
        torch.randn(shape, generator=made, dtype=torch.float64)
        for shape in (shapes[0], shapes[1], shapes[1], shapes[0])
    ]


def laid_out(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The same numbers as they are, as parts of longer buffers, and as messages hold them."""
    yield tensors
    yield [torch.cat([x, x, x], 2)[:, :, x.shape[2] : 2 * x.shape[2]] for x in tensors]
    yield [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in tensors]


@pytest.mark.parametrize(("dtype", "size", "kernel"), CASES)
@pytest.mark.parametrize("tile", [*TILES, *LARGER], ids=str)
def test_a_rectangle_is_softmax(
    tile: Tile, dtype: torch.dtype, size: int, kernel: type[Kernel]
) -> None:
    rounded = [x.to(dtype) for x in drawn(tile, size)]
    wanted = softmax_of(rounded, mask_of(tile), size**-0.5)
    for given in laid_out([x.cuda() for x in rounded]):
        assert kernel_for(given[0]) is kernel
        compare(attend(given, [tile], size**-0.5), wanted, dtype)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_rectangles_with_rows_between_them(dtype: torch.dtype, batch: int) -> None:
    """Three of a kind in a call, rows and keys of nobody between them, and two over the same."""
    parts = [
        Tile(0, 70, 10, 80, offset=0), Tile(90, 120, 80, 110, offset=0),
        Tile(121, 200, 120, 199, offset=0), Tile(30, 60, 210, 260), Tile(150, 200, 240, 300),
        Tile(40, 160, 300, 400, offset=40, window=70),
    ]  # fmt: skip
    whole = drawn(Tile(0, 210, 0, 400), 64)
    rounded = [torch.cat([x.to(dtype)] * 2)[:batch] for x in whole]
    allowed = torch.zeros(210, 400, dtype=torch.bool)
    for tile in parts:
        allowed[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] |= mask_of(tile)
    reached = allowed.any(1)
    wanted = softmax_of(rounded, allowed, 0.125, reached)
    for given in laid_out([x.cuda() for x in rounded]):
        compare(attend(given, parts, 0.125), wanted, dtype)


def softmax_of(
    tensors: list[Tensor], allowed: Tensor, scale: float, reached: Tensor | None = None
) -> list[Tensor]:
    """Output, log-sum-exp and gradients; of queries that attend nothing: 0, minus infinity, 0."""
    reached = torch.ones(len(allowed), dtype=torch.bool) if reached is None else reached
    q, k, v = (x.double().requires_grad_() for x in tensors[:3])
    out, lse = softmax(q[:, :, reached], k, v, allowed[reached], scale)
    made = torch.autograd.grad(out, (q, k, v), tensors[3].double()[:, :, reached])
    whole = torch.zeros_like(q)
    whole[:, :, reached] = out.detach()
    every = q.new_full(q.shape[:3], -torch.inf)
    every[:, :, reached] = lse.detach()
    return [whole, every, *made]


def attend(tensors: list[Tensor], parts: list[Tile], scale: float) -> list[Tensor]:
    q, k, v, gradient = tensors
    partial = OnlineSoftmax(q, scale)
    partial.add(k, v, parts)
    out, lse = partial.result()
    back = SoftmaxBackward(gradient, q, out, lse, scale)
    dk, dv = back.add(k, v, parts)
    return [out, lse, back.dq, dk, dv]


def compare(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    wrong = []
    for what, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        ours, kept = ours.double().cpu(), theirs.isfinite()
        assert torch.equal(ours.isfinite(), kept), what
        off, most = (ours - theirs)[kept].abs().max(), theirs[kept].abs().max()
        if not off <= BOUNDS[dtype] * max(1, most):
            wrong.append(f"{what} off by {off} of {most}")
    assert not wrong, wrong


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [64, 128])
def test_one_document_is_left_to_the_kernel_that_torch_takes(size: int, causal: bool) -> None:
    """cuDNN's, where it is faster; its steps are a zig-zag's, with the keys of another rank."""
    zigzag, mask = SequenceSharding.zigzag(1024, 2), Mask(causal)
    q, k, v, gradient = (x.to(torch.bfloat16) for x in drawn(Tile(0, 1024, 0, 1024), size))
    allowed = torch.ones(1024, 1024, dtype=torch.bool).tril_(0 if causal else 1024)
    out, lse, dq, _, _ = softmax_of([q, k, v, gradient], allowed, size**-0.5)
    rows = torch.tensor([row for run in zigzag.ranges[1] for row in range(*run)])
    given = [x[:, :, rows].cuda() for x in (q, gradient)]
    partial = OnlineSoftmax(given[0], size**-0.5)
    cuts = []
    for step in ring_steps(zigzag.ranges, zigzag.documents, 1, mask):
        held = zigzag.ranges[step.source]
        wanted = needed(zigzag.ranges[1], held, zigzag.documents, mask)
        theirs = torch.tensor([row for run in wanted for row in range(*run)])
        cuts.append(([x[:, :, theirs].cuda() for x in (k, v)], step.tiles))
        assert all(part.recurs for part in varlen_calls(step.tiles))
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for keys, tiles in cuts:
            partial.add(*keys, tiles)
        found, found_lse = partial.result()
        back = SoftmaxBackward(given[1], given[0], found, found_lse, size**-0.5)
        for keys, tiles in cuts:
            back.add(*keys, tiles)
        torch.cuda.synchronize()
    for ours, theirs in ((found, out), (found_lse, lse), (back.dq, dq)):
        off = (ours.double().cpu() - theirs[:, :, rows]).abs().max()
        assert off <= BOUNDS[torch.bfloat16] * max(1, theirs.abs().max())
    choice = torch._fused_sdp_choice(given[0], *cuts[0][0], is_causal=causal, enable_gqa=True)
    ran = any("cudnn" in event.key for event in profiled.key_averages())
    assert ran == (choice == SDPBackend.CUDNN_ATTENTION.value)
