"""Calls of a kernel for sequences of variable length, such as flash attention on CUDA: many
rectangles in one.

Such a kernel is given rows of queries and of keys that are cut into segments, the n-th of queries
for the n-th of keys, and one mask for all: query i of s attends key j of t if
-left ≤ j - i - (t - s) ≤ right. Rectangles of one such mask that follow each other in queries and
in keys are one call; what lies between them is a segment of the one without any of the other.

    documents     0 0 0 0 1 1 2 2 2       queries  4 2 3     one call with right = 0,
    each causal                           keys     4 2 3     however many documents

So a rank's hundreds of documents take a handful of calls, where one for each would leave the device
waiting for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from commgrid.context_parallel.tiles import Tile, Tiles

Band = tuple[int, int]
"""How far a query sees to the left and to the right of the diagonal that ends in the last corner of
its rectangle; -1: all the way."""


@dataclass(frozen=True)
class VarlenCall:
    """Rectangles for one call.

    Args:
        band: what of each is attended.
        tiles: in the order of their queries, and of their keys.
        recurs: whether it is one rectangle without a window whose shape no document's length
            decides, so that every step of training has it.
    """

    band: Band
    tiles: tuple[Tile, ...]
    recurs: bool = False
    _made: dict[tuple[torch.device, int], tuple[Tensor, Tensor, Tensor | None]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def rows(self) -> slice:
        """The queries that it takes; those between its tiles are among them."""
        return slice(self.tiles[0].q_start, self.tiles[-1].q_stop)

    @property
    def columns(self) -> slice:
        """As `rows`, the keys."""
        return slice(self.tiles[0].k_start, self.tiles[-1].k_stop)

    @property
    def is_causal(self) -> bool:
        """Whether it is one rectangle, cut by the diagonal that begins in its first corner."""
        return len(self.tiles) == 1 and self.tiles[0].is_causal

    @cached_property
    def segments(self) -> tuple[list[int], list[int]]:
        """How many queries and how many keys each has."""
        queries, keys = [], []
        row, column = self.rows.start, self.columns.start
        for tile in self.tiles:
            between = (tile.q_start - row, tile.k_start - column)  # each with none of the other
            for q_size, k_size in ((between[0], 0), (0, between[1]), tile.size):
                if q_size or k_size:
                    queries.append(q_size)
                    keys.append(k_size)
            row, column = tile.q_stop, tile.k_stop
        return queries, keys

    @property
    def longest(self) -> tuple[int, int]:
        """The kernel's arguments for the longest segment, in queries and in keys.

        They are more than the truth where the kernel would misread it: for 1 query it expects one
        in each segment, and a side of the band that is not below the keys counts as endless.
        """
        queries, keys = self.segments
        return max(2, *queries), max(*keys, *self.band) + 1

    def on(self, device: torch.device, batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The kernel's arguments beside tensors of (batch · rows, heads, head_size).

        Returns:
            Where the segments end, of queries and of keys, int32, after a zero, and (rows,) which
            queries attend nothing in this call; None: all attend something.
        """
        if (device, batch) not in self._made:
            q_ends, k_ends = (
                torch.tensor([0, *accumulate(sizes * batch)], dtype=torch.int32).to(device)
                for sizes in self.segments
            )
            queries, keys = (torch.tensor(sizes) for sizes in self.segments)
            idle = (keys == 0).repeat_interleave(queries)
            self._made[device, batch] = (
                q_ends, k_ends, idle.to(device) if idle.any() else None
            )  # fmt: skip
        return self._made[device, batch]


def varlen_calls(tiles: Sequence[Tile]) -> tuple[VarlenCall, ...]:
    """Tiles in as few calls as a greedy search finds; kept with `Tiles`.

    Example:
        >>> documents = [Tile(0, 4, 0, 4, 0), Tile(4, 6, 4, 6, 0), Tile(6, 9, 6, 9, 0)]
        >>> [(found.band, len(found.tiles)) for found in varlen_calls(documents)]
        [((-1, 0), 3)]
    """
    if not isinstance(tiles, Tiles):
        return _calls(tiles)
    found: tuple[VarlenCall, ...] | None = tiles.calls
    if found is None:
        found = tiles.calls = _calls(tiles.uncut(), one_document=tiles.of_one_document)
    return found


def _calls(tiles: Sequence[Tile], one_document: bool = False) -> tuple[VarlenCall, ...]:
    calls: dict[Band, list[list[Tile]]] = {}
    for tile in sorted(map(_trimmed, tiles)):
        for call in calls.setdefault(_band(tile), []):
            if call[-1].q_stop <= tile.q_start and call[-1].k_stop <= tile.k_start:
                call.append(tile)
                break
        else:
            calls[_band(tile)].append([tile])
    return tuple(
        VarlenCall(band, tuple(call), one_document and _is_plain(call))
        for band, found in calls.items()
        for call in found
    )


def _is_plain(call: list[Tile]) -> bool:
    """Whether it is one rectangle, whole or cut by its diagonal from corner to corner."""
    tile = call[0]
    rows, columns = tile.size
    return len(call) == 1 and (tile.offset is None or (tile.is_causal and rows == columns))


def _trimmed(tile: Tile) -> Tile:
    """Without last keys that no query attends and last queries that attend none, so that neither
    side of the band is short of the diagonal."""
    if tile.offset is None:
        return tile
    rows, columns = tile.size
    columns = min(columns, tile.offset + rows)
    if tile.window is not None:
        rows = min(rows, tile.window + columns - 1 - tile.offset)
    return tile._replace(q_stop=tile.q_start + rows, k_stop=tile.k_start + columns)


def _band(tile: Tile) -> Band:
    if tile.offset is None:
        return -1, -1
    rows, columns = tile.size
    right = tile.offset + rows - columns
    return -1 if tile.window is None else tile.window - 1 - right, right
