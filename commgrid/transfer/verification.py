"""Verification of a run: digests of the target's tensors against those of the source's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
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


class Verification:
    """Sums of digests, in which equal boxes of the source and the target cancel.

    A sender adds the digest of each box, in the dtype that it travels in and then in the target's;
    its receiver subtracts that of its own tensor. Each is times an odd number of its box and
    receiver, so that boxes that were exchanged differ, too.

    Args:
        plan: of the transfer.
        target: what its ranks hold.
        rank: this one.
        group: of the ranks of both sides.
        device: to sum on.
    """

    def __init__(
        self,
        plan: TransferPlan,
        target: GridLayouts,
        rank: int,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self._plan, self._rank, self._group, self._device = plan, rank, group, device
        self._dtypes: dict[str, torch.dtype] = {
            name: form.torch_dtype for name, form in sorted(target.forms.items())
        }

    def check(self, source: LocalBoxes, target: LocalBoxes) -> None:
        """Refuse a target that differs; collective over the group.

        Args:
            source, target: what this rank holds.

        Raises:
            TransferError: on all ranks; names the first tensor, and the ranks that hold it.
        """
        sums = dict.fromkeys(self._dtypes, 0)
        for name, _, value in self._digests(source, target):
            sums[name] += value
        differing = self._total(list(sums.values())).nonzero().flatten().tolist()
        if not differing:
            return
        first = [*sums][differing[0]]
        ranks = self._plan.target_ranks
        by_rank = dict.fromkeys(ranks, 0)
        for name, receiver, value in self._digests(source, target):
            by_rank[receiver] += value * (name == first)
        odd = self._total(list(by_rank.values())).nonzero().flatten().tolist()
        more = f", and so do {len(differing) - 1} more tensors" if len(differing) > 1 else ""
        raise TransferError(
            f"{first} on {describe_ranks(ranks[place] for place in odd)} of the target differs "
            f"from the source{more}; see whether another thread or stream writes to "
            "a model during run(), then look for a faulty device or link"
        )

    def _digests(self, source: LocalBoxes, target: LocalBoxes) -> Iterator[tuple[str, int, int]]:
        """Each box of this rank: its tensor's name, its receiver, and what goes into the sum."""
        for move in (*self._plan.moves(self._rank), *self._plan.copies(self._rank)):
            name, factor = move.tensor.name, _factor(move)
            if move.sender == self._rank:
                view = source.view(move.tensor.source, move.box)
                sent = view.to(dtype_of(move.tensor.dtype)).to(self._dtypes[name])
                yield name, move.receiver, int(digest(sent)) * factor
            if move.receiver == self._rank:
                yield name, move.receiver, -int(digest(target.view(name, move.box))) * factor

    def _total(self, values: list[int]) -> Tensor:
        """The sums of all ranks, of which those of equal tensors are 0."""
        signed = [(value + _WORDS // 2) % _WORDS - _WORDS // 2 for value in values]
        return all_reduce(torch.tensor(signed, device=self._device), self._group, op="sum")


def _factor(move: Move) -> int:
    """An odd number of a move's box and receiver."""
    text = repr((move.box, move.receiver)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") | 1
