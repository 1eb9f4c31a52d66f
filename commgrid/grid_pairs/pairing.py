"""Two grids come together, where a rank may know one of them only; for a transfer, or a bridge.

The first ranks of the two find each other (`commgrid.rendezvous.grid_match`) and tell the other
ranks of their grids. Then all ranks of both meet, compare what they were given, and name absent
ranks:

    first of source   finds the   first of target
    others of source  ◄── read the other grid's card ──►  others of target
    all ranks of both    meet, compare, make their communicator, meet

The n-th source of a name meets the n-th target. A rank that knows both grids need not wait.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from commgrid.errors import (
    CommGridError,
    GridDestroyedError,
    GridNotInitializedError,
    PeerFailedError,
    PeerTimeoutError,
)
from commgrid.layout.rank_text import describe_ranks
from commgrid.planning.spec import GridSpec
from commgrid.rendezvous import grid_match as match
from commgrid.rendezvous.grid_match import Calls
from commgrid.rendezvous.op import Protocol, StoreLostError
from commgrid.rendezvous.round import tidy
from commgrid.rendezvous.timeouts import timeouts
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.startup_agreement import Rendezvous
from commgrid.store.driver import Result, StoreDriver
from commgrid.store.key_wait import seconds_until
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.peer_errors import as_peer_error

SIDES = ("source", "target")

_HEARD: WeakKeyDictionary[HyperCommGrid, dict[str, int]] = WeakKeyDictionary()
"""For each grid of this rank: by counter, the number of its last failed call."""


@dataclass(frozen=True)
class Card:
    """A grid, as ranks see it that are not in it.

    Args:
        identity: of the grid; no other one has it.
        spec: resolved.
        backend, timeout: of its communicators, as they were given.
        watched: whether it is watched (`commgrid.health.detector`).
    """

    identity: str
    spec: GridSpec
    backend: str | None
    timeout: float | None
    watched: bool

    @classmethod
    def of(cls, grid: HyperCommGrid) -> Card:
        watched = grid.watch is not None
        return cls(grid.identity, grid.spec, grid.backend, grid.timeout, watched)

    @property
    def first(self) -> int:
        """The rank that speaks for the others."""
        return int(self.spec.grid_ranks[0])

    def to_text(self) -> str:
        return json.dumps({
            "identity": self.identity, "spec": self.spec.to_dict(),
            "world": len(self.spec.grid_ranks), "backend": self.backend, "timeout": self.timeout,
            "watched": self.watched,
        })  # fmt: skip

    @classmethod
    def from_text(cls, text: str) -> Card:
        said = json.loads(text)
        spec = GridSpec.from_config(said["spec"])
        spec = spec.resolve(said["world"] if spec.ranks is None else None)
        return cls(said["identity"], spec, said["backend"], said["timeout"], said["watched"])


def check_alive(about: str, grid: HyperCommGrid) -> None:
    """Raise if a grid has no communicators, or if its torch.distributed has ended.

    Args:
        about: for the message, such as `bridge 'images'`.
    """
    if grid.is_destroyed:
        raise GridDestroyedError(
            f"{about}: grid {grid.name!r} was destroyed; make another one, and on it what needs it"
        )
    if not grid.is_alive:
        raise GridNotInitializedError(
            f"{about}: grid {grid.name!r} was made on a torch.distributed that has ended; both "
            "grids live on the same one, so make it again"
        )


class Pairing:
    """All ranks of two grids, from finding each other to being ready.

    Made on all of them at once. Used with `with`: an error within it ends the others' waits.

    Args:
        what: the purpose, such as `bridge`.
        name: of the bridge or transfer.
        grids: this rank's, by side; at least one.
        document: plain values, equal on all ranks.
        deadline: `time.monotonic()` until which to wait.
        phases: names of the rounds after comparing, at least one.
        limit: the parameter by which a user sets the deadline, for messages.

    Attributes:
        rank: this one.
        cards: of both sides.
        ranks: of both, ascending.
        watched: whether one of the grids is watched, so that their communicator has to be, too.
        key: at the store, for this bridge or transfer alone.

    Raises:
        GridDestroyedError, GridNotInitializedError: a grid's communicators are gone.
        GridMismatchError: ranks were given other documents.
        PeerTimeoutError: no grid came on the other side, or a rank of either did not.
    """

    def __init__(
        self,
        what: str,
        name: str,
        grids: Mapping[str, HyperCommGrid],
        document: Mapping[str, Any],
        deadline: float,
        *,
        phases: Sequence[str],
        limit: str,
    ) -> None:
        self._about, self._what, self._limit = f"{what} {name!r}", what, limit
        for grid in grids.values():
            check_alive(self._about, grid)
        self._driver = StoreDriver(
            torch_world.world_store(),
            max(grid.world_size for grid in grids.values()),
            lambda: max(0.0 if self._failing else seconds_until(deadline), timeouts().answer),
        )
        self._failing = False
        self.rank = torch_world.world_rank()
        self._room = f"commgrid/{what}/{name}"
        self._grids = grids
        # Time before the deadline to tell the other ranks of this grid what was found.
        margin = timeouts().margin_of(seconds_until(deadline))
        self._deadline, self._until = deadline, deadline - margin
        self._calls: dict[str, tuple[Calls, int]] = {}
        self._card: match.Candidate | None = None
        try:
            self.cards = self._both({side: Card.of(grid) for side, grid in grids.items()})
            source, target = (self.cards[side] for side in SIDES)
            self.ranks = tuple(sorted({*source.spec.grid_ranks, *target.spec.grid_ranks}))
            self.watched = source.watched or target.watched
            self._rendezvous = Rendezvous(
                self._driver.store,
                name=f"{what}/{name}",
                about=self._about,
                rank=self.rank,
                ranks=self.ranks,
                document={
                    **document, "source_grid": source.identity, "target_grid": target.identity,
                },
                deadline=deadline,
                phases=phases,
                call=self._advice,
                limit=limit,
            )  # fmt: skip
        except BaseException as error:
            self._failing = True
            with suppress(StoreLostError):
                self._end_calls(error)
            if isinstance(error, CommGridError) or not isinstance(error, RuntimeError):
                raise
            raise as_peer_error(self._about, error) from error
        finally:
            self._driver.close()
        for calls, number in self._calls.values():  # all ranks have come to the meeting
            self._driver.run(tidy(calls.end(number)))
        for side, grid in grids.items():
            _HEARD.get(grid, {}).pop(self._counter(side, self.cards[side]), None)
        self.key = (
            f"{self._room}/{self._rendezvous.incarnation}/{source.identity}/{target.identity}"
        )
        self.meet, self.patience = self._rendezvous.meet, self._rendezvous.patience

    def __enter__(self) -> Pairing:
        return self

    def __exit__(self, *how: Any) -> None:
        self._rendezvous.__exit__(*how)

    @property
    def _advice(self) -> str:
        return f"{self._what.capitalize()} on the ranks of both grids, under one name="

    # -- finding the other grid -----------------------------------------------------------

    def _run(self, protocol: Protocol[Result]) -> Result:
        try:
            return self._driver.run(protocol)
        except StoreLostError as lost:
            raise (lost.__cause__ or lost) from None

    def _both(self, known: dict[str, Card]) -> dict[str, Card]:
        """Both sides' cards, of which this rank knows one or both."""
        for side, card in known.items():
            if card.first == self.rank:
                calls = Calls(self._counter(side, card))
                self._calls[side] = calls, self._run(calls.begin())
        for side, other in (SIDES, SIDES[::-1]):
            if side in self._calls and not self._know_each_other(known):
                known[other] = self._find(known, side, other)
        for side, other in (SIDES, SIDES[::-1]):
            if side in self._calls:
                calls, number = self._calls[side]
                told = json.dumps({"card": known[other].to_text()})
                self._run(calls.tell(number, told))
            elif other not in known:
                known[other] = self._hear(side, known[side])
        return known

    def _know_each_other(self, known: Mapping[str, Card]) -> bool:
        """Whether the first ranks of both grids are ranks of both."""
        cards = known.values()
        return len(cards) == 2 and all(a.first in b.spec.grid_ranks for a in cards for b in cards)

    def _find(self, known: Mapping[str, Card], side: str, other: str) -> Card:
        mine, wanted = known[side], known.get(other)
        self._card = match.Candidate(
            self._about, side, mine.identity, None if wanted is None else wanted.identity,
            f"{self._room}/{uuid4().hex}", mine.to_text(),
        )  # fmt: skip
        text = self._run(match.match(self._card, self._until))
        if text is None:
            raise self._nobody(side, mine)
        return Card.from_text(text)

    def _nobody(self, side: str, card: Card, unless: str = "") -> PeerTimeoutError:
        (other,) = {*SIDES} - {side}
        return PeerTimeoutError(
            f"{self._about}: no {other} grid has come to meet the {side} grid of "
            f"{describe_ranks(card.spec.grid_ranks)} within {self._limit}{unless}; is its first "
            f"rank running, and does every rank call {self._advice}, on one torch.distributed?"
        )

    # -- the first rank tells the others of its grid --------------------------------------

    def _counter(self, side: str, card: Card) -> str:
        return f"{self._room}/{side}/of/{card.identity}"

    def _hear(self, side: str, card: Card) -> Card:
        """Return the other side's card, as the grid's first rank tells it."""
        counter = self._counter(side, card)
        last = _HEARD.get(self._grids[side], {})
        heard = self._run(Calls(counter).hear(last.get(counter, 0), self._deadline))
        if heard.words is None:
            if heard.is_open:  # it came later than this rank, and waits itself; or it has ended
                raise self._nobody(side, card, f", or rank {card.first} has ended meanwhile")
            raise PeerTimeoutError(
                f"{self._about}: rank {card.first}, the first of the {side} grid, did not come "
                f"within {self._limit}; is it running, and does every rank call {self._advice}?"
            )
        _HEARD.setdefault(self._grids[side], {})[counter] = heard.number
        told = json.loads(heard.words)
        if "card" in told:
            return Card.from_text(told["card"])
        raise (PeerTimeoutError if told["late"] else PeerFailedError)(told["error"])

    def _end_calls(self, error: BaseException) -> None:
        """Tell the other ranks of an error, and look for another grid no longer."""
        known = isinstance(error, CommGridError)
        said = f"{error}" if known else f"{self._about}: rank {self.rank} failed: {error!r}"
        words = json.dumps({"error": said, "late": isinstance(error, PeerTimeoutError)})
        for calls, number in self._calls.values():
            self._driver.run(calls.fail(number, words))
        if self._card is not None:
            self._driver.run(match.withdraw(self._card, f"{self._card.at}/failed"))
