"""What agreeing costs a store at 1,024 to 16,384 ranks, and how soon it is said who is missing.

    python tests/benchmarks/agreement.py --json
    python tests/benchmarks/agreement.py --worlds 1024

A real TCPStore; ranks are threads of four processes, which share a process's connection, and its
waits for one key. In the good case all of them compare, create nothing and are ready: calls and
bytes a rank. Then some never come, or half of them hold another spec: seconds from the deadline
(or, where all have come, from the last arrival) to the verdict and to the last rank's error, which
must name the right ranks; bytes that one rank reads at most, and calls and bytes in all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

sys.path.insert(0, str(Path(__file__).parents[2]))

from commgrid import GridSpec
from commgrid.errors import CommGridError, GridMismatchError, PeerTimeoutError
from commgrid.layout.rank_text import describe_ranks
from commgrid.runtime.startup_agreement import Rendezvous
from tests.benchmarks.report import Row, compare, main

PROCESSES = 4
CASES = ("good", "1 missing", "3 missing", "200 missing", "the first missing", "half differ")
SPEC = {"tp": 8, "pp": 4, "cp": 2, "ep": 8, "etp": 1}


class Counting:
    """A store, and what one rank has asked of it and read from it."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls, self.read = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls += 1
            found = getattr(self.store, name)(*args)
            self.read += len(found) if isinstance(found, bytes) else 8
            return found

        return call


class Shared:
    """The waits of a process: one connection and thread for each key, however many wait."""

    def __init__(self, store: Any) -> None:
        self.store, self.lock = store, threading.Lock()
        self.waits: dict[str, threading.Event] = {}
        self.found: dict[str, bytes] = {}

    def event(self, key: str) -> threading.Event:
        with self.lock:
            if key not in self.waits:
                self.waits[key] = threading.Event()
                threading.Thread(target=self._wait, args=(key,), daemon=True).start()
            return self.waits[key]

    def _wait(self, key: str) -> None:
        store = self.store.clone()
        store.set_timeout(timedelta(seconds=600))
        self.found[key] = store.get(key)
        self.waits[key].set()


class SharedLine:
    """What a Rendezvous needs of a line, over the waits of its process."""

    def __init__(self, counting: Counting, shared: Shared) -> None:
        self._counting, self._shared = counting, shared

    def within(self, key: str, seconds: float) -> bytes | None:
        self._counting.calls += 2  # a look, and the wait
        if not self._shared.event(key).wait(max(seconds, 0.0)):
            return None
        found = self._shared.found[key]
        self._counting.read += len(found)
        return found

    def close(self) -> None:
        """Nothing: the process's waits serve its other ranks too."""


def patience(world: int) -> float:
    """Seconds in which all ranks can come on two cores: some 1 ms for each."""
    return 3.0 + world / 400


def absent_of(case: str, world: int) -> list[int]:
    if case == "the first missing":
        return [0]
    count = int(case.split()[0]) if case.endswith("missing") else 0
    return sorted(random.Random(4).sample(range(1, world), count))


def one_rank(
    rank: int, world: int, case: str, store: Any, shared: Shared, deadline: float
) -> tuple[int, int, float, str]:
    """Calls, bytes read, when it was over, and what it raised."""
    counting = Counting(store)
    spec = GridSpec.build(**SPEC, dp=-1 if case != "half differ" or rank % 2 else 1).to_dict()
    said = ""
    try:
        made = Rendezvous(
            counting, name="grid", rank=rank, ranks=range(world), document={"spec": spec},
            deadline=deadline, line=SharedLine(counting, shared),  # type: ignore[arg-type]
        )  # fmt: skip
        made.meet()
        made.meet()
    except CommGridError as error:
        said = f"{type(error).__name__}: {error}"
    return counting.calls, counting.read, time.monotonic(), said


def play(
    ranks: Sequence[int], world: int, case: str, port: int, started: Any, results: Any
) -> None:
    """One process: a thread for each of its ranks."""
    threading.stack_size(256 * 1024)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    shared = Shared(store)
    found: list[Any] = [None] * len(ranks)
    arrived = [0.0] * len(ranks)

    started.wait()
    deadline = time.monotonic() + patience(world)

    def run(index: int) -> None:
        arrived[index] = time.monotonic()
        found[index] = one_rank(ranks[index], world, case, store, shared, deadline)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((found, max(arrived), deadline))


def play_all(world: int, case: str) -> dict[str, float]:
    """A case among all processes; what it took."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    absent = absent_of(case, world)
    context = multiprocessing.get_context("spawn")
    results, started = context.Queue(), context.Barrier(PROCESSES)
    present = [rank for rank in range(world) if rank not in set(absent)]
    workers = [
        context.Process(
            target=play, args=(present[i::PROCESSES], world, case, server.port, started, results)
        )
        for i in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    parts = [results.get(timeout=300) for _ in workers]
    for worker in workers:
        worker.join()
    ranks = [rank for part, *_ in parts for rank in part]
    check(case, absent, {said for *_, said in ranks})
    last_arrival = max(arrived for _, arrived, _ in parts)
    deadline = min(limit for *_, limit in parts)
    assert last_arrival < deadline, "this machine is too slow for so many ranks"
    since = last_arrival if case in ("good", "half differ") else deadline
    return {
        "calls a rank": sum(calls for calls, *_ in ranks) / len(ranks),
        "calls of most ranks, at most": sorted(calls for calls, *_ in ranks)[-1 - world // 16],
        "calls of one rank, at most": max(calls for calls, *_ in ranks),
        "bytes read by one rank, at most": max(read for _, read, *_ in ranks),
        "calls in all": sum(calls for calls, *_ in ranks),
        "bytes read in all": sum(read for _, read, *_ in ranks),
        "first rank is told after": min(over for _, _, over, _ in ranks) - since,
        "last rank is told after": max(over for _, _, over, _ in ranks) - since,
    }


def check(case: str, absent: list[int], said: set[str]) -> None:
    """Every rank says the same, and it is right."""
    assert len(said) == 1, sorted(said)[:3]
    (text,) = said
    if case == "good":
        assert text == "", text
    elif case == "half differ":
        assert text.startswith(GridMismatchError.__name__), text
        assert "-1 on ranks 1, 3, 5" in text, text
    else:
        assert text.startswith(PeerTimeoutError.__name__), text
        assert f"{describe_ranks(absent)} did not arrive" in text, text


UNITS = {"first rank is told after": "s", "last rank is told after": "s"}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    for world in args.worlds:
        for case in args.cases:
            found = [play_all(world, case) for _ in range(args.repeats)]
            for metric in found[0]:
                unit = UNITS.get(metric, "bytes" if "bytes" in metric else "calls")
                column = [row[metric] for row in found]
                yield compare(f"{world:,} ranks, {case}", metric, unit, "(no peer)", column, [])


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--worlds", {"type": int, "nargs": "*", "default": [1024, 4096, 16_384],
                      "help": "numbers of ranks"}),
        ("--cases", {"nargs": "*", "default": list(CASES), "choices": CASES,
                     "help": "what happens"}),
        ("--repeats", {"type": int, "default": 1, "help": "of each case (default 1)"}),
    )  # fmt: skip
