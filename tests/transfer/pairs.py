"""Sixty pairs of cuts, and what is checked of each."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import commgrid
from commgrid import checkpoint
from commgrid.resharding import transport
from commgrid.transfer import Transfer
from tests.transfer.cuts import (
    Cut,
    build,
    fill,
    grid_of,
    items,
    optimizer_of,
    same,
    state_of,
    wrong,
    wrong_slices,
)

BF16, F64 = torch.bfloat16, torch.float64
Pair = tuple[Cut, Cut]


def on(count: int, first: int = 0, **axes: Any) -> Cut:
    """A cut over `count` ranks from the `first`."""
    own = {key: axes.pop(key) for key in ("chunks", "way", "dtype", "shard") if key in axes}
    return Cut(tuple(range(first, first + count)), axes, **own)


HSDP = {"dp_replicate": 2, "dp_shard": 2, "way": "hsdp"}
SHORT: list[Pair] = [
    (on(8, tp=2, pp=2, dp=2), on(8, tp=4, dp=2)),
    (on(4, pp=2, dp=2, chunks=2), on(4, 4, tp=4)),
    (on(4, dp=4, way="fsdp"), on(4, tp=4)),
    (on(8, dp=8), on(3, tp=3, dtype=BF16)),
]
LONG: list[Pair] = [
    (on(6, tp=2, dp=3), on(2, 6, tp=2)),
    (on(6, tp=3, dp=2), on(2, 6, pp=2)),
    (on(6, pp=2, dp=3), on(4, 2, tp=2, dp=2)),
    (on(6, tp=2, pp=3), on(4, 4, tp=4)),
    (on(4, tp=4), on(4, 4, pp=4)),
    (on(4, pp=4), on(4, 4, tp=4)),
    (on(4, pp=4), on(4, pp=2, tp=2)),
    (on(4, pp=2, tp=2), on(4, pp=2, tp=2)),
    (on(8, pp=2, tp=2, dp=2, chunks=2), on(4, tp=4)),
    (on(8, pp=2, tp=2, dp=2), on(8, pp=2, tp=2, dp=2, chunks=2)),
    (on(2, pp=2, chunks=2), on(1, 5)),
    (on(1, 5), on(2, pp=2, chunks=2)),
    (on(1), on(8, tp=4, dp=2)),
    (on(1), on(8, dp=8)),
    (on(8, dp=8), on(1, 7)),
    (on(8, tp=4, dp=2), on(3, pp=3)),
    (on(8, tp=2, dp=4), on(3, 5, tp=3)),
    (on(8, tp=2, dp=4), on(3, 2, dp=3)),
    (on(3, tp=3), on(8, tp=4, dp=2)),
    (on(3, 5, tp=3), on(4, tp=4)),
    (on(3, tp=3), on(4, 2, tp=4)),
    (on(4, dp=4, way="fsdp"), on(4, 4, dp=4, way="fsdp")),
    (on(4, dp=4, way="fsdp"), on(4, dp=4)),
    (on(4, dp=4, way="fsdp"), on(3, 5, dp=3, way="fsdp")),
    (on(4, tp=2, dp=2, way="fsdp"), on(4, 2, dp=4, way="fsdp")),
    (on(4, tp=2, dp=2, way="fsdp"), on(8, tp=4, dp=2)),
    (on(4, dp=4, way="fsdp"), on(2, 6, pp=2)),
    (on(4, pp=2, dp=2), on(4, 2, dp=4, way="fsdp")),
    (on(8, dp=8), on(8, dp=8, way="fsdp")),
    (on(4, **HSDP), on(4, 4, tp=4)),
    (on(4, **HSDP), on(4, dp=4, way="fsdp")),
    (on(4, tp=4), on(4, 4, **HSDP)),
    (on(8, tp=2, **HSDP), on(8, tp=4, dp=2)),
    (on(8, pp=2, tp=2, dp=2), on(8, tp=2, **HSDP)),
    (on(4, dp=4, shard=True), on(4, 4, **HSDP)),
    (on(4, tp=2, dp=2, dtype=F64), on(4, 4, tp=4, dtype=BF16)),
    (on(4, tp=4, dtype=BF16), on(4, tp=2, dp=2, dtype=F64)),
    (on(4, pp=2, dp=2, dtype=BF16), on(2, 3, tp=2)),
    (on(2, way="plain"), on(4, 4, tp=4)),
    (on(4, tp=4), on(2, way="plain")),
    (on(4, pp=2, dp=2, way="plain"), on(3, 1, tp=3)),
    (on(2, 6, tp=2), on(6, tp=2, dp=3)),
    (Cut((3, 1, 2, 0), {"tp": 4}), Cut((4, 7, 0, 2), {"tp": 2, "pp": 2})),
]
EXPERTS_SHORT: list[Pair] = [(on(8, ep=4, etp=2, dp=8), on(2, 6, ep=2, etp=1, dp=2))]
EXPERTS_LONG: list[Pair] = [
    (on(8, ep=4, etp=2, dp=8), on(2, ep=2, etp=1, dp=2)),
    (on(8, ep=4, etp=2, tp=2, dp=4), on(4, ep=2, etp=2, dp=4)),
    (on(8, ep=2, etp=1, pp=2, dp=4), on(4, 2, ep=4, etp=1, dp=4)),
    (on(4, ep=4, etp=1, dp=4), on(4, 4, ep=2, etp=1, tp=2, dp=2)),
    (on(4, ep=1, etp=2, tp=2, dp=2), on(8, ep=4, etp=1, tp=4, dp=2)),
    (on(8, tp=4, ep=2, etp=1, dp=2), on(4, tp=2, ep=1, etp=1, dp=2)),
]
OPTIMIZERS_SHORT: list[Pair] = [
    (on(4, tp=2, dp=2, shard=True), on(4, 2, tp=4)),
]
OPTIMIZERS_LONG: list[Pair] = [
    (on(4, dp=4, shard=True, dtype=BF16), on(3, 2, dp=3, shard=True, dtype=BF16)),
    (on(4, dp=4, shard=True), on(4, 4, **HSDP)),
    (on(4, dp=4, way="fsdp"), on(4, tp=2, dp=2, shard=True)),
    (on(4, dp=4, shard=True), on(4, dp=4, shard=True)),
    (on(8, dp=8, shard=True), on(3, 1, dp=3, shard=True)),
    (on(4, pp=2, dp=2, shard=True), on(4, 4, tp=4)),
    (on(4, dp=4, shard=True, dtype=BF16), on(2, 6, tp=2)),
    (on(4, tp=4), on(4, 2, dp=4, shard=True, dtype=BF16)),
]


class Counted:
    """Counts what is really received."""

    def __init__(self) -> None:
        self.size, self._start = 0, transport.start_transfers

    def __call__(self, group: Any, sends: Any, recvs: Any, refused: Any) -> Any:
        self.size += sum(tensor.nbytes for tensor, _ in recvs)
        return self._start(group, sends, recvs, refused)


def boxes_of(chunks: Any, grid: Any) -> dict[str, Any]:
    """Name to shape, dtype and boxes of this rank's tensors."""
    return {
        item.path[-1]: (
            item.shape, item.dtype, [(c.offset, tuple(c.data.shape)) for c in item.chunks]
        )
        for item in items(chunks, grid)
    } if chunks is not None else {}  # fmt: skip


def move(pairs: Sequence[Pair], experts: bool, folder: str) -> list[Any]:
    """Moves over every pair twice, and loads the source's checkpoint where there is a folder.

    Returns:
        For each pair what is wrong, this rank's boxes of both sides, and the plan's bytes received
        and sent of all ranks.
    """
    commgrid.join()
    transport.start_transfers = counted = Counted()  # type: ignore[assignment]
    found: list[Any] = []
    for number, (source_cut, target_cut) in enumerate(pairs):
        source_grid, target_grid = grid_of(source_cut, "s"), grid_of(target_cut, "t")
        source = build(source_cut, source_grid, experts)
        target = build(target_cut, target_grid, experts)
        bad: list[str] = []
        if source is not None or target is not None:
            transfer = Transfer(
                source, target, source_grid=source_grid, target_grid=target_grid, max_bytes=1500
            )
            for salt in (0.25, 0.75):
                if source is not None:
                    fill(source, source_grid, salt)
                counted.size = 0
                transfer.run()
                if target is not None:
                    bad += wrong(target, target_grid, salt, source_cut.dtype)
                    bad += wrong_slices(target, target_grid, salt, source_cut.dtype)
                planned = transfer.plan.received.get(dist.get_rank(), 0)
                if counted.size != planned:
                    bad.append(f"received {counted.size} instead of {planned}")
            boxes = boxes_of(source, source_grid), boxes_of(target, target_grid)
            found.append([bad, boxes, transfer.plan.received, transfer.plan.sent])
            transfer.close()
        else:
            found.append([bad, ({}, {}), None, None])
        if folder:
            runs = f"{folder}/{number}"
            if source is not None:
                checkpoint.save(runs, 1, source, progress=False, grid=source_grid)
            dist.barrier()
            if target is not None:
                loaded = build(target_cut, target_grid, experts)
                checkpoint.load(runs, loaded, progress=False, grid=target_grid)
                for one, other in zip(
                    items(target, target_grid), items(loaded, target_grid), strict=True
                ):
                    if not all(
                        torch.equal(a.data, b.data)
                        for a, b in zip(one.chunks, other.chunks, strict=True)
                    ):
                        bad.append(f"{one.path[-1]} is not as loaded")
        commgrid.destroy()
        dist.barrier()  # rank 0, which serves the store, may be on neither grid
    commgrid.shutdown()
    return found


def move_state(pairs: Sequence[Pair], folder: str) -> list[list[str]]:
    """Moves weights and optimizer state over every pair; another target loads the checkpoint."""
    commgrid.join()
    found: list[list[str]] = []
    for number, (source_cut, target_cut) in enumerate(pairs):
        runs, bad = f"{folder}/{number}", []
        source_grid, target_grid = grid_of(source_cut, "s"), grid_of(target_cut, "t")
        source, target, loaded = (
            build(cut, grid, False)
            for cut, grid in (
                (source_cut, source_grid), (target_cut, target_grid), (target_cut, target_grid)
            )
        )  # fmt: skip
        mine = theirs = again = None
        if source is not None:
            fill(source, source_grid, 0.5)
            mine = optimizer_of(source_cut, source, source_grid, 0.25)
        if target is not None:
            # One salt, so that the padding of a vocabulary, which no rank sends, is alike.
            fill(target, target_grid, 0.3)
            fill(loaded, target_grid, 0.2)
            theirs = optimizer_of(target_cut, target, target_grid, 0.75)
            again = optimizer_of(target_cut, loaded, target_grid, 0.75)
        if source is not None or target is not None:
            transfer = Transfer(
                source, target, source_grid=source_grid, target_grid=target_grid,
                optimizer=(mine, theirs), max_bytes=1500,
            )  # fmt: skip
            for rate in (0.5, 0.0625):
                if mine is not None:
                    mine.param_groups[0]["lr"] = rate
                transfer.run()
        if source is not None:
            checkpoint.save(runs, 1, source, mine, progress=False, grid=source_grid)
        dist.barrier()
        if target is not None:
            checkpoint.load(runs, loaded, again, progress=False, grid=target_grid)
            if not same(state_of(theirs), state_of(again)):
                bad.append(f"{source_cut} → {target_cut}: other state than was loaded")
            if state_of(theirs)[0]["lr"] != 0.0625:
                bad.append("the learning rate did not come")
            if len(state_of(theirs)) < 2:
                bad.append("no state to compare")
            for one, other in zip(
                items(target, target_grid), items(loaded, target_grid), strict=True
            ):
                for a, b in zip(one.chunks, other.chunks, strict=True):
                    if not torch.equal(a.data, b.data):
                        bad.append(f"{one.path[-1]} is not as loaded")
        found.append(bad)
        commgrid.destroy()
    commgrid.shutdown()
    return found
