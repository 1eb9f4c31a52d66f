"""How the ranks of two grids find each other: at the store, without any that are in neither.

The first rank of each grid counts the transfers of a name on its side and writes down, under that
number, which ranks its grid has; the others of its grid read the number from it. So the n-th source
of a name meets its n-th target. What somebody has given up on is passed over by all, also by ranks
that were not there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from commgrid.errors import GridDestroyedError, PeerTimeoutError
from commgrid.planning.rank_lists import describe_ranks
from commgrid.planning.ranks import as_ranks
from commgrid.runtime import torch_world
from commgrid.runtime.roll import Line, seconds_until
from commgrid.transfer.gate import Gate

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

SIDES = ("source", "target")

_LAST: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()
"""Of each store, the number of the last transfer that this process knows of, by side and grid."""


class Meeting:
    """The ranks of a source and a target that belong together.

    Args:
        grids: this rank's grids by side, at least one.
        name: what tells this transfer from others between other grids.
        seconds: how long to wait for the others.

    Attributes:
        base: what nothing else at the store is called.
        ranks: of each side.
        union: of both, ascending.

    Raises:
        GridDestroyedError: a grid was destroyed, or its torch.distributed ended.
        PeerTimeoutError: nobody came on the other side, or some ranks did not.
        TransferError: a rank has said why it cannot.
    """

    def __init__(self, grids: Mapping[str, HyperCommGrid], name: str, seconds: float) -> None:
        for grid in grids.values():
            check_alive(grid)
        self.rank = next(iter(grids.values())).rank
        self.store = torch_world.world_store()
        self._room = f"commgrid/transfer/{name}"
        deadline = time.monotonic() + seconds
        self.line = Line(self.store, max(grid.world_size for grid in grids.values()))
        self._links: list[str] = []
        numbers = {
            side: self._number(side, grid, seconds, deadline) for side, grid in grids.items()
        }
        # On ranks of both grids the two count alike unless somebody has called on one side alone.
        self.base = f"{self._room}/{max(numbers.values())}"
        self.ranks = {side: self._ranks(side, seconds, deadline) for side in SIDES}
        self.union = tuple(sorted({*self.ranks["source"], *self.ranks["target"]}))
        self.first = self.gate("calls")
        left = max(seconds_until(deadline), 0.01)
        self.first.come(left, "did not call Transfer", limit=seconds)

    def gate(self, key: str) -> Gate:
        """A gate of all ranks of both sides."""
        return Gate(self.store, f"{self.base}/{key}", self.rank, self.union, self.line)

    def forget(self) -> None:
        """Takes from the store what all ranks have read."""
        if self.rank == self.union[0]:
            for side in SIDES:
                self.store.delete_key(f"{self.base}/{side}")
        for link in self._links:
            self.store.delete_key(link)

    def close(self) -> None:
        """Lets the store's connections go."""
        self.line.close()

    def _number(self, side: str, grid: HyperCommGrid, seconds: float, deadline: float) -> int:
        """Which of the transfers of this name it is, as the grid's first rank says.

        After each number stands the next; one that has a verdict is over, and is passed over.
        """
        last = _LAST.setdefault(self.store, {})
        mine = f"{self._room}/of/{side}/{grid.identity}"
        first = grid.spec.grid_ranks[0]
        link = f"{mine}/after/{last.get(mine, 0)}"
        if self.rank == first:
            number = self._next(side)
            self.store.set(f"{self._room}/{number}/{side}", json.dumps(list(grid.spec.grid_ranks)))
            self.store.set(link, str(number))
            self._links.append(link)
        else:
            while True:
                if not self.line.within(link, seconds_until(deadline)):
                    raise PeerTimeoutError(
                        f"transfer: rank {first}, the first of the {side} grid {grid.name!r}, did "
                        f"not call Transfer within {seconds:.3g} s; call it on all ranks of both "
                        "grids"
                    )
                number = int(self.store.get(link))
                if not self._is_over(number):
                    break
                link = f"{mine}/after/{number}"
        last[mine] = number
        return number

    def _next(self, side: str) -> int:
        """The next number of a side that nobody has given up on."""
        while self._is_over(number := int(self.store.add(f"{self._room}/{side}s", 1))):
            pass
        return number

    def _is_over(self, number: int) -> bool:
        return bool(self.store.check([f"{self._room}/{number}/calls/verdict"]))

    def _ranks(self, side: str, seconds: float, deadline: float) -> tuple[int, ...]:
        key = f"{self.base}/{side}"
        if not self.line.within(key, seconds_until(deadline)):
            told = f"no {side} came within {seconds:.3g} s: its first rank did not call Transfer"
            mine = next(other for other in SIDES if other != side)
            there = json.loads(self.store.get(f"{self.base}/{mine}"))
            message = (
                f"transfer: {told}, while {describe_ranks(there)} wait as its {mine}; call it on "
                "all ranks of both grids, under one name="
            )
            gate = Gate(self.store, f"{self.base}/calls", self.rank, there, self.line)
            raise gate.conclude("absent", message) or PeerTimeoutError(message)
        return tuple(as_ranks(json.loads(self.store.get(key))))


def check_alive(grid: HyperCommGrid) -> None:
    """That a grid has its communicators, in the torch.distributed that is up.

    Raises:
        GridDestroyedError: it has not.
    """
    if not grid.is_alive:
        raise GridDestroyedError(
            f"transfer: grid {grid.name!r} was destroyed, or the torch.distributed it was made in "
            "has ended; make it again, and the transfer after it"
        )
