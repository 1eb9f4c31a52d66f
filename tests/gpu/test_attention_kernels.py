"""CUDA's attention kernels on rectangles, in the layouts they are given, against plain softmax."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from commgrid.context_parallel.kernel import Kernel, _Efficient, _Flash, _Products, kernel_for
from commgrid.context_parallel.tiles import Tile
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
]
CASES = [
    (torch.bfloat16, _Flash), (torch.float16, _Flash), (torch.bfloat16, _Efficient),
    (torch.float32, _Efficient), (torch.float64, _Products), (torch.bfloat16, _Products),
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
    yield [torch.cat([x[:, :, :3], x, x], 2)[:, :, 3 : 3 + x.shape[2]] for x in tensors]
    yield [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in tensors]


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize(("dtype", "kernel"), CASES)
@pytest.mark.parametrize("tile", [*TILES, *LARGER], ids=str)
def test_a_kernel_is_softmax(
    tile: Tile, dtype: torch.dtype, kernel: type[Kernel], size: int
) -> None:
    scale, bound = size**-0.5, BOUNDS[dtype]
    rounded = [x.to(dtype) for x in drawn(tile, size)]
    leaves = [x.double().requires_grad_() for x in rounded[:3]]
    out, lse = softmax(*leaves, mask_of(tile), scale)  # type: ignore[arg-type]
    wanted = (out, lse, *torch.autograd.grad(out, leaves, rounded[3].double()))
    for q, k, v, gradient in laid_out([x.cuda() for x in rounded]):
        if kernel is _Flash:
            assert kernel_for(q) is kernel
        found, found_lse = kernel.forward(q, k, v, tile, scale)
        made = kernel.backward(gradient, q, k, v, found, found_lse, tile, scale)
        for what, ours, theirs in zip(
            ("out", "lse", "dq", "dk", "dv"), (found, found_lse, *made), wanted, strict=True
        ):
            off = (ours.double().cpu() - theirs).abs().max()
            assert off <= bound * max(1, theirs.abs().max()), f"{what} off by {off}"
