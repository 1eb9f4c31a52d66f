"""Ranks, a store and faults in virtual time: any order of operations, in milliseconds.

A rank is a generator of operations (`commgrid.rendezvous.op`). Each operation takes a while to get
to the store and a while to come back, which the seed draws; waiting costs nothing. A fault strikes
a rank at its k-th operation.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from commgrid.rendezvous.op import (
    Add,
    Cas,
    Drop,
    Get,
    Now,
    Op,
    Protocol,
    Put,
    StoreLostError,
    WaitKey,
)

ANSWER = 5.0  # seconds after which a rank gives an operation up
FAULTS = (
    "crash",  # the process ends before its operation reaches the store
    "crash after",  # it ends when the operation has taken effect
    "pause",  # it stands still for longer than a lease
    "long pause",  # it stands still until after the deadline
    "given up",  # no answer comes, and the operation never takes effect
    "given up, done",  # no answer comes, and the operation has taken effect
    "given up, later",  # no answer comes, and the operation takes effect much later
    "store gone",  # the store ends for all ranks
    "store stopped",  # the store is silent for all ranks
)
PAUSES = {"pause": 40.0, "long pause": 100.0}


class SimulatedStore:
    """Keys and values with the semantics of torch's stores."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.operations = 0

    def do(self, op: Op) -> Any:
        """Carry out an operation other than `WaitKey` and `Now`."""
        self.operations += 1
        values = self.values
        match op:
            case Get(keys):
                return tuple(values.get(key) for key in keys)
            case Put(key, value):
                values[key] = value
            case Add(key, by):
                values[key] = str(int(values.get(key, b"0")) + by).encode()
                return int(values[key])
            case Cas(key, old, new):
                if values.get(key, b"") == old:
                    values[key] = new
                return values.get(key, old)
            case Drop(keys):
                for key in keys:
                    values.pop(key, None)
        return None


@dataclass
class Fault:
    """A fault at the `at`-th operation of a process."""

    kind: str
    at: int


@dataclass(eq=False)
class Process:
    """One process as a rank."""

    rank: int
    protocol: Protocol[Any]
    fault: Fault | None = None
    issued: int = 0
    ended: bool = False
    crashed: bool = False
    unsure: bool = False  # of an operation that it has given up
    result: Any = None
    error: BaseException | None = None
    over_at: float = 0.0
    waits_for: str | None = None
    log: list[str] = field(default_factory=list)


class Simulation:
    """Processes at one store.

    Args:
        seed: draws how long operations take; None: all take the same time.
        store: of an earlier simulation, as a launcher keeps it over restarts.
    """

    def __init__(self, seed: int | None = None, store: SimulatedStore | None = None) -> None:
        self.store = store or SimulatedStore()
        self.now = 0.0
        self.lost = ""  # "store gone" or "store stopped"
        self.processes: list[Process] = []
        self._chance = None if seed is None else random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def start(
        self, rank: int, make: Callable[[float], Protocol[Any]], at: float = 0.0,
        fault: Fault | None = None,
    ) -> Process:  # fmt: skip
        """Start a process: `make` is given the time, and makes its protocol."""
        process = Process(rank, iter(()), fault)  # type: ignore[arg-type]
        self.processes.append(process)

        def begin() -> None:
            process.protocol = make(self.now)
            self._resume(process, None)

        self._after(at, begin)
        return process

    def run(self, until: float = 1e6) -> None:
        """Run all processes to their ends."""
        while self._events and self.now < until:
            self.now, _, action = heapq.heappop(self._events)
            action()

    # -- one process --------------------------------------------------------------------

    def _resume(self, process: Process, outcome: Any, error: BaseException | None = None) -> None:
        if process.crashed or process.ended:
            return
        try:
            if error is not None:
                op = process.protocol.throw(error)
            else:
                op = process.protocol.send(outcome)
        except StopIteration as over:
            process.ended, process.result, process.over_at = True, over.value, self.now
            return
        except Exception as raised:
            process.ended, process.error, process.over_at = True, raised, self.now
            return
        self._issue(process, op)

    def _issue(self, process: Process, op: Op) -> None:
        if isinstance(op, Now):
            self._resume(process, self.now)
            return
        process.issued += 1
        process.log.append(f"{self.now:8.3f} rank {process.rank}: {op}")
        fault = process.fault
        struck = fault.kind if fault is not None and fault.at == process.issued else ""
        if struck == "crash":
            process.crashed = True
            return
        if struck in ("store gone", "store stopped"):
            self.lost = struck
            for other in self.processes:
                if other.waits_for is not None:
                    other.waits_for = None
                    self._lose(other)
        if struck in PAUSES:
            self._after(PAUSES[struck], lambda: self._deliver(process, op))
        elif struck.startswith("given up"):
            process.unsure = True
            if struck != "given up" and not isinstance(op, WaitKey):
                delay = self._delay() if struck.endswith("done") else 37.0
                self._after(delay, lambda: self._do(op))
            self._after(
                ANSWER, lambda: self._resume(process, None, StoreLostError("silence", True))
            )
        else:
            self._after(self._delay(), lambda: self._deliver(process, op, struck == "crash after"))

    def _deliver(self, process: Process, op: Op, crashes: bool = False) -> None:
        """The operation reaches the store."""
        if process.crashed:
            return
        if self.lost:
            self._lose(process)
            return
        if crashes:
            process.crashed = True
        if isinstance(op, WaitKey):
            self._wait(process, op)
            return
        outcome = self._do(op)
        self._after(self._delay(), lambda: self._resume(process, outcome))

    def _do(self, op: Op) -> Any:
        outcome = self.store.do(op)
        written = {Put, Add, Cas} & {type(op)}
        if written:
            for process in self.processes:
                if process.waits_for is not None and process.waits_for in self.store.values:
                    self._wake(process, self.store.values[process.waits_for])
        return outcome

    def _wait(self, process: Process, op: WaitKey) -> None:
        self.store.operations += 1
        value = self.store.values.get(op.key)
        if value is not None or op.until <= self.now:
            self._after(self._delay(), lambda: self._resume(process, value))
            return
        process.waits_for, number = op.key, process.issued

        def time_is_up() -> None:
            if process.waits_for == op.key and process.issued == number:
                process.waits_for = None
                self._resume(process, None)

        self._after(op.until - self.now, time_is_up)

    def _wake(self, process: Process, value: bytes) -> None:
        process.waits_for = None
        self._after(self._delay(), lambda: self._resume(process, value))

    def _lose(self, process: Process) -> None:
        silent = self.lost == "store stopped"
        wait = ANSWER if silent else self._delay()
        lost = StoreLostError("silence" if silent else "closed by peer", silent)
        self._after(wait, lambda: self._resume(process, None, lost))

    def _delay(self) -> float:
        if self._chance is None:
            return 0.001
        return self._chance.choice((0.0001, 0.001, 0.001, 0.01, 0.2))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        tie = self._count if self._chance is None else self._chance.getrandbits(40)
        heapq.heappush(self._events, (self.now + seconds, (tie << 40) + self._count, action))

    def schedule(self) -> str:
        """Return the operations of all processes in the order of time."""
        lines = [line for process in self.processes for line in process.log]
        return "\n".join(sorted(lines))


def every_fault(
    ranks: int, make: Callable[[int, float], Protocol[Any]], starts: Sequence[float] | None = None
) -> Iterator[tuple[str, Process, Simulation]]:
    """Run a protocol of some ranks with each fault at every operation of every rank.

    Args:
        ranks: processes, ranks 0 to n - 1.
        make: makes the protocol of a rank, which begins at a time.
        starts: of each rank; None: all at 0.

    Yields:
        The fault, the process that it struck, and the run, in which all others have ended.
    """
    for kind in FAULTS:
        for victim in range(ranks):
            for k in count(1):
                found = Simulation()
                for rank in range(ranks):
                    strikes = Fault(kind, k) if rank == victim else None
                    at = 0.0 if starts is None else starts[rank]
                    found.start(rank, lambda now, r=rank: make(r, now), at, strikes)
                found.run()
                struck = found.processes[victim]
                if struck.issued < k:
                    break  # it was over before
                hanging = [p.rank for p in found.processes if not p.ended and not p.crashed]
                assert not hanging, f"{hanging}\n{found.schedule()}"
                yield kind, struck, found


def run_alone(protocol: Protocol[Any], store: SimulatedStore) -> Any:
    """Run a protocol of one process, which never has to wait, and return its result."""
    outcome: Any = None
    try:
        while True:
            op = protocol.send(outcome)
            outcome = 0.0 if isinstance(op, Now) else store.do(op)
    except StopIteration as over:
        return over.value
