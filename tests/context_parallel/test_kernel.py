"""Torch's kernels on rectangles against plain softmax, and partial results that become one."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from commgrid.context_parallel.kernels import Kernel, _OnCpu, _Products
from commgrid.context_parallel.online_softmax import OnlineSoftmax, SoftmaxBackward
from commgrid.context_parallel.tiles import Tile

TILES = [
    Tile(0, 6, 0, 9),
    Tile(0, 7, 0, 7, offset=0),
    Tile(0, 6, 0, 9, offset=3),
    Tile(0, 6, 0, 9, offset=4, window=3),
    Tile(0, 5, 0, 4, offset=2, window=4),
    Tile(0, 1, 0, 1, offset=0),
]


def mask_of(tile: Tile) -> Tensor:
    rows, columns = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    allowed = torch.ones(rows, columns, dtype=torch.bool)
    for i, j in itertools.product(range(rows), range(columns)):
        if tile.offset is not None:
            behind = tile.offset + i - j
            allowed[i, j] = behind >= 0 and (tile.window is None or behind < tile.window)
    return allowed


def softmax(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1), scores.logsumexp(-1)


def drawn(rows: int, columns: int, seed: int = 0) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = [(2, 6, rows, 5), (2, 2, columns, 5), (2, 2, columns, 5)]
    return [torch.randn(s, generator=made, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("kernel", [_OnCpu, _Products])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_kernel_is_softmax(kernel: type[Kernel], tile: Tile) -> None:
    q, k, v = drawn(tile.q_stop, tile.k_stop)
    out, lse = softmax(q, k, v, mask_of(tile), 0.4)
    with torch.no_grad():
        found, found_lse = kernel.forward(q, k, v, tile, 0.4)
    torch.testing.assert_close(found, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_lse, lse, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (q, k, v), gradient)
    with torch.no_grad():
        made = kernel.backward(gradient, q, k, v, found, found_lse, tile, 0.4)
    for ours, theirs in zip(made, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_parts_in_any_order_are_the_whole() -> None:
    """Some queries meet their keys in three steps, some in one, some none."""
    parts = [
        Tile(0, 4, 0, 3), Tile(2, 6, 3, 7, offset=0), Tile(0, 2, 7, 9), Tile(4, 6, 7, 9),
        Tile(1, 3, 10, 12, offset=1, window=2),
    ]  # fmt: skip
    q, k, v = drawn(8, 12)
    allowed = torch.zeros(8, 12, dtype=torch.bool)
    for tile in parts:
        allowed[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] |= mask_of(tile)
    assert not allowed[6:].any()
    out, lse = softmax(q[:, :, :6], k, v, allowed[:6], 1.0)
    gradient = torch.randn_like(q)
    wanted = torch.autograd.grad(out, (q, k, v), gradient[:, :, :6])
    draw = random.Random(0)
    for _ in range(10):
        draw.shuffle(parts)
        with torch.no_grad():
            partial = OnlineSoftmax(q, 1.0)
            for tile in parts:
                partial.add(k, v, [tile])
            found, found_lse = partial.result()
            assert not found[:, :, 6:].any()
            assert (found_lse[:, :, 6:] == -torch.inf).all()
            torch.testing.assert_close(found[:, :, :6], out, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found_lse[:, :, :6], lse, rtol=1e-12, atol=1e-12)
            back = SoftmaxBackward(gradient, q, found, found_lse, 1.0)
            dk, dv = back.add(k, v, parts)
        for ours, theirs in zip((back.dq, dk, dv), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
