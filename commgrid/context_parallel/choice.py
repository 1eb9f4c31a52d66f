"""Which way suits a case, as a value that says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.plans import kv_heads_of
from commgrid.context_parallel.sharding import SequenceSharding
from commgrid.context_parallel.volume import Heads, rows_to_exchange
from commgrid.errors import ShapeError, SpecError
from commgrid.planning.names import nearest

WAYS = ("ring", "allgather", "ulysses", "2d")
"""The ways to talk; "auto" chooses among them."""

_HIDDEN_FROM = {"cpu": 256}
_HIDDEN_FROM_ELSEWHERE = 8192
"""From so many positions a rank on, times the query heads of a head of keys, a step of a ring hides
the transfer of the next one's keys.

A step over s positions and H heads of size d takes 4 · s² · H · d operations, its K heads of keys
and values 4 · s · K · d bytes in bf16: the step takes longer where s · H / K is over operations by
bytes a second. 8192 are 400 TFLOP/s over 50 GB/s, an H100 that reaches 40 % of its peak, and a
port between nodes. On the CPU it was measured (`tests/benchmarks/context.py`): over gloo both ways
are alike at 128 positions, and from 256 on the ring takes less.
"""
_RING_FIRST_FROM = {"cpu": 2048}
_RING_FIRST_FROM_ELSEWHERE = 4096
"""From so many positions a rank on, if its transfers are hidden too, the ring comes before a way
that sends less, of which nothing is hidden.

A ring cuts the work into a step for each rank, and joins what they give: on the CPU measured as
above; an H100 takes some 0.7 ms for a step of 4096 positions and 32 heads of 128, far more than it
takes to launch.
"""


@dataclass(frozen=True)
class Choice:
    """A way, and what it was chosen by.

    Args:
        way: one of `WAYS`.
        reason: in words.
        sent: for each way that could be taken, how many numbers a rank sends forward on average,
            estimated.
    """

    way: str
    reason: str
    sent: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.way}: {self.reason}"


def choose(
    sharding: SequenceSharding,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_size: int = 1,
    batch: int = 1,
    causal: bool = True,
    window: int | None = None,
    inner: int | None = None,
    device: str = "cuda",
) -> Choice:
    """What `attention(way="auto")` takes. It depends on the arguments alone, so ranks agree.

    Where a step is so long that a ring's transfers hide behind it, the ring is taken; else the way
    that sends least, and of the ring and the all-gather, which send alike, the all-gather.

    Args:
        sharding: of the sequence.
        heads, kv_heads, head_size, batch: of the tensors; kv_heads None: as many as heads.
        causal, window: the mask.
        inner: ranks inside, where cp is split into two levels; None: it is not.
        device: type of the tensors' device: how long a step takes beside its transfer.

    Example:
        >>> sharding = SequenceSharding.zigzag(32_768, 8)
        >>> print(choose(sharding, heads=32, kv_heads=32, head_size=128))
        ulysses: sends least: 58720256 numbers a rank, ring and allgather 176160768
        >>> print(choose(sharding, heads=30, kv_heads=2, head_size=128))
        ring: sends least, with allgather: 11010048 numbers a rank; 4096 positions a rank hide its \
transfers (547 do)
        >>> choose(sharding, heads=30, kv_heads=2).sent
        mappingproxy({'ring': 86016, 'allgather': 86016})
    """
    kv_heads = heads if kv_heads is None else kv_heads
    shape = Heads(heads, kv_heads, head_size * batch)
    hidden = -(-_HIDDEN_FROM.get(device, _HIDDEN_FROM_ELSEWHERE) * kv_heads // heads)
    first = max(hidden, _RING_FIRST_FROM.get(device, _RING_FIRST_FROM_ELSEWHERE))
    return _choose(sharding, shape, Mask(causal, window), inner, hidden, first)


@lru_cache(maxsize=256)
def _choose(
    sharding: SequenceSharding, heads: Heads, mask: Mask, inner: int | None, hidden: int, first: int
) -> Choice:
    sent = _estimates(sharding, heads, mask, inner)
    if sharding.parts == 1:
        return Choice("ring", "one rank has the whole sequence", sent)
    if sent["ring"] == 0:
        return Choice("ring", "no document lies on two ranks, so nothing is sent", sent)
    least = min(sent.values())
    positions = sharding.length // sharding.parts
    if sent["ring"] > least:
        way = min(sent, key=lambda way: (sent[way], way))
        numbers = f"{least} numbers a rank, ring and allgather {sent['ring']}"
        if positions < first:
            return Choice(way, f"sends least: {numbers}", sent)
        why = f"{positions} positions a rank hide its transfers ({first} do)"
        return Choice("ring", f"{why}; {way} sends less, which nothing hides: {numbers}", sent)
    long = positions >= hidden
    way, other = ("ring", "allgather") if long else ("allgather", "ring")
    why = (
        f"{positions} positions a rank hide its transfers ({hidden} do)"
        if long
        else f"{positions} positions a rank are too few to hide a ring's ({hidden} would)"
    )
    return Choice(way, f"sends least, with {other}: {least} numbers a rank; {why}", sent)


def _estimates(
    sharding: SequenceSharding, heads: Heads, mask: Mask, inner: int | None
) -> Mapping[str, int]:
    parts = sharding.parts
    rows = rows_to_exchange(sharding.ranges, sharding.documents, mask)
    keys = 2 * rows * heads.kv_heads * heads.size // parts
    sent = {"ring": keys, "allgather": keys}
    if shares_heads(heads.heads, heads.kv_heads, parts):
        sent["ulysses"] = _for_heads(sharding, heads, parts)
    splits = inner is not None and 1 < inner < parts and parts % inner == 0
    if inner is not None and splits and shares_heads(heads.heads, heads.kv_heads, inner):
        outside = sharding.merged(inner)
        rows = rows_to_exchange(outside.ranges, outside.documents, mask)
        local = max(heads.kv_heads // inner, 1)
        across = 2 * rows * local * heads.size // outside.parts
        sent["2d"] = _for_heads(sharding, heads, inner) + across
    return MappingProxyType(sent)


def _for_heads(sharding: SequenceSharding, heads: Heads, size: int) -> int:
    """On average, in both all-to-alls, among blocks of `size` ranks."""
    row = (2 * (heads.heads // size) + 2 * max(heads.kv_heads // size, 1)) * heads.size
    return sharding.length * (size - 1) * row // sharding.parts


def shares_heads(heads: int, kv_heads: int, size: int) -> bool:
    """Whether that many ranks can share the heads."""
    try:
        kv_heads_of(heads, kv_heads, size, 0)
    except ShapeError:
        return False
    return True


def check_way(way: str) -> None:
    """Raises SpecError where `way` is neither "auto" nor one of `WAYS`."""
    if way not in ("auto", *WAYS):
        known = ("auto", *WAYS)
        raise SpecError(f"way={way!r}: expected one of {', '.join(known)}{nearest(way, known)}")
