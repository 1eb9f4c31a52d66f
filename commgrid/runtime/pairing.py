"""Two grids come together, where a rank may know one of them only; for a transfer, or a bridge.

The first ranks of the two find each other on the board and tell the others of their grids; then all
of both meet, which compares what they were given and names who does not come:

    first of source   finds, on the board, the   first of target
    others of source  ◄── told the target's card and the source's ──►  others of target
    all ranks of both    meet, compare, make what they came for, meet

The n-th source of a name meets the n-th target. A rank that knows both grids is told nothing. Of
each grid its first rank counts beginnings and ends of its calls at the store, so that the others
know which call is open, or comes next: who comes late to a call that is over waits for the next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from commgrid.errors import (
    CommGridError,
    GridDestroyedError,
    GridNotInitializedError,
    PeerFailedError,
    PeerTimeoutError,
)
from commgrid.planning.rank_lists import describe_ranks
from commgrid.planning.spec import GridSpec
from commgrid.runtime import torch_world
from commgrid.runtime.board import find
from commgrid.runtime.patient import PatientStore
from commgrid.runtime.rendezvous import Rendezvous
from commgrid.runtime.roll import Line, seconds_until

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

_ANSWER_SECONDS = 5.0
_FIRST_LOOK_SECONDS = 1.0  # and then twice as long each time
SIDES = ("source", "target")

_HEARD: WeakKeyDictionary[HyperCommGrid, dict[str, int]] = WeakKeyDictionary()
"""Of this rank's grids, by counter, the last call that it has heard of, unless that succeeded."""


@dataclass(frozen=True)
class Card:
    """What a grid is, for those who are not in it.

    Args:
        identity: what no other grid is called.
        spec: resolved.
        backend, timeout: of its communicators, as they were given.
        watched: whether a thread of each of its ranks sees who is gone.
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
    """Raises where a grid has no communicators, or those of a torch.distributed that has ended.

    Args:
        about: what needs it, for the message.
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

    Made on all of them at once. Used with `with`: what is raised within it is told to the ranks
    that wait.

    Args:
        what: they come for, such as `bridge`.
        name: which one.
        grids: this rank's, by side; at least one.
        document: plain values, equal on all ranks.
        deadline: `time.monotonic()` until which to wait.
        phases: what they meet for after comparing, at least one.
        limit: what the user sets the deadline with, for messages.

    Attributes:
        rank: this one.
        cards: of both sides.
        ranks: of both, ascending.
        watched: whether one of the grids is, and what they make has to be.
        key: what nothing else at the store is called.

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
        self._store = PatientStore(
            torch_world.world_store(), lambda: max(seconds_until(deadline), _ANSWER_SECONDS)
        )
        self.rank = torch_world.world_rank()
        self._room = f"commgrid/{what}/{name}"
        self._grids = grids
        # Kept back from looking for the other grid, to tell the ranks of one's own in time.
        margin = min(1.0, seconds_until(deadline) / 4)
        self._deadline, self._until = deadline, deadline - margin
        self._line = Line(self._store, max(grid.world_size for grid in grids.values()))
        self._calls: dict[str, tuple[str, int]] = {}
        try:
            self.cards = self._both({side: Card.of(grid) for side, grid in grids.items()})
            source, target = (self.cards[side] for side in SIDES)
            self.ranks = tuple(sorted({*source.spec.grid_ranks, *target.spec.grid_ranks}))
            self.watched = source.watched or target.watched
            self._rendezvous = Rendezvous(
                self._store,
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
            with suppress(RuntimeError):  # the store is gone
                self._end_calls(error)
            if isinstance(error, CommGridError) or not isinstance(error, RuntimeError):
                raise
            raise torch_world.as_peer_error(self._about, error) from error
        finally:
            self._line.close()
        self._forget_calls()  # all have come to the meeting, so all have read what was told
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

    def _both(self, known: dict[str, Card]) -> dict[str, Card]:
        """Both sides' cards, of which this rank knows one or both."""
        for side, card in known.items():
            if card.first == self.rank:
                self._calls[side] = self._begin_call(side, card)
        for side, other in (SIDES, SIDES[::-1]):
            if side in self._calls and not self._know_each_other(known):
                known[other] = self._find(known, side, other)
        for side, other in (SIDES, SIDES[::-1]):
            if side in self._calls:
                self._tell(side, {"card": known[other].to_text()})
            elif other not in known:
                known[other] = self._hear(side, known[side])
        return known

    def _know_each_other(self, known: Mapping[str, Card]) -> bool:
        """Whether the first ranks of both grids are ranks of both."""
        cards = known.values()
        return len(cards) == 2 and all(a.first in b.spec.grid_ranks for a in cards for b in cards)

    def _find(self, known: Mapping[str, Card], side: str, other: str) -> Card:
        mine, wanted = known[side], known.get(other)
        text = find(
            self._store,
            self._line,
            (self._about, side, mine.identity),
            (self._about, other, wanted.identity if wanted is not None else None),
            mine.to_text(),
            self._until,
        )
        if text is None:
            raise self._nobody(side, mine)
        return Card.from_text(text)

    def _nobody(self, side: str, card: Card) -> PeerTimeoutError:
        (other,) = {*SIDES} - {side}
        return PeerTimeoutError(
            f"{self._about}: no {other} grid has come to meet the {side} grid of "
            f"{describe_ranks(card.spec.grid_ranks)} within {self._limit}; is its first rank "
            f"running, and does every rank call {self._advice}, on one torch.distributed?"
        )

    # -- the first rank tells the others of its grid --------------------------------------

    def _counter(self, side: str, card: Card) -> str:
        return f"{self._room}/{side}/of/{card.identity}"

    def _begin_call(self, side: str, card: Card) -> tuple[str, int]:
        """Where a grid's calls are counted, and the number of this one, odd while it is open."""
        counter = self._counter(side, card)
        call = self._store.add(counter, 1)
        self._store.delete_key(f"{counter}/{call - 2}")
        return counter, call

    def _tell(self, side: str, told: Mapping[str, Any]) -> None:
        counter, call = self._calls[side]
        self._store.set(f"{counter}/{call}", json.dumps(told))

    def _hear(self, side: str, card: Card) -> Card:
        """What the grid's first rank tells of the call that is open, or comes next."""
        counter = self._counter(side, card)
        heard = _HEARD.get(self._grids[side], {})
        pause, call = _FIRST_LOOK_SECONDS, 0
        while True:
            # One that this rank has heard of has failed: the first rank is about to end it.
            call = max(self._store.add(counter, 0), heard.get(counter, 0) + 1)
            call += 1 - call % 2
            left = seconds_until(self._deadline)
            if self._line.within(f"{counter}/{call}", min(pause, left)):
                break
            if left <= pause:
                if self._store.add(counter, 0) % 2:  # it came later than this rank, waits itself
                    raise self._nobody(side, card)
                raise PeerTimeoutError(
                    f"{self._about}: rank {card.first}, the first of the {side} grid, did not come "
                    f"within {self._limit}; is it running, and does every rank call {self._advice}?"
                )
            pause *= 2  # the call may have ended meanwhile, and another one be open
        _HEARD.setdefault(self._grids[side], {})[counter] = call
        told = json.loads(self._store.get(f"{counter}/{call}"))
        if "card" in told:
            return Card.from_text(told["card"])
        raise (PeerTimeoutError if told["late"] else PeerFailedError)(told["error"])

    def _end_calls(self, error: BaseException) -> None:
        """After an error: who waits to be told of the call learns it, who comes later does not."""
        known = isinstance(error, CommGridError)
        said = f"{error}" if known else f"{self._about}: rank {self.rank} failed: {error!r}"
        for side, (counter, call) in self._calls.items():
            if self._store.check([f"{counter}/{call}"]):
                self._store.delete_key(f"{counter}/{call}")  # who has read it meets, and is told
            else:
                late = isinstance(error, PeerTimeoutError)
                self._tell(side, {"error": said, "late": late})
            self._store.add(counter, 1)

    def _forget_calls(self) -> None:
        for counter, call in self._calls.values():
            self._store.delete_key(f"{counter}/{call}")
            self._store.delete_key(counter)
