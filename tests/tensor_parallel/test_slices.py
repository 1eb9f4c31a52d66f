"""A slice that is drawn by itself is what the full weight has there, bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from commgrid.tensor_parallel.counter_rng import Law, Normal, Uniform
from commgrid.tensor_parallel.slices import fill, pieces, runs

LAWS = [Normal(0, 0.02), Uniform(-1, 2), Normal(0.1, 1, -0.5, 1)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (7,), (64,), (1, 1), (6, 4), (5, 7), (7, 6), (33, 2), (4, 3, 2), (3, 5, 7),
          (2, 2, 6, 4), (3, 1, 1, 5)]  # fmt: skip


def whole(law: Law, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    full = torch.empty(shape, dtype=dtype)
    fill(full, shape, (0,) * len(shape), law, 11)
    return full


@pytest.mark.full("*-dtype1", "*-dtype2", "*-dtype3")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_any_box_of_any_shape(law: Law, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        full = whole(law, shape, dtype)
        cuts = [
            {(0, size), (0, (size + 1) // 2), (size // 2, size), (size // 3, size // 3 + 1)}
            for size in shape
        ]
        for index, box in enumerate(itertools.product(*map(sorted, cuts))):
            expected = full[tuple(slice(start, stop) for start, stop in box)]
            found = torch.empty_like(expected)
            chunk = (None, 1, 2, 3, 5, 16)[index % 6]
            fill(found, shape, [start for start, _ in box], law, 11, chunk)
            assert torch.equal(found, expected), (shape, box, chunk)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_any_chunk(law: Law) -> None:
    for dtype in (torch.float32, torch.float64):
        full = whole(law, (60, 77), dtype)
        for chunk in (63, 64, 65, 1000, 4096, 2**20):
            again = torch.empty_like(full)
            fill(again, full.shape, (0, 0), law, 11, chunk)
            assert torch.equal(again, full), chunk


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_targets_of_any_strides(law: Law) -> None:
    full = whole(law, (12, 10), torch.float32)
    for target in (
        torch.empty(10, 12).t(), torch.empty(24, 20)[::2, ::2], torch.empty(3, 12, 10)[1],
        torch.empty(12, 11)[:, 1:],
    ):  # fmt: skip
        for chunk in (None, 7):
            target.zero_()
            fill(target, (12, 10), (0, 0), law, 11, chunk)
            assert torch.equal(target, full)
    base = torch.zeros(24, 20)
    fill(base[::2, ::2], (12, 10), (0, 0), law, 11)
    assert not base[1::2].any()
    assert not base[:, 1::2].any()


def test_threads_change_no_bit() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(whole(Normal(0, 1), (500, 1001), torch.float32))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_no_more_than_a_chunk_is_in_memory() -> None:
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                made.append(out.untyped_storage().nbytes())
            return out

    column = torch.empty(512, 16)
    with Watch():
        fill(column, (512, 2**20), (0, 2**19), Normal(0, 1), 0, 2**11)
    made.remove(max(made))
    biggest = max(size for size in made if size != column.untyped_storage().nbytes())
    assert biggest <= 8 * (2**11 + 1)


def test_pieces_are_the_box_and_runs_their_places() -> None:
    for shape in SHAPES:
        places = torch.arange(math.prod(shape)).view(shape)
        for most in (1, 2, 5, 12, 1000):
            seen = torch.zeros(shape, dtype=torch.int64)
            for box in pieces(shape, most):
                assert seen[box].numel() <= most
                seen[box] += 1
                rows, run = runs(seen[box].shape, places.stride())
                starts = torch.zeros(1, dtype=torch.int64)
                for count, stride in rows:
                    starts = (starts[:, None] + torch.arange(count) * stride).flatten()
                found = (starts[:, None] + torch.arange(run)).flatten() + places[box].flatten()[0]
                assert torch.equal(found, places[box].flatten())
            assert (seen == 1).all()


def test_nothing_to_draw() -> None:
    for shape in ((0,), (3, 0), (0, 3)):
        fill(torch.empty(shape), (5, 5)[: len(shape)], (0, 0)[: len(shape)], Normal(0, 1), 0)
    alone = torch.zeros(())
    fill(alone, (), (), Normal(0, 1), 0)
    assert alone != 0
