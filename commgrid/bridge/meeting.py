"""How two grids find each other, where a rank may know one of them only.

The first rank of each grid writes a card, which says what its grid is, under the bridge's name, and
reads the other's. A store may hold cards of processes that are gone, so each card has a mark of its
own, and who has read one answers under that mark: whoever is answered has been read by somebody
who is there. The first ranks then tell their own grid's ranks, and all of both grids meet, which
compares what they were given and names who does not come.

    first of source   card ──►  store  ◄── card   first of target
                      answers the target's mark, and it the source's
    others of source  ◄── told the target's card       others of target  ◄── told the source's
    all ranks of both    meet, compare, make the communicator, meet
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from commgrid.errors import GridDestroyedError, GridNotInitializedError, PeerTimeoutError, SpecError
from commgrid.planning.rank_lists import describe_ranks
from commgrid.planning.spec import GridSpec
from commgrid.runtime import torch_world
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.roll import Line, seconds_until

if TYPE_CHECKING:
    from commgrid.runtime.roll import Store

_POLL_SECONDS = 0.01
SIDES = ("source", "target")


@dataclass(frozen=True)
class Card:
    """What a grid is, for those who are not in it.

    Args:
        identity: what no other grid is called.
        spec: resolved.
        backend, timeout: of its communicators, as they were given.
    """

    identity: str
    spec: GridSpec
    backend: str | None
    timeout: float | None

    @classmethod
    def of(cls, grid: HyperCommGrid) -> Card:
        return cls(grid.identity, grid.spec, grid.backend, grid.timeout)

    def to_dict(self) -> dict[str, Any]:
        return {
            "identity": self.identity, "spec": self.spec.to_dict(),
            "ranks": list(self.spec.grid_ranks), "backend": self.backend, "timeout": self.timeout,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Card:
        spec = GridSpec.from_config(said["spec"]).resolve(ranks=said["ranks"])
        return cls(said["identity"], spec, said["backend"], said["timeout"])


def check_grid(what: str, grid: HyperCommGrid | None) -> None:
    """Raises where a grid has no communicators, or those of a torch.distributed that has ended."""
    if grid is None:
        return
    if not isinstance(grid, HyperCommGrid):
        raise SpecError(f"{what}_grid={grid!r}: expected a grid, or None on ranks that are not in "
                        "it")  # fmt: skip
    if grid.is_destroyed:
        raise GridDestroyedError(f"{what}_grid: grid {grid.name!r} was destroyed; make another one")
    if not grid.is_alive:
        raise GridNotInitializedError(
            f"{what}_grid: grid {grid.name!r} was made on a torch.distributed that has ended; both "
            "grids of a bridge live on the same one, so make it again"
        )


def find_cards(
    name: str, grids: Mapping[str, HyperCommGrid | None], deadline: float
) -> dict[str, Card]:
    """Both sides' cards, on every rank of either grid.

    Args:
        name: the bridge's.
        grids: `source` and `target`; None for one that this rank is not in.
        deadline: `time.monotonic()` until which to wait.

    Raises:
        PeerTimeoutError: the other grid's first rank did not come.
    """
    store = torch_world.world_store()
    known = {what: Card.of(grid) for what, grid in grids.items() if grid is not None}
    leads = [what for what, card in known.items() if _first(card) == torch_world.world_rank()]
    if len(known) < 2 and leads:
        known[_other(leads[0])] = _handshake(store, name, leads[0], known[leads[0]], deadline)
    elif len(leads) == 1:  # knows both; but the other side's first rank may not
        _handshake(store, name, leads[0], known[leads[0]], deadline)
    for what in leads:
        told = json.dumps(known[_other(what)].to_dict())
        store.set(_told_key(name, what, known[what]), told)
    if len(known) < 2:
        (mine,) = known
        key = _told_key(name, mine, known[mine])
        line = Line(store, len(known[mine].spec.grid_ranks))
        try:
            if not line.within(key, seconds_until(deadline)):
                raise _nobody(name, mine, known[mine])
        finally:
            line.close()
        known[_other(mine)] = Card.from_dict(json.loads(store.get(key)))
    return {what: known[what] for what in SIDES}


def forget_cards(name: str, cards: Mapping[str, Card]) -> None:
    """Takes from the store what this rank has left there, once all have read it."""
    store = torch_world.world_store()
    for what, card in cards.items():
        if _first(card) == torch_world.world_rank():
            with suppress(RuntimeError):
                store.delete_key(_told_key(name, what, card))
                store.delete_key(f"commgrid/bridge/{name}/{what}/card")


def _first(card: Card) -> int:
    return int(card.spec.grid_ranks[0])


def _other(what: str) -> str:
    return SIDES[1 - SIDES.index(what)]


def _told_key(name: str, what: str, card: Card) -> str:
    return f"commgrid/bridge/{name}/{what}/of/{card.identity}"


def _handshake(store: Store, name: str, what: str, card: Card, deadline: float) -> Card:
    """The other side's card, once both first ranks know that the other is there."""
    base = f"commgrid/bridge/{name}"
    mark = uuid4().hex
    store.set(f"{base}/{what}/card", json.dumps({"mark": mark, **card.to_dict()}))
    theirs, mine = f"{base}/{_other(what)}/card", f"{base}/answer/{mark}"
    answered: str | None = None
    try:
        while _appears(store, theirs, deadline):
            seen = json.loads(store.get(theirs))
            if seen["mark"] != answered:  # who came anew has another mark
                answered = str(seen["mark"])
                store.set(f"{base}/answer/{answered}", mark)
            if store.check([mine]) and store.get(mine).decode() == answered:
                return Card.from_dict(seen)
            time.sleep(_POLL_SECONDS)
        store.delete_key(f"{base}/{what}/card")
        raise _nobody(name, what, card)
    finally:
        with suppress(RuntimeError):
            store.delete_key(mine)


def _appears(store: Store, key: str, deadline: float) -> bool:
    """Whether a key is there before the deadline, without a wait that would hold the store."""
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return time.monotonic() <= deadline


def _nobody(name: str, what: str, card: Card) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"bridge {name!r}: no {_other(what)} grid has come to meet the {what} grid of "
        f"{describe_ranks(card.spec.grid_ranks)} in time; every rank of both grids makes the "
        "bridge, under one name and on one torch.distributed; is its first rank running, and was "
        "it given this name=?"
    )
