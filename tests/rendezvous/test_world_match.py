"""Two worlds that find each other by a name at one store, in virtual time."""

import random

import pytest

from commgrid.rendezvous.grid_match import Met, NotMet, meet_world
from commgrid.rendezvous.op import StoreLostError
from tests.rendezvous.simulator import FAULTS, Fault, Process, Simulation

SIDES = ("source", "target")
LIMIT = 60.0


def start(
    found: Simulation, side: str, token: str, at: float = 0.0, fault: Fault | None = None
) -> Process:
    (other,) = {*SIDES} - {side}
    return found.start(
        0,
        lambda now: meet_world("room", side, other, token, f"words of {token}", now + LIMIT),
        at,
        fault,
    )


@pytest.mark.parametrize("first", SIDES)
def test_worlds_that_come_in_either_order_get_one_name(first: str) -> None:
    for seed in range(100):
        found, chance = Simulation(seed), random.Random(seed)
        later = chance.choice([0.0, 0.001, 3.0, 50.0])
        source = start(found, "source", "s", 0.0 if first == "source" else later)
        target = start(found, "target", "t", 0.0 if first == "target" else later)
        found.run()
        assert source.result == Met("s+t", "words of t"), found.schedule()
        assert target.result == Met("s+t", "words of s"), found.schedule()
        assert not found.store.values


def test_a_world_that_never_comes() -> None:
    found = Simulation()
    source = start(found, "source", "s")
    found.run()
    assert source.result == NotMet()
    assert not found.store.values


@pytest.mark.parametrize("killed", SIDES)
def test_a_side_that_is_killed_and_started_again_is_met(killed: str) -> None:
    """Whatever the killed process has left at the store, and whoever comes first."""
    for at in range(1, 12):
        for kind in ("crash", "crash after"):
            for others_at in (0.0, 2.0, 20.0):
                found = Simulation(at)
                (other,) = {*SIDES} - {killed}
                dead = start(found, killed, "dead", 0.0, Fault(kind, at))
                lives = start(found, other, "lives", others_at)
                again = start(found, killed, "again", 10.0)
                found.run()
                if not dead.crashed:
                    continue
                if isinstance(lives.result, Met) and lives.result.words == "words of dead":
                    continue  # it had agreed before it was killed: the round after this names it
                assert isinstance(again.result, Met), (kind, at, found.schedule())
                assert isinstance(lives.result, Met), (kind, at, found.schedule())
                assert again.result.name == lives.result.name


def test_two_living_worlds_on_one_side_are_told() -> None:
    found = Simulation(1)
    first = start(found, "target", "one")
    second = start(found, "target", "two", 5.0)
    source = start(found, "source", "s", 20.0)
    found.run()
    assert first.result == NotMet(replaced=True)
    assert second.result == Met("s+two", "words of s")
    assert source.result == Met("s+two", "words of two")
    assert not found.store.values


def test_every_fault_at_every_operation_ends() -> None:
    for kind in FAULTS:
        for at in range(1, 12):
            for struck in SIDES:
                found = Simulation(at)
                both = [
                    start(found, side, side, 0.0, Fault(kind, at) if side == struck else None)
                    for side in SIDES
                ]
                found.run()
                for process in both:
                    over = process.result is not None or process.crashed
                    assert over or isinstance(process.error, StoreLostError), (kind, at, struck)
