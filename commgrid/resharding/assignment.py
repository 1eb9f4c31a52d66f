"""Assignment of boxes to the ranks that hold them: who sends of several, who writes each copy.

Every pool is so many bytes that some ranks hold and some others need. Its holders share what it
asks of them by their loads, as water fills a vessel: the least loaded first, up to one level. The
pools with the fewest holders go first, and all are poured again while that lowers the highest
load; pouring one pool again never raises the sum of the loads' squares, whose least is the fairest
of all shares.

What a rank saves is a list of boxes with their offsets, as torch.distributed.checkpoint stores it.
Copies are written once, each by the rank that so far has least to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor import DTensor, Replicate, Shard

from commgrid.errors import SpecError
from commgrid.parameters import Placement, layout_of
from commgrid.parameters.foreign import ForeignCut
from commgrid.resharding.item import HeldBoxes, held_boxes
from commgrid.runtime.grid import HyperCommGrid

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


@dataclass(frozen=True)
class SavedParameter(HeldBoxes):
    """A parameter, the boxes of it that this rank holds, and where copies of them are.

    Args:
        shape, held, boxes: as HeldBoxes'.
        name: in the whole model.
        copies: the axes along which ranks have copies of it.
        is_owner: False on stages whose copy another stage writes.
    """

    name: str
    copies: tuple[str, ...]
    is_owner: bool = True


def saved_parameter(
    placement: Placement,
    grid: HyperCommGrid,
    cut_over: str | None = None,
    foreign: ForeignCut | None = None,
) -> SavedParameter:
    """The boxes of a parameter that this rank holds, and where copies of them are.

    Args:
        placement: the parameter, which may be a DTensor, such as FSDP2 makes of it.
        grid: with the axes that cut it.
        cut_over: the group over which a sharded optimizer has cut it further.
        foreign: how another library's layer has cut it; its copies are not known then.

    Raises:
        SpecError: slices over a group that is not one of the grid's, or of another region.
    """
    boxes = held_boxes(placement, foreign)
    layout = layout_of(placement, grid, _cut_further(placement, cut_over))
    _check_experts(placement, grid)
    is_owner = placement.shared is None or placement.shared.rank == 0
    return SavedParameter(
        boxes.shape, boxes.held, boxes.boxes, placement.name, layout.copied_axes, is_owner
    )


def _cut_further(placement: Placement, cut_over: str | None) -> Iterator[tuple[str, int]]:
    """By FSDP2, and by a sharded optimizer, which cuts a parameter's elements in their order."""
    parameter = placement.parameter
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        if not mesh.mesh_dim_names:
            raise SpecError(
                f"{placement.name}: a DTensor on {mesh}, whose dims have no names; take meshes "
                "from grid.device_mesh"
            )
        for name, kind in zip(mesh.mesh_dim_names, parameter.placements, strict=False):
            if not isinstance(kind, Replicate):
                yield name, getattr(kind, "dim", 0)
    if cut_over is not None:
        yield cut_over, 0


def _check_experts(placement: Placement, grid: HyperCommGrid) -> None:
    """Refuses experts that have one name on all ranks of ep."""
    if placement.region != "expert" or "ep" not in grid.shape or grid.size("ep") == 1:
        return
    cut = layout_of(placement, grid).weight["ep"]
    if not isinstance(cut, Shard):
        raise SpecError(
            f"{placement.name} is marked as of the expert region, where other ranks of ep have "
            "others, but not as sliced over ep, so that all have one name; use GroupedExperts, or "
            "a ShardedModule whose shards_of says which experts a rank has"
        )


@dataclass
class Turns:
    """Shares out what ranks have copies of; all of them come to the same answer by themselves.

    Args:
        grid: whose ranks.
        first: whether the first of the ranks with copies writes all of them, so that what is
            written is one rank's where copies differ.
    """

    grid: HyperCommGrid
    first: bool = False
    _loads: dict[tuple[str, ...], list[int]] = field(default_factory=dict)
    _place: dict[tuple[str, ...], int] = field(default_factory=dict)

    def is_mine(self, copies: tuple[str, ...], amount: int) -> bool:
        """Whether this rank writes something of which ranks along `copies` have copies.

        Args:
            copies: axes.
            amount: bytes.
        """
        if copies not in self._loads:
            shape, coordinate = self.grid.shape, self.grid.coordinate
            place, count = 0, 1
            for axis in copies:
                place, count = place * shape[axis] + coordinate[axis], count * shape[axis]
            self._loads[copies], self._place[copies] = [0] * count, place
        loads, place = self._loads[copies], self._place[copies]
        if self.first:
            return place == 0
        chosen = loads.index(min(loads))
        loads[chosen] += amount
        return chosen == place
