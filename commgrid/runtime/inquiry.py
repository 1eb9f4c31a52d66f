"""Asking every rank what it has recorded, also while their main threads hang.

    rank 1: diagnose() ──► the store: request 3 ──► a thread of each rank ──► its last calls
    kill -USR1 ──► a thread of the rank ──► rank_00003.json, rank_00003.stacks

A process that records has one thread for it, which looks at the store once a second over a
connection of its own: one small question a second and rank, whatever the program does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from commgrid.errors import CommGridError
from commgrid.observe import trace_files
from commgrid.observe.diagnosis import PATIENCE
from commgrid.observe.diagnosis import diagnose as judge
from commgrid.observe.findings import Diagnosis
from commgrid.observe.traces import Trace
from commgrid.runtime import recorder, torch_world
from commgrid.runtime.patient import PatientStore
from commgrid.runtime.recorder import Recorder
from commgrid.runtime.roll import connection_of

LAST = 64
"""Calls of each communicator that a rank answers with, at most."""

MOST_BYTES = 1 << 17
"""Of an answer, once it is packed; a rank that has more leaves out its earlier calls."""

FOLDER = "commgrid_trace"
"""Where a signal has records written that COMMGRID_TRACE gives no folder for."""

_LOOK_SECONDS = 1.0
_ANSWERS_SECONDS = 3.0  # that an error waits for them
_SOON_SECONDS = 1.0  # in which the rank whose call timed out begins to ask
_STORE_SECONDS = 2.0  # in which the store answers, unless its server is stopped
_KEPT_SECONDS = 60.0  # until an answer that nobody has fetched is taken back
_ASKED = "commgrid/diagnose/asked"


def diagnose(timeout: float = 10.0, patience: float = PATIENCE) -> Diagnosis:
    """What is wrong among all ranks now, from what each has recorded; any rank may ask alone.

    Every rank records (`initialize(trace=True)` or COMMGRID_TRACE). Their threads answer, so they
    may hang. Of each communicator the last 64 calls count.

    Args:
        timeout: seconds to wait for answers; ranks that give none are named as missing.
        patience: seconds that a wait may last before it is worth a word.

    Returns:
        What was found, the first cause first; `str` of it says so in words.

    Raises:
        CommGridError: this process does not record.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize(trace=True)
        >>> print(commgrid.diagnose())
        nothing is wrong that the records of rank 0 show
        >>> commgrid.trace.stop()
        >>> commgrid.shutdown()
    """
    own = recorder.current()
    if own is None:
        raise CommGridError(
            "commgrid.diagnose: this process does not record its calls; "
            "commgrid.initialize(trace=True) or COMMGRID_TRACE=1 on every rank lets it"
        )
    found = [trace_files.parse(own.as_dict(LAST))]
    if torch_world.is_initialized() and torch_world.world_size() > 1:
        found += _others(own.rank, timeout)
    return judge(found, patience)


def _others(rank: int, timeout: float) -> list[Trace]:
    """What the other ranks answer in time."""
    found = []
    with suppress(RuntimeError):  # the store has gone with the rank that served it
        store = connection_of(torch_world.world_store())
        number = store.add(_ASKED, 1)
        waiting = [each for each in range(torch_world.world_size()) if each != rank]
        until = time.monotonic() + timeout
        while waiting:
            here = [each for each in waiting if store.check([_answer(number, each)])]
            for each in here:
                key = _answer(number, each)
                found.append(trace_files.parse(json.loads(zlib.decompress(bytes(store.get(key))))))
                store.delete_key(key)
            waiting = [each for each in waiting if each not in here]
            if not waiting or time.monotonic() > until:
                break
            time.sleep(0.1)
    return found


def _answer(number: int, rank: int) -> str:
    return f"commgrid/diagnose/{number}/{rank}"


def packed(own: Recorder) -> bytes:
    """A rank's last calls, within the bounds."""
    last = LAST
    while True:
        data = zlib.compress(json.dumps(own.as_dict(last)).encode(), 1)
        if len(data) <= MOST_BYTES or last <= 1:
            return data
        last //= 2


class Answering:
    """The thread that answers for one process.

    Args:
        own: what it has recorded.
        store: where it is asked.
    """

    def __init__(self, own: Recorder, store: Any) -> None:
        self.own, self.store = own, store
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._signalled = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        if self._signalled:
            # Python's own handlers wait until the main thread is out of torch's C++; this one
            # writes its stacks into our pipe at once.
            faulthandler.register(signal.SIGUSR1, file=self._writer, all_threads=True)
        self._left: list[tuple[str, float]] = []
        self._over = False
        self._thread = threading.Thread(target=self._run, name="commgrid answers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        if self._over:
            return
        self._over = True
        if self._signalled:
            faulthandler.unregister(signal.SIGUSR1)
        os.close(self._writer)  # which the thread sees
        self._thread.join(2 * _LOOK_SECONDS)

    def _run(self) -> None:
        answered: int | None = None
        store: Any = None
        try:
            while True:
                ready, _, _ = select.select([self._reader], [], [], _LOOK_SECONDS)
                if self._over:
                    break
                if ready:
                    self._write_down()
                with suppress(RuntimeError):  # of a store that ends with the world
                    if store is None:
                        store = connection_of(self.store)
                        answered = store.add(_ASKED, 0)
                    asked = store.add(_ASKED, 0)
                    if asked != answered:
                        answered = asked
                        self._answer(store, asked)
                    self._take_back(store)
        finally:
            os.close(self._reader)

    def _answer(self, store: Any, number: int) -> None:
        key = _answer(number, self.own.rank)
        store.set(key, packed(self.own))
        self._left.append((key, time.monotonic() + _KEPT_SECONDS))

    def _take_back(self, store: Any) -> None:
        while self._left and time.monotonic() > self._left[0][1]:
            store.delete_key(self._left.pop(0)[0])

    def _write_down(self) -> None:
        """After a signal: the records, and where each thread is."""
        time.sleep(0.05)  # until the stacks are all there
        stacks = os.read(self._reader, 1 << 16)
        folder = Path(folder_of_environment() or FOLDER)
        with suppress(CommGridError, OSError):
            path = self.own.save(folder)
            path.with_suffix(".stacks").write_bytes(stacks)
            print(f"commgrid: rank {self.own.rank} has written {path}", file=sys.stderr)


def folder_of_environment() -> str | None:
    """The folder that COMMGRID_TRACE names, if it does."""
    named = os.environ.get("COMMGRID_TRACE", "")
    return named if named not in ("", "0", "1") else None


_answering: list[Answering] = []  # one at most


def follow() -> None:
    """Answers from now on while this process records; otherwise not any more."""
    own = recorder.current()
    store = torch_world.world_store() if own and torch_world.is_initialized() else None
    if _answering and (own is not _answering[0].own or store is not _answering[0].store):
        stop()
    if own is not None and store is not None and not _answering:
        own.job = _job(store, own.job)
        _answering.append(Answering(own, store))


def _job(store: Any, known: str) -> str:
    """What the ranks of this world call their job, so that two jobs' traces are told apart."""
    with suppress(RuntimeError, ValueError):  # the store has gone with the rank that served it
        asked = known or uuid.uuid4().hex
        return bytes(store.compare_set("commgrid/trace/job", "", asked)).decode() or asked
    return known


def stop() -> None:
    """Answers no more."""
    if _answering:
        _answering.pop().stop()


def at_failure(identity: str, late: bool) -> Callable[[], str]:
    """After a peer did not answer, finds out what is wrong, beside what else is done then.

    The first rank whose call timed out finds it out, and the others take it from the store. The
    records are saved too, where COMMGRID_TRACE names a folder.

    Args:
        identity: of the grid.
        late: whether a call timed out; where a connection was closed only what others found counts.

    Returns:
        Waits for it and says it in words; "" where none records, or nothing is wrong.
    """
    own = recorder.current()
    if own is None:
        return lambda: ""
    own.paused = True  # what ends the grid now is no call of the program's
    said: list[str] = []
    thread = threading.Thread(
        target=lambda: said.append(_why(own, identity, late)), name="commgrid asks", daemon=True
    )
    thread.start()

    def result() -> str:
        # A store whose server is stopped meanwhile holds the thread for ever.
        thread.join(_SOON_SECONDS + 3 * _ANSWERS_SECONDS + _STORE_SECONDS)
        return "".join(said)

    return result


def _why(own: Recorder, identity: str, late: bool) -> str:
    """What the first rank whose call timed out finds, on every rank."""
    key = f"commgrid/failures/{identity}/why"
    with suppress(CommGridError, RuntimeError):
        folder = folder_of_environment()
        if folder is not None:
            own.save(Path(folder))
        store = connection_of(PatientStore(torch_world.world_store(), lambda: _STORE_SECONDS))
        if late and store.add(f"{key}/asked", 1) == 1:
            found = diagnose(_ANSWERS_SECONDS, patience=0.5)
            store.set(key, f"{found}" if found else "")
        # gloo closes the connections of a call that times out before its rank can say so.
        soon = time.monotonic() + _SOON_SECONDS
        while store.add(f"{key}/asked", 0) == 0:
            if time.monotonic() > soon:
                return ""
            time.sleep(0.05)
        until = time.monotonic() + 2 * _ANSWERS_SECONDS
        while time.monotonic() < until:
            if store.check([key]):
                return bytes(store.get(key)).decode()
            time.sleep(0.05)
    return ""
