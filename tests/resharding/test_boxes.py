"""Boxes against an index of every element, and work that copies share out."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import commgrid
from commgrid.layout.box import boxes_of_range
from commgrid.parameters.foreign import ForeignCut
from commgrid.resharding.holders import Turns
from commgrid.resharding.item import HeldBoxes
from commgrid.testing import run_on_ranks

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_hold_exactly_the_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = torch.arange(count).view(shape)
    found = []
    boxes = list(boxes_of_range(start, stop, shape))
    for offset, size in boxes:
        part = numbers[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@given(shapes.filter(bool), st.data())
def test_chunks_of_a_cut_and_padded_slice(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Slices of equal size along one dim, the last ones padded, each then cut into flat ranges."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    ranks = data.draw(st.integers(1, 4))
    share = math.ceil(shape[dim] / ranks)
    full = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    held = (*shape[:dim], share, *shape[dim + 1 :])
    padded = torch.full((*shape[:dim], share * ranks, *shape[dim + 1 :]), -1.0).double()
    padded.narrow(dim, 0, shape[dim]).copy_(full)
    seen = torch.zeros(shape)
    for rank in range(ranks):
        own = padded.narrow(dim, rank * share, share).contiguous()
        offset = tuple(rank * share if d == dim else 0 for d in range(len(shape)))
        whole = (0,) * len(held), held
        box = HeldBoxes(shape, held, ((whole, offset),))
        middle = data.draw(st.integers(0, own.numel()))
        flat = own.view(-1)
        chunks = [
            *box.chunks(flat[:middle], 0, middle),
            *box.chunks(flat[middle:], middle, own.numel()),
        ]
        for chunk in chunks:
            place = tuple(
                slice(o, o + n) for o, n in zip(chunk.offset, chunk.data.shape, strict=True)
            )
            assert torch.equal(chunk.data, full[place])
            assert chunk.data.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
            seen[place] += 1
    assert torch.equal(seen, torch.ones(shape))  # every element in one chunk, padding in none


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_chunks_of_a_slice_in_pieces(
    ranks: int, pieces: int, length: int, data: st.DataObject
) -> None:
    """Megatron-core's `partition_stride`: piece i of rank r is piece i · ranks + r of the whole."""
    dim = data.draw(st.integers(0, 1))
    full = torch.arange(ranks * pieces * length * 2)
    full = full.view(-1, 2) if dim == 0 else full.view(2, -1)
    parts = full.split(length, dim)
    seen = torch.zeros_like(full)
    for rank in range(ranks):
        own = torch.cat(parts[rank::ranks], dim)
        cut = ForeignCut(dim, pieces, ranks, rank)
        shape = tuple(own.shape)
        assert cut.full_shape(shape) == tuple(full.shape)
        boxes = HeldBoxes(cut.full_shape(shape), shape, cut.boxes(shape))
        middle = data.draw(st.integers(0, own.numel()))
        flat = own.view(-1)
        for chunk in [*boxes.chunks(flat[:middle], 0, middle),
                      *boxes.chunks(flat[middle:], middle, own.numel())]:  # fmt: skip
            place = tuple(
                slice(o, o + n) for o, n in zip(chunk.offset, chunk.data.shape, strict=True)
            )
            assert torch.equal(chunk.data, full[place])
            seen[place] += 1
    assert torch.equal(seen, torch.ones_like(seen))


def shared_out() -> list[list[bool]]:
    grid = commgrid.initialize(dp=2, tp=2)
    turns = Turns(grid)
    sizes = [5, 3, 3, 1, 7, 2, 2, 6]
    both = [turns.is_mine(("tp", "dp"), size) for size in sizes]
    one = [turns.is_mine(("dp",), size) for size in sizes]
    commgrid.shutdown()
    return [both, one]


def test_copies_are_written_once_and_evenly() -> None:
    ranks = run_on_ranks(shared_out, 4, backend=None, launcher="torchrun")
    sizes = [5, 3, 3, 1, 7, 2, 2, 6]
    both = [found[0] for found in ranks]
    assert [sum(column) for column in zip(*both, strict=True)] == [1] * len(sizes)
    loads = [sum(itertools.compress(sizes, mine)) for mine in both]
    assert max(loads) - min(loads) <= max(sizes)
    for tp in range(2):  # ranks tp, tp + 2 differ along dp only
        pair = [ranks[tp][1], ranks[tp + 2][1]]
        assert [sum(column) for column in zip(*pair, strict=True)] == [1] * len(sizes)
