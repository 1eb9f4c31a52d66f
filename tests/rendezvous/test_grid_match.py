"""Two grids that find each other under every fault, in virtual time."""

import random

import pytest

from commgrid.rendezvous.grid_match import Calls, Candidate, Heard, match, withdraw
from commgrid.rendezvous.op import Now, Protocol, StoreLostError, WaitKey
from commgrid.rendezvous.round import tidy
from tests.rendezvous.simulator import FAULTS, Fault, Process, Simulation, every_fault

LIMIT = 300.0
SIDES = ("source", "target")


def card(who: str, wants: str | None = None, about: str = "this") -> Candidate:
    """The card of a grid; `s0` is a source, `t0` a target."""
    side = "source" if who.startswith("s") else "target"
    return Candidate(about, side, who, wants, f"{about}/{who}", who)


def finding(mine: Candidate, seconds: float = LIMIT) -> Protocol[str | None]:
    try:
        return (yield from match(mine, (yield Now()) + seconds))
    except StoreLostError:
        yield from tidy(left(mine))
        raise


def left(mine: Candidate) -> Protocol[None]:
    yield from withdraw(mine, f"{mine.at}/failed")


def start(found: Simulation, who: str, at: float, seconds: float = LIMIT) -> Process:
    return found.start(0, lambda now: finding(card(who), seconds), at)


def keys(found: Simulation) -> set[str]:
    """Keys that are left, besides an empty board."""
    board = found.store.values.get("commgrid/match/board", b'"waiting": []')
    assert b'"waiting": []' in board, board
    return {*found.store.values} - {"commgrid/match/board"}


def test_the_nth_source_meets_the_nth_target() -> None:
    for seed in range(200):
        found = Simulation(seed)
        sources = [start(found, f"s{i}", 2.0 * i) for i in range(4)]
        targets = [start(found, f"t{i}", 2.0 * i + random.Random(seed).random()) for i in range(4)]
        found.run()
        assert [process.result for process in sources] == ["t0", "t1", "t2", "t3"]
        assert [process.result for process in targets] == ["s0", "s1", "s2", "s3"]
        assert not keys(found)


def test_all_at_once_find_one_each() -> None:
    for seed in range(300):
        found = Simulation(seed)
        names = [f"{side}{i}" for i in range(5) for side in "st"]
        by_name = {name: start(found, name, 0.0) for name in names}
        found.run()
        for name, process in by_name.items():
            assert by_name[process.result].result == name, found.schedule()
        assert not keys(found)


@pytest.mark.parametrize("first", [0, 1])
def test_every_fault_at_every_operation(first: int) -> None:
    """One of each side; afterwards another of each finds the other."""
    rows = 0
    names = ("s0", "t0")
    starts = [5.0 * (rank != first) for rank in range(2)]
    for kind, struck, found in every_fault(2, lambda r, _: finding(card(names[r])), starts):
        rows += 1
        for process in found.processes:
            if process.crashed or process is struck:
                continue
            lost = isinstance(process.error, StoreLostError)
            assert process.error is None or (lost and kind.startswith("store")), process.error
            assert process.result in (None, names[1 - process.rank])
            assert process.over_at <= 5.0 + LIMIT + 20.0
        if kind in ("pause", "long pause"):  # however long one stands still
            assert [process.result for process in found.processes] == ["t0", "s0"]
            assert not keys(found)
    assert rows >= len(FAULTS) * 7


@pytest.mark.parametrize("kind", ["store gone", "store stopped", "given up"])
def test_a_store_that_is_lost_after_the_match_changes_nothing(kind: str) -> None:
    """s0 has read the other one's words, and only deletes them."""
    found = Simulation()
    source = found.start(0, lambda now: finding(card("s0")), fault=Fault(kind, 4))
    target = start(found, "t0", 5.0)
    found.run()
    assert source.issued == 4
    assert (source.result, target.result) == ("t0", "s0"), found.schedule()


def test_a_rank_that_stands_still_is_not_passed_over() -> None:
    """s0 has left its card and stands still when t0 comes, which does not meet s1 instead."""
    rows, names = 0, ("s0", "s1", "t0", "t1")
    runs = every_fault(4, lambda r, _: finding(card(names[r])), [0.0, 10.0, 20.0, 30.0])
    for kind, struck, found in runs:
        assert struck.fault is not None
        if kind in ("pause", "long pause") and struck.rank == 0 and struck.fault.at > 2:
            rows += 1
            assert [p.result for p in found.processes] == ["t0", "t1", "s0", "s1"], found.schedule()
    assert rows == 4  # while it begins to wait, and while it deletes what it has read


def test_a_rank_that_knows_the_other_grid_meets_no_third() -> None:
    for seed in range(100):
        found = Simulation(seed)
        early, late = start(found, "s0", 0.0), start(found, "t1", 6.0)
        choosy = found.start(0, lambda now: finding(card("t0", wants="s1")), 2.0)
        vain = found.start(0, lambda now: finding(card("s2", wants="t9"), 1.0), 3.0)
        wanted, else_ = start(found, "s1", 4.0), found.start(
            0, lambda now: finding(card("t2", about="that"), 5.0), 1.0
        )  # fmt: skip
        found.run()
        assert [process.result for process in (choosy, wanted, late, early)] == [
            "s1", "t0", "s0", "t1",
        ]  # fmt: skip
        assert vain.result is None
        assert else_.result is None
        assert not keys(found)


def test_a_grid_that_has_given_up_is_not_met() -> None:
    """The time of s0 is up as t0 comes: either both meet or neither does."""
    met = set()
    for seed in range(400):
        found, at = Simulation(seed), 10.0 + random.Random(seed).uniform(-0.5, 0.5)
        source, target = start(found, "s0", 0.0, 10.0), start(found, "t0", at, 1.0)
        found.run()
        met.add((source.result, target.result))
        assert not keys(found)
    assert met == {(None, None), ("t0", "s0")}


def test_a_card_of_a_grid_that_failed_is_taken_off() -> None:
    found = Simulation()
    start(found, "s0", 0.0)
    found.start(1, lambda now: left(card("s0")), 1.0)  # another rank of the grid
    target, again = start(found, "t0", 2.0), start(found, "s1", 3.0)
    found.run()
    assert (target.result, again.result) == ("s1", "t0")


def test_a_card_of_a_call_that_failed_is_replaced() -> None:
    """s0 could not take its card back, as if the store did not answer, and calls again."""
    found = Simulation()
    lost = Candidate("this", "source", "s0", None, "this/s0 before", "s0")
    found.start(0, lambda now: match(lost, now + LIMIT), 0.0)
    again, target = start(found, "s0", 1.0), start(found, "t0", 2.0)
    found.run()
    assert (again.result, target.result) == ("t0", "s0")


# -- the first rank of a grid tells the others --------------------------------------------


def first(words: str, waits: float, fails: bool) -> Protocol[None]:
    calls = Calls("c")
    number = yield from calls.begin()
    yield WaitKey("never", (yield Now()) + waits)
    if fails:
        yield from calls.fail(number, words)
    else:
        yield from calls.tell(number, words)


def other(after: int = 0, seconds: float = 60.0) -> Protocol[Heard]:
    return (yield from Calls("c").hear(after, (yield Now()) + seconds))


def test_the_others_hear_what_the_first_rank_tells() -> None:
    for fails in (False, True):
        for seed in range(100):
            found, drawn = Simulation(seed), random.Random(seed)
            found.start(0, lambda now, f=fails: first("found", 5.0, f), drawn.random() * 4)
            others = [found.start(1, lambda now: other(), drawn.random() * 4) for _ in range(3)]
            found.run()
            assert {process.result for process in others} == {Heard(1, "found")}


def test_a_rank_that_comes_late_to_a_failed_call_waits_for_the_next() -> None:
    found = Simulation()
    found.start(0, lambda now: first("failed", 1.0, fails=True))
    late = found.start(1, lambda now: other(), 10.0)
    found.start(0, lambda now: first("found", 1.0, fails=False), 30.0)
    heard = found.start(2, lambda now: other(after=1), 10.0)  # it has heard of the failed one
    found.run()
    assert late.result == heard.result == Heard(3, "found")


def test_a_call_that_was_not_ended_does_not_shift_the_next() -> None:
    """The store did not answer when the first rank failed; it calls again."""

    def not_ended() -> Protocol[None]:
        yield from Calls("c").begin()

    found = Simulation()
    found.start(0, lambda now: not_ended())
    heard = found.start(1, lambda now: other(), 2.0)
    found.start(0, lambda now: first("found", 1.0, fails=False), 5.0)
    found.run()
    assert heard.result == Heard(3, "found")


def test_the_time_is_up_before_or_after_the_first_rank_has_come() -> None:
    for comes, is_open in ((1.0, True), (100.0, False)):
        found = Simulation()
        found.start(0, lambda now: first("found", 50.0, fails=False), comes)
        waits = found.start(1, lambda now: other(seconds=20.0))
        found.run()
        assert waits.result == Heard(1, None, is_open)
        assert waits.over_at == pytest.approx(20.0, abs=0.1)


def test_a_rank_that_waits_looks_less_and_less_often() -> None:
    found = Simulation()
    waits = found.start(1, lambda now: other(seconds=1000.0))
    found.run()
    assert waits.issued <= 25
