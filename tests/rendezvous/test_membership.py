"""Membership after a failure, in virtual time."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from commgrid.errors import CommGridError, GridMismatchError, PeerTimeoutError
from commgrid.layout.rank_text import unpack
from commgrid.rendezvous.membership import OVER, Membership, Subject
from commgrid.rendezvous.op import Protocol, StoreLostError
from tests.rendezvous.simulator import (
    FAULTS,
    Fault,
    Process,
    SimulatedStore,
    Simulation,
    every_fault,
)

LONG = 600.0  # a rank that waits for it is late


def conclude(here: Sequence[int], said: Sequence[str]) -> dict[str, Any]:
    return {"said": list(said)}


def answering(
    rank: int, world: int, now: float, knows: Sequence[int] = (), grace: float = LONG,
    ranks: tuple[int, ...] | None = None, after: str = "g/0", name: str = "g",
) -> Protocol[Mapping[str, Any]]:  # fmt: skip
    part = Membership(rank, range(world), knows)
    about = Subject(name, after, ranks)
    return part.answer(about, f"{rank} says", conclude, grace, now + 2 * LONG)


def call(
    store: SimulatedStore, world: int, calling: Mapping[int, float],
    knows: Mapping[int, Sequence[int]], seed: int | None = None, **more: Any,
) -> list[Any]:  # fmt: skip
    """Return the decision or error of each of the `calling` ranks, given with their times."""
    found = Simulation(seed, store)
    for rank, at in calling.items():
        found.start(
            rank, lambda now, r=rank: answering(r, world, now, knows.get(r, ()), **more), at
        )
    found.run()
    return [told(process) for process in found.processes]


def told(process: Process) -> Any:
    assert process.ended
    if process.error is None:
        return process.result
    assert isinstance(process.error, CommGridError), process.error
    return process.error


def at_once(*ranks: int) -> dict[int, float]:
    return dict.fromkeys(ranks, 0.0)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    """Two have seen it, the others have not."""
    for verdict in call(SimulatedStore(), 5, at_once(0, 1, 2, 4), {2: [3], 4: [3]}):
        assert (unpack(verdict["here"]), unpack(verdict["ended"])) == ({0, 1, 2, 4}, {3})
        assert verdict["said"] == ["0 says", "1 says", "2 says", "4 says"]


def test_more_than_thirty_have_seen_it() -> None:
    """A bitmap has two bits for a rank: a third mark would be another rank's."""
    calling = [rank for rank in range(45) if rank != 20]
    knows = {rank: [20] for rank in calling}
    for verdict in call(SimulatedStore(), 45, at_once(*calling), knows):
        assert (unpack(verdict["here"]), unpack(verdict["ended"])) == ({*calling}, {20})


def test_a_rank_that_comes_itself_has_not_ended() -> None:
    """A connection that something on the way has closed is no death."""
    for verdict in call(
        SimulatedStore(), 4, {3: 0.0, **dict.fromkeys((0, 1, 2), 1.0)}, {2: [3], 0: [3]}
    ):
        assert (unpack(verdict["here"]), unpack(verdict["ended"])) == ({0, 1, 2, 3}, set())


def test_a_rank_that_is_only_missing_gets_the_grace() -> None:
    """Rank 2 comes while the others wait, and is counted; or never, and the grace ends."""
    for verdict in call(SimulatedStore(), 4, at_once(0, 1), {0: [3]}, grace=0.6):
        assert (unpack(verdict["here"]), unpack(verdict["ended"])) == ({0, 1}, {3})
    for verdict in call(SimulatedStore(), 4, {0: 0.0, 1: 0.0, 2: 30.0}, {0: [3]}):
        assert (unpack(verdict["here"]), unpack(verdict["ended"])) == ({0, 1, 2}, {3})


def test_certain_ranks_of_which_one_has_ended() -> None:
    for error in call(SimulatedStore(), 4, at_once(0, 1, 2), {0: [3]}, ranks=(0, 1, 2, 3)):
        with pytest.raises(PeerTimeoutError, match=r"the process of rank 3 has ended \(ranks 0-2"):
            raise error


def test_certain_ranks_of_which_one_has_ended_and_one_is_late() -> None:
    (error,) = call(SimulatedStore(), 4, at_once(0), {0: [3]}, ranks=(0, 1, 2, 3))
    with pytest.raises(
        PeerTimeoutError,
        match=r"the process of rank 3 has ended, ranks 1-2 did not come within timeout \(rank 0 c",
    ):
        raise error


def test_other_ranks_are_refused_on_all() -> None:
    found = Simulation()
    for rank, ranks in ((0, (0, 1)), (1, (0, 1, 2))):
        found.start(rank, lambda now, r=rank, a=ranks: answering(r, 3, now, ranks=a))
    found.run()
    for process in found.processes:
        assert isinstance(process.error, GridMismatchError)
        assert "give the same on all" in str(process.error)


def test_the_next_call_is_a_call_of_its_own() -> None:
    """The keys of the last call are deleted, and all that came are counted."""
    store, knows = SimulatedStore(), {0: [3]}
    for number in range(4):
        for verdict in call(store, 4, at_once(0, 1, 2), knows, after=f"g/{number}"):
            assert unpack(verdict["ended"]) == {3}
        knows = {rank: [3] for rank in (0, 1, 2)}
    kept = len(store.values)
    call(store, 4, at_once(0, 1, 2), knows, after="g/4")
    assert len(store.values) == kept


def test_two_grids_in_one_call_each_get_their_own_decision() -> None:
    """Both find the word that there will be no call, and put theirs in its place."""
    for seed in range(300):
        found = Simulation(seed)
        found.store.values["commgrid/rebuild/1/call"] = OVER
        for rank in range(4):
            name = "ab"[rank // 2]
            found.start(
                rank,
                lambda now, r=rank, n=name: answering(
                    r, 4, now, grace=10.0, name=n, after=f"{n}/0"
                ),
            )
        found.run()
        for process in found.processes:
            verdict = told(process)
            assert process.rank in unpack(verdict["here"]), found.schedule()
            # Each grid's ranks have said something in its call, and the other's have not.
            mine = {f"{rank} says" for rank in range(4) if rank // 2 == process.rank // 2}
            assert set(verdict["said"]) <= mine, found.schedule()


def test_another_grids_call_waits_for_a_long_grace() -> None:
    """Ranks 0 and 1 wait 30 s for others; ranks 3 and 4 have a grid of their own to rebuild."""
    found = Simulation()
    for rank, name, grace in ((0, "a", 30.0), (1, "a", 30.0), (3, "b", 1.0), (4, "b", 1.0)):
        found.start(
            rank,
            lambda now, r=rank, n=name, g=grace: answering(
                r, 5, now, grace=g, name=n, after=f"{n}/0"
            ),
        )
    found.run()
    for process in found.processes:
        mine = {0, 1} if process.rank < 2 else {3, 4}
        assert unpack(told(process)["here"]) == mine, told(process)


def test_a_call_whose_caller_has_ended_is_closed() -> None:
    found = Simulation()
    found.start(0, lambda now: answering(0, 3, now, name="a", after="a/0"), 0.0, Fault("crash", 6))
    for rank in (1, 2):
        found.start(rank, lambda now, r=rank: answering(r, 3, now, [0], name="b", after="b/0"), 1.0)
    found.run()
    for process in found.processes[1:]:
        assert unpack(told(process)["here"]) == {1, 2}


def test_a_rank_that_stood_still_over_several_calls_is_late() -> None:
    """Its call is over and its keys are deleted; it decides nothing, and numbers only rise."""
    for k in range(1, 30):
        found = Simulation()
        found.start(
            3, lambda now: answering(3, 4, now, grace=5.0), 0.0, Fault("long pause", k)
        )  # fmt: skip

        def three_calls(rank: int, now: float) -> Protocol[list[str]]:
            decided = []
            for number in range(3):
                part = Membership(rank, range(4), ())
                call = Subject("g", f"g/{number}")
                until = now + 2 * LONG
                verdict = yield from part.answer(call, "", conclude, 5.0, until)
                decided.append(verdict["here"])
            return decided

        for rank in (0, 1, 2):
            found.start(rank, lambda now, r=rank: three_calls(r, now))
        found.run()
        late = found.processes[0]
        if late.issued < k:
            break
        assert late.ended, found.schedule()
        for process in found.processes[1:]:
            assert process.error is None, f"{process.error}{found.schedule()}"
            assert process.result[1:] == ["0-2", "0-2"]
        if late.error is None:
            assert late.result["here"] == found.processes[1].result[0]
        assert found.store.values["commgrid/rebuild/count"] == b"3"


def test_a_spare_that_stood_still_finds_the_next_call() -> None:
    for k in range(1, 12):
        found = Simulation()
        found.start(
            3, lambda now: Membership(3, range(4)).wait("g", "3 waits"), 0.0, Fault("long pause", k)
        )
        for number, at in enumerate((10.0, 30.0, 50.0, 1000.0)):
            for rank in (0, 1):
                found.start(
                    rank,
                    lambda now, r=rank, n=number: answering(r, 4, now, [2], 5.0, after=f"g/{n}"),
                    at,
                )
        found.start(0, lambda now: Membership(0, range(4)).tell_over(), 2000.0)
        found.run()
        assert found.processes[0].ended, found.schedule()


def test_every_fault_at_every_operation() -> None:
    """Rank 3 has ended; another one may, at any of its operations."""
    rows = 0
    for kind, struck, found in every_fault(
        3, lambda rank, now: answering(rank, 4, now, [3], grace=5.0)
    ):
        rows += 1
        decisions = set()
        for process in found.processes:
            if process.crashed:
                continue
            assert process.over_at < 300.0, found.schedule()
            if process.error is not None:
                assert isinstance(process.error, CommGridError | StoreLostError)
                assert process is struck or kind.startswith("store"), process.error
            else:
                assert process.rank in unpack(process.result["here"])
                decisions.add(process.result["here"])
        assert len(decisions) <= 1, found.schedule()
    assert rows >= len(FAULTS) * 3 * 8


def test_any_order() -> None:
    """All ranks that come within the grace have the same decision, with all of them in it."""
    for seed in range(500):
        chance = random.Random(seed)
        world = chance.randrange(2, 7)
        dead = set(chance.sample(range(world), chance.randrange(world)))
        calling = {rank: chance.uniform(0.0, 2.0) for rank in range(world) if rank not in dead}
        knows = {rank: sorted(dead) for rank in calling if chance.random() < 0.5}
        found = call(SimulatedStore(), world, calling, knows, seed, grace=10.0)
        assert {frozenset(unpack(verdict["here"])) for verdict in found} == {frozenset(calling)}


def test_a_spare_waits_for_a_place() -> None:
    def waiting(rank: int) -> Protocol[Mapping[str, Any] | None]:
        return Membership(rank, range(4)).wait("g", f"{rank} waits")

    found = Simulation()
    found.start(3, lambda now: waiting(3))
    for rank in (0, 1):
        found.start(rank, lambda now, r=rank: answering(r, 4, now, [2]), 5000.0)
    found.run()
    for process in found.processes:
        assert unpack(told(process)["here"]) == {0, 1, 3}
        assert "3 waits" in told(process)["said"]


def test_a_spare_learns_that_the_job_is_over() -> None:
    found = Simulation()
    found.start(3, lambda now: Membership(3, range(4)).wait("g", ""))
    found.start(0, lambda now: Membership(0, range(4)).tell_over(), 10.0)
    found.run()
    assert found.processes[0].ended
    assert found.processes[0].result is None
