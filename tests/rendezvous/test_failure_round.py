"""Naming ranks after a failure, in virtual time."""

import random
from collections.abc import Mapping, Sequence

import pytest

from commgrid.layout.rank_text import unpack
from commgrid.rendezvous.failure_round import Failure
from commgrid.rendezvous.op import Now, Protocol, StoreLostError, WaitKey
from commgrid.rendezvous.round import Decision
from commgrid.rendezvous.timeouts import timeouts
from tests.rendezvous.simulator import FAULTS, Process, Simulation, every_fault


def text(absent: Sequence[int], words: Mapping[int, bytes]) -> dict[str, str]:
    return {"text": f"{list(absent)}, told by {sorted(words)}"}


def failing(rank: int, world: int) -> Protocol[Decision]:
    found = Failure("f", rank, range(world))
    yield from found.report(b"closed by peer")
    return (yield from found.find_out(text))


def play(world: int, reports_at: Mapping[int, float], seed: int | None = None) -> Simulation:
    found = Simulation(seed)
    for rank, at in reports_at.items():
        found.start(rank, lambda now, r=rank: failing(r, world), at)
    found.run()
    assert all(process.ended for process in found.processes), found.schedule()
    return found


def named(process: Process) -> set[int]:
    assert process.error is None, process.error
    return unpack(process.result["absent"])


def test_an_absent_rank_whose_program_ended_has_left_its_words() -> None:
    found = Simulation(None)
    found.start(2, lambda now: Failure("f", 2, range(3)).end(b"ended"), 0.0)
    for rank in (0, 1):
        found.start(rank, lambda now, r=rank: failing(r, 3), 1.0)
    found.run()
    told = {process.result["text"] for process in found.processes if process.result is not None}
    assert told == {"[2], told by [0, 1, 2]"}


def reading(rank: int, world: int, at: float) -> Protocol[Decision]:
    """Rank 0 serves the store, and the others read the decision at some time."""
    found = Failure("f", rank, range(world))
    yield from found.report(b"closed by peer")
    decision = yield from found.find_out(text)
    if rank != 0:
        yield WaitKey("never", at)
    yield from found.leave(unpack(decision["absent"]), rank == 0)
    return decision


@pytest.mark.parametrize("dead", [set(), {2}])
def test_the_server_of_the_store_stays_until_others_have_read_the_decision(dead: set[int]) -> None:
    found = Simulation()
    for rank in {0, 1, 2, 3} - dead:
        found.start(rank, lambda now, r=rank: reading(r, 4, 1.5 + 0.1 * r), 0.0)
    found.run()
    over = {process.rank: process.over_at for process in found.processes}
    assert over[0] >= over[3] - 0.01
    assert over[0] < 2.0, "it does not wait for the dead rank"
    assert set(found.store.values) == {"f/decision"}


def test_the_server_of_the_store_stays_for_a_while_only() -> None:
    found = Simulation()
    for rank in range(3):
        found.start(rank, lambda now, r=rank: reading(r, 3, 1000.0 if r == 2 else 0.0), 0.0)
    found.run()
    over = {process.rank: process.over_at for process in found.processes}
    assert over[0] < timeouts().leave + 1.0


def ending(rank: int, world: int) -> Protocol[None]:
    yield from Failure("f", rank, range(world)).over()


@pytest.mark.parametrize("over", [{1}, {2, 3}, {0, 1, 2}])
def test_ranks_that_ended_in_order_are_named_at_once(over: set[int]) -> None:
    found = Simulation()
    for rank in range(4):
        begins = (lambda now, r=rank: ending(r, 4)) if rank in over else None
        found.start(rank, begins or (lambda now, r=rank: failing(r, 4)), 0.0 if begins else 1.0)
    found.run()
    told = [process for process in found.processes if process.rank not in over]
    assert [named(process) for process in told] == [over] * len(told)
    assert {process.result["text"].partition("by ")[2] for process in told} == {"[0, 1, 2, 3]"}
    assert max(process.over_at for process in told) < 1.0 + timeouts().settle / 2
    assert set(found.store.values) == {"f/decision"}


def test_a_rank_that_has_not_ended_is_waited_for_beside_one_that_has() -> None:
    """It computes for five seconds before it comes to the collective that has failed."""
    found = Simulation()
    found.start(3, lambda now: ending(3, 4), 0.0)
    for rank, at in ((0, 1.0), (1, 1.1), (2, 6.0)):
        found.start(rank, lambda now, r=rank: failing(r, 4), at)
    found.run()
    assert [named(process) for process in found.processes[1:]] == [{3}] * 3


def test_ranks_that_all_end_in_order_leave_nothing() -> None:
    found = Simulation()
    for rank in range(64):
        found.start(rank, lambda now, r=rank: ending(r, 64), rank / 10)
    found.run()
    assert not found.store.values


@pytest.mark.parametrize("dead", range(8))
def test_a_dead_rank_is_named_around_a_ring(dead: int) -> None:
    """Each rank reports a moment after its neighbour."""
    times = {rank: 0.3 * ((rank - dead) % 8) for rank in range(8) if rank != dead}
    found = play(8, times)
    assert {frozenset(named(process)) for process in found.processes} == {frozenset({dead})}
    assert max(p.over_at for p in found.processes) < max(times.values()) + 1.5 * timeouts().settle


def test_the_last_rank_has_time_after_the_one_before_it() -> None:
    """Rank 1 reports and then breaks its connections, which rank 2 sees half a second later."""
    assert [named(p) for p in play(3, {0: 0.0, 1: 4.0, 2: 4.5}).processes] == [set()] * 3


def test_of_two_ranks_the_later_one_is_not_named() -> None:
    """Both live, and their connection broke."""
    for late in (0.0, 0.5, 0.9):
        assert [named(p) for p in play(2, {0: 0.0, 1: late}).processes] == [set(), set()]


def test_a_busy_rank_is_not_named_beside_a_dead_one() -> None:
    """It computes for five seconds before it comes to the collective that has failed."""
    found = play(4, {0: 0.0, 1: 0.1, 2: 5.0})
    assert [named(process) for process in found.processes] == [{3}] * 3


def test_who_knows_decides() -> None:
    def knowing(rank: int) -> Protocol[str]:
        found = Failure("f", rank, range(3))
        if rank == 2:
            return (yield from found.post("rank 2 failed: ValueError"))
        yield from found.report(b"closed by peer")
        return str((yield from found.find_out(text))["text"])

    simulation = Simulation()
    for rank in range(3):
        simulation.start(rank, lambda now, r=rank: knowing(r), 0.3 if rank == 2 else 0.0)
    simulation.run()
    assert [p.result for p in simulation.processes] == ["rank 2 failed: ValueError"] * 3


def test_another_grid_hears_why_a_rank_has_closed_its_connections() -> None:
    """Rank 9 is a member of another grid, and sees a connection to rank 1 close."""

    def outside(rank: int) -> Protocol[str | None]:
        found = Failure("f", 9, range(3))
        return (yield from found.told_by([rank], (yield Now()) + 20.0))

    def heard(rank: int, reports_at: Mapping[int, float], at: float) -> object:
        simulation = Simulation()
        for member, begins in reports_at.items():
            simulation.start(member, lambda now, r=member: failing(r, 3), begins)
        asks = simulation.start(9, lambda now: outside(rank), at)
        simulation.run()
        assert asks.error is None
        return asks.result

    reports = {0: 0.0, 1: 0.1}
    assert heard(1, reports, 0.2) == "[2], told by [0, 1]", "while the others find out"
    assert heard(1, reports, 60.0) == "[2], told by [0, 1]", "after the decision"
    assert heard(2, reports, 0.2) is None, "rank 2 has not reported"
    assert heard(1, {}, 0.2) is None


def test_a_rank_that_reports_after_the_decision_leaves_nothing() -> None:
    found = play(3, {0: 0.0, 1: 0.1, 2: 60.0})
    assert set(found.store.values) == {"f/decision"}


def test_only_the_decision_is_left() -> None:
    assert set(play(3, {0: 0.0, 1: 0.1}).store.values) == {"f/decision"}
    assert set(play(64, dict.fromkeys(range(64), 0.0)).store.values) == {"f/decision"}


def test_living_ranks_that_report_in_time_are_never_named() -> None:
    for seed in range(1_000):
        chance = random.Random(seed)
        world = chance.randrange(2, 9)
        dead = set(chance.sample(range(world), chance.randrange(world)))
        # The last living rank comes within `settle` of the one before it.
        at, times = 0.0, {}
        for rank in chance.sample(sorted({*range(world)} - dead), world - len(dead)):
            times[rank] = at = at + chance.uniform(0.0, timeouts().settle / 2)
        found = play(world, times, seed)
        for process in found.processes:
            assert named(process) <= dead, found.schedule()


def test_every_fault_at_every_operation() -> None:
    """Rank 3 is dead; the others decide alike, also if one of them ends or stands still."""
    rows = 0
    starts = [0.1 * rank for rank in range(3)]
    for _, struck, found in every_fault(3, lambda rank, now: failing(rank, 4), starts):
        rows += 1
        told = set()
        for process in found.processes:
            if process.crashed:
                continue
            assert process.over_at <= 150.0, f"{process.over_at}\n{found.schedule()}"
            if process.error is not None:
                assert isinstance(process.error, StoreLostError), process.error
            elif process is not struck:
                assert named(process) <= {3, struck.rank}, found.schedule()
                told.add(process.result["text"])
        assert len(told) <= 1, found.schedule()
    assert rows >= len(FAULTS) * 3 * 6
