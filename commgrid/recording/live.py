"""Compares what the members of each communicator issue, call by call, while they issue it.

    dp of ranks 0, 2, 4, 6:  0 ◄─► 2 ◄─► 4 ◄─► 6 ◄─► 0      each tells both neighbours

Before a call is made, its digest goes to both neighbours, and theirs, if they have come, are
compared with it: the later of two ranks finds a difference, and does not make the call. Only then
do the two send each other words. A wait of more than a moment asks all ranks for their
records (`commgrid.recording.remote`): ranks that wait for each other are an error on all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from commgrid.call_analysis.mismatch import both, difference
from commgrid.call_records import files as trace_files
from commgrid.call_records.call import Call, Group
from commgrid.call_records.operations import TRANSFERS, Alike
from commgrid.errors import GridMismatchError, SpecError
from commgrid.health.mailbox import Mailbox, NoMailboxError
from commgrid.recording import dump, recorder, remote
from commgrid.recording.counterpart import (
    ANY_SOURCE,
    KEPT,
    TAKEN_BACK,
    Counterpart,
    Words,
    is_plain,
    number,
    way_of,
)  # fmt: skip
from commgrid.recording.counts import Begun
from commgrid.recording.observed import ObservedGrid
from commgrid.recording.places import group_of
from commgrid.recording.stacks import announce
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import Asked, PatientStore
from commgrid.store.key_wait import connection_of
from commgrid.torch_compat import interposer as torch_calls
from commgrid.torch_compat import world as torch_world

MOMENT = 1.0
"""Seconds that a wait may last before it looks at what others do."""

_DEADLOCK = "deadlock: "


@dataclass(slots=True, eq=False)
class Channel:
    """A communicator of the grid, and its links.

    Args:
        group: as records know it.
        links: of collectives ("", None, 0): with the previous member and the next one; of messages
            by operation, peer and tag.
        met: ranks that messages were exchanged with.
    """

    group: Group
    links: dict[tuple[str, int | None, int], tuple[Counterpart, ...]] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)


class Issued(NamedTuple):
    """One call of this rank: its communicator, its links, the earlier rank's first, its record."""

    channel: Channel
    links: tuple[Counterpart, ...]
    begun: Begun
    is_transfer: bool


class OrderCheck:
    """Compares every call on the communicators of a grid before it is made.

    Args:
        grid: of which all ranks make one.
    """

    def __init__(self, grid: ObservedGrid) -> None:
        self._grid, self._records, self._rank = grid, recorder.hold(), grid.rank
        self._base = f"commgrid/order/{grid.identity}"
        # A server that is stopped must not hold who ends the grid because of it.
        self._store = PatientStore(connection_of(torch_world.world_store()))
        self._channels: torch_calls.ByIdentity[Channel] = torch_calls.ByIdentity()
        self._links: dict[tuple[int, int], Counterpart] = {}
        self._digests: dict[Alike, int] = {}
        self._agree: set[tuple[int, int]] = set()  # digests of calls that differ in the unknown
        self._pending: torch_calls.ByIdentity[Issued] = torch_calls.ByIdentity()
        self._gone: set[int] = set()
        self._asked: Asked | None = None
        self._lock = threading.RLock()
        self._mail = Mailbox(
            self._rank, PatientStore(connection_of(self._store)),
            self._base, torch_world.own_address(), self._heard,
        )  # fmt: skip
        torch_calls.listen(self)
        grid.before_destroy(self.close)

    def close(self) -> None:
        """Hears no more."""
        torch_calls.stop(self)
        self._mail.close()
        recorder.release(self._records)
        remote.follow()

    def _channel(self, its_group: dist.ProcessGroup) -> Channel | None:
        """A communicator of the grid's, which may be new after a suspension; None: another one."""
        found = self._channels.get(its_group)
        if found is None and its_group.size() > 1:
            for each in self._grid.communicators:
                if not each.suspended and each.group is its_group:
                    found = self._channels[its_group] = Channel(group_of(its_group))
        return found

    def _links_of(self, channel: Channel, made: torch_calls.Arguments) -> tuple[Counterpart, ...]:
        """The links of a call; of a receipt from any source, those with all members."""
        is_transfer = made.operation in TRANSFERS
        of = (made.operation, made.peer, made.tag) if is_transfer else ("", None, 0)
        if of not in channel.links:
            ranks, others = channel.group.ranks, tuple[int, ...]()
            if not is_transfer:
                place = ranks.index(self._rank)
                others = ranks[place - 1], ranks[(place + 1) % len(ranks)]
            else:
                others = ranks if made.peer is None else (ranks[made.peer],)
            channel.links[of] = tuple(
                self._counterpart(
                    rank, way_of(channel.group, made.operation, self._rank, rank, made.tag)
                )
                for rank in dict.fromkeys(others) if rank != self._rank
            )  # fmt: skip
        return channel.links[of]

    def _counterpart(self, rank: int, way: int) -> Counterpart:
        """The link with a rank, which may have been heard of before this rank uses it."""
        with self._lock:
            return self._links.setdefault((rank, way), Counterpart(rank, way))

    # -- a call, from its beginning to its end -------------------------------------------

    def begins(self, its_group: dist.ProcessGroup, made: torch_calls.Arguments) -> Issued | None:
        begun, channel = self._records.thread.begun, self._channel(its_group)
        if begun is None or channel is None:
            return None
        links, is_transfer = self._links_of(channel, made), made.operation in TRANSFERS
        if is_transfer and made.peer is None:
            for link in links:
                if not link.is_open and made.operation == "recv":
                    link.is_open = True
                    self._tell(link, ANY_SOURCE, 0)
            return None
        digest = self._digest(made.alike) - (not is_plain(made.tensors))
        for link in links:
            with self._lock:
                link.add(begun.turn, digest)
            self._tell(link, begun.turn, digest)
        if is_transfer:
            self._meet(channel, links[0].rank)
        call = Issued(channel, links, begun, is_transfer)
        self._compare_all(call, made)
        return call

    def _meet(self, channel: Channel, rank: int) -> None:
        """Wait a moment for the other side of a pair's first message.

        A backend that connects the two then holds this rank until the other has come.
        """
        if rank not in channel.met:
            channel.met.add(rank)
            ends = sorted((rank, self._rank))
            pair = self._counterpart(rank, number(f"{channel.group.key} {ends}"))
            self._tell(pair, 0, 1)
            self._read_until(lambda: 0 in pair.theirs or rank in self._gone, MOMENT)

    def _digest(self, alike: Alike) -> int:
        """Eight bytes for what has to be alike, the same in all processes."""
        found = self._digests.get(alike)
        if found is None:
            if len(self._digests) >= KEPT:
                self._digests.clear()
            found = self._digests[alike] = number(f"{tuple(alike)}")
        return found

    def _tell(self, link: Counterpart, turn: int, digest: int) -> None:
        try:
            is_there = self._mail.send(link.rank, (link.way, turn, digest))
        except NoMailboxError:
            raise GridMismatchError(
                f"rank {link.rank} does not compare its calls with others'; give "
                "initialize(verify='order') on every rank"
            ) from None
        if not is_there:
            self._gone.add(link.rank)

    def issued(self, call: object, work: dist.Work | None) -> None:
        if not isinstance(call, Issued):
            return
        channel, links, begun, _ = call
        for link in links:
            link.issued[begun.turn] = link.mine[begun.turn]
            self._compare(link, channel, begun.turn)
        if work is not None:
            self._pending[work] = call

    def failed(self, call: object) -> None:
        """Take the call back where its record was; else say what was found, if that ended it."""
        if not isinstance(call, Issued):
            return
        if call.begun.turns.count > call.begun.turn:
            self._say_what_was_found()
            return
        for link in call.links:
            link.mine.pop(call.begun.turn, None)
            self._tell(link, call.begun.turn, TAKEN_BACK)

    def waits(self, work: dist.Work) -> None:
        call = self._pending.get(work)
        if call is None:
            return
        channel, links, begun, is_transfer = call
        link = links[0]
        if "gloo" in channel.group.backend and not is_transfer:
            self._poll(work)
            self._compare_all(call)
            return

        # gloo closes the connection of a transfer whose wait times out.
        while not self._read_until(lambda: self._is_settled(link, begun.turn), MOMENT):
            if work.is_completed():  # with an error, which the wait raises
                return
            self._look()
        self._compare(link, channel, begun.turn)

    def _poll(self, work: dist.Work) -> None:
        """Wait in parts for a collective: any member may be missing."""
        while True:
            try:
                torch_calls.plain_wait(work, timedelta(seconds=MOMENT))
                return
            except RuntimeError as error:
                if work.is_completed() or "Operation timed out!" not in str(error):
                    return  # the wait raises it
            self._look()

    def waited(self, work: dist.Work, failed: bool) -> None:
        call = self._pending.pop(work)
        if failed and call is not None:
            self._say_what_was_found()

    # -- comparing ----------------------------------------------------------------------

    def _heard(self, rank: int, message: Any) -> None:
        """A digest or the words of another rank's call; None: the rank is gone."""
        if message is None:
            self._gone.add(rank)
            return
        way, turn, told = message
        link = self._counterpart(rank, way)
        with self._lock:
            if turn == ANY_SOURCE:
                link.is_open = True
            elif isinstance(told, int):
                link.theirs[turn] = told
            else:
                digest, is_issued, alike, said, where = told
                link.words[turn] = Words(digest, is_issued, Alike(*alike), said, where)
        if turn in link.words or self._differs(link, turn):
            self._say(link, turn)

    def _differs(self, link: Counterpart, turn: int) -> bool:
        """Whether both sides of a call have come, and are not known to agree."""
        return link.differs(turn) and (link.mine[turn], link.theirs[turn]) not in self._agree

    def _is_settled(self, link: Counterpart, turn: int) -> bool:
        """Whether it is known if a call agrees with the other's, or none will be known."""
        theirs, words = link.theirs.get(turn, TAKEN_BACK), link.words.get(turn)
        if link.is_open or link.rank in self._gone:
            return True
        has_words = words is not None and words.digest == theirs and words.is_issued
        return theirs != TAKEN_BACK and (has_words or not self._differs(link, turn))

    def _say(self, link: Counterpart, turn: int) -> None:
        """Send words of this rank's call to the other, once before and once after its issue."""
        with self._lock:
            digest = link.mine.get(turn)
            is_issued = link.issued.get(turn) == digest
            if digest is None or link.said.get(turn) == (digest, is_issued):
                return
            link.said[turn] = digest, is_issued
        call = self._recorded(link, turn)
        if call is not None:
            words = Words(digest, is_issued, call.alike, call.said(), call.where)
            self._mail.tell(link.rank, [link.way, turn, words])

    def _recorded(self, link: Counterpart, turn: int) -> Call | None:
        """This rank's record of a call."""
        (trace,) = trace_files.parse([self._records.contents(KEPT)])
        for each in reversed(trace.calls):
            of = each.group, each.operation, self._rank, link.rank, each.tag
            if (each.turn, way_of(*of)) == (turn, link.way) and each.peer in (None, link.rank):
                return each
        return None

    def _compare_all(self, call: Issued, made: torch_calls.Arguments | None = None) -> None:
        """Compare a call with what has come from the other ranks, as `_compare` does."""
        turn = call.begun.turn
        if not all(turn in link.theirs for link in call.links):
            self._mail.read(0.0)
        for link in call.links:
            self._compare(link, call.channel, turn, made)

    def _compare(
        self, link: Counterpart, channel: Channel, turn: int,
        made: torch_calls.Arguments | None = None,
    ) -> None:  # fmt: skip
        """Compare a call with the other's, if that has come.

        Args:
            made: the call, if it was not issued yet. torch may refuse it, or what the other has
                issued, and the program make another one: it is stopped only if its size differs,
                for which gloo ends the process.

        Raises:
            GridMismatchError: they differ.
        """
        if not self._differs(link, turn):
            return
        self._say(link, turn)
        self._read_until(
            lambda: self._is_settled(link, turn) or (made is not None and turn in link.words),
            timeouts().answer,
        )
        theirs, mine = link.words.get(turn), self._recorded(link, turn)
        if not self._differs(link, turn) or theirs is None or mine is None:
            return  # it was taken back, or its rank is gone
        kind = difference(mine.alike, theirs.alike)
        if not kind:
            self._agree.add((link.mine[turn], theirs.digest))
        is_deadly = kind in ("other shape", "other size") and link.mine[turn] & theirs.digest & 1
        if not kind or (made is not None and not is_deadly):
            return
        sides = [
            ((self._rank,), mine.said(), mine.where), ((link.rank,), theirs.said, theirs.where)
        ]  # fmt: skip
        told = both(sorted(sides))
        error = GridMismatchError(
            f"call {turn} of {channel.group.name} is not the same on all ranks: {told}"
        )
        self._post(f"{error}")
        raise error

    def _read_until(self, is_enough: Callable[[], bool], seconds: float) -> bool:
        """Read messages until something is known; return whether it is."""
        until = time.monotonic() + seconds
        while not is_enough():
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._mail.read(left, is_enough)
        return True

    def _post(self, text: str) -> None:
        """Tell the other ranks of an error."""
        with suppress(RuntimeError):
            self._store.compare_set(f"{self._base}/failed", "", text)
        if self._grid.watch is not None:  # wakes ranks that wait on a device
            self._grid.watch.post(f"rank {self._rank} has found that {text}")

    def _say_what_was_found(self) -> None:
        """Raises the error that a rank has found, if one has."""
        told = ""
        with suppress(RuntimeError):  # the store has gone; the wait itself will say who else
            if self._store.check([f"{self._base}/failed"]):
                told = bytes(self._store.get(f"{self._base}/failed")).decode()
        if told.startswith(_DEADLOCK):
            raise GridMismatchError(f"deadlock: {told.removeprefix(_DEADLOCK)}")
        if told:
            raise GridMismatchError(f"{told} (found on another rank)")

    # -- looking at what others do -------------------------------------------------------

    def _look(self) -> None:
        """After a moment of waiting: what was found, and a search for circles on a thread.

        Raises:
            GridMismatchError: a rank has found a difference or a circle.
        """
        self._say_what_was_found()
        if self._asked is None or self._asked.is_over():
            self._asked = Asked(self._search)

    def _search(self) -> None:
        """Ask all ranks, unless another rank does, and post a circle that stays."""
        at, before = f"{self._base}/search", b""
        mine = f"{self._rank} {time.time():.0f}"
        if self._store.check([at]):
            before = bytes(self._store.get(at))
            if time.time() - float(before.split()[1]) < timeouts().lease:
                return
        if bytes(self._store.compare_set(at, before.decode(), mine)).decode() != mine:
            return
        try:
            found = self._circles()
            if found and found == self._circles():  # no rank has moved
                self._post(_DEADLOCK + "; ".join(sorted(found)))
        finally:
            self._store.delete_key(at)

    def _circles(self) -> set[str]:
        """Return the circles of ranks that wait for each other, by the records of all."""
        found = remote.diagnose(2 * timeouts().beat, patience=MOMENT)
        return {each.text for each in found.causes if each.is_circle and each.severity == "error"}


def check_argument(verify: str | None) -> None:
    """Raise SpecError unless `verify` is None or "order"."""
    if verify not in (None, "order"):
        raise SpecError(f"verify={verify!r}: expected None, or 'order'")


def observe(trace: bool, verify: str | None, grid: ObservedGrid) -> None:
    """Begin to record and to compare a grid's calls, before its ranks say that they are ready."""
    if verify == "order" and any(len(each.ranks) > 1 for each in grid.communicators):
        OrderCheck(grid)
    recorder.follow(trace, grid)
    records = recorder.current()
    ring = records.ring.path if records is not None else None
    identity = f"{grid.identity}"
    announce(identity, grid.rank, torch_world.world_size(), ring)
    dump.follow()
    grid.before_destroy(lambda: dump.leave(identity))
    remote.follow()
