"""Memory of a run: only messages that have to be are packed, and all buffers are freed."""

from typing import Any

import pytest
import torch

import commgrid
from commgrid.resharding import transport
from commgrid.resharding import transport as ring
from commgrid.testing import run_on_ranks
from commgrid.transfer import Part, Transfer
from tests.runtime.test_leaks import check_flat, usage

ROWS, COLUMNS = 512, 256  # of which half are more than a large box's least bytes
CYCLES, SETTLING = 60, 10


def full() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS * 2, dtype=torch.float32).view(ROWS, COLUMNS * 2)


def in_place(columns: bool, dtype: torch.dtype) -> tuple[list[int], list[int], int, bool]:
    """Rank 0 has all, rank 1 a half: where messages lie, where tensors do, and bytes of rings."""
    commgrid.join()
    source_grid = commgrid.initialize(ranks=[0], name="source")
    target_grid = commgrid.initialize(ranks=[1], name="target")
    source = target = None
    if source_grid is not None:
        source = {"w": full(), "a": torch.ones(3), "b": torch.ones(4)}
        ends = [source["w"].data_ptr(), source["w"].data_ptr() + source["w"].nbytes]
    else:
        size = (ROWS, COLUMNS) if columns else (ROWS // 2, 2 * COLUMNS)
        offset = (0, COLUMNS) if columns else (ROWS // 2, 0)
        held = torch.zeros(size, dtype=dtype)
        target = {"w": Part(held, (ROWS, 2 * COLUMNS), offset)}
        target |= {"a": torch.zeros(3), "b": torch.zeros(4)}
        ends = [held.data_ptr(), held.data_ptr() + held.nbytes]
    transfer = Transfer(source, target, source_grid=source_grid, target_grid=target_grid)
    places, rings, start, take = [], 0, transport.start_transfers, ring.RingBuffer.take

    def started(group: Any, sends: Any, recvs: Any, refused: Any) -> Any:
        places.extend(tensor.data_ptr() for tensor, _ in (*sends, *recvs))
        return start(group, sends, recvs, refused)

    def taken(self: Any, size: int) -> Any:
        nonlocal rings
        rings += size
        return take(self, size)

    transport.start_transfers, ring.RingBuffer.take = started, taken  # type: ignore[assignment,method-assign]
    transfer.run()
    is_right = True
    if target_grid is not None:
        wanted = full()[:, COLUMNS:] if columns else full()[ROWS // 2 :]
        is_right = torch.equal(held, wanted.to(dtype))
    commgrid.shutdown()
    return places, ends, rings, is_right


def straight(found: Any) -> list[bool]:
    places, (first, last), _, is_right = found
    assert is_right
    return [first <= place < last for place in places]


def test_a_box_in_one_piece_travels_from_where_it_is_to_where_it_goes() -> None:
    sender, receiver = run_on_ranks(
        in_place, 2, False, torch.float32, backend=None, launcher="torchrun"
    )
    assert sorted(straight(sender)) == sorted(straight(receiver)) == [False, True]
    assert sender[2] == receiver[2] == ring.aligned(12 + 16)  # the small ones'


def test_other_boxes_are_packed_where_they_are_not_in_one_piece() -> None:
    sender, receiver = run_on_ranks(
        in_place, 2, True, torch.float32, backend=None, launcher="torchrun"
    )
    assert sorted(straight(receiver)) == [False, True]
    assert not any(straight(sender))
    sender, receiver = run_on_ranks(
        in_place, 2, False, torch.float64, backend=None, launcher="torchrun"
    )
    assert sorted(straight(sender)) == [False, True]
    assert not any(straight(receiver))


def cycles() -> list[tuple[int, int, float]]:
    """Open files, threads and MiB of memory after every fifteenth cycle."""
    source_grid = commgrid.initialize(ranks=[0, 1], name="source")
    target_grid = commgrid.initialize(ranks=[1, 2], name="target")
    source = {"w": full()} if source_grid is not None else None
    target = {"w": torch.zeros(ROWS, 2 * COLUMNS)} if target_grid is not None else None
    found = []
    for cycle in range(SETTLING + CYCLES + 1):
        if cycle >= SETTLING and (cycle - SETTLING) % 15 == 0:
            found.append(usage())
        transfer = Transfer(source, target, source_grid=source_grid, target_grid=target_grid)
        transfer.run()
        transfer.close()
    commgrid.shutdown()
    return found


@pytest.mark.full
def test_transfer_after_transfer_leaves_nothing_behind() -> None:
    """A tensor of theirs is 1 MiB: 60, were one kept each time. Of a group torch keeps some KiB."""
    for found in run_on_ranks(cycles, 3, backend=None, launcher="torchrun"):
        assert len(found) == CYCLES // 15 + 1
        check_flat(found)
