"""Attention on two levels: Ulysses inside, ring across; each alone where the other has one rank.

    cp 4 = ring 2 × a2a 2     ranks 0, 1 exchange heads      ranks 0, 2 are a ring of keys
                              ranks 2, 3 exchange heads      ranks 1, 3 are another

The ranks inside follow each other in the group and are to be those of one node, where an
all-to-all is cheap and heads bound how many there can be; the ring goes from node to node. A ring
then has what all ranks inside hold together, of their share of the heads (arXiv 2406.18485).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.plans import HeadExchange, Step, head_exchange, ring_steps
from commgrid.context_parallel.ring import ring_attention
from commgrid.context_parallel.sharding import SequenceSharding
from commgrid.context_parallel.ulysses import to_heads, to_positions


@dataclass(frozen=True)
class Levels:
    """A rank's part on both.

    Args:
        exchange: of heads for positions, among the ranks inside.
        steps: of the ring across.
    """

    exchange: HeadExchange
    steps: tuple[Step, ...]


@lru_cache(maxsize=64)
def two_levels(sharding: SequenceSharding, rank: int, mask: Mask, inner: int) -> Levels:
    """A rank's part where `inner` ranks that follow each other exchange heads.

    Example:
        >>> levels = two_levels(SequenceSharding.contiguous(8, 4), 3, Mask(), 2)
        >>> levels.exchange.sizes, [step.source for step in levels.steps]
        ((2, 2), [1, 0])
    """
    block = rank // inner * inner
    merged = sharding.merged(inner)
    return Levels(
        head_exchange(sharding.ranges[block : block + inner]),
        ring_steps(merged.ranges, merged.documents, rank // inner, mask),
    )


def two_level_attention(
    q: Tensor, k: Tensor, v: Tensor, *, levels: Levels, inside: ProcessGroup | None,
    across: ProcessGroup | None, scale: float,
) -> Tensor:  # fmt: skip
    """Attention of this rank's queries over the sequence.

    Args:
        q: (batch, heads, positions, head_size).
        k, v: (batch, kv_heads, positions, head_size).
        levels: of `two_levels`.
        inside: whose ranks exchange heads; None: one rank.
        across: the ring; None: one rank.
        scale: of the products of queries and keys.
    """
    if inside is not None:
        q, k, v = to_heads(q, k, v, levels.exchange, inside)
    out = ring_attention(q, k, v, steps=levels.steps, group=across, scale=scale)
    return out if inside is None else to_positions(out, levels.exchange, inside)
