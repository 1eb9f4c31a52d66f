"""A rank of one of two programs is killed somewhere in a transfer: the other program names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import commgrid
from commgrid.grid_pairs.pair_group import PairGroup
from commgrid.launching.process import free_port
from commgrid.resharding.local_boxes import LocalBoxes
from commgrid.resharding.transport import Carrier
from commgrid.store.driver import StoreDriver
from commgrid.transfer.barriers import TransferBarriers
from commgrid.transfer.sides import OneSide
from tests.killing import KILLED, kill_me
from tests.transfer.programs import World, said, started

FOREVER = 1000.0
"""Seconds to wait for others, longer than the test: an error came without it."""
SHORT = 4.0
Victim = tuple[str, int]
ENGINE: list[Victim] = [("engine", 1), ("engine", 0)]
TRAINER: list[Victim] = [("trainer", 1), ("trainer", 0)]  # whose rank 0 serves the store

AT_ONCE = ("while planning", "when planned", "before a run", "in a run", "at the end of a run")
LATE = ("before it meets", "before its group is made")
NEVER_MOVED = {"before it meets", "before its group is made", "while planning", "when planned"}


def dies_in(kind: type, name: str, nth: int = 1, after: bool = False) -> None:
    """The `nth` call of a method from now on ends this process, at its beginning or its end."""
    method: Callable[..., Any] = getattr(kind, name)
    calls = 0

    def dying(*args: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            kill_me()
        found = method(*args, **how)
        if calls == nth:
            kill_me()
        return found

    setattr(kind, name, dying)


def arm(phase: str) -> None:
    """Kill this process where it gets to a phase; the run is its second one."""
    if phase == "before its group is made":
        dies_in(PairGroup, "__init__")
    elif phase == "while planning":
        dies_in(OneSide, "hold")
    elif phase == "when planned":
        dies_in(PairGroup, "begin")
    elif phase == "before a run":
        dies_in(Carrier, "meet", after=True)
    elif phase == "in a run":
        dies_in(Carrier, "carry", nth=2)
    elif phase == "once all have everything":
        dies_in(LocalBoxes, "take", nth=2)
    elif phase == "at the end of a run":  # the barriers: planned, run 1, it is done, run 2
        dies_in(TransferBarriers, "come", nth=5)


def lives(
    world: World, phase: str, victim: Victim, meets_again: bool = False, **how: Any
) -> dict[str, Any]:
    """Two runs, in which the victim is killed; and another one with a new engine."""
    if (world.name, world.rank) == victim:
        if phase == "before it meets":
            kill_me()
        arm(phase)

    def runs() -> None:
        transfer = world.meet(timeout=SHORT if phase in LATE else FOREVER, **how)
        for version in (1, 2):
            if world.name == "trainer":
                world.fill(version)
            transfer.run()

    found: dict[str, Any] = {"told": said(runs)}
    found["holds"] = next((version for version in (1, 2) if world.holds(version)), 0)
    if meets_again and world.name == "trainer":
        transfer = world.meet()
        world.fill(3)
        transfer.run()
        found["sent"] = sorted(transfer.plan.received)
        world.store.wait(["the new engine is done"])
    return found


def comes_again(world: World) -> bool:
    world.meet().run()
    dist.barrier()
    if world.rank == 0:
        world.store.set("the new engine is done", "")
    return world.holds(3)


def stages(world: World, phase: str, victim: Victim) -> dict[str, Any]:
    return lives(world, phase, victim, staged=True)


def leaves(world: World, how: str) -> str:
    """An engine that ends well after a run, while the trainer goes on."""
    transfer = world.meet(timeout=FOREVER)
    transfer.run()
    if world.name == "engine":
        if how == "close":
            transfer.close()
            world.store.wait(["the trainer was told"])
        elif how == "shutdown":
            commgrid.shutdown()
            world.store.wait(["the trainer was told"])
        return ""
    told = said(transfer.run)
    dist.barrier()
    if world.rank == 0:
        world.store.set("the trainer was told", "")
    return told


@pytest.mark.full
@pytest.mark.parametrize("how", ["close", "shutdown", "exit"])
def test_an_engine_that_leaves_is_named_at_once(how: str) -> None:
    port = free_port()
    with (
        started(leaves, "trainer", 2, port, how, killable=True) as trainer,
        started(leaves, "engine", 2, port, how, killable=True) as engine,
    ):
        assert engine.results() == ["", ""]
        for told in trainer.results():
            gone = "(has closed the transfer|is gone: its process has ended)"
            assert re.match(f"PeerFailedError: rank [23] {gone}[, ]", told), told
            assert "nothing was moved; make a new Transfer" in told


@pytest.mark.full
@pytest.mark.parametrize("victim", [ENGINE[0], *TRAINER])
@pytest.mark.parametrize("phase", ["in a run", "at the end of a run", "once all have everything"])
def test_a_staged_run_leaves_the_target_old_or_new(phase: str, victim: Victim) -> None:
    port = free_port()
    given = (port, phase, victim)
    with (
        started(stages, "trainer", 2, *given, killable=True),
        started(stages, "engine", 2, *given, killable=True) as engine,
    ):
        living = [each for each in engine.results() if each is not KILLED]
    for each in living:
        if victim == TRAINER[1] and phase != "in a run":  # nothing tells how the others decided
            assert each["holds"] == 2 or "the target is not to be used" in each["told"], each
        elif phase == "once all have everything":
            assert each["holds"] == 2
        else:
            assert "is gone: its process has ended" in each["told"]
            assert "the target is as it was; make a new Transfer" in each["told"]
            assert each["holds"] == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("phase", "victim"),
    [("before it meets", ENGINE[0]), *((phase, each) for phase in AT_ONCE for each in ENGINE)],
)
def test_an_engine_of_another_size_comes_after_one_that_was_killed(
    phase: str, victim: Victim
) -> None:
    port = free_port()
    with started(lives, "trainer", 2, port, phase, victim, True, killable=True) as trainer:
        with started(lives, "engine", 2, port, phase, victim, killable=True) as engine:
            assert engine.results()[victim[1]] is KILLED
        with started(comes_again, "engine", 3, port) as engine:
            assert engine.results() == [True, True, True]
        found = trainer.results()
    check_told(found, phase, victim, port)
    assert [each["sent"] for each in found] == [[2, 3, 4], [2, 3, 4]]


def waits_alone(world: World) -> str:
    """The first rank of an engine leaves its card, and is killed while it waits."""
    if world.rank == 0:
        world.store.wait(["the other rank has started"])
        dies_in(StoreDriver, "_wait")
    else:
        world.store.set("the other rank has started", "")
    told = said(lambda: world.meet(timeout=SHORT))
    world.store.set("the first engine is gone", "")
    return told


def comes_late(world: World) -> list[int]:
    world.store.wait(["the first engine is gone"])
    transfer = world.meet()
    world.fill(3)
    transfer.run()
    world.store.wait(["the new engine is done"])
    return sorted(transfer.plan.received)


@pytest.mark.full
def test_the_card_of_a_killed_engine_is_replaced() -> None:
    port = free_port()
    with started(comes_late, "trainer", 2, port) as trainer:
        with started(waits_alone, "engine", 2, port, killable=True) as engine:
            killed, told = engine.results()
        assert killed is KILLED
        assert told.startswith("PeerTimeoutError: transfer 'default': ")
        with started(comes_again, "engine", 3, port) as engine:
            assert engine.results() == [True, True, True]
        assert trainer.results() == [[2, 3, 4], [2, 3, 4]]


def check_told(found: list[Any], phase: str, victim: Victim, port: int) -> None:
    name, rank = victim
    # Before the ranks are linked nothing tells more of the rank that serves the store.
    unlinked = phase in (*LATE, "while planning") and victim == ("trainer", 0)
    joint = rank + 2 * (name == "engine")
    for each in found:
        if each is KILLED:
            continue
        text = each["told"]
        if unlinked and f"transfer 'default': the store at 127.0.0.1:{port} " in text:
            continue
        if phase in AT_ONCE:
            assert text.startswith("PeerFailedError: "), text
            assert f"rank {joint} is gone" in text, text
        else:
            assert text.startswith("PeerTimeoutError: transfer 'default': "), text
            assert f"rank {joint} did not " in text, text
        assert "(ranks 0-1 are trainer's ranks 0-1 and ranks 2-3 are engine's ranks 0-1)" in text


CASES = [
    pytest.param(
        phase, victim,
        marks=() if (phase, victim) == ("in a run", ENGINE[0]) else pytest.mark.full,
        id=f"{'-'.join(map(str, victim))} {phase}",
    )
    for phase in (*AT_ONCE, *LATE)
    for victim in (*ENGINE, *TRAINER)
    # Its own ranks alone know that the first one is killed before it can tell them of the other.
    if (phase, victim[1]) != ("before it meets", 0)
]  # fmt: skip


@pytest.mark.parametrize(("phase", "victim"), CASES)
def test_a_killed_rank_is_named_on_all_others(phase: str, victim: Victim) -> None:
    port = free_port()
    given = (port, phase, victim)
    with (
        started(lives, "trainer", 2, *given, killable=True) as trainer,
        started(lives, "engine", 2, *given, killable=True) as engine,
    ):
        found = {"engine": engine.results(), "trainer": trainer.results()}
    assert found[victim[0]][victim[1]] is KILLED
    check_told([*found["trainer"], *found["engine"]], phase, victim, port)
    for each in found["engine"]:
        if each is not KILLED and phase == "before a run":
            assert each["holds"] == 1
        if each is not KILLED and phase in NEVER_MOVED:
            assert each["holds"] == 0
