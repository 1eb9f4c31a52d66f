"""Questions to all ranks under every fault, in virtual time."""

import random

import pytest

from commgrid.rendezvous.op import Now, Protocol, StoreLostError, WaitKey
from commgrid.rendezvous.remote_questions import Questions, first, hear, tell
from tests.rendezvous.simulator import FAULTS, Simulation, every_fault

ASKS_AT, SECONDS, LISTENS = 1.0, 30.0, 200.0
Answers = dict[int, bytes]


def asking(rank: int, world: int) -> Protocol[Answers]:
    found: Answers = yield from Questions(rank, range(world)).ask(SECONDS)
    return found


def listening(rank: int, world: int, until: float = LISTENS, again: float = 20.0) -> Protocol[None]:
    """Answer all questions, as the thread of a rank does."""
    mine = Questions(rank, range(world))
    yield from mine.begin()
    while (now := (yield Now())) < until:
        yield WaitKey(mine.next_key, min(now + again, until))
        yield from mine.answer(lambda: f"rank {rank}".encode())


def one(rank: int, world: int) -> Protocol[Answers | None]:
    """Rank 0 asks, the others answer."""
    return (yield from (asking if rank == 0 else listening)(rank, world))


def left(found: Simulation) -> set[str]:
    """Keys of questions that are still there, besides their count."""
    return {*found.store.values} - {"commgrid/questions/count"}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_fault_at_every_operation(world: int) -> None:
    rows, starts = 0, [ASKS_AT] + [0.0] * (world - 1)
    for kind, struck, found in every_fault(world, lambda r, _: one(r, world), starts):
        rows += 1
        asker = found.processes[0]
        if asker.crashed:
            continue
        if asker.error is not None:
            assert isinstance(asker.error, StoreLostError)
            assert asker is struck or kind.startswith("store")
            continue
        slow = 100.0 if asker is struck else 0.0
        assert asker.over_at < ASKS_AT + SECONDS + slow + 1.0, found.schedule()
        if asker is not struck:
            assert set(asker.result) >= {*range(1, world)} - {struck.rank}, found.schedule()
        assert all(text == f"rank {rank}".encode() for rank, text in asker.result.items())
        if kind in ("pause", "long pause"):  # also if it answers long after
            answers = {key for key in left(found) if "/said/" in key}
            assert not answers, f"{answers}\n{found.schedule()}"
    assert rows >= len(FAULTS) * max(6 * (world - 1), 5)


def test_all_answer_and_nothing_is_left() -> None:
    for seed in range(100):
        found = Simulation(seed)
        asker = found.start(3, lambda now: asking(3, 40), ASKS_AT)
        for rank in {*range(40)} - {3}:
            found.start(rank, lambda now, r=rank: listening(r, 40))
        found.run()
        assert sorted(asker.result) == sorted({*range(40)} - {3})
        assert asker.over_at < ASKS_AT + 5.0  # no rank waits until the time is up
        assert not left(found)


def test_several_ask_at_once_and_again() -> None:
    """Ranks that ask answer the others' questions too, on their threads, and not their own."""
    for seed in range(100):
        found, drawn = Simulation(seed), random.Random(seed)
        for rank in range(4):
            found.start(rank, lambda now, r=rank: listening(r, 4))
        times = [ASKS_AT + drawn.random() * 3 for _ in range(6)]
        askers = [found.start(i % 4, lambda now, r=i % 4: asking(r, 4), times[i]) for i in range(6)]
        found.run()
        for asker in askers:
            assert set(asker.result) == {*range(4)} - {asker.rank}, found.schedule()
        assert not left(found)


def test_a_question_that_came_and_went_unseen_is_no_reason_to_stop() -> None:
    """Rank 1 stands still while rank 0 asks; later it answers."""
    found = Simulation()
    found.start(1, lambda now: listening(1, 2), at=ASKS_AT + SECONDS + 5.0)
    for at in (ASKS_AT, ASKS_AT + SECONDS + 50.0):
        found.start(0, lambda now: asking(0, 2), at)
    found.run()
    assert [process.result for process in found.processes[1:]] == [{}, {1: b"rank 1"}]


def test_an_answer_takes_five_operations_and_waiting_none() -> None:
    counts = []
    for asked in (0, 1):
        found = Simulation()
        listener = found.start(1, lambda now: listening(1, 1024, until=100.0, again=100.0))
        if asked:
            found.start(0, lambda now: asking(0, 1024), ASKS_AT)
        found.run()
        counts.append(listener.issued)
    assert counts[1] - counts[0] <= 6  # with the next wait


def test_the_first_rank_tells_what_it_has_found() -> None:
    def finding(late: bool) -> Protocol[str]:
        if late and (yield from first("why")):
            yield WaitKey("never", (yield Now()) + 2.0)
            yield from tell("why", "rank 2 is late")
        return (yield from hear("why", 1.0, 6.0))

    for said, late in (("rank 2 is late", (True, True, False)), ("", (False, False, False))):
        found = Simulation(1)
        for rank, at in enumerate((0.0, 0.5, 1.0)):
            found.start(rank, lambda now, is_late=late[rank]: finding(is_late), at)
        found.run()
        assert {process.result for process in found.processes} == {said}
        assert max(process.over_at for process in found.processes) < 8.0
