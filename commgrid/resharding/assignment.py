"""Assignment of boxes to ranks with copies of them, so that none sends much more than others.

Every pool is so many bytes that some ranks hold and some others need. Its holders share what it
asks of them by their loads, as water fills a vessel: the least loaded first, up to one level. The
pools with the fewest holders go first, and all are poured again while that lowers the highest
load; pouring one pool again never raises the sum of the loads' squares, whose least is the fairest
of all shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SWEEPS = 12
_GRAINS = 16  # a sender gets at least this part of a mean load at once, so that messages are few
ALIGNED = 16  # bytes: no element is cut in two


@dataclass(frozen=True)
class Demand:
    """Bytes that several ranks need, and the ranks with copies of them.

    Args:
        size: bytes for one receiver.
        senders: ranks with copies.
        receivers: who needs it.
    """

    size: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


def fair_shares(demands: Sequence[Demand]) -> list[dict[int, int]]:
    """For each demand, sender to the bytes that it sends to all its receivers together.

    >>> fair_shares([Demand(32, (0,), (5,)), Demand(32, (0, 1), (5, 6))])
    [{0: 32}, {1: 48, 0: 16}]
    """
    loads = {rank: 0 for demand in demands for rank in demand.senders}
    total = sum(demand.size * len(demand.receivers) for demand in demands)
    grain = max(total // max(len(loads), 1) // _GRAINS, ALIGNED)
    order = sorted(range(len(demands)), key=lambda number: (len(demands[number].senders), number))
    shares: list[dict[int, int]] = [{} for _ in demands]
    best, highest = shares, -1
    for _ in range(_SWEEPS):
        for number in order:
            demand = demands[number]
            if len(demand.senders) == 1 and shares[number]:
                continue
            for rank, given in shares[number].items():
                loads[rank] -= given
            shares[number] = _pour(demand.size * len(demand.receivers), demand, loads, grain)
            for rank, given in shares[number].items():
                loads[rank] += given
        now = max(loads.values(), default=0)
        if 0 <= highest <= now:
            break
        best, highest = [dict(share) for share in shares], now
    return best


def _pour(amount: int, demand: Demand, loads: dict[int, int], grain: int) -> dict[int, int]:
    """Shares an amount among a demand's senders so that their loads rise to one level."""
    ordered = sorted(demand.senders, key=lambda rank: (loads[rank], rank))
    ordered = ordered[: max(1, -(-amount // grain))]
    level, used, below = 0, len(ordered), 0
    for count, rank in enumerate(ordered, 1):
        below += loads[rank]
        level = (amount + below) // count
        if count == len(ordered) or level <= loads[ordered[count]]:
            used = count
            break
    shares = {}
    left = amount
    for rank in ordered[:used]:
        given = min(max(level - loads[rank], 0), left)
        given -= given % ALIGNED
        shares[rank] = given
        left -= given
    shares[ordered[0]] += left
    return {rank: given for rank, given in shares.items() if given}


def cut(
    demand: Demand, shares: dict[int, int], hosts: dict[int, str]
) -> dict[int, list[tuple[int, int, int]]]:
    """Share out the bytes of a demand; senders on the receiver's host go first.

    Args:
        demand: what is needed.
        shares: sender to bytes.
        hosts: rank to the name of its host.

    Returns:
        Receiver to sender, first byte and the one after the last, which follow on each other.

    Example:
        >>> cut(Demand(32, (0, 1), (5, 6)), {0: 16, 1: 48}, {0: "a", 1: "b", 5: "b", 6: "a"})
        {5: [(1, 0, 32)], 6: [(0, 0, 16), (1, 16, 32)]}
    """
    left = dict(shares)
    on: dict[str, list[int]] = {}
    for sender in shares:
        on.setdefault(hosts.get(sender, ""), []).append(sender)
    taken: dict[int, list[tuple[int, int]]] = {receiver: [] for receiver in demand.receivers}
    missing = dict.fromkeys(demand.receivers, demand.size)
    anywhere = list(shares)
    for lists in (on, {}):
        for receiver in demand.receivers:
            queue = lists.get(hosts.get(receiver, ""), []) if lists else anywhere
            while missing[receiver] and queue:
                sender = queue[-1]
                given = min(missing[receiver], left[sender])
                if given:
                    taken[receiver].append((sender, given))
                    missing[receiver] -= given
                    left[sender] -= given
                if not left[sender]:
                    queue.pop()
    return {receiver: _ranges(parts, demand.size) for receiver, parts in taken.items()}


def _ranges(parts: list[tuple[int, int]], size: int) -> list[tuple[int, int, int]]:
    """Amounts as ranges of bytes, begun where an element does."""
    found, position, start = [], 0, 0
    for sender, given in parts:
        position += given
        stop = size if position >= size else position - position % ALIGNED
        if stop > start:
            found.append((sender, start, stop))
        start = stop
    return found
