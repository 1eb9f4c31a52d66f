"""Gate: a store at which a communicator's members meet right before NCCL connects them.

ProcessGroupNCCL asks its store for a communicator's id just before it connects, whether the call
comes from Python, from DistributedDataParallel's C++ or from compiled code. The gate is this store.

    all_reduce ─► ProcessGroupNCCL ─► store.get("…/0") ─► gate: have all members come?
                                                            yes ─► the id ─► NCCL connects
                                                            no  ─► PeerTimeoutError names them

The first member of a communicator writes the id, or several do in large groups, and the others read
it. torch passes an error on
the first member through unchanged; on the others it wraps the error into a DistBackendError.

| key, after `<group>//<device>//` | backend | members that meet |
|---|---|---|
| `<n>` | first | all |
| `<a>:<b>` | first | two, for unbatched messages between them |
| `UniqueNCCLID:<i>` | first, in groups of many ranks | all |
| `<name>/nccl_storekey_<n>`, `…_<n>_<i>` | second | all |
| `<name>/p2p-<a>-<b>-<n>/nccl_storekey_<n>` | second, lazy | two |
"""

from __future__ import annotations

import _thread
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from commgrid.errors import CommGridError, PeerFailedError, PeerTimeoutError
from commgrid.layout.rank_text import unpack
from commgrid.rendezvous.barriers import Barriers
from commgrid.rendezvous.op import Protocol, StoreLostError, WaitKey, single
from commgrid.rendezvous.round import Decision, is_good
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.driver import StoreDriver
from commgrid.store.search import first_line

_ID = re.compile(
    r"(?:\w+//)?(?:(\d+)|((\d+):(\d+))|(UniqueNCCLID:)\d+"
    r"|(.*?(?:/p2p-(\d+)-(\d+)-\d+)?/?nccl_storekey_\d+)(?:_\d+)?)$"
)
_DUMP = "exception_dump"
"""Key with which torch's watchdog asks all ranks to dump and end; the gate drops it."""


@dataclass(frozen=True)
class Hearing:
    """Callbacks of a gate to the failure detector.

    Args:
        where: returns where absent ranks are, such as `it is at train.py:31 in step`; "": unknown.
        told: called on each member with the failure that its call raises, and whether the lost rank
            may be alive.
    """

    where: Callable[[Sequence[int]], str] = lambda ranks: ""
    told: Callable[[str, bool], object] = lambda text, late: None


@dataclass(frozen=True)
class _Meeting:
    """One connection that is being made.

    Args:
        kind: the part of torch's keys that its ids share.
        barriers: of the ranks that meet, which pass one.
        writer_reads: whether the member that writes an id reads it as well.
        ids: the keys asked for so far.
    """

    kind: str
    barriers: Barriers
    writer_reads: bool
    ids: list[str] = field(default_factory=list)


class Gate(Store):
    """The store that one communicator of NCCL's is given.

    Keep a Python reference as long as the group lives: torch's C++ reference does not keep the
    Python object alive.

    Args:
        store: the one it forwards to.
        group: name under which the members meet, which torch's keys begin with.
        about: the communicator's name in messages.
        me: this process's rank.
        ranks: the members' global ranks, in the group's order.
        timeout: seconds to wait for members.
        startup: seconds from now for the first meeting, if the caller connects it at once; None:
            `timeout`, as for any other.
        hearing: callbacks to the failure detector.
    """

    def __init__(
        self,
        store: Any,
        group: str,
        about: str,
        me: int,
        ranks: Sequence[int],
        timeout: float,
        startup: float | None = None,
        hearing: Hearing | None = None,
    ) -> None:
        super().__init__()
        self._store, self._group, self._about = store, group, about
        self._me, self._ranks, self._timeout = me, ranks, timeout
        self._until = None if startup is None else time.monotonic() + startup
        self._hearing = hearing or Hearing()
        self._meetings: dict[str, _Meeting] = {}
        self._under_way: list[Barriers] = []
        self._failed: tuple[str, bool] | None = None
        self.has_begun = False
        """Whether NCCL has an id, by which it connects."""

    @property
    def waits(self) -> bool:
        """Whether a thread of this rank waits for members."""
        return bool(self._under_way)

    def end(self, text: str, late: bool) -> None:
        """End all waits, here and of the other members, and refuse later ones.

        Args:
            text: which rank is gone.
            late: whether it may be alive.
        """
        self._failed = self._failed or (text, late)
        for barriers in list(self._under_way):
            with suppress(StoreLostError):
                self._run(barriers.interrupt(text, late))

    def close(self) -> None:
        """Delete what is left at the store, once the group is destroyed."""
        for meeting in list(self._meetings.values()):
            self._leave(meeting)

    # -- what torch calls -----------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        if key.endswith(_DUMP):
            return
        meeting = self._meet(key)
        self._store.set(key, value)
        self.has_begun |= meeting is not None
        if meeting is not None and not meeting.writer_reads:
            self._leave(meeting)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = bytes(self._store.get(key))
        self._has_read(key)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        values = [bytes(each) for each in self._store.multi_get(keys)]
        self._has_read(*keys)
        return values

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        try:
            for key in keys:
                if self._meet(key) is not None:
                    self._await(key)
                elif timeout is None:
                    self._store.wait([key])
                else:
                    self._store.wait([key], timeout)
        except KeyboardInterrupt:
            _thread.interrupt_main()  # torch may put an error of its own round this one
            raise

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._store.compare_set(key, expected, desired))

    def append(self, key: str, value: Any) -> None:
        self._store.append(key, value)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    # -- meeting --------------------------------------------------------------------------

    def _meet(self, key: str) -> _Meeting | None:
        """Meet the members that connect by an id; None if the key is that of no id."""
        found = _ID.match(key.removeprefix(f"{self._group}//"))
        if found is None:
            return None
        one, pair, low, high, some, second, lower, upper = found.groups()
        kind = one or pair or some or second
        meeting = self._meetings.get(kind)
        if meeting is None:
            two = [int(each) for each in (low or lower, high or upper) if each is not None]
            ranks = [self._ranks[each] for each in two] or list(self._ranks)
            barriers = Barriers(f"{self._group}/gate/{kind}", self._me, ranks)
            self._pass(barriers)
            meeting = self._meetings[kind] = _Meeting(kind, barriers, bool(some or second))
        if key not in meeting.ids:
            meeting.ids.append(key)
        return meeting

    def _pass(self, barriers: Barriers) -> None:
        """Wait until all ranks have come.

        Raises:
            PeerTimeoutError: a member did not come.
            PeerFailedError: a rank is gone.
        """
        until, self._until = self._until or time.monotonic() + self._timeout, None
        call = f"the first call on {self._about}"
        self._under_way.append(barriers)
        try:
            self._check()  # `end` may have run before this barrier was listed
            coming = barriers.come("come", until, f"did not come to {call}", self._hearing.where)
            decision: Decision = self._run(coming)
        except StoreLostError as error:
            raise self._store_lost(error) from error
        finally:
            self._under_way.remove(barriers)
        if is_good(decision):
            return
        text, late = str(decision["message"]), decision["kind"] == "absent"
        if self._me in unpack(decision.get("absent", "")):
            text = f"rank {self._me} came too late to {call}; the others had given up waiting"
        raise self._error(text, late)

    def _await(self, key: str) -> None:
        """Wait for an id, which a member has come to write."""
        until = time.monotonic() + self._timeout
        try:
            while True:
                look = WaitKey(key, min(until, time.monotonic() + timeouts().beat))
                if self._run(single(look)) is not None:
                    return
                self._check()
                if time.monotonic() > until:
                    raise self._error(
                        f"all members came to the first call on {self._about}, and the first of "
                        f"them did not write the id to connect by within {self._timeout:.3g} s; "
                        "has it ended?", True
                    )  # fmt: skip
        except StoreLostError as error:
            raise self._store_lost(error) from error

    def _store_lost(self, error: StoreLostError) -> CommGridError:
        return self._error(
            f"the store ended or did not answer before the first call on {self._about} "
            f"({first_line(error)}); has the process that serves it ended?", True
        )  # fmt: skip

    def _check(self) -> None:
        if self._failed is not None:
            raise self._error(*self._failed)

    def _error(self, text: str, late: bool) -> CommGridError:
        """Tell the detector of a failure, and return the error for it."""
        self._failed = self._failed or (text, late)
        self._hearing.told(text, late)
        return PeerTimeoutError(text) if late else PeerFailedError(text)

    def _has_read(self, *keys: str) -> None:
        for meeting in list(self._meetings.values()):
            if set(keys) & set(meeting.ids):
                self.has_begun = True
                self._leave(meeting)

    def _leave(self, meeting: _Meeting) -> None:
        """Leave a meeting; the last member to do so deletes the ids."""
        self._meetings.pop(meeting.kind, None)
        with suppress(StoreLostError):  # its keys are lost with it
            self._run(meeting.barriers.close(*meeting.ids))

    def _run(self, protocol: Protocol[Any]) -> Any:
        driver = StoreDriver(self._store, len(self._ranks))
        try:
            return driver.run(protocol)
        finally:
            driver.close()
