"""Verification of a run: digests of the target's tensors against those of the source's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from commgrid.collectives.plain import all_reduce
from commgrid.equality.digest import digest
from commgrid.errors import TransferError
from commgrid.layout.rank_text import describe_ranks
from commgrid.resharding.dtypes import dtype_of
from commgrid.resharding.layouts import GridLayouts
from commgrid.resharding.local_boxes import LocalBoxes
from commgrid.resharding.plan import Move, TransferPlan

_WORDS = 1 << 64
Key = TypeVar("Key")


def verify(
    plan: TransferPlan,
    layouts: GridLayouts,
    source: LocalBoxes,
    target: LocalBoxes,
    rank: int,
    group: ProcessGroup,
    device: torch.device,
) -> None:
    """Refuse a target that differs from its source; collective over the group.

    Sums of digests are compared, in which equal boxes of the source and the target cancel. A sender
    adds the digest of each box, in the dtype that it travels in and then in the target's; its
    receiver subtracts that of its own tensor. Each is times an odd number of its box and receiver,
    so that boxes that were exchanged differ, too.

    Args:
        plan: of the transfer.
        layouts: what the target's ranks hold.
        source, target: what this rank holds.
        rank: this one.
        group: of the ranks of both sides.
        device: to sum on.

    Raises:
        TransferError: on all ranks; names the first tensor, and the ranks that hold it.
    """
    dtypes = {name: form.torch_dtype for name, form in sorted(layouts.forms.items())}

    def digests() -> Iterator[tuple[str, int, int]]:
        """Each box of this rank: its tensor's name, its receiver, and what goes into the sum."""
        for move in (*plan.moves(rank), *plan.copies(rank)):
            name, factor = move.tensor.name, _factor(move)
            if move.sender == rank:
                view = source.view(move.tensor.source, move.box)
                sent = view.to(dtype_of(move.tensor.dtype)).to(dtypes[name])
                yield name, move.receiver, int(digest(sent)) * factor
            if move.receiver == rank:
                yield name, move.receiver, -int(digest(target.view(name, move.box))) * factor

    def differing(sums: dict[Key, int]) -> list[Key]:
        """Those of which the sums of all ranks are not 0."""
        signed = [(value + _WORDS // 2) % _WORDS - _WORDS // 2 for value in sums.values()]
        total = all_reduce(torch.tensor(signed, device=device), group, op="sum").tolist()
        return [key for key, value in zip(sums, total, strict=True) if value]

    sums = dict.fromkeys(dtypes, 0)
    for name, _, value in digests():
        sums[name] += value
    names = differing(sums)
    if not names:
        return
    by_rank = dict.fromkeys(plan.target_ranks, 0)
    for name, receiver, value in digests():
        by_rank[receiver] += value * (name == names[0])
    more = f", and so do {len(names) - 1} more tensors" if len(names) > 1 else ""
    raise TransferError(
        f"{names[0]} on {describe_ranks(differing(by_rank))} of the target differs "
        f"from the source{more}; see whether another thread or stream writes to "
        "a model during run(), then look for a faulty device or link"
    )


def _factor(move: Move) -> int:
    """An odd number of a move's box and receiver."""
    text = repr((move.box, move.receiver)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") | 1
