"""The start of a world and of a grid under every fault, in virtual time.

A row of the table is a protocol, a number of ranks, and a fault at the k-th operation of one rank,
for every k. Of each run: every living rank returns or raises by its deadline and a bounded time
more, all of them alike; no rank that lives and came is said to be absent; and with no fault, all
return.
"""

import random
import re
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from commgrid.errors import CommGridError, GridMismatchError, PeerTimeoutError
from commgrid.layout.ranks import parse_ranks
from commgrid.rendezvous.agreement import Agreement
from commgrid.rendezvous.arrival_bitmap import arrived
from commgrid.rendezvous.op import Protocol, StoreLostError, WaitKey
from commgrid.rendezvous.round import leave
from commgrid.rendezvous.world_epoch import FirstAgreement
from tests.rendezvous.simulator import (
    FAULTS,
    PAUSES,
    Fault,
    SimulatedStore,
    Simulation,
    every_fault,
    run_alone,
)

LIMIT = 60.0  # startup_timeout of each rank
LATEST = LIMIT + 2 * PAUSES["long pause"] + 30.0
"""When the last rank knows: the deadline, two pauses (its own, an elected one's), and leases."""
_tokens = count()


def starting(rank: int, world: int, now: float, *, first: bool) -> Protocol[str]:
    """A start of three phases, of a world or of a grid in it."""
    given: dict[str, Any] = {
        "name": "g", "me": rank, "members": range(world), "document": {},
        "began": now, "until": now + LIMIT, "server": 0,
    }  # fmt: skip
    token = f"epoch {next(_tokens)}"
    made = FirstAgreement(token=token, **given) if first else Agreement(**given)
    return _phases(made)


def _phases(made: Agreement) -> Protocol[str]:
    yield from made.compare()
    for _ in range(2):
        yield from made.meet()
    return made.incarnation


def run(
    world: int, fault: Fault | None, victim: int, *, first: bool, seed: int | None = None,
    store: SimulatedStore | None = None, who: Sequence[int] | None = None,
) -> Simulation:  # fmt: skip
    found = Simulation(seed, store)
    chance = random.Random(seed)
    for rank in range(world) if who is None else who:
        at = 0.0 if seed is None else chance.choice((0.0, 0.001, 0.3, 4.0))
        strikes = fault if rank == victim else None
        found.start(rank, lambda now, r=rank: starting(r, world, now, first=first), at, strikes)
    found.run()
    return found


def accused(error: BaseException) -> set[int]:
    """Ranks that an error says are absent."""
    found = re.search(r"ranks? ([\d, /-]+) (did not|came too late)", str(error))
    return set(parse_ranks(found[1].replace(" ", ""))) if found else set()


def check(found: Simulation, victim: int, kind: str) -> None:
    """Every rank ends in time, and no living rank is accused by another."""
    living = [process for process in found.processes if not process.crashed]
    for process in living:
        assert process.ended, found.schedule()
        assert process.over_at <= LATEST, f"rank {process.rank} at {process.over_at}"
        if process.error is not None:
            assert isinstance(process.error, CommGridError | StoreLostError), process.error
            expected = {victim} if kind in FAULTS else set()
            assert accused(process.error) <= expected, f"{process.error}\n{found.schedule()}"
    others = [process for process in living if process.rank != victim]
    if kind not in ("store gone", "store stopped"):
        good = {process.rank for process in others if process.error is None}
        assert good in (set(), {p.rank for p in others}), f"{good}\n{found.schedule()}"


BOTH = pytest.mark.parametrize("first", [False, True], ids=["grid", "world"])
STARTS = (0.0, 0.001, 0.3, 4.0)


@BOTH
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_fault_at_every_operation(world: int, first: bool) -> None:
    rows = 0
    for kind, struck, found in every_fault(
        world, lambda rank, now: starting(rank, world, now, first=first)
    ):
        rows += 1
        check(found, struck.rank, kind)
    assert rows >= len(FAULTS) * world * 9


@BOTH
@pytest.mark.parametrize("kind", ["crash", "crash after"])
def test_a_rank_that_ends_is_named_unless_all_have_started(kind: str, first: bool) -> None:
    """The others return only if it ended after the last barrier was complete."""
    for victim in range(3):
        for k in range(1, 30):
            found = run(3, Fault(kind, k), victim, first=first)
            *_, gone = (p for p in found.processes if p.rank == victim)
            for process in found.processes:
                if process is gone or process.error is None:
                    continue
                text = str(process.error)
                who = f"rank {victim} did not|all come, and (the last of them|rank 0)"
                assert re.search(who, text), text
            started = [p.error is None for p in found.processes if p is not gone]
            if not gone.crashed:
                assert all(started)
            elif all(started):
                assert any("/phase 2/" in line for line in gone.log), gone.log


def draw(seed: int) -> tuple[Simulation, int, str]:
    chance = random.Random(seed)
    world, kind = chance.choice((2, 3, 4, 5)), chance.choice(FAULTS)
    victim, k = chance.randrange(world), chance.randrange(1, 16)
    first = chance.random() < 0.5
    return run(world, Fault(kind, k), victim, first=first, seed=seed), victim, kind


@pytest.mark.nightly("100000")
@pytest.mark.parametrize("seeds", [3_000, 100_000])
def test_any_order_of_operations(seeds: int) -> None:
    for seed in range(seeds):
        check(*draw(seed))


@BOTH
def test_sixty_four_ranks(first: bool) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        victim, kind = chance.randrange(64), chance.choice(FAULTS)
        fault = Fault(kind, chance.randrange(1, 16))
        check(run(64, fault, victim, first=first, seed=seed), victim, kind)


@BOTH
def test_two_faults(first: bool) -> None:
    """Two of four ranks are struck; all end, and the other two are never accused."""
    kinds = [kind for kind in FAULTS if not kind.startswith("store")]
    for seed in range(2_000):
        chance = random.Random(seed)
        victims = chance.sample(range(4), 2)
        found = Simulation(seed)
        for rank in range(4):
            fault = (
                Fault(chance.choice(kinds), chance.randrange(1, 16)) if rank in victims else None
            )
            found.start(rank, lambda now, r=rank: starting(r, 4, now, first=first), 0.0, fault)
        found.run()
        for process in found.processes:
            if process.crashed:
                continue
            assert process.ended, found.schedule()
            assert process.over_at <= LATEST + 100.0
            if process.error is not None and not isinstance(process.error, StoreLostError):
                assert accused(process.error) <= {*victims}, f"{process.error}{found.schedule()}"


def test_a_restart_starts_whatever_the_attempts_before_have_left() -> None:
    """The store stays, as a launcher's does; up to three attempts are lost at any operation."""
    for seed in range(3_000):
        chance, store = random.Random(seed), SimulatedStore()
        world = chance.choice((2, 3, 4, 5))
        for attempt in range(chance.choice((1, 2, 3))):
            lost = Simulation(seed + attempt, store)
            for rank in range(world):
                kind, k = chance.choice(("crash", "crash after", "")), chance.randrange(1, 18)
                if chance.random() < 0.85:
                    at, fault = chance.choice(STARTS), Fault(kind, k) if kind else None
                    lost.start(
                        rank,
                        lambda now, r=rank, w=world: starting(r, w, now, first=True),
                        at,
                        fault,
                    )
            lost.run(until=chance.choice((1.0, 5.0, 61.0, 1000.0)))  # the launcher ends them all
        found = run(world, None, -1, first=True, seed=seed, store=store)
        epochs = {process.result for process in found.processes}
        assert len(epochs) == 1, found.schedule()
        assert None not in epochs, found.schedule()
        left = [key for key in store.values if str(*epochs) in key]
        assert left == [], left


@pytest.mark.nightly("16384")
@pytest.mark.parametrize("world", [1024, 16_384])
def test_operations_do_not_grow_with_the_world(world: int) -> None:
    """Ranks that come within a second of each other: no rank publishes where it waits."""
    for first in (False, True):
        found = run(world, None, -1, first=first)
        issued = sorted(process.issued for process in found.processes)
        assert found.store.operations / world <= 11.0
        assert issued[world // 2] <= 10
        assert issued[-1] <= 34


@pytest.mark.parametrize("gone", [[], [2]])
@pytest.mark.parametrize("absent", [[], [2]])
def test_the_server_of_the_store_leaves_last(absent: list[int], gone: list[int]) -> None:
    """Or after a time, if a rank has ended without leaving, and no failure has named it."""
    found = Simulation()
    for rank in range(4):
        if rank not in absent:
            found.start(
                rank,
                lambda now, r=rank: leave("e", r, range(4), gone, r == 0, now + 5.0),
                float(rank),
            )
    found.run()
    over = {process.rank: process.over_at for process in found.processes}
    assert over[0] >= (5.0 if absent != gone and absent else over[3] - 0.01)
    assert over[0] < (5.5 if absent and not gone else 3.5)
    assert all(process.ended for process in found.processes)


@pytest.mark.parametrize("seed", range(20))
def test_many_survivors_do_not_count_a_gone_rank_together(seed: int) -> None:
    """A counter has room for two marks of a rank, and nine survivors marked rank 4 at once."""
    found = Simulation(seed)
    for rank in set(range(10)) - {4}:
        found.start(rank, lambda now, r=rank: leave("e", r, range(10), [4], r == 0, now + 5.0))
    found.run()
    assert all(process.ended and process.over_at < 1.0 for process in found.processes)
    assert {*run_alone(arrived("e", range(10)), found.store)} == {*range(10)}


def test_a_rank_that_was_named_as_gone_and_lives_makes_nobody_leave_early() -> None:
    """Its own arrival, after the others have counted it, does not stand for rank 1's."""
    found = Simulation()
    for rank, at in ((2, 0.0), (0, 1.0), (1, 3.0)):
        gone = [] if rank == 2 else [2]
        found.start(
            rank,
            lambda now, r=rank, g=gone: leave("e", r, range(3), g, r == 0, now + 5.0),
            at,
        )
    found.run()
    over = {process.rank: process.over_at for process in found.processes}
    assert 3.0 <= over[0] < 3.5


def test_a_pause_within_the_limit_is_no_reason_to_give_up() -> None:
    """Rank 0 comes late, and rank 1 stands still meanwhile, for longer than it looks at once."""
    for k in range(1, 4):
        found = Simulation()
        for rank in range(3):
            strikes = Fault("pause", k) if rank == 1 else None
            at = 20.0 if rank == 0 else 0.0
            found.start(rank, lambda now, r=rank: starting(r, 3, now, first=True), at, strikes)
        found.run()
        assert [process.error for process in found.processes] == [None] * 3


def speaking(rank: int, world: int, now: float) -> Protocol[list[str]]:
    made = Agreement(
        name="g", me=rank, members=range(world), document={}, began=now, until=now + LIMIT,
        phases=("hosts", "ready"),
    )  # fmt: skip
    yield from made.compare()
    decision = yield from made.meet(
        lambda said: {"hosts": [said[rank].decode() for rank in range(world)]},
        f"host {rank}".encode(),
        range(world),
    )
    yield from made.meet()
    return list(decision["hosts"])


def test_words_stay_until_all_have_the_decision_of_them() -> None:
    """Whichever rank decides, also one after another that ended just before it wrote."""
    for _, _, found in every_fault(3, lambda rank, now: speaking(rank, 3, now)):
        for process in found.processes:
            if process.error is not None:
                assert isinstance(process.error, CommGridError | StoreLostError)
            elif not process.crashed:
                assert process.result == ["host 0", "host 1", "host 2"]


def test_a_rank_that_gives_up_does_not_complete_a_phase() -> None:
    """It has waited in torch until the deadline; the others come to the phase a moment later."""

    def run_phase(rank: int, now: float) -> Protocol[str]:
        made = Agreement(
            name="g", me=rank, members=range(3), document={}, began=now, until=now + 10.0,
            phases=("ready",),
        )  # fmt: skip
        yield from made.compare()
        yield WaitKey("nothing", 9.0 if rank == 1 else 9.2)
        if rank == 1:
            raise (yield from made.give_up(PeerTimeoutError("timed out")))
        yield from made.meet()
        return "started"

    found = Simulation()
    for rank in range(3):
        found.start(rank, lambda now, r=rank: run_phase(r, now))
    found.run()
    for process in found.processes:
        assert process.result is None
        assert "timed out" in str(process.error)


@BOTH
def test_a_store_that_goes_when_all_is_decided_changes_nothing(first: bool) -> None:
    """The rank that serves it may end first; the others are still deleting keys."""
    for kind, _, found in every_fault(3, lambda rank, now: starting(rank, 3, now, first=first)):
        for process in found.processes if kind.startswith("store") else ():
            if any("/left/" in line for line in process.log):
                assert process.error is None, f"{process.error}\n{found.schedule()}"


def test_a_store_that_goes_after_a_bad_decision_does_not_hide_it() -> None:
    def differing(rank: int, now: float) -> Protocol[None]:
        made = Agreement(
            name="g", me=rank, members=range(3), document={"tp": rank}, began=now,
            until=now + LIMIT, server=0,
        )  # fmt: skip
        yield from made.compare()

    for kind, _, found in every_fault(3, differing):
        for process in found.processes if kind.startswith("store") else ():
            if any("/gone" in line for line in process.log):
                assert isinstance(process.error, GridMismatchError), process.error
