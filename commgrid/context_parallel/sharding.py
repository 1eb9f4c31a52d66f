"""SequenceSharding: which positions of a sequence each rank of a group holds, as a value.

    length 16, 2 ranks   contiguous   0000000011111111
                         zigzag       0000111111110000    the middle attends as much as both ends
    documents 3, 5, 8    packed       0000011111111000    equal, however long the documents are

A rank's rows are its positions, ascending. Documents lie one after the other in the sequence and
attend only themselves; positions of a document count from its own start, which is what rotary
phases are made of. Nothing here needs torch but what makes or takes tensors.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from commgrid.context_parallel.balance import Mask, balanced, check_lengths, pairs_of
from commgrid.context_parallel.ranges import Range, Ranges, count, joined, sorting_runs, union
from commgrid.errors import ShapeError, SpecError
from commgrid.wording import several

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from commgrid.runtime.grid import HyperCommGrid

Batch = TypeVar("Batch", "Tensor", Mapping[str, Any])


@dataclass(frozen=True)
class SequenceSharding:
    """Who holds which positions of a sequence, and where its documents begin.

    Hashable and picklable; two that say the same are equal. `contiguous`, `zigzag`, `packed` and
    `from_positions` make the usual ones; any other assignment is as good.

    Args:
        length: positions of the sequence, documents one after the other.
        ranges: for each rank its (start, stop) ranges, disjoint and ascending; a rank may have
            none. Every position is on just one rank.
        documents: where each document begins, and the length: 0, …, length. None: one document.

    Raises:
        SpecError: ranges that overlap, leave something out or are out of order; documents whose
            boundaries are.

    Example:
        >>> sharding = SequenceSharding.zigzag(16, parts=2)
        >>> sharding.ranges
        (((0, 4), (12, 16)), ((4, 12),))
        >>> [sharding.attended_pairs(rank) for rank in range(2)]
        [68, 68]
    """

    length: int
    ranges: tuple[Ranges, ...]
    documents: tuple[int, ...]

    def __init__(
        self,
        length: int,
        ranges: Iterable[Iterable[Sequence[int]]],
        documents: Iterable[int] | None = None,
    ) -> None:
        held = tuple(_as_ranges(rank, one) for rank, one in enumerate(ranges))
        bounds = (
            (0, operator.index(length))
            if documents is None
            else tuple(map(operator.index, documents))
        )
        object.__setattr__(self, "length", operator.index(length))
        object.__setattr__(self, "ranges", held)
        object.__setattr__(self, "documents", bounds)
        _check_documents(self.length, bounds)
        _check_partition(self.length, held)

    # -- making one -----------------------------------------------------------------------

    @classmethod
    def contiguous(
        cls, length: int, parts: int, documents: Iterable[int] | None = None
    ) -> SequenceSharding:
        """Equal slices, rank by rank.

        Args:
            length: of the sequence, a multiple of parts.
            parts: how many ranks.
            documents: boundaries, 0 … length; None: one document.

        Raises:
            SpecError: parts does not divide the length.
        """
        size = _share(length, parts, parts, "contiguous")
        return cls(length, [[(r * size, (r + 1) * size)] for r in range(parts)], documents)

    @classmethod
    def zigzag(
        cls, length: int, parts: int, documents: Iterable[int] | None = None
    ) -> SequenceSharding:
        """Megatron-LM's: of 2 · parts chunks rank r has number r, and number r from the end.

        Under a causal mask over one document all ranks attend equally many pairs.

        Args:
            length: of the sequence, a multiple of 2 · parts.
            parts, documents: as `contiguous`.

        Raises:
            SpecError: 2 · parts does not divide the length.
        """
        size = _share(length, parts, 2 * parts, "zigzag")
        chunks = [(i * size, (i + 1) * size) for i in range(2 * parts)]
        return cls(length, [union([chunks[r], chunks[-1 - r]]) for r in range(parts)], documents)

    @classmethod
    def packed(
        cls, lengths: Iterable[int], parts: int, *, causal: bool = True, window: int | None = None
    ) -> SequenceSharding:
        """Documents of any lengths on any number of ranks, equal in tokens and in attended pairs.

        Args:
            lengths: of each document, in the order in which they are packed.
            parts: how many ranks.
            causal, window: the mask whose pairs are to be equal.

        Raises:
            SpecError: no documents, a length below 1, or a window without causal.

        Example:
            >>> SequenceSharding.packed([3, 5, 8], 2).ranges
            (((0, 5), (13, 16)), ((5, 13),))
        """
        lengths = check_lengths(lengths)
        held = balanced(lengths, parts, causal=causal, window=window)
        documents = (0, *accumulate(lengths))
        return cls(documents[-1], held, documents)

    @classmethod
    def from_positions(
        cls, positions: Iterable[Iterable[int]], documents: Iterable[int] | None = None
    ) -> SequenceSharding:
        """A user's own assignment: for each rank its positions, ascending.

        Raises:
            SpecError: positions that are not ascending, or not each on just one rank.

        Example:
            >>> SequenceSharding.from_positions([[0, 2, 4], [1, 3]]).ranges
            (((0, 1), (2, 3), (4, 5)), ((1, 2), (3, 4)))
        """
        held = [[(p, p + 1) for p in map(operator.index, one)] for one in positions]
        return cls(sum(map(len, held)), held, documents)

    # -- what it says ---------------------------------------------------------------------

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    @cached_property
    def digest(self) -> str:
        """A short text that is the same for equal shardings, on every rank."""
        said = repr((self.length, self.ranges, self.documents)).encode()
        return hashlib.blake2b(said, digest_size=16).hexdigest()

    @property
    def described(self) -> str:
        """A short text that is different for every sharding."""
        first = str(self.ranges[0])
        held = first if len(first) < 60 else f"{first[:60]}…"
        return f"{self} (rank 0 holds {held}; {self.digest})"

    @property
    def parts(self) -> int:
        """How many ranks."""
        return len(self.ranges)

    @cached_property
    def local_lengths(self) -> tuple[int, ...]:
        """How many positions each rank holds."""
        return tuple(count(held) for held in self.ranges)

    @property
    def document_lengths(self) -> list[int]:
        """How many positions each document has."""
        return [stop - start for start, stop in pairwise(self.documents)]

    def attended_pairs(self, rank: int, *, causal: bool = True, window: int | None = None) -> int:
        """How many (query, key) pairs the positions of a rank attend: its work."""
        return pairs_of(self.document_lengths, self.ranges[rank], Mask(causal, window))

    def positions(self, rank: int, device: Any = None) -> Tensor:
        """The positions of a rank in the sequence, ascending, int64."""
        import torch

        rows = [torch.arange(start, stop, device=device) for start, stop in self.ranges[rank]]
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device=device)

    def document_ids(self, rank: int, device: Any = None) -> Tensor:
        """The number of the document that each position of a rank is in, int64."""
        import torch

        starts = torch.tensor(self.documents[1:], device=device)
        return torch.bucketize(self.positions(rank, device), starts, right=True)

    def position_ids(self, rank: int, device: Any = None) -> Tensor:
        """Each position of a rank, counted from its document's start: for rotary phases, int64."""
        import torch

        starts = torch.tensor(self.documents, device=device)
        return self.positions(rank, device) - starts[self.document_ids(rank, device)]

    # -- tensors --------------------------------------------------------------------------

    def shard(
        self,
        batch: Batch,
        rank: int | None = None,
        *,
        dim: int = 0,
        group: str | ProcessGroup = "cp",
        grid: HyperCommGrid | None = None,
    ) -> Batch:
        """A rank's part of a tensor, or of each tensor of a batch, differentiable.

        Args:
            batch: a tensor whose `dim` is the sequence; or a mapping of such tensors, such as
                tokens, labels and loss mask, in which None stays None. The same on all ranks of the
                group: in its first steps a GradientReducer compares those without a gradient.
            rank: whose; None: this one's, in `group`.
            dim: the sequence's.
            group, grid: looked at where `rank` is None.

        Returns:
            The same, with `local_lengths[rank]` in `dim`; views where that takes one range.

        Raises:
            ShapeError: a tensor whose `dim` has not the sharding's length, or a group of another
                number of ranks.
        """
        members = None
        if rank is None:
            from commgrid.collectives import resolve

            members = resolve(group, grid)
            if complaint := self._group_complaint(members):
                raise ShapeError(complaint)
            rank = members.rank()
        if isinstance(batch, Mapping):
            return {
                name: None if one is None else self._shard(one, rank, members, dim, f"{name!r}")
                for name, one in batch.items()
            }
        return self._shard(batch, rank, members, dim, "a tensor")

    def _shard(
        self, tensor: Tensor, rank: int, members: ProcessGroup | None, dim: int, what: str
    ) -> Tensor:
        if not hasattr(tensor, "narrow"):
            raise ShapeError(
                f"{what} is of type {type(tensor).__name__}: expected a tensor, or None; leave "
                "what is not to be cut out of the batch"
            )
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != self.length:
            raise ShapeError(
                f"{what} of shape {tuple(tensor.shape)} has not the {self.length} positions of "
                f"this sharding in dim {dim}; give the whole sequence, or a sharding of its length"
            )
        if members is not None:
            from commgrid.equality.inputs import note_batch

            note_batch(what, tensor, members)
        return take_runs(tensor, self.ranges[rank], dim)

    def unshard(
        self,
        shards: Tensor | Sequence[Tensor],
        *,
        dim: int = 0,
        group: str | ProcessGroup = "cp",
        grid: HyperCommGrid | None = None,
    ) -> Tensor:
        """The whole tensor again, of every rank's shard.

        Args:
            shards: all ranks' shards, in order; or this rank's, and the others' are gathered from
                `group`: collective, differentiable, and expects the same gradient on every rank.
            dim: the sequence's.
            group, grid: see there.

        Raises:
            ShapeError: shards of another sharding, on any rank.
            SpecError: ranks have other shardings.
        """
        import torch

        if isinstance(shards, torch.Tensor):
            from commgrid.collectives import gather_from_group, resolve
            from commgrid.context_parallel.agreement import agree

            members = resolve(group, grid)
            complaint = self._group_complaint(members) or self._shard_complaint(
                shards, members.rank(), dim
            )
            about = f"unshard over group {members.group_desc!r} of {members.size()} ranks"
            agree(members, about, (("shardings", self.described),), complaint)
            joined = gather_from_group(shards, members, dim=dim, sizes=self.local_lengths)
        else:
            if len(shards) != self.parts:
                raise ShapeError(f"{len(shards)} shards of a sharding over {self.parts} ranks")
            for rank, shard in enumerate(shards):
                if complaint := self._shard_complaint(shard, rank, dim):
                    raise ShapeError(complaint)
            joined = torch.cat(list(shards), dim)
        return take_runs(joined, sorting_runs(self.ranges), dim)

    def _shard_complaint(self, shard: Tensor, rank: int, dim: int) -> str | None:
        if not -shard.dim() <= dim < shard.dim():
            return f"rank {rank}'s shard of shape {tuple(shard.shape)} has no dim {dim}"
        if shard.shape[dim] == self.local_lengths[rank]:
            return None
        return (
            f"rank {rank}'s shard of shape {tuple(shard.shape)} has {shard.shape[dim]} positions "
            f"in dim {dim}, its share of this sharding is {self.local_lengths[rank]}"
        )

    def _group_complaint(self, members: ProcessGroup) -> str | None:
        if members.size() == self.parts:
            return None
        return (
            f"a sharding over {self.parts} ranks, but group {members.group_desc!r} has "
            f"{members.size()}"
        )

    # -- levels ---------------------------------------------------------------------------

    def merged(self, size: int) -> SequenceSharding:
        """The sharding over blocks of `size` ranks that follow each other, each holding all of its
        ranks' positions.

        Raises:
            SpecError: size does not divide the number of ranks.

        Example:
            >>> SequenceSharding.contiguous(8, 4).merged(2).ranges
            (((0, 4),), ((4, 8),))
        """
        if size < 1 or self.parts % size:
            raise SpecError(f"blocks of {size} ranks do not divide the {self.parts} of a sharding")
        blocks = [
            [one for held in self.ranges[i : i + size] for one in held]
            for i in range(0, self.parts, size)
        ]
        return SequenceSharding(self.length, map(union, blocks), self.documents)

    def __str__(self) -> str:
        positions, documents = (self.length, "position"), (len(self.documents) - 1, "document")
        return f"{several(*positions)} in {several(*documents)} over {several(self.parts, 'rank')}"


def take_runs(tensor: Tensor, runs: Ranges, dim: int = 0) -> Tensor:
    """Rows of a dim, in the order of the runs; a view where they are one run."""
    import torch

    parts = [tensor.narrow(dim, start, stop - start) for start, stop in runs]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


# -- checks -------------------------------------------------------------------------------


def _as_ranges(rank: int, ranges: Iterable[Sequence[int]]) -> Ranges:
    found: list[Range] = []
    for start, stop in (map(operator.index, one) for one in ranges):
        if start >= stop or (found and start < found[-1][1]):
            before = f" after ({found[-1][0]}, {found[-1][1]})" if found else ""
            raise SpecError(
                f"rank {rank} has ({start}, {stop}){before}: expected disjoint ranges of 1 "
                "position or more, ascending"
            )
        found.append((start, stop))
    return joined(found)


def _check_documents(length: int, documents: tuple[int, ...]) -> None:
    if (
        len(documents) < 2
        or documents[0] != 0
        or documents[-1] != length
        or any(stop <= start for start, stop in pairwise(documents))
    ):
        shown = ", ".join(map(str, documents[:12])) + (", …" if len(documents) > 12 else "")
        raise SpecError(
            f"documents=({shown}): expected where each document begins, ascending from 0, and at "
            f"the end the length of the sequence, {length}"
        )


def _check_partition(length: int, ranges: tuple[Ranges, ...]) -> None:
    if not ranges:
        raise SpecError("ranges is empty: expected those of 1 rank or more")
    every = sorted((start, stop, rank) for rank, held in enumerate(ranges) for start, stop in held)
    at, owner = 0, -1
    for start, stop, rank in every:
        if start < at:
            who = f"ranks {owner} and {rank}" if owner >= 0 else f"rank {rank}, before the first"
            raise SpecError(f"position {start} is on {who}; expected each on just one rank")
        if start > at:
            break
        at, owner = stop, rank
    if at < length:
        raise SpecError(f"position {at} of {length} is on no rank; expected each on just one")
    if at > length:
        raise SpecError(f"rank {owner} has position {at - 1}, past the end of {length} positions")


def _share(length: int, parts: int, divisor: int, name: str) -> int:
    if parts < 1:
        raise SpecError(f"parts={parts}: expected 1 rank or more")
    if length < 1:
        raise SpecError(f"{name}: length={length}: expected 1 position or more")
    if length % divisor:
        raise SpecError(
            f"{name} cannot cut {length} positions for {parts} ranks: expected a multiple of "
            f"{divisor}; pad the sequence, or use packed([{length}], {parts}), which takes any"
        )
    return length // divisor
