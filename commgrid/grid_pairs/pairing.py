"""Two grids come together, where a rank may know one of them only; for a transfer, or a bridge.

The first ranks of the two find each other (`commgrid.rendezvous.grid_match`) and tell the other
ranks of their grids. Then all ranks of both meet, compare what they were given, and name absent
ranks:

    first of source   finds the   first of target
    others of source  ◄── read the other grid's card ──►  others of target
    all ranks of both    meet, compare, make their communicator, meet

The n-th source of a name meets the n-th target. A rank that knows both grids need not wait.

The grids may be of two programs, each with a torch.distributed of its own (`OtherWorld`). Their
first ranks find each other at a store of both, and all ranks get joint numbers, the source's first:

    ranks 0-3 of the trainer    0 1 2 3
    ranks 0-1 of the engine             4 5
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from commgrid.errors import (
    CommGridError,
    GridDestroyedError,
    GridMismatchError,
    GridNotInitializedError,
    PeerFailedError,
    PeerTimeoutError,
)
from commgrid.health.detector import can_watch
from commgrid.layout.rank_text import describe_ranks
from commgrid.planning.spec import GridSpec
from commgrid.rendezvous import grid_match as match
from commgrid.rendezvous.grid_match import Calls
from commgrid.rendezvous.op import StoreLostError
from commgrid.rendezvous.round import tidy
from commgrid.rendezvous.timeouts import timeouts
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.startup_agreement import Rendezvous
from commgrid.store.client import served
from commgrid.store.driver import StoreDriver
from commgrid.store.key_wait import seconds_until
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.peer_errors import as_peer_error
from commgrid.version import VERSION

SIDES = ("source", "target")

_ERRORS: dict[str, type[CommGridError]] = {
    each.__name__: each for each in (GridMismatchError, PeerTimeoutError)
}
_HEARD: WeakKeyDictionary[HyperCommGrid, dict[str, int]] = WeakKeyDictionary()
"""For each grid of this rank: by counter, the number of its last failed call."""


@dataclass(frozen=True)
class OtherWorld:
    """The program of the other grid, which has a torch.distributed of its own.

    Args:
        store: a store of torch's that all ranks of both programs reach.
        name: what this program calls the other one in messages.
    """

    store: Any
    name: str

    def __str__(self) -> str:
        store = served(self.store)
        at = f"{store.host}:{store.port}" if hasattr(store, "host") else getattr(store, "path", "")
        return f"a store at {at}" if at else "one store"


@dataclass(frozen=True)
class Card:
    """A grid, as ranks see it that are not in it.

    Args:
        identity: of the grid; no other one has it.
        spec: resolved.
        backend, timeout: of its communicators, as they were given.
        watched: whether it is watched (`commgrid.health.detector`).
        peer: what its program calls the other one; "": there is one program.
        kinds: its world's backend for each device, such as `cpu:gloo`.
    """

    identity: str
    spec: GridSpec
    backend: str | None
    timeout: float | None
    watched: bool
    peer: str = ""
    kinds: tuple[str, ...] = ()

    @classmethod
    def of(cls, grid: HyperCommGrid, elsewhere: OtherWorld | None = None) -> Card:
        watched = grid.watch is not None
        found = cls(grid.identity, grid.spec, grid.backend, grid.timeout, watched)
        if elsewhere is None:
            return found
        return replace(found, peer=elsewhere.name, kinds=torch_world.world_kinds())

    @property
    def first(self) -> int:
        """The rank that speaks for the others."""
        return int(self.spec.grid_ranks[0])

    def to_text(self) -> str:
        spec = {"spec": self.spec.to_dict(), "world": len(self.spec.grid_ranks)}
        return json.dumps({**vars(self), **spec})

    @classmethod
    def from_text(cls, text: str) -> Card:
        said = json.loads(text)
        spec, world = GridSpec.from_config(said["spec"]), said.pop("world")
        spec = spec.resolve(world if spec.ranks is None else None)
        return cls(**{**said, "spec": spec, "kinds": tuple(said["kinds"])})


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


def numbered(error: BaseException, legend: str) -> BaseException:
    """Return an error that says whose ranks its numbers are.

    Args:
        error: one of commgrid's; others stay as they are.
        legend: of a pairing.
    """
    if not legend or legend in f"{error}" or not isinstance(error, CommGridError):
        return error
    return type(error)(f"{error} ({legend})")


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
        elsewhere: where the other grid is; None: in this world.
        watch: whether to watch the ranks of both even if neither grid is watched.

    Attributes:
        numbering: this rank's number, and the store of both grids.
        cards: of both sides.
        ranks: of both, ascending.
        backend: of their communicator; "": WORLD's.
        legend: for messages, whose joint numbers are which ranks; "" within one world.
        watched: whether their communicator is watched; it always is if one of the grids is.
        hears_silence: whether a rank that is stopped ends it, too: if one of the grids is watched.
        key: at the store, for this bridge or transfer alone.
        leftovers: keys there that no rank needs once it has ended.

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
        elsewhere: OtherWorld | None = None,
        watch: bool = False,
    ) -> None:
        self._about, self._what, self._limit = f"{what} {name!r}", what, limit
        self._meeting = self.legend = self.backend = ""
        for grid in grids.values():
            check_alive(self._about, grid)
        self._driver = StoreDriver(
            torch_world.world_store(),
            max(grid.world_size for grid in grids.values()),
            lambda: max(0.0 if self._failing else seconds_until(deadline), timeouts().answer),
        )
        self._failing = False
        self._rank = torch_world.world_rank()
        self._room = f"commgrid/{what}/{name}"
        self._grids, self._elsewhere = grids, elsewhere
        # Time before the deadline to tell the other ranks of this grid what was found.
        margin = timeouts().margin_of(seconds_until(deadline))
        self._deadline, self._until = deadline, deadline - margin
        self._calls: dict[str, tuple[Calls, int]] = {}
        self._card: match.Candidate | None = None
        try:
            self.cards = self._both(
                {side: Card.of(grid, elsewhere) for side, grid in grids.items()}
            )
            source, target = (self.cards[side] for side in SIDES)
            self._take_numbers(source, target)
            self.watched = self.hears_silence or (watch and can_watch(self.backend))
            self._rendezvous = Rendezvous(
                self.numbering.store,
                name=f"{what}/{name}",
                about=self._about,
                rank=self.numbering.rank,
                ranks=self.ranks,
                document={**document, **self._in_common()},
                deadline=deadline,
                phases=phases,
                call=self._advice,
                limit=limit,
                tells_host=elsewhere is None,
            )  # fmt: skip
        except BaseException as error:
            if isinstance(error, StoreLostError):
                error = error.__cause__ or error  # torch's own
            self._failing = True
            with suppress(StoreLostError):
                self._end_calls(error)
            if isinstance(error, CommGridError):
                raise numbered(error, self.legend) from error
            if not isinstance(error, RuntimeError):
                raise
            store = None if elsewhere is None else elsewhere.store
            raise as_peer_error(self._about, error, store) from error
        finally:
            self._driver.close()
        for calls, number in self._calls.values():  # all ranks have come to the meeting
            self._driver.run(tidy(calls.end(number)))
        for side, grid in grids.items():
            _HEARD.get(grid, {}).pop(self._counter(side, self.cards[side]), None)
        unique = f"{self._rendezvous.incarnation}/{source.identity}/{target.identity}"
        self.key = f"{self._room}/{self._meeting or unique}"
        self.leftovers = () if elsewhere is None else (self._rendezvous.counter,)
        self.meet, self.patience = self._rendezvous.meet, self._rendezvous.patience

    def __enter__(self) -> Pairing:
        return self

    def __exit__(self, *how: Any) -> None:
        self._rendezvous.__exit__(*how)

    def _take_numbers(self, source: Card, target: Card) -> None:
        """Number the ranks of both grids, and choose how they talk."""
        self.hears_silence = source.watched or target.watched
        ranks, others = source.spec.grid_ranks, target.spec.grid_ranks
        if self._elsewhere is None:
            self.ranks = tuple(sorted({*ranks, *others}))
            self.numbering = torch_world.world_numbering()
            return
        count = len(ranks)
        is_source = "source" in self._grids
        place = ranks.index(self._rank) if is_source else count + others.index(self._rank)
        self.ranks = tuple(range(count + len(others)))
        self.numbering = torch_world.joint_numbering(
            place, self._elsewhere.store, f"{self._room}/{self._meeting}"
        )
        numbers = (
            (self.ranks[:count], target.peer, ranks),
            (self.ranks[count:], source.peer, others),
        )
        self.legend = " and ".join(
            f"{describe_ranks(joint)} {'are' if len(joint) > 1 else 'is'} {name}'s "
            f"{describe_ranks(own)}" for joint, name, own in numbers
        )  # fmt: skip
        self.backend = torch_world.common_backend(source.kinds, target.kinds)

    def _in_common(self) -> dict[str, Any]:
        """Plain values that all ranks have in common, where they fit together."""
        found = {f"{side}_grid": self.cards[side].identity for side in SIDES}
        if self._elsewhere is None:
            return found
        (card,) = (self.cards[side] for side in self._grids)
        return {**found, "commgrid": VERSION, "backend": self.backend or ", ".join(card.kinds)}

    @property
    def _advice(self) -> str:
        if self._elsewhere is not None:
            return f"{self._what.capitalize()} with this name= and {self._elsewhere}"
        return f"{self._what.capitalize()} on the ranks of both grids, under one name="

    # -- finding the other grid -----------------------------------------------------------

    def _both(self, known: dict[str, Card]) -> dict[str, Card]:
        """Both sides' cards, of which this rank knows one or both."""
        for side, card in known.items():
            if card.first == self._rank:
                calls = Calls(self._counter(side, card))
                self._calls[side] = calls, self._driver.run(calls.begin())
        for side, other in (SIDES, SIDES[::-1]):
            if side in self._calls and not self._know_each_other(known):
                known[other] = self._find(known, side, other)
        for side, other in (SIDES, SIDES[::-1]):
            if side in self._calls:
                calls, number = self._calls[side]
                told = json.dumps({"card": known[other].to_text(), "meeting": self._meeting})
                self._driver.run(calls.tell(number, told))
            elif other not in known:
                known[other] = self._hear(side, known[side])
        return known

    def _know_each_other(self, known: Mapping[str, Card]) -> bool:
        """Whether the first ranks of both grids are ranks of both."""
        cards = known.values()
        return len(cards) == 2 and all(a.first in b.spec.grid_ranks for a in cards for b in cards)

    def _find(self, known: Mapping[str, Card], side: str, other: str) -> Card:
        mine, wanted = known[side], known.get(other)
        if self._elsewhere is not None:
            return self._meet(self._elsewhere, side, other, mine)
        self._card = match.Candidate(
            self._about, side, mine.identity, None if wanted is None else wanted.identity,
            f"{self._room}/{uuid4().hex}", mine.to_text(),
        )  # fmt: skip
        text = self._driver.run(match.match(self._card, self._until))
        if text is None:
            raise self._nobody(side, mine)
        return Card.from_text(text)

    def _meet(self, elsewhere: OtherWorld, side: str, other: str, mine: Card) -> Card:
        """Meet the other program's first rank at the store of both."""
        shared = StoreDriver(
            elsewhere.store, 2, lambda: max(seconds_until(self._deadline), timeouts().answer)
        )
        words = uuid4().hex[:16], mine.to_text()
        try:
            met = shared.run(match.meet_world(self._room, side, other, *words, self._until))
        finally:
            shared.close()
        if isinstance(met, match.Met):
            self._meeting = met.name
            return Card.from_text(met.words)
        if met.replaced:
            raise GridMismatchError(
                f"{self._about}: another program has come to {elsewhere} as its {side}, while this "
                "one waited; give each pair of programs a name= of its own"
            )
        silent = "; a process came before, and has ended or does not answer" if met.silent else ""
        raise PeerTimeoutError(
            f"{self._about}: no {elsewhere.name} has come to meet this program at {elsewhere} "
            f"within {self._limit}{silent}; is its first rank running, and does it call "
            f"{self._advice}?"
        )

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
        heard = self._driver.run(Calls(counter).hear(last.get(counter, 0), self._deadline))
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
            self._meeting = told["meeting"]
            return Card.from_text(told["card"])
        raise _ERRORS.get(told["kind"], PeerFailedError)(told["error"])

    def _end_calls(self, error: BaseException) -> None:
        """Tell the other ranks of an error, and look for another grid no longer."""
        known = isinstance(error, CommGridError)
        said = f"{error}" if known else f"{self._about}: rank {self._rank} failed: {error!r}"
        words = json.dumps({"error": said, "kind": type(error).__name__})
        for calls, number in self._calls.values():
            self._driver.run(calls.fail(number, words))
        if self._card is not None:
            self._driver.run(match.withdraw(self._card, f"{self._card.at}/failed"))
