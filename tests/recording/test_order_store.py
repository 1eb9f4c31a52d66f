"""Keys of the order check: each error once a rank, and a lease that only its holder ends."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from commgrid.call_records.operations import Alike
from commgrid.recording.counterpart import KEPT, Counterpart, Words
from commgrid.recording.order_store import OrderStore
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import PatientStore


@pytest.fixture
def ranks() -> list[OrderStore]:
    """Three ranks at one store."""
    store = PatientStore(dist.HashStore())
    return [OrderStore(store, "order", rank) for rank in range(3)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that this host's clock shows."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_an_error_is_raised_in_its_call_alone(ranks: list[OrderStore]) -> None:
    ranks[0].post("7 4", "call 4 differs")
    assert ranks[1].error(["7 5", "8 4"]) is None
    found = ranks[1].error(["7 4"])
    assert found is not None
    assert (found.finder, found.text) == (0, "call 4 differs")
    ranks[1].note_raised("7 4")
    assert ranks[1].error(["7 4"]) is None
    assert ranks[2].error(["7 4"]) is not None


def test_an_error_that_two_ranks_find_is_one(ranks: list[OrderStore]) -> None:
    ranks[0].post("7 4", "call 4 differs from rank 1")
    ranks[2].post("7 4", "call 4 differs from rank 3")
    assert [each.text for each in ranks[1]._found()] == ["call 4 differs from rank 1"]


def test_a_deadlock_is_an_error_of_the_ranks_in_it(ranks: list[OrderStore]) -> None:
    ranks[2].post("0 waits for 1", "deadlock", [0, 1])
    assert ranks[2].error([]) is None
    assert ranks[0].error([]) is not None
    ranks[0].note_raised("0 waits for 1")
    assert ranks[0].error([]) is None
    ranks[1].note_ended()  # its wait has ended all the same, since rank 0 went on
    assert ranks[1].error([]) is None


def test_the_store_keeps_the_last_errors(ranks: list[OrderStore]) -> None:
    for turn in range(500):
        ranks[0].post(f"7 {turn}", "differs")
        ranks[0].note_raised(f"7 {turn}")
    assert len(ranks[1]._found()) <= 64
    assert not ranks[0]._found()


def test_one_rank_searches_at_a_time(ranks: list[OrderStore], clock: list[float]) -> None:
    assert ranks[0].take_lease()
    assert not ranks[1].take_lease()
    ranks[0].end_lease()
    assert ranks[1].take_lease()


@pytest.mark.parametrize("wall", [-1e6, 1e6], ids=["behind", "ahead"])
def test_wall_clocks_of_other_hosts_do_not_matter(
    ranks: list[OrderStore], clock: list[float], monkeypatch: pytest.MonkeyPatch, wall: float
) -> None:
    assert ranks[0].take_lease()
    before = time.time()
    monkeypatch.setattr(time, "time", lambda: before + wall)
    assert not ranks[1].take_lease()
    clock[0] += 0.9 * timeouts().lease
    assert not ranks[1].take_lease()
    assert not ranks[2].take_lease()  # which has seen it only now
    clock[0] += 0.2 * timeouts().lease
    assert not ranks[2].take_lease()
    assert ranks[1].take_lease()


def test_a_lease_that_was_taken_over_is_not_ended(
    ranks: list[OrderStore], clock: list[float]
) -> None:
    assert ranks[0].take_lease()
    assert not ranks[1].take_lease()
    clock[0] += 2 * timeouts().lease
    assert ranks[1].take_lease()
    ranks[0].end_lease()  # it was only slow
    assert not ranks[2].take_lease()
    assert not ranks[0].take_lease()


def test_a_lease_that_is_taken_again_is_a_new_one(
    ranks: list[OrderStore], clock: list[float]
) -> None:
    for _ in range(3):  # of one rank, each for less than the limit
        assert ranks[0].take_lease()
        assert not ranks[1].take_lease()
        clock[0] += 0.9 * timeouts().lease
        ranks[0].end_lease()


def test_nothing_is_kept_of_calls_of_long_ago() -> None:
    link, alike = Counterpart(1, 7), Alike("all_reduce", "", 0, None, "")
    for turn in range(3 * KEPT):
        link.add(turn, 5)
        link.theirs[turn], link.issued[turn], link.said[turn] = 3, 5, (5, True)
        link.words[turn] = Words(3, True, alike, "", "")
    for held in (link.mine, link.theirs, link.issued, link.said, link.words):
        assert len(held) <= KEPT
