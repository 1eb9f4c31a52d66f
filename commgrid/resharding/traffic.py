"""Bytes between each two ranks of a transfer, and a short table of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from commgrid.layout.rank_text import describe_ranks

_MOST_PAIRS = 4
_UNITS = ("B", "kB", "MB", "GB", "TB")


def as_table(
    count: int,
    sent: Mapping[int, int],
    received: Mapping[int, int],
    pairs: Mapping[tuple[int, int], int],
    copied: Mapping[int, int],
    on_one_host: int = 0,
) -> str:
    """A plan for people: who sends and receives how much, and the pairs with most.

    Args:
        count: of the tensors that are moved.
        sent, received: each rank of the source, and of the target, to its bytes.
        pairs: sender and receiver to the bytes between them.
        copied: rank to the bytes that it has already.
        on_one_host: of the bytes sent, those between ranks of one host.

    Example:
        >>> pairs = {(0, 2): 64, (1, 2): 64}
        >>> print(as_table(1, {0: 64, 1: 64}, {1: 0, 2: 128}, pairs, {1: 128}))
        1 tensor from 2 ranks (0-1) to 2 (1-2): 128 B sent, 128 B copied
                  ranks       most     mean    least
        send          2       64 B     64 B     64 B   most: rank 0
        receive       2      128 B     64 B      0 B   most: rank 2
        pairs         2   0 → 2 64 B, 1 → 2 64 B
    """
    lines = [
        f"{count:,} tensor{'s' if count > 1 else ''} from {_who(sent)} to "
        f"{_who(received, '')}: {bytes_of(sum(sent.values()))} sent, "
        f"{bytes_of(sum(copied.values()))} copied"
        + (f", {bytes_of(on_one_host)} between ranks of one host" if on_one_host else ""),
        f"{'':9} {'ranks':>5} {'most':>10} {'mean':>8} {'least':>8}",
        _row("send", sent),
        _row("receive", received),
    ]
    largest = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
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


def _who(ranks: Collection[int], unit: str = " ranks") -> str:
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
