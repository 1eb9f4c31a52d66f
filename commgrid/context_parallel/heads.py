"""Attention after an exchange of heads for positions: Ulysses, alone and inside a ring.

Ulysses: an all-to-all from a slice of the sequence with all heads to all of it with a slice of the
heads, attention as on one rank, and the way back (arXiv 2309.14509).

    2 ranks, 4 heads, 8 positions     before                 after
    rank 0                            heads 0-3, 0-3         heads 0-1, 0-7
    rank 1                            heads 0-3, 4-7         heads 2-3, 0-7

Each of n ranks has H / n of the H query heads, and K / n of the K heads of keys and values, or if
K < n the one head that its queries use. A rank that holds s positions sends, forward, s rows of
H / n + 2 · max(K / n, 1) heads to each other rank, and then back, for each position of another
rank, its output of H / n heads. Backward is the same the other way.

Two levels: Ulysses inside, ring across; each alone where the other has one rank.

    cp 4 = ring 2 × a2a 2     ranks 0, 1 exchange heads      ranks 0, 2 are a ring of keys
                              ranks 2, 3 exchange heads      ranks 1, 3 are another

The ranks inside follow each other in the group and are to be those of one node, where an
all-to-all is cheap and heads bound how many there can be; the ring goes from node to node. A ring
then has what all ranks inside hold together, of their share of the heads (arXiv 2406.18485).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import start_all_to_all
from commgrid.collectives.first_order import first_order
from commgrid.context_parallel.agreement import names_peers
from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.plans import Step, ring_steps
from commgrid.context_parallel.ranges import Ranges, sorting_runs
from commgrid.context_parallel.ring import ring_attention
from commgrid.context_parallel.sharding import SequenceSharding, take_runs


@dataclass(frozen=True)
class Levels:
    """A rank's part on both levels.

    Args:
        sizes: positions of each rank inside.
        order: of the rows that come from all of them, by position.
        steps: of the ring across.
    """

    sizes: tuple[int, ...]
    order: Ranges
    steps: tuple[Step, ...]


@lru_cache(maxsize=128)
def two_levels(sharding: SequenceSharding, rank: int, mask: Mask, inner: int) -> Levels:
    """A rank's part where `inner` ranks that follow each other exchange heads.

    Example:
        >>> levels = two_levels(SequenceSharding.contiguous(8, 4), 3, Mask(), 2)
        >>> levels.sizes, [step.source for step in levels.steps]
        ((2, 2), [1, 0])
    """
    block = slice(rank // inner * inner, (rank // inner + 1) * inner)
    across = sharding.merged(inner)
    return Levels(
        sharding.local_lengths[block],
        sorting_runs(sharding.ranges[block]),
        ring_steps(across.ranges, across.documents, rank // inner, mask),
    )


def two_level_attention(
    q: Tensor, k: Tensor, v: Tensor, *, levels: Levels, inside: ProcessGroup | None,
    across: ProcessGroup | None, scale: float, ahead: int,
) -> Tensor:  # fmt: skip
    """Attention of this rank's queries over the sequence.

    Args:
        q: (batch, heads, positions, head_size).
        k, v: (batch, kv_heads, positions, head_size).
        levels: of `two_levels`.
        inside: whose ranks exchange heads; None: one rank.
        across: the ring; None: one rank.
        scale, ahead: of `ring_attention`.
    """
    if inside is not None:
        q, k, v = to_heads(q, k, v, levels, inside)
    out = ring_attention(q, k, v, steps=levels.steps, group=across, scale=scale, ahead=ahead)
    return out if inside is None else to_positions(out, levels, inside)


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, levels: Levels, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """From all heads of this rank's positions to its heads of all positions, differentiable.

    Args:
        q: (batch, heads, own positions, head_size).
        k, v: (batch, kv_heads, own positions, head_size).
        levels: of `two_levels`.
        group: whose ranks share the heads.

    Returns:
        q (batch, heads / n, positions, head_size), k and v (batch, max(kv_heads / n, 1), …).
    """
    size = group.size()
    parts = [q.shape[1] // size, max(k.shape[1] // size, 1)]
    if k.shape[1] < size:
        used = [rank * k.shape[1] // size for rank in range(size)]  # by each rank's queries
        k, v = k[:, used], v[:, used]
    rows = torch.cat([torch.unflatten(x, 1, (size, -1)) for x in (q, k, v)], 2)
    rows = rows.permute(1, 3, 0, 2, 4).flatten(0, 1)  # (rank · own positions, batch, heads, d)
    own = levels.sizes[group.rank()]
    arrived: Tensor = _Exchange.apply(rows, group, (own,) * size, levels.sizes)  # type: ignore[no-untyped-call]
    # By head and then by position, which kernels on the CPU take less time for.
    whole = take_runs(arrived.permute(1, 2, 0, 3), levels.order, 2).contiguous()
    q, k, v = torch.split(whole, [parts[0], parts[1], parts[1]], 1)
    return q, k, v


def to_positions(x: Tensor, levels: Levels, group: ProcessGroup) -> Tensor:
    """The way back of an output, differentiable.

    Args:
        x: (batch, heads / n, positions, head_size).

    Returns:
        (batch, heads, own positions, head_size).
    """
    rows = take_runs(x.permute(2, 0, 1, 3), sorting_runs([levels.order]))  # as they came
    own = levels.sizes[group.rank()]
    arrived: Tensor = _Exchange.apply(rows, group, levels.sizes, (own,) * group.size())  # type: ignore[no-untyped-call]
    by_rank = arrived.view(group.size(), own, *arrived.shape[1:])
    return by_rank.permute(2, 0, 3, 1, 4).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Rows to and from each rank of the group; backward the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: ProcessGroup, send: tuple[int, ...],
        receive: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return start_all_to_all(rows, group, send, receive).wait()

    @staticmethod
    @first_order("context-parallel attention")
    @names_peers
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back = start_all_to_all(gradient, ctx.group, ctx.receive, ctx.send).wait()
        return back, None, None, None
