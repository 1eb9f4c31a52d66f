"""Bitmaps of arrivals: the last rank, the absent ranks, and two processes as one rank."""

from commgrid.rendezvous.arrival_bitmap import Arrival, arrive, arrived, counters
from commgrid.rendezvous.op import Add
from tests.rendezvous.simulator import SimulatedStore, run_alone

EARLY, LAST, TWICE = Arrival.EARLY, Arrival.LAST, Arrival.TWICE


def test_the_absent_are_known() -> None:
    store, ranks = SimulatedStore(), range(3, 200, 3)
    found = [run_alone(arrive("at", rank, ranks), store) for rank in ranks]
    assert found == [EARLY] * (len(ranks) - 1) + [LAST]
    assert run_alone(arrive("at", 30, ranks), store) is TWICE
    assert run_alone(arrive("at", 1, ranks), store) is EARLY  # not a member
    assert run_alone(arrived("at", range(10)), store) == [1, 3, 6, 9]
    assert set(store.values) == set(counters("at", ranks))


def test_any_of_them_may_be_the_last() -> None:
    """Ranks 0 to 60 fill two counters and begin a third."""
    for late in range(61):
        store = SimulatedStore()
        others = [rank for rank in range(61) if rank != late]
        assert {run_alone(arrive("at", r, range(61)), store) for r in others} == {EARLY}, late
        assert run_alone(arrive("at", late, range(61)), store) is LAST


def test_a_second_process_does_not_touch_its_neighbour() -> None:
    """It has marked itself, and is slow to take that back."""
    store = SimulatedStore()
    for rank in (1, 2):
        assert run_alone(arrive("at", rank, range(4)), store) is EARLY
    twin = arrive("at", 1, range(4))
    undo = twin.send(store.do(next(twin)))
    assert run_alone(arrive("at", 0, range(4)), store) is EARLY
    assert run_alone(arrived("at", range(4)), store) == [0, 1, 2]
    assert run_alone(arrive("at", 3, range(4)), store) is LAST
    assert isinstance(undo, Add)
    store.do(undo)
    assert run_alone(arrived("at", range(4)), store) == [0, 1, 2, 3]


def test_earlier_places_are_swept() -> None:
    store = SimulatedStore()
    for at, sweep in (("first", []), ("second", ["first"])):
        for rank in range(40):
            run_alone(arrive(at, rank, range(40), sweep), store)
    assert set(store.values) == {"first/blocks", *counters("second", range(40))}
