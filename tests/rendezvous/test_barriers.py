"""Barriers in sequence under every fault, in virtual time."""

import re
from typing import Any

import pytest

from commgrid.layout.ranks import parse_ranks
from commgrid.rendezvous.barriers import Barriers
from commgrid.rendezvous.op import Now, Protocol, StoreLostError
from commgrid.rendezvous.round import is_good
from tests.rendezvous.simulator import FAULTS, Simulation, every_fault

LIMIT = 60.0
NAMES = ("planned", "run 1", "run 1 is done")


class Ended(Exception):
    """A barrier did not open."""


def passing(rank: int, world: int, fails: int | None = None) -> Protocol[str]:
    made = Barriers("t", rank, range(world))
    for name in NAMES:
        if rank == fails and name == "run 1":
            yield from made.fail(name, "failed", f"rank {rank} failed")
        decision = yield from made.come(name, (yield Now()) + LIMIT, "did not come")
        if not is_good(decision):
            yield from made.close(before="run 2")
            raise Ended(decision["message"])
    yield from made.close(before="run 2")
    return "passed"


def run(world: int, seed: int | None = None, fails: int | None = None) -> Simulation:
    found = Simulation(seed)
    for rank in range(world):
        found.start(rank, lambda now, r=rank: passing(r, world, fails))
    found.run()
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_fault_at_every_operation(world: int) -> None:
    rows = 0
    for _, struck, found in every_fault(world, lambda rank, now: passing(rank, world)):
        rows += 1
        for process in found.processes:
            if process.crashed:
                continue
            assert process.over_at <= 4 * LIMIT
            if process.error is None or process is struck:
                continue
            assert isinstance(process.error, Ended | StoreLostError), process.error
            named = re.search(r"ranks? ([\d, -]+) did not", str(process.error))
            absent = set(parse_ranks(named[1].replace(" ", ""))) if named else set()
            assert absent <= {struck.rank}, f"{process.error}\n{found.schedule()}"
    assert rows >= len(FAULTS) * world * 8


def test_all_have_the_reason_of_the_one_that_fails() -> None:
    for seed in range(200):
        found = run(4, seed=seed, fails=2)
        assert {str(process.error) for process in found.processes} == {"rank 2 failed"}


def test_nothing_is_left() -> None:
    for fails in (None, 1):
        found = run(40, fails=fails)
        assert found.store.values == {}


def test_a_lost_rank_ends_the_barrier_and_all_later_ones() -> None:
    def interrupted(rank: int) -> Protocol[list[bool]]:
        made, passed = Barriers("t", rank, range(3)), []
        if rank == 0:
            yield from made.interrupt("rank 2 is gone", late=False)
        for name in NAMES:
            decision = yield from made.come(name, (yield Now()) + LIMIT, "did not come")
            passed.append(is_good(decision))
        return passed

    found = Simulation()
    for rank in (0, 1):
        found.start(rank, lambda now, r=rank: interrupted(r))
    found.run()
    assert [process.result for process in found.processes] == [[False] * 3] * 2
    assert found.now < 1.0


def test_a_rank_that_leaves_early_ends_what_it_would_pass_next() -> None:
    def leaving(rank: int) -> Protocol[list[str]]:
        made, told = Barriers("t", rank, range(3)), []
        for name in NAMES:
            if rank == 1 and name == "run 1":
                break
            decision = yield from made.come(name, (yield Now()) + LIMIT, "did not come")
            told.append(decision.get("message", ""))
            if told[-1]:
                break
        yield from made.close(before="run 1" if rank == 1 else "run 2", why=f"rank {rank} has left")
        return told

    for seed in range(50):
        found = Simulation(seed)
        for rank in range(3):
            found.start(rank, lambda now, r=rank: leaving(r))
        found.run()
        others = [["", "rank 1 has left"]] * 2
        assert [found.processes[rank].result for rank in (0, 2)] == others
        assert found.now < LIMIT
        assert found.store.values == {}


@pytest.mark.parametrize("cause_is_told", [False, True])
def test_a_consequence_waits_for_its_cause(cause_is_told: bool) -> None:
    """Rank 1 sees rank 0 close its connection, which waited too long for rank 2."""

    def failing(rank: int) -> Protocol[Any]:
        made = Barriers("t", rank, range(3))
        absent = yield from made.absent_after_failure("run 1", {0: 2, 1: 0}[rank])
        if rank == 0 and cause_is_told:
            yield from made.fail("run 1", "gone", "rank 2 is gone")
        if rank == 1:
            return (yield from made.fail("run 1", "gone", f"gone: {sorted(absent)}"))["message"]
        return None

    found = Simulation()
    for rank in (0, 1):
        found.start(rank, lambda now, r=rank: failing(r))
    found.run()
    told = "rank 2 is gone" if cause_is_told else "gone: [2]"
    assert found.processes[1].result == told
