"""Order check: the calls of a communicator's members are compared before they are made.

    dp of ranks 0, 2, 4, 6:  0 ◄─► 2 ◄─► 4 ◄─► 6 ◄─► 0      digests go to both neighbours

A rank sends the digest of a call to both neighbours before it makes the call, and compares it with
theirs if these have come. The later of two ranks finds a difference and does not make the call.
Only then do the two send each other the call in words. A rank that waits for more than a moment
asks all ranks for their records (`commgrid.recording.remote`); ranks that wait for each other raise
an error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
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
    digest_of,
    ending,
    is_accepted,
    number,
    way_of,
)  # fmt: skip
from commgrid.recording.counts import Begun, CallCount
from commgrid.recording.observed import ObservedGrid
from commgrid.recording.order_store import OrderStore
from commgrid.recording.places import group_of
from commgrid.recording.stacks import announce, withdraw
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import Asked, PatientStore
from commgrid.store.key_wait import connection_of
from commgrid.torch_compat import interposer as torch_calls
from commgrid.torch_compat import world as torch_world

MOMENT = 1.0
"""Seconds that a rank waits before it asks the others for their records."""


class Issued(NamedTuple):
    """One call of this rank: its communicator, its links, the earlier rank's first, its record."""

    group: Group
    links: tuple[Counterpart, ...]
    begun: Begun
    is_transfer: bool


class OrderCheck:
    """Compares every call on the communicators of a grid before it is made.

    Args:
        grid: the grid; all its ranks have a check.
    """

    def __init__(self, grid: ObservedGrid) -> None:
        self._grid, self._records, self._rank = grid, recorder.hold(), grid.rank
        prefix = f"commgrid/order/{grid.identity}"
        # A stopped server must not block a rank that ends the grid because of it.
        store = PatientStore(connection_of(torch_world.world_store()))
        self._at_store = OrderStore(store, prefix, self._rank)
        self._groups: torch_calls.ByIdentity[Group] = torch_calls.ByIdentity()
        self._links: dict[tuple[int, int], Counterpart] = {}
        # By what turns are counted on: of collectives with the previous member and the next one.
        self._linked: dict[CallCount, tuple[Counterpart, ...]] = {}
        self._met: set[tuple[str, int]] = set()  # by communicator, ranks of messages
        # Digests of two calls that differ only in properties that were not recorded.
        self._agree: deque[tuple[int, int]] = deque(maxlen=KEPT)
        self._pending: torch_calls.ByIdentity[Issued] = torch_calls.ByIdentity()
        self._gone: set[int] = set()
        self._asked: Asked | None = None
        self._lock = threading.RLock()
        self._mail = Mailbox(
            self._rank, PatientStore(connection_of(store)),
            prefix, torch_world.own_address(torch_world.world_store()), self._heard,
        )  # fmt: skip
        torch_calls.listen(self)
        grid.before_destroy(self.close)

    def close(self) -> None:
        """End the check."""
        torch_calls.stop(self)
        self._mail.close()
        self._at_store.close()
        recorder.release(self._records)
        remote.follow()

    def _group(self, its_group: dist.ProcessGroup) -> Group | None:
        """A communicator of the grid's, which may be new after a suspension; None: another one."""
        found = self._groups.get(its_group)
        if found is None and its_group.size() > 1:
            for each in self._grid.communicators:
                if not each.suspended and each.group is its_group:
                    found = self._groups[its_group] = group_of(its_group)
        return found

    def _links_of(
        self, group: Group, turns: CallCount, made: torch_calls.Arguments
    ) -> tuple[Counterpart, ...]:
        """The links of a call; of a receipt from any source, those with all members."""
        if turns not in self._linked:
            ranks, others = group.ranks, tuple[int, ...]()
            if made.operation not in TRANSFERS:
                place = ranks.index(self._rank)
                others = ranks[place - 1], ranks[(place + 1) % len(ranks)]
            else:
                others = ranks if made.peer is None else (ranks[made.peer],)
            self._linked[turns] = tuple(
                self._counterpart(rank, way_of(group, made.operation, self._rank, rank, made.tag))
                for rank in dict.fromkeys(others) if rank != self._rank
            )  # fmt: skip
        return self._linked[turns]

    def _counterpart(self, rank: int, way: int) -> Counterpart:
        """The link with a rank, which may have been heard of before this rank uses it."""
        with self._lock:
            return self._links.setdefault((rank, way), Counterpart(rank, way))

    # -- a call, from its beginning to its end -------------------------------------------

    def begins(self, its_group: dist.ProcessGroup, made: torch_calls.Arguments) -> Issued | None:
        begun, group = self._records.thread.begun, self._group(its_group)
        if begun is None or group is None:
            return None
        links, is_transfer = self._links_of(group, begun.turns, made), made.operation in TRANSFERS
        if is_transfer and made.peer is None:
            for link in links:
                if not link.is_open and made.operation == "recv":
                    link.is_open = True
                    self._send_digest(link, ANY_SOURCE, 0)
            return None
        digest = digest_of(made.alike, is_accepted(made))
        for link in links:
            with self._lock:
                link.add(begun.turn, digest)
            self._send_digest(link, begun.turn, digest)
        if is_transfer:
            self._meet(group, links[0].rank)
        call = Issued(group, links, begun, is_transfer)
        self._compare_all(call, made)
        return call

    def _meet(self, group: Group, rank: int) -> None:
        """Wait a moment for the other side of a pair's first message.

        A backend that connects the two then holds this rank until the other has come.
        """
        if (group.key, rank) not in self._met:
            self._met.add((group.key, rank))
            ends = sorted((rank, self._rank))
            pair = self._counterpart(rank, number(f"{group.key} {ends}"))
            self._send_digest(pair, 0, 1)
            self._read_until(lambda: 0 in pair.theirs or rank in self._gone, MOMENT)

    def _send_digest(self, link: Counterpart, turn: int, digest: int) -> None:
        try:
            is_there = self._mail.send(link.rank, (link.way, turn, digest))
        except NoMailboxError:
            raise GridMismatchError(
                f"rank {link.rank} runs without verify='order'; pass "
                "initialize(verify='order') on every rank"
            ) from None
        if not is_there:
            self._gone.add(link.rank)

    def issued(self, call: object, work: dist.Work | None) -> None:
        if not isinstance(call, Issued):
            return
        _, links, begun, _ = call
        for link in links:
            link.issued[begun.turn] = link.mine[begun.turn]
            self._compare(call, link)
        if work is not None:
            self._pending[work] = call

    def failed(self, call: object) -> None:
        """Take back a call that torch has refused; raise the error that explains any other."""
        if not isinstance(call, Issued):
            return
        if not call.begun.is_refused:
            self._raise_posted_error(call)
            return
        for link in call.links:
            link.mine.pop(call.begun.turn, None)
            self._send_digest(link, call.begun.turn, TAKEN_BACK)

    def waits(self, work: dist.Work) -> None:
        call = self._pending.get(work)
        if call is None:
            return
        group, links, begun, is_transfer = call
        link, has_looked = links[0], False
        if "gloo" in group.backend and not is_transfer:
            while not self._has_ended(work):
                self._look(call)
                has_looked = True
            self._compare_all(call)
        else:
            # gloo closes the connection of a transfer whose wait times out.
            while not self._read_until(lambda: self._is_settled(link, begun.turn), MOMENT):
                if work.is_completed():  # with an error, which the wait raises
                    return
                self._look(call)
                has_looked = True
            self._compare(call, link)
        if has_looked:
            self._at_store.note_ended()

    def _has_ended(self, work: dist.Work) -> bool:
        """Wait a moment for a collective, whose wait is then the one to raise its error."""
        try:
            torch_calls.plain_wait(work, timedelta(seconds=MOMENT))
        except RuntimeError as error:
            return work.is_completed() or "Operation timed out!" not in str(error)
        return True

    def waited(self, work: dist.Work, failed: bool) -> None:
        call = self._pending.pop(work)
        if failed and call is not None:
            self._raise_posted_error(call)

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
            self._send_words(link, turn)

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

    def _send_words(self, link: Counterpart, turn: int) -> None:
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
            self._compare(call, link, made)

    def _compare(
        self, call: Issued, link: Counterpart, made: torch_calls.Arguments | None = None
    ) -> None:
        """Compare a call with the other rank's, if that has come.

        Args:
            made: the arguments of a call that is not issued yet; None: it is issued. torch may
                still refuse either call, and the program then make another one. So a call is
                stopped before its issue only if gloo would end the process, and once the other is
                issued. If neither is, the lower rank issues its call first.

        Raises:
            GridMismatchError: they differ.
        """
        turn = call.begun.turn
        if not self._differs(link, turn):
            return
        self._send_words(link, turn)
        is_first = self._rank < link.rank

        def is_known() -> bool:
            if self._is_settled(link, turn) or not self._differs(link, turn):
                return True
            if made is None or (words := link.words.get(turn)) is None:
                return False
            return is_first or ending(made.alike, words.alike) != "other dtype"

        self._read_until(is_known, timeouts().answer)
        theirs, mine = link.words.get(turn), self._recorded(link, turn)
        if not self._differs(link, turn) or theirs is None or mine is None:
            return  # it was taken back, or its rank is gone
        kind, end = (of(mine.alike, theirs.alike) for of in (difference, ending))
        if not kind:
            self._agree.append((link.mine[turn], theirs.digest))
        is_stopped = (
            (end == "other dtype" and theirs.is_issued) or end in ("other shape", "other size")
        ) and link.mine[turn] % 2 == theirs.digest % 2 == 1  # torch is sure to issue both
        if not kind or (made is not None and not is_stopped):
            return
        for each in call.links:  # whether torch accepts it or not
            each.issued[turn] = each.mine[turn]
            self._send_words(each, turn)
        sides = [
            ((self._rank,), mine.said(), mine.where), ((link.rank,), theirs.said, theirs.where)
        ]  # fmt: skip
        told = both(sorted(sides))
        error = GridMismatchError(
            f"call {turn} of {call.group.name} is not the same on all ranks: {told}"
        )
        event = link.event(turn)
        self._post_error(event, f"{error}")
        self._at_store.note_raised(event)
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

    def _post_error(self, event: str, text: str, ranks: Collection[int] = ()) -> None:
        """Tell the other ranks of an error (`FoundError`)."""
        self._at_store.post(event, text, ranks)
        if self._grid.watch is not None:  # wakes ranks that wait on a device
            self._grid.watch.post(f"rank {self._rank} has found that {text}")

    def _raise_posted_error(self, call: Issued) -> None:
        """Raise the error that a rank has found in a call, in an earlier one, or in this wait."""
        found = self._at_store.error([link.event(t) for link in call.links for t in [*link.mine]])
        if found is not None:
            self._at_store.note_raised(found.event)
            raise GridMismatchError(f"{found.text} (found on rank {found.finder})")

    # -- looking at the other ranks --------------------------------------------------------

    def _look(self, call: Issued) -> None:
        """After a moment of waiting, raise an error that concerns it, and search for deadlocks.

        Raises:
            GridMismatchError: a rank has found a difference or a deadlock.
        """
        self._raise_posted_error(call)
        if self._asked is None or self._asked.is_over():
            self._asked = Asked(self._search)

    def _search(self) -> None:
        """Ask all ranks, unless another rank does, and post the deadlocks that stay."""
        if not self._at_store.take_lease():
            return
        try:
            found = self._deadlocks()
            # Else ranks have moved meanwhile.
            again = self._deadlocks() if found else {}
            for text in found.keys() & again.keys():
                self._post_error(text, f"deadlock: {text}", again[text])
        finally:
            self._at_store.end_lease()

    def _deadlocks(self) -> dict[str, list[int]]:
        """Return deadlocks by the records of all ranks, each with the ranks that wait for it."""
        found = remote.diagnose(2 * timeouts().beat, patience=MOMENT)
        return {
            each.text: found.behind(each.ranks[0])
            for each in found.causes if each.is_circle and each.severity == "error"
        }  # fmt: skip


def check_argument(verify: str | None) -> None:
    """Raise SpecError unless `verify` is None or "order"."""
    if verify not in (None, "order"):
        raise SpecError(f"verify={verify!r}: expected None, or 'order'")


def observe(trace: bool, verify: str | None, grid: ObservedGrid) -> None:
    """Start recording and comparing a grid's calls, before its ranks say that they are ready."""
    if verify == "order" and any(len(each.ranks) > 1 for each in grid.communicators):
        OrderCheck(grid)
    recorder.follow(trace, grid)
    records = recorder.current()
    ring = records.ring.path if records is not None else None
    identity = f"{grid.identity}"
    announce(identity, grid.rank, torch_world.world_size(), ring)
    dump.follow()
    grid.before_destroy(lambda: withdraw(identity, dump.stop))
    remote.follow()
