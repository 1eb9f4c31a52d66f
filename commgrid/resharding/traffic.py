"""Bytes between each two ranks of a transfer, and a short table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from commgrid.layout.rank_text import describe_ranks

_MOST_PAIRS = 4
_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Traffic:
    """Bytes of a transfer's plan.

    Args:
        tensors: how many are moved.
        source_ranks, target_ranks: of both grids, in order.
        pairs: sender and receiver to the bytes between them.
        copied: rank to the bytes that it has already.
        on_one_host: of the bytes sent, those between ranks of one host.
    """

    tensors: int
    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    pairs: Mapping[tuple[int, int], int]
    copied: Mapping[int, int]
    on_one_host: int = 0

    @cached_property
    def sent(self) -> dict[int, int]:
        """Rank of the source to the bytes that it sends."""
        return self._by_rank(self.source_ranks, 0)

    @cached_property
    def received(self) -> dict[int, int]:
        """Rank of the target to the bytes that it receives."""
        return self._by_rank(self.target_ranks, 1)

    def _by_rank(self, ranks: tuple[int, ...], place: int) -> dict[int, int]:
        """The bytes of the pairs by the rank at a place in them."""
        found = dict.fromkeys(ranks, 0)
        for pair, size in self.pairs.items():
            found[pair[place]] += size
        return found


def as_table(plan: Traffic) -> str:
    """The plan for people: who sends and receives how much, and the pairs with most.

    Example:
        >>> print(as_table(Traffic(1, (0, 1), (1, 2), {(0, 2): 64, (1, 2): 64}, {1: 128})))
        1 tensor from 2 ranks (0-1) to 2 (1-2): 128 B sent, 128 B copied
                  ranks       most     mean    least
        send          2       64 B     64 B     64 B   most: rank 0
        receive       2      128 B     64 B      0 B   most: rank 2
        pairs         2   0 → 2 64 B, 1 → 2 64 B
    """
    total, copied = sum(plan.sent.values()), sum(plan.copied.values())
    count = plan.tensors
    lines = [
        f"{count:,} tensor{'s' if count > 1 else ''} from {_who(plan.source_ranks)} to "
        f"{_who(plan.target_ranks, '')}: {bytes_of(total)} sent, {bytes_of(copied)} copied"
        + (f", {bytes_of(plan.on_one_host)} between ranks of one host" if plan.on_one_host else ""),
        f"{'':9} {'ranks':>5} {'most':>10} {'mean':>8} {'least':>8}",
        _row("send", plan.sent),
        _row("receive", plan.received),
    ]
    largest = sorted(plan.pairs.items(), key=lambda item: (-item[1], item[0]))
    told = ", ".join(f"{s} → {r} {bytes_of(size)}" for (s, r), size in largest[:_MOST_PAIRS])
    more = f", and {len(largest) - _MOST_PAIRS:,} more" if len(largest) > _MOST_PAIRS else ""
    lines.append(f"{'pairs':9} {len(largest):>5}   {told or 'none'}{more}")
    return "\n".join(lines)


def bytes_of(count: float) -> str:
    """Bytes in a unit that leaves a short number."""
    for unit in _UNITS[:-1]:
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}"


def _who(ranks: tuple[int, ...], unit: str = " ranks") -> str:
    named = describe_ranks(ranks).removeprefix("ranks ").removeprefix("rank ")
    return f"{len(ranks):,}{unit} ({named})"


def _row(what: str, sizes: Mapping[int, int]) -> str:
    values = sizes.values()
    mean = sum(values) / len(sizes)
    most = max(values)
    who = describe_ranks([rank for rank, size in sizes.items() if size == most][:1])
    return (
        f"{what:9} {len(sizes):>5} {bytes_of(most):>10} {bytes_of(mean):>8} "
        f"{bytes_of(min(values)):>8}   most: {who}"
    )
