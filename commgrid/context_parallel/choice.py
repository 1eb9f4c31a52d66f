"""Choice of a way to talk, with the reason for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.plans import heads_complaint
from commgrid.context_parallel.ranges import count
from commgrid.context_parallel.sharding import SequenceSharding
from commgrid.context_parallel.tiles import needed
from commgrid.layout.axis_names import check_word

WAYS = ("ring", "allgather", "ulysses", "2d")
"""The ways to talk; "auto" chooses among them."""

_MEGATRONS = {"p2p": "ring", "all_gather": "allgather", "a2a": "ulysses", "a2a+p2p": "2d"}
"""Megatron's `cp_comm_type` of each."""

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
    """A way, and the reason for it.

    Args:
        way: one of `WAYS`.
        reason: in words.
    """

    way: str
    reason: str

    def __str__(self) -> str:
        return f"{self.way}: {self.reason}"


def choose(
    sharding: SequenceSharding,
    *,
    heads: int,
    kv_heads: int | None = None,
    causal: bool = True,
    window: int | None = None,
    inner: int | None = None,
    device: str = "cuda",
) -> Choice:
    """The way that `attention(way="auto")` takes; a function of its arguments, so ranks agree.

    Where a step is so long that a ring's transfers hide behind it, the ring is taken; else the way
    that sends least, and of the ring and the all-gather, which send alike, the all-gather.

    Args:
        sharding: of the sequence.
        heads, kv_heads: of the tensors; kv_heads None: as many as heads.
        causal, window: the mask.
        inner: ranks inside, where cp is split into two levels; None: it is not.
        device: type of the tensors' device: how long a step takes beside its transfer.

    Example:
        >>> sharding = SequenceSharding.zigzag(32_768, 8)
        >>> print(choose(sharding, heads=32))
        ulysses: sends least: 112 heads a position, ring and allgather 336
        >>> print(choose(sharding, heads=30, kv_heads=2))
        ring: sends least, with allgather; 4096 positions a rank hide its transfers (547 do)
    """
    kv_heads = heads if kv_heads is None else kv_heads
    hidden = -(-_HIDDEN_FROM.get(device, _HIDDEN_FROM_ELSEWHERE) * kv_heads // heads)
    first = max(hidden, _RING_FIRST_FROM.get(device, _RING_FIRST_FROM_ELSEWHERE))
    sent = _heads_sent(sharding, heads, kv_heads, Mask(causal, window), inner)
    if not sent["ring"]:
        return Choice("ring", "no document lies on two ranks, so nothing is sent")
    least = min(sent, key=sent.__getitem__)
    positions = sharding.length // sharding.parts
    hides = f"{positions} positions a rank hide its transfers"
    if least != "ring" and positions >= first:
        return Choice("ring", f"{hides} ({first} do); {least} sends less, which nothing hides")
    if least != "ring":
        numbers = f"{sent[least]:.4g} heads a position, ring and allgather {sent['ring']:.4g}"
        return Choice(least, f"sends least: {numbers}")
    if positions >= hidden:
        return Choice("ring", f"sends least, with allgather; {hides} ({hidden} do)")
    few = f"{positions} positions a rank are too few to hide a ring's transfers ({hidden} would)"
    return Choice("allgather", f"sends least, with ring; {few}")


@lru_cache(maxsize=256)
def _heads_sent(
    sharding: SequenceSharding, heads: int, kv_heads: int, mask: Mask, inner: int | None
) -> Mapping[str, float]:
    """By way, heads that a rank sends for each of its positions, forward and on average."""

    def of_keys(held: SequenceSharding, kv_heads: int) -> float:
        whole = ((0, held.length),)
        wanted = sum(count(needed(own, whole, held.documents, mask)) for own in held.ranges)
        return 2 * kv_heads * (wanted - held.length) / held.length

    def of_exchanges(size: int) -> float:
        return 2 * (heads + max(kv_heads, size)) * (size - 1) / size

    parts = sharding.parts
    sent = {"ring": of_keys(sharding, kv_heads)}
    if heads_complaint(heads, kv_heads, parts) is None:
        sent["ulysses"] = of_exchanges(parts)
    splits = inner and 1 < inner < parts and not parts % inner
    if inner and splits and heads_complaint(heads, kv_heads, inner) is None:
        sent["2d"] = of_exchanges(inner) + of_keys(sharding.merged(inner), max(kv_heads, inner))
    return sent


def way_named(way: str) -> str:
    """The way by its name in `WAYS`, or "auto".

    Args:
        way: that name, or its `cp_comm_type` in Megatron.

    Raises:
        SpecError: another name.

    >>> way_named("a2a+p2p")
    '2d'
    """
    found = _MEGATRONS.get(way, way)
    check_word("way=", found, ("auto", *WAYS, *_MEGATRONS))
    return found
