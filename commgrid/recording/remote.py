"""Ask every rank for its records, also while main threads hang.

    rank 1: diagnose() ──► the store: question 3 ──► a thread of each rank ──► its last calls

Each recording process has a thread for it, which looks for questions at the store, over a
connection of its own (`commgrid.rendezvous.remote_questions`).
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from commgrid.call_analysis.diagnosis import PATIENCE
from commgrid.call_analysis.diagnosis import diagnose as judge
from commgrid.call_analysis.finding import Diagnosis
from commgrid.call_records import files as trace_files
from commgrid.errors import CommGridError
from commgrid.recording import recorder
from commgrid.recording.recorder import Recorder
from commgrid.rendezvous.op import Cas, StoreLostError, single
from commgrid.rendezvous.remote_questions import Questions, first, hear, tell
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import Asked, PatientStore
from commgrid.store.driver import StoreDriver
from commgrid.store.key_wait import connection_of
from commgrid.torch_compat import world as torch_world

_log = logging.getLogger("commgrid")

LAST = 64
"""Calls of each communicator that a rank answers with, at most."""

MOST_BYTES = 1 << 17
"""Largest packed answer; earlier calls are left out to fit."""


def diagnose(timeout: float = 10.0, patience: float = PATIENCE) -> Diagnosis:
    """Find out what is wrong among all ranks now, from their records. Any rank may call it alone.

    Every rank records (`initialize(trace=True)` or COMMGRID_TRACE). Their threads answer, so they
    may hang. Of each communicator the last 64 calls count.

    Args:
        timeout: seconds to wait for answers; ranks that give none are named as missing.
        patience: shorter waits, in seconds, are not reported.

    Returns:
        What was found, the first cause first; `str` of it says so in words.

    Raises:
        CommGridError: this process does not record.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize(trace=True)
        >>> print(commgrid.diagnose())
        no fault found in the records of rank 0
        >>> commgrid.trace.stop()
        >>> commgrid.shutdown()
    """
    own = recorder.current()
    if own is None:
        raise CommGridError(
            "commgrid.diagnose: this process does not record its calls; "
            "commgrid.initialize(trace=True) or COMMGRID_TRACE=1 on every rank lets it"
        )
    found = [own.contents(LAST)]
    if torch_world.is_initialized() and torch_world.world_size() > 1:
        found += others(own.rank, timeout)
    return judge(trace_files.parse(found), patience, timeout)


def others(rank: int, timeout: float) -> list[bytes]:
    """Return the records that other ranks send in time."""
    # The store has gone with the rank that served it.
    with suppress(RuntimeError), closing(_own_driver(torch_world.world_store())) as driver:
        asking = Questions(rank, range(torch_world.world_size()))
        return [zlib.decompress(each) for each in driver.run(asking.ask(timeout)).values()]
    return []


def _own_driver(store: Any) -> StoreDriver:
    """A driver on a connection of its own; if the store's server is stopped, that is an error."""
    return StoreDriver(connection_of(PatientStore(store)), torch_world.world_size())


def packed(own: Recorder) -> bytes:
    """Return a rank's last calls, in at most `MOST_BYTES`."""
    last = LAST
    while True:
        data = zlib.compress(own.contents(last), 1)
        if len(data) <= MOST_BYTES or last < 1:
            return data
        last //= 2


class Answering:
    """The thread that answers questions for one process.

    Args:
        own: its records.
        store: where questions are asked.
    """

    def __init__(self, own: Recorder, store: Any) -> None:
        self.own, self.store = own, store
        self._world = range(torch_world.world_size())
        self._questions = Questions(own.rank, self._world)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commgrid answers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._ended.set()
        self._thread.join(2 * timeouts().beat)

    def _run(self) -> None:
        driver: StoreDriver | None = None
        until = 0.0
        try:
            while not self._ended.wait(timeouts().beat):
                self.own.ring.touch()
                if len(self._world) == 1:
                    continue
                try:
                    if driver is None:
                        driver = _own_driver(self.store)
                        driver.run(self._questions.begin())
                    is_asked = driver.has_come(self._questions.next_key)
                    if is_asked or time.monotonic() > until:
                        driver.run(self._questions.answer(lambda: packed(self.own)))
                        until = time.monotonic() + timeouts().silent
                except RuntimeError:
                    pass  # the store ended together with torch.distributed
                except Exception:
                    _log.exception("rank %d cannot answer a question", self.own.rank)
        finally:
            if driver is not None:
                driver.close()


_answering: list[Answering] = []  # one at most


def follow() -> None:
    """Answer questions while this process records; stop if it does not."""
    own = recorder.current()
    store = torch_world.world_store() if own and torch_world.is_initialized() else None
    if _answering and (own is not _answering[0].own or store is not _answering[0].store):
        stop()
    if own is not None and store is not None and not _answering:
        own.set_job(_job(store, own.job))
        atexit.unregister(stop)
        atexit.register(stop)  # its thread must not be within torch when Python is taken down
        _answering.append(Answering(own, store))


def _job(store: Any, known: str) -> str:
    """Return the job's name, the same on all ranks, which tells the traces of two jobs apart."""
    proposed = known or uuid.uuid4().hex
    with suppress(StoreLostError):  # with the rank that served it
        driver = StoreDriver(store, torch_world.world_size())
        name: bytes = driver.run(single(Cas("commgrid/trace/job", b"", proposed.encode())))
        return name.decode()
    return known


def stop() -> None:
    """Stop answering."""
    if _answering:
        _answering.pop().stop()


def at_failure(identity: str, late: bool) -> Callable[[], str]:
    """Begin to find out why a peer did not answer, on a thread.

    The first rank whose call timed out asks all ranks, and the others read its result at the store.
    Args:
        identity: of the grid.
        late: whether a call timed out. If a connection was closed, this rank does not ask.

    Returns:
        A function that waits for the result and returns it in words; "" if this process does not
        record, or nothing is wrong.
    """
    own = recorder.current()
    if own is None:
        return lambda: ""
    own.paused = True  # calls that end the grid are not the program's
    asked = Asked(lambda: _why(own, identity, late))

    def result() -> str:
        # A store whose server is stopped meanwhile holds the thread for ever.
        limit = timeouts().settle + 3 * timeouts().leave + timeouts().answer
        return str(asked.answer()) if asked.is_over(limit) else ""

    return result


def _why(own: Recorder, identity: str, late: bool) -> str:
    """Return the reason that the first rank whose call timed out has found, on every rank."""
    at = f"commgrid/failures/{identity}/why"
    # The failure itself is the error to raise.
    with suppress(Exception), closing(_own_driver(torch_world.world_store())) as driver:
        if late and driver.run(first(at)):
            found = diagnose(timeouts().leave, patience=timeouts().beat)
            driver.run(tell(at, f"{found}" if found else ""))
        # gloo closes the connections of a call that times out before its rank can say so.
        return driver.run(hear(at, timeouts().settle, 2 * timeouts().leave))
    return ""
