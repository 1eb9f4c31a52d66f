"""Ranks that share a device move weights through its memory; here it is a CPU's, and shared memory.

Ranks are told that they share GPUs, as those of an NCCL world are; the device is their CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import commgrid
from commgrid.launching.local_ranks import Ranks
from commgrid.resharding import transport
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat.messages import lend, start_copies, wait_for
from commgrid.transfer import Part, Transfer
from tests.killing import kill_me
from tests.transfer.programs import said

FOREVER = 1000.0
"""Seconds to wait for others, longer than the test: an error came without it."""


class Counts:
    """How many messages have gone each way."""

    def __init__(self) -> None:
        self.near = self.far = 0
        near, far = transport.start_copies, transport.start_transfers

        def start_near(group: Any, sends: Any, recvs: Any, refused: Any) -> Any:
            self.near += len(sends) + len(recvs)
            return near(group, sends, recvs, refused)

        def start_far(group: Any, sends: Any, recvs: Any, refused: Any) -> Any:
            self.far += len(sends) + len(recvs)
            return far(group, sends, recvs, refused)

        transport.start_copies = start_near
        transport.start_transfers = start_far


def share(devices: str) -> Counts:
    """Have each rank be on the device whose letter is the rank's."""
    torch_groups.nccl_kinds = lambda *_: frozenset({"nccl"})  # type: ignore[assignment]
    torch_nccl.device_name = lambda host: devices[torch.distributed.get_rank()]  # type: ignore[assignment]
    torch_nccl.rank_device = lambda: torch.device("cpu")
    return Counts()


def full(salt: float) -> torch.Tensor:
    return torch.arange(48 * 32, dtype=torch.float32).view(48, 32) + salt


def crossed(devices: str, max_bytes: int) -> Any:
    """From rows on ranks 0 and 1 to columns on ranks 2 and 3, three times."""
    commgrid.join()
    counts = share(devices)
    one, other = (
        commgrid.initialize(tp=2, name=name, ranks=range(first, first + 2), watch=False)
        for name, first in (("one", 0), ("other", 2))
    )
    rank, source, target = torch.distributed.get_rank(), None, None
    if one is not None:
        rows = torch.zeros(24, 32)
        source = {"w": Part(rows, (48, 32), (24 * rank, 0)), "b": torch.ones(5)}
    else:
        columns = torch.zeros(48, 16, dtype=torch.float64)
        target = {"w": Part(columns, (48, 32), (0, 16 * (rank - 2))), "b": torch.zeros(5)}
    transfer = Transfer(
        source, target, source_grid=one, target_grid=other, max_bytes=max_bytes, timeout=FOREVER
    )
    right = []
    for salt in range(3):
        if one is not None:
            rows.copy_(full(salt)[24 * rank : 24 * rank + 24])
        transfer.run(verify=salt == 2)
        if other is not None:
            wanted = full(salt)[:, 16 * (rank - 2) : 16 * (rank - 1)].double()
            right.append(torch.equal(columns, wanted) and bool((target["b"] == 1).all()))
    is_lent = one is not None and rows.untyped_storage().filename is not None
    transfer.close()
    commgrid.shutdown()
    return all(right), is_lent, counts.near > 0, counts.far > 0


@pytest.mark.parametrize(
    ("devices", "max_bytes"),
    [
        ("abab", 1 << 28),
        pytest.param("abab", 256, marks=pytest.mark.full),
        pytest.param("aaaa", 256, marks=pytest.mark.full),
        pytest.param("abcd", 256, marks=pytest.mark.full),
        pytest.param("abcb", 256, marks=pytest.mark.full),
    ],
)
def test_weights_arrive_through_the_memory_of_a_shared_device(devices: str, max_bytes: int) -> None:
    found = run_on_ranks(crossed, 4, devices, max_bytes, backend=None, launcher="torchrun")
    for rank, (is_right, is_lent, near, far) in enumerate(found):
        assert is_right
        assert not is_lent  # a source's own memory stays as it is
        has_near = any(devices[rank] == devices[peer] for peer in ((2, 3) if rank < 2 else (0, 1)))
        assert near == has_near
        assert far == (devices != "aaaa")


def each_to_each(max_bytes: int) -> bool:
    """Three ranks of one device; each has rows that both others need, and needs theirs."""
    share("aaa")
    grid = commgrid.initialize(dp=3)
    held, rank = torch.zeros(48, 32), grid.rank
    rows = full(0.0)[16 * rank : 16 * rank + 16].clone()
    transfer = Transfer(
        {"w": Part(rows, (48, 32), (16 * rank, 0))}, {"w": held},
        source_grid=grid, target_grid=grid, max_bytes=max_bytes, timeout=FOREVER,
    )  # fmt: skip
    for _ in range(3):
        held.zero_()
        transfer.run()
        assert torch.equal(held, full(0.0))
    commgrid.shutdown()
    return True


@pytest.mark.full
@pytest.mark.parametrize("max_bytes", [64, 4096, 1 << 28])
def test_all_ranks_of_a_device_send_to_each_other(max_bytes: int) -> None:
    assert all(run_on_ranks(each_to_each, 3, max_bytes, backend=None, launcher="torchrun"))


def both_ways(ranks: int) -> bool:
    """Each rank sends to each other one and receives from it, started together."""
    grid = commgrid.initialize(dp=ranks)
    group, rank = grid.get_group("dp"), grid.rank
    others = [peer for peer in range(ranks) if peer != rank]
    cpu = torch.device("cpu")
    mine = {peer: lend(8, cpu)[:8].fill_(10 * rank + peer) for peer in others}
    got = {peer: torch.zeros(8, dtype=torch.uint8) for peer in others}

    def refused(error: RuntimeError, _: int | None) -> Exception:
        return error

    sends, recvs = ([(held[p], p) for p in others] for held in (mine, got))
    works = start_copies(group, sends, recvs, refused)
    for _ in range(2):  # a second wait does nothing
        for work in works:
            wait_for(work, 20.0)
    commgrid.shutdown()
    return all(bool((got[peer] == 10 * peer + rank).all()) for peer in others)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_ranks_of_a_device_may_send_and_receive_in_one_start(ranks: int) -> None:
    assert all(run_on_ranks(both_ways, ranks, ranks))


def killed_amid() -> str:
    """Rank 1 is killed in place of its copy out of rank 0's memory."""
    share("aa")
    grid = commgrid.initialize(dp=2)
    rank = grid.rank
    transfer = Transfer(
        {"w": Part(torch.ones(4), (8,), (4 * rank,))}, {"w": torch.zeros(8)},
        source_grid=grid, target_grid=grid, timeout=FOREVER,
    )  # fmt: skip
    if rank == 1:
        transport.Carrier._finish = lambda *_: kill_me()  # type: ignore[method-assign]
    return said(transfer.run)


@pytest.mark.full
def test_a_rank_that_is_killed_on_a_shared_device_is_named() -> None:
    ranks = Ranks(killed_amid, 2, backend=None, launcher="torchrun", killable=True)
    with ranks:
        told = ranks.wait()[0].value
    assert told.startswith("PeerFailedError: rank 1 is gone"), told
    assert "the target is not to be used" in told
