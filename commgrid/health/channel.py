"""Connections between the processes of a grid, by which they hear at once that one of them is gone.

Every rank is linked with the ranks 1, 2, 4, 8, … places further on, round the grid: with two times
log2 of all ranks, and from any rank to any other it takes at most log2 of them steps. A process
that ends closes its links. But a closed link is not an end: a link that is closed on purpose is
announced (`bye`, `dropped`), and after any other the neighbour tries to connect again, which only
an ended process refuses. A process that is stopped, or whose host is gone, is silent.
A message goes from neighbour to neighbour to all ranks.

    8 ranks: 0 ── 1, 2, 4          rank 5 killed ──► 1, 3, 4, 6, 7 see it ──► 0 and 2 hear of it

The store is asked for addresses once, and never again.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4
from weakref import WeakSet

from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.hosts import listening, own_host

_LONGEST_LINE = 1 << 20
_log = logging.getLogger("commgrid")

Message = dict[str, Any]
_OPEN: WeakSet[ControlChannel] = WeakSet()


def _is_forked() -> None:
    for each in list(_OPEN):
        each.let_go()


os.register_at_fork(after_in_child=_is_forked)


def neighbours_of(place: int, count: int) -> list[int]:
    """Places that one connects to; as many connect to it.

    >>> neighbours_of(6, 8), neighbours_of(0, 3), neighbours_of(0, 1)
    ([7, 0, 2], [1, 2], [])
    """
    steps = (1 << power for power in range(count.bit_length()))
    return list(dict.fromkeys((place + step) % count for step in steps if step < count))


@dataclass(eq=False)
class _Link:
    """One connection; `rank` is -1 until the other side has said who it is."""

    connection: socket.socket
    rank: int
    heard: float
    address: str = ""
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)


class ControlChannel:
    """This process's connections with its neighbours, and the thread that reads them.

    Args:
        me: this rank.
        ranks: of the grid, by place.
        address: of this host, at which others reach it.
        silent_after: seconds without a sign of life until a neighbour counts as silent.
        hear: called with each message of another rank.
        lost: called with a neighbour's rank and how it was lost: `"ended"`, its host refuses
            connections to it; `"unreachable"`, its link has closed and no other can be made;
            `"silent"`.
        look: is called every now and then.

    Attributes:
        silent_after: may be changed at any time.
    """

    def __init__(
        self,
        me: int,
        ranks: range | tuple[int, ...],
        address: str,
        silent_after: float,
        *,
        hear: Callable[[Message], object],
        lost: Callable[[int, str], object],
        look: Callable[[], object],
    ) -> None:
        self._me, self._ranks, self._secret = me, ranks, ""
        self.silent_after = silent_after
        self._hear, self._lost, self._look = _logged(hear), _logged(lost), _logged(look)
        self._listener = listening(address, "initialize(watch=False)")
        self._listener.setblocking(False)
        self._host, port = self._listener.getsockname()[:2]
        self.address = f"{self._host} {port} {own_host()}"
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._links: list[_Link] = []
        self._said: list[Message] = []  # by other threads, to be sent by ours
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="commgrid links", daemon=True)
        _OPEN.add(self)

    def neighbours(self) -> list[int]:
        """The ranks that this one connects to."""
        place = self._ranks.index(self._me)
        return [self._ranks[each] for each in neighbours_of(place, len(self._ranks))]

    def connect(self, addresses: Mapping[int, str], secret: str) -> None:
        """Connect to the neighbours, and begin to listen; log a neighbour that cannot be reached.

        On this host no firewall is between: a refused connection there means an ended process.

        Args:
            addresses: of each of `neighbours`.
            secret: what only the grid's processes know, to tell other programs' connections apart.
        """
        self._secret, ended = secret, []
        for rank, address in addresses.items():
            host, port, _ = address.split(" ", 2)
            try:
                made = socket.create_connection((host, int(port)), timeouts().answer)
                made.sendall(self._line(self._hello()))
            except OSError as error:
                if isinstance(error, ConnectionRefusedError) and self._is_here(address):
                    ended.append(rank)
                    continue
                _log.warning(
                    "rank %d cannot watch rank %d at %s: %s; it has ended, or if the two hosts "
                    "cannot reach each other on any port, initialize(watch=False)",
                    self._me, rank, address, error,
                )  # fmt: skip
                continue
            self._take(made, rank, address)
        for waiting in (self._listener, self._bell):
            self._selector.register(waiting, selectors.EVENT_READ)
        self._thread.start()
        for rank in ended:
            self._lost(rank, "ended")

    def tell(self, message: Message) -> None:
        """Tells all ranks of the grid; returns at once."""
        said = {**message, "id": uuid4().hex, "by": self._me}
        with self._lock:
            self._known.add(said["id"])
            self._said.append(said)
        self._ring()

    def close(self) -> None:
        """Says goodbye to the neighbours, who will not miss this rank."""
        if self._closing:
            return
        self._closing = True
        if self._thread.is_alive():
            self._ring()
            if threading.current_thread() is not self._thread:
                self._thread.join(timeouts().answer)
        else:
            self._release()

    def let_go(self) -> None:
        """Close the sockets in a forked process, in which they would outlive this rank."""
        self._closing = True
        self._release()

    # -- the thread's part --------------------------------------------------------------

    def _run(self) -> None:
        now = last = time.monotonic()
        while not self._closing:
            pause = self._interval() / 2
            events, before = self._selector.select(pause), now
            now = time.monotonic()
            # This thread could hear nothing while it, its process or its host stood still.
            stood = max(now - before - pause, 0.0)
            for link in self._all():
                link.heard += stood
            for key, _ in events:
                if key.fileobj is self._bell:
                    with suppress(BlockingIOError):
                        self._bell.recv(4096)
                elif key.fileobj is self._listener:
                    with suppress(OSError):
                        self._take(self._listener.accept()[0], -1)
                else:
                    self._read(key.data, now)
            self._send_what_was_said()
            last = self._beat(now, last)
        self._send_what_was_said()
        self._say_goodbye()
        self._release()

    def _say_goodbye(self) -> None:
        """Tells the neighbours, and reads on until they close too: a connection that is closed
        with something unread takes with it what it was told last."""
        for link in self._all():
            self._send(link, {"kind": "bye"})
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + timeouts().leave
        while self._all() and (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if isinstance(key.data, _Link):
                    with suppress(BlockingIOError):
                        if not self._received(key.data):
                            self._drop(key.data)
                elif key.fileobj is self._listener:
                    with suppress(OSError):
                        self._listener.accept()[0].close()
                else:
                    with suppress(BlockingIOError):
                        self._bell.recv(4096)

    @staticmethod
    def _received(link: _Link) -> bytes:
        """Return the bytes that have arrived; empty if the link is closed."""
        try:
            return link.connection.recv(1 << 16)
        except BlockingIOError:
            raise
        except OSError:
            return b""

    def _interval(self) -> float:
        """Seconds between two signs of life, of which a neighbour may miss some."""
        return min(timeouts().beat, self.silent_after / 4)

    def _beat(self, now: float, last: float) -> float:
        """Once in a while: says that this rank is there, and sees who is not."""
        if now - last < self._interval():
            return last
        for link in self._all():
            self._send(link, {"kind": "beat"})
            if now - link.heard > self.silent_after:
                self._send(link, {"kind": "dropped", "seconds": self.silent_after})
                self._drop(link)
                self._lost(link.rank, "silent")
        for link in list(self._links):
            if link.rank < 0 and now - link.heard > timeouts().silent / 2:
                self._drop(link)
        self._look()
        return now

    def _hello(self) -> Message:
        return {"kind": "hello", "secret": self._secret, "by": self._me, "at": self.address}

    def _is_here(self, address: str) -> bool:
        """Whether an address is on this host. On another one, a loopback address may be equal."""
        host, _, name = address.split(" ", 2)
        return host == self._host and name == own_host()

    def _again(self, link: _Link) -> None:
        """Connect again to a neighbour whose link has closed, or report how it is lost."""
        host, port, _ = link.address.split(" ", 2)
        until, how = time.monotonic() + timeouts().beat, "unreachable"
        while time.monotonic() < until:
            made = None
            try:
                made = socket.create_connection((host, int(port)), timeouts().beat)
                made.sendall(self._line(self._hello()))
            except ConnectionRefusedError:
                how = "ended" if self._is_here(link.address) else "unreachable"
                break
            except (ConnectionResetError, BrokenPipeError):  # it is ending just now
                if made is not None:
                    made.close()
                time.sleep(timeouts().beat / 20)
            except OSError:
                break
            else:
                self._take(made, link.rank, link.address)
                return
        self._lost(link.rank, how)

    def _take(self, made: socket.socket, rank: int, address: str = "") -> None:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(made, rank, time.monotonic(), address)
        self._selector.register(made, selectors.EVENT_READ, link)
        self._links.append(link)

    def _read(self, link: _Link, now: float) -> None:
        try:
            got = self._received(link)
        except BlockingIOError:
            return
        if not got:
            known = link.rank >= 0
            self._drop(link)
            if known:
                self._again(link)
            return
        link.heard = now
        link.inbox += got
        while (end := link.inbox.find(b"\n")) >= 0:
            line = bytes(link.inbox[:end])
            del link.inbox[: end + 1]
            if not self._obey(link, line):
                self._drop(link)
                return
        if len(link.inbox) > _LONGEST_LINE:
            self._drop(link)

    def _obey(self, link: _Link, line: bytes) -> bool:
        """Handle a line of a neighbour; return whether the link stays open."""
        try:
            message = json.loads(line)
            kind = message["kind"]
        except (ValueError, KeyError, TypeError):
            return False  # no program of ours
        if link.rank < 0:
            if kind != "hello" or message.get("secret") != self._secret:
                return False
            link.rank, link.address = int(message["by"]), str(message["at"])
        elif kind == "bye":
            return False
        elif kind == "dropped":
            # This process stood still, and the others go on without it. They live.
            text = (
                f"rank {self._me} was stopped, or its host was, for over "
                f"{float(message['seconds']):.3g} s, and rank {link.rank} went on without it"
            )
            self._hear({"kind": "failed", "text": text, "late": True})
            return False
        elif kind != "beat" and message.get("id") not in self._known:
            self._known.add(message["id"])
            self._pass_on(message, link)
            self._hear(message)
        return True

    def _send_what_was_said(self) -> None:
        with self._lock:
            said, self._said = self._said, []
        for message in said:
            self._pass_on(message, None)

    def _pass_on(self, message: Message, by: _Link | None) -> None:
        for link in self._all():
            if link is not by:
                self._send(link, message)

    def _send(self, link: _Link, message: Message) -> None:
        """Send as much as the connection takes; the rest goes with the next message."""
        link.outbox += self._line(message)
        with suppress(OSError):
            sent = link.connection.send(link.outbox)
            del link.outbox[:sent]
        if len(link.outbox) > _LONGEST_LINE:  # a neighbour that reads nothing; it will be silent
            self._drop(link)

    def _all(self) -> list[_Link]:
        """Those whose other side has said who it is."""
        return [link for link in self._links if link.rank >= 0]

    def _drop(self, link: _Link) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.connection)
        link.connection.close()
        if link in self._links:
            self._links.remove(link)

    def _release(self) -> None:
        for link in self._links:
            link.connection.close()
        for each in (self._listener, self._bell, self._ringer, self._selector):
            each.close()
        self._links.clear()

    def _ring(self) -> None:
        with suppress(OSError):  # full: it will be heard anyway
            self._ringer.send(b".")

    @staticmethod
    def _line(message: Message) -> bytes:
        return json.dumps(message).encode() + b"\n"


def _logged(callback: Callable[..., object]) -> Callable[..., object]:
    """A callback whose exceptions are logged, and do not end the thread that calls it."""

    def call(*given: object) -> None:
        try:
            callback(*given)
        except Exception:
            _log.exception("a callback of the links between ranks failed; they go on")

    return call
