"""Compares what the members of each communicator issue, call by call, while they issue it.

    dp of ranks 0, 2, 4, 6:  0 ──► 2 ──► 4 ──► 6 ──► 0      each tells the next what it issues

Before a call is made, what it is goes to the next member, and before its result is waited for, what
the previous one has sent is compared with it. The first that differ are an error on both, which
name both lines; the others read it at the store. A wait of more than a moment looks at what those
do whom it waits for: ranks that wait for each other across groups are an error on all of them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from commgrid.call_analysis.wait_cycle import circle_through
from commgrid.call_records.operations import TRANSFERS, described
from commgrid.errors import CommGridError, GridMismatchError, SpecError
from commgrid.health.mailbox import Mailbox, NoMailboxError
from commgrid.recording import dump, recorder, remote
from commgrid.recording.places import caller, place_of
from commgrid.recording.recorder import ObservedGrid
from commgrid.recording.stacks import announce, withdraw
from commgrid.store.client import PatientStore
from commgrid.store.key_wait import connection_of
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import interposer as torch_calls
from commgrid.torch_compat import world as torch_world

MOMENT = 1.0
"""Seconds that a wait may last before it looks at what others do."""

_KEPT = 1024  # calls of each communicator that are held against others'
_GLOO_SECONDS = 0.05  # that an asynchronous call on gloo waits for the other's
_MOST_ASKED = 16  # members whose state is read in one look
_DEEPEST = 16  # ranks of a circle


@dataclass(slots=True, eq=False)
class Issued:
    """One call of this rank.

    Args:
        channel: its communicator.
        way: what it is counted by: the communicator's names, and for a transfer the two ranks.
        turn: how many were issued of these before.
        kind: what has to be alike.
        words: what it is, for messages.
        where: file and line.
        source: the rank whose message it is compared with.
        seen: whether it was.
    """

    channel: Channel
    way: str
    turn: int
    kind: list[Any]
    words: str
    where: str
    source: int
    seen: bool = False


@dataclass(frozen=True)
class Channel:
    """A communicator of the grid.

    Args:
        names: with commas.
        ranks: its members.
        place: this rank's among them.
        polls: whether a wait for a collective may be made in parts, as on gloo.
    """

    names: str
    ranks: tuple[int, ...]
    place: int
    polls: bool


class OrderCheck:
    """Hears of every call on the communicators of a grid, before it is made.

    Args:
        grid: of which all ranks make one.
    """

    def __init__(self, grid: ObservedGrid) -> None:
        self._grid, self._rank = grid, grid.rank
        self._base = f"commgrid/order/{grid.identity}"
        # A server that is stopped must not hold who ends the grid because of it.
        own = connection_of(torch_world.world_store())
        self._store = PatientStore(own)
        self._channels: WeakKeyDictionary[dist.ProcessGroup, Channel] = WeakKeyDictionary()
        self._pending: torch_calls.ByIdentity[Issued] = torch_calls.ByIdentity()
        self._turns: dict[str, int] = {}
        self._theirs: dict[str, OrderedDict[int, list[Any]]] = {}
        self._gone: set[int] = set()
        self._open: set[str] = set()  # communicators, and ranks that receive from any source there
        self._circle: list[Any] = []  # as the last look has found it
        self._lock = threading.RLock()
        self._mail = Mailbox(
            self._rank, PatientStore(connection_of(self._store)),
            self._base, torch_world.own_address(), self._heard,
        )  # fmt: skip
        self._refresh()
        torch_calls.listen(self)
        grid.before_destroy(self.close)

    def close(self) -> None:
        """Hears no more."""
        torch_calls.stop(self)
        self._mail.close()
        self._delete_state()

    def _refresh(self) -> None:
        """Knows the grid's communicators, some of which may be new after a suspension."""
        for each in self._grid.communicators:
            if len(each.ranks) > 1 and not each.suspended:
                self._channels[each.group] = Channel(
                    ",".join(each.names), each.ranks, each.ranks.index(self._rank),
                    "gloo" in torch_groups.backend_of(each.group),
                )  # fmt: skip

    # -- a call, from its beginning to its end -------------------------------------------

    def begins(self, its_group: dist.ProcessGroup, made: torch_calls.Arguments) -> Issued | None:
        channel = self._channels.get(its_group)
        if channel is None:
            if its_group.size() == 1 or not its_group.group_name.startswith("commgrid/"):
                return None
            self._refresh()
            channel = self._channels.get(its_group)
            if channel is None:
                return None
        if made.operation in TRANSFERS and made.peer is None:
            self._take_from_anybody(channel)
            return None
        where = place_of(*caller())
        call, target = self._made(channel, made, where)
        there = self._tell(target, [call.way, call.turn, call.kind, call.words, call.where])
        if not there:
            with self._lock:
                self._gone.add(target)
        if torch_calls.is_blocking():  # it will wait for the others anyway
            until = time.monotonic() + torch_world.group_timeout(self._grid.timeout)
            if self._await(call, lambda: self._has_failed or time.monotonic() > until):
                self._delete_state()
        elif channel.polls:
            # gloo ends a process that gets more than it expects.
            self._hear(call, _GLOO_SECONDS)
        self._compare(call)
        return call

    def _take_from_anybody(self, channel: Channel) -> None:
        """Tell the members that this rank takes messages from any of them."""
        to = f"{channel.names} >{self._rank}"
        if to in self._open:
            return
        self._open.add(to)
        for rank in channel.ranks:
            if rank != self._rank:
                self._tell(rank, [to, -1, [], "", ""])

    def _is_open(self, call: Issued) -> bool:
        """Whether it is a message to a rank that receives from any source."""
        names, _, ends = call.way.rpartition(" ")
        return ">" in ends and f"{names} >{ends.partition('>')[2]}" in self._open

    def _tell(self, rank: int, message: list[Any]) -> bool:
        """Send a message to a member; return whether it is there."""
        try:
            return self._mail.send(rank, message)
        except NoMailboxError:
            raise GridMismatchError(
                f"rank {rank} does not compare its calls with others'; give "
                "initialize(verify='order') on every rank"
            ) from None

    def _made(
        self, channel: Channel, made: torch_calls.Arguments, where: str
    ) -> tuple[Issued, int]:
        """Return the call that is to be issued, and the rank that learns of it."""
        operation, peer = made.operation, made.peer
        if operation in TRANSFERS:
            assert peer is not None
            other = channel.ranks[peer]
            ends = (self._rank, other) if operation == "send" else (other, self._rank)
            way = f"{channel.names} {ends[0]}>{ends[1]}"
            source = target = other
            counted = f"{way} {operation}"
        else:
            way = counted = channel.names
            ranks, place = channel.ranks, channel.place
            source, target = ranks[place - 1], ranks[(place + 1) % len(ranks)]
        kind = [*made.alike]
        words = described(operation, made.dtype, made.shape, made.reduction)
        with self._lock:
            turn = self._turns.get(counted, 0)
            self._turns[counted] = turn + 1
            call = Issued(channel, way, turn, kind, words, where, source)
        return call, target

    def issued(self, call: object, work: dist.Work | None) -> None:
        if isinstance(call, Issued) and work is not None:
            self._pending[work] = call

    def failed(self, call: object) -> None:
        """Says what was found, where that has ended the call."""
        if isinstance(call, Issued):
            self._say_what_was_found()

    def waits(self, work: dist.Work) -> None:
        call = self._pending.get(work)
        if call is None:
            return
        told = self._await(call, work.is_completed)
        try:
            if call.channel.polls:
                told = self._poll(work, call, told)
        finally:
            if told:
                self._delete_state()

    def _await(self, call: Issued, is_over: Callable[[], bool]) -> bool:
        """Wait until a call was compared, or has ended.

        Returns:
            Whether this rank has put its state at the store.
        """
        told = False
        while not self._compare(call) and call.source not in self._gone:
            if not self._hear(call, MOMENT):
                if is_over():  # with an error, which the wait raises
                    break
                told = True
                self._look(call)
        return told

    @property
    def _has_failed(self) -> bool:
        """Whether the grid's watch knows of a failure, with which torch's call ends."""
        return self._grid.watch is not None and self._grid.watch.failure is not None

    def _delete_state(self) -> None:
        """Delete this rank's state from the store, once it no longer waits."""
        self._circle = []
        with suppress(RuntimeError):
            self._store.delete_key(f"{self._base}/state/{self._rank}")

    def _poll(self, work: dist.Work, call: Issued, told: bool) -> bool:
        """Wait in parts for a collective: a member other than the previous one may be missing."""
        if ">" in call.way:
            return told  # gloo closes the connection of a transfer whose wait times out
        while True:
            try:
                torch_calls.plain_wait(work, timedelta(seconds=MOMENT))
                return told
            except RuntimeError as error:
                if work.is_completed() or "Operation timed out!" not in str(error):
                    return told  # the wait raises it
            told = True
            self._look(call)

    def waited(self, work: dist.Work, failed: bool) -> None:
        call = self._pending.pop(work)
        if failed and call is not None:
            self._say_what_was_found()

    # -- comparing ----------------------------------------------------------------------

    def _heard(self, rank: int, message: Any) -> None:
        """What the previous member, or a transfer's other side, issues."""
        with self._lock:
            if message is None:
                self._gone.add(rank)
            else:
                way, turn, kind, words, where = message
                if turn < 0:
                    self._open.add(way)
                held = self._theirs.setdefault(way, OrderedDict())
                held[int(turn)] = [rank, kind, words, where]
                if len(held) > 4 * _KEPT:
                    held.popitem(last=False)

    def _hear(self, call: Issued, seconds: float) -> bool:
        """Read messages until a call can be compared; return whether it can."""
        until = time.monotonic() + seconds
        while not self._answered(call):
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._mail.read(left, lambda: self._answered(call))
        return True

    def _answered(self, call: Issued) -> bool:
        return (
            call.turn in self._theirs.get(call.way, ())
            or call.source in self._gone
            or self._is_open(call)
        )

    def _answer_to(self, call: Issued) -> list[Any] | None:
        """The other's rank, kind, words and line, once they are there."""
        held = self._theirs.get(call.way)
        return None if held is None else held.get(call.turn)

    def _compare(self, call: Issued) -> bool:
        """Whether a call was compared with the other's, which has to be there for it.

        Raises:
            GridMismatchError: they differ.
        """
        if call.seen or self._is_open(call):
            return True
        theirs = self._answer_to(call)
        if theirs is None:
            return False
        call.seen = True
        rank, kind, words, where = theirs
        if kind != call.kind:
            raise self._posted(
                GridMismatchError(
                    f"call {call.turn} of {call.channel.names} is not the same on all ranks: "
                    f"{self._both(call, rank, words, where)}"
                )
            )
        return True

    def _both(self, call: Issued, rank: int, words: str, where: str) -> str:
        told = sorted([(self._rank, call.words, call.where), (rank, words, where)])
        return ", ".join(f"{what} at {place} on rank {who}" for who, what, place in told)

    def _posted(self, error: GridMismatchError) -> GridMismatchError:
        """Tell the other ranks of an error, and return it."""
        with suppress(RuntimeError):
            self._store.compare_set(f"{self._base}/failed", "", str(error))
        if self._grid.watch is not None:  # wakes ranks that wait on a device
            self._grid.watch.post(f"rank {self._rank} has found that {error}")
        return error

    def _say_what_was_found(self) -> None:
        """Raises the error that another rank has found, if one has."""
        told = ""
        with suppress(RuntimeError):
            if self._store.check([f"{self._base}/failed"]):
                told = bytes(self._store.get(f"{self._base}/failed")).decode()
        if told:
            raise GridMismatchError(f"{told} (found on another rank)")

    # -- looking at what others do -------------------------------------------------------

    def _look(self, call: Issued) -> None:
        """After a moment of waiting: what others have found, and whether they wait for this rank.

        Raises:
            GridMismatchError: another rank has found a difference, or there is a circle.
        """
        try:
            self._say_what_was_found()
            self._store.set(f"{self._base}/state/{self._rank}", json.dumps(self._state(call)))
            found = self._find_circle(self._state(call))
        except CommGridError:
            raise
        except RuntimeError:
            return  # the store has gone; the wait itself will say who else
        if found and found == self._circle:  # twice the same: no rank has moved
            steps = "; ".join(
                f"rank {rank} waits in {names} {words} at {where} for rank {after}"
                for rank, names, words, where, after in sorted(found)
            )
            raise self._posted(
                GridMismatchError(f"ranks wait for each other, in calls of another order: {steps}")
            )
        self._circle = found

    def _state(self, call: Issued) -> dict[str, Any]:
        with self._lock:
            return {
                "rank": self._rank, "names": call.channel.names, "ranks": call.channel.ranks,
                "way": call.way, "turn": call.turn, "words": call.words, "where": call.where,
                "turns": dict(self._turns), "other": call.source if ">" in call.way else None,
            }  # fmt: skip

    def _find_circle(self, mine: dict[str, Any]) -> list[Any]:
        """The ranks from this one back to it that wait for each other, with their calls."""
        states = {self._rank: mine}

        def following(rank: int) -> Iterator[tuple[list[Any], int]]:
            state = states[rank]
            for other in self._missing(state):
                states.setdefault(other["rank"], other)
                yield (
                    [rank, state["names"], state["words"], state["where"], other["rank"]],
                    other["rank"],
                )

        return sorted(step for _, step in circle_through(self._rank, following, _DEEPEST))

    def _missing(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states of ranks that wait elsewhere and have not entered a rank's call."""
        asked = [rank for rank in state["ranks"] if rank != state["rank"]]
        if state["other"] is not None:
            asked = [state["other"]]
        found = []
        for rank in asked[:_MOST_ASKED]:
            key = f"{self._base}/state/{rank}"
            if not self._store.check([key]):
                continue
            theirs = json.loads(bytes(self._store.get(key)))
            way = state["way"]
            if ">" in way:
                way += " recv" if state["words"].startswith("send") else " send"
            if theirs["turns"].get(way, 0) <= state["turn"]:
                found.append(theirs)
        return found


def check_argument(verify: str | None) -> None:
    """Raise SpecError unless `verify` is None or "order"."""
    if verify not in (None, "order"):
        raise SpecError(f"verify={verify!r}: expected None, or 'order'")


def follow(verify: str | None, grid: ObservedGrid) -> None:
    """Compares a grid's calls from now on, where that was asked for."""
    if verify == "order" and any(len(each.ranks) > 1 for each in grid.communicators):
        OrderCheck(grid)


def observe(trace: bool, verify: str | None, grid: ObservedGrid) -> None:
    """Begin to record and to compare a grid's calls, before its ranks say that they are ready."""
    recorder.follow(trace, grid)
    records = recorder.current()
    ring = records.ring.path if records is not None else None
    identity = f"{grid.identity}"
    announce(identity, grid.rank, torch_world.world_size(), ring)
    grid.before_destroy(lambda: withdraw(identity))
    grid.before_destroy(dump.follow(identity))
    remote.follow()
    follow(verify, grid)
