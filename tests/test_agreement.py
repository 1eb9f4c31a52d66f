"""The meeting itself, on threads and a store in memory: what it costs, and whom it names."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from commgrid.errors import (
    CommGridError,
    GridMismatchError,
    PeerFailedError,
    PeerTimeoutError,
)
from commgrid.runtime.agreement import Meeting
from commgrid.runtime.diagnosis import describe_mismatch, describe_ranks


class CountingStore:
    """A store that counts one rank's calls."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return getattr(self.store, name)(*args)

        return call


def on_threads(world: int, task: Callable[[int, CountingStore], Any]) -> list[Any]:
    """Runs `task(rank, store)` on a thread a rank; exceptions are results too."""
    shared = HashStore()
    found: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            found[rank] = task(rank, CountingStore(shared))
        except CommGridError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def meeting(store: Any, rank: int, world: int, seconds: float = 10.0, **document: Any) -> Meeting:
    return Meeting(
        store, name="test", rank=rank, ranks=range(world), document=document,
        deadline=time.monotonic() + seconds,
    )  # fmt: skip


def all_phases(rank: int, store: CountingStore, world: int) -> int:
    made = meeting(store, rank, world, size=2)
    made.meet("created")
    made.meet("ready")
    return sum(store.calls.values())


@pytest.mark.parametrize("world", [4, 64])  # above the three phases: some rank is never last
def test_calls_do_not_grow_with_the_world(world: int) -> None:
    calls = on_threads(world, lambda rank, store: all_phases(rank, store, world))
    assert max(calls) <= 20
    assert min(calls) == 14  # and whoever comes last in a phase writes its verdict


def test_every_meeting_gets_a_number_of_its_own() -> None:
    def twice(rank: int, store: CountingStore) -> list[int]:
        return [meeting(store, rank, 4).incarnation for _ in range(3)]

    numbers = on_threads(4, twice)
    assert all(found == numbers[0] for found in numbers)
    assert len(set(numbers[0])) == 3


def test_many_differences_are_named_once_each() -> None:
    def differing(rank: int, store: CountingStore) -> Meeting:
        return meeting(store, rank, 6, tp=rank // 3, name="x" if rank == 5 else "y", same=1)

    for error in on_threads(6, differing):
        assert isinstance(error, GridMismatchError)
        text = str(error)
        assert "tp is 0 on ranks 0-2 and 1 on ranks 3-5" in text.replace(
            "tp is 1 on ranks 3-5 and 0 on ranks 0-2", "tp is 0 on ranks 0-2 and 1 on ranks 3-5"
        )
        assert "name is 'x' on rank 5 and 'y' on ranks 0-4" in text
        assert "same" not in text.replace("give every rank the same", "")


def test_a_failure_wakes_those_who_wait() -> None:
    def failing(rank: int, store: CountingStore) -> float:
        made = meeting(store, rank, 4)
        if rank == 2:
            made.give_up("created", ValueError("out of sockets"))
            return 0.0
        made.meet("created")
        raise AssertionError("not reached")

    started = time.monotonic()
    found = on_threads(4, failing)
    assert time.monotonic() - started < 5
    for rank in (0, 1, 3):
        assert isinstance(found[rank], PeerFailedError)
        assert "rank 2 failed: ValueError: out of sockets" in str(found[rank])


def test_a_rank_that_stops_half_way_is_named() -> None:
    def stopping(rank: int, store: CountingStore) -> None:
        made = meeting(store, rank, 4, seconds=1.0)
        if rank != 1:
            made.meet("created")

    found = on_threads(4, stopping)
    assert found[1] is None
    for rank in (0, 2, 3):
        assert isinstance(found[rank], PeerTimeoutError)
        assert "rank 1 did not get as far as 'created'" in str(found[rank])


def test_a_store_that_goes_away_is_not_a_missing_rank() -> None:
    class Gone(CountingStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(PeerTimeoutError, match=r"stopped answering \(Connection reset by peer\)"):
        meeting(Gone(HashStore()), 0, 2)


def test_descriptions() -> None:
    assert describe_ranks([5, 0, 1]) == "ranks 0-1, 5"
    holders = [('{"a": {"b": 1}}', [0]), ('{"a": {"b": 2}, "c": 3}', [1, 2])]
    assert describe_mismatch(holders) == (
        "ranks disagree: a.b is 1 on rank 0 and 2 on ranks 1-2; "
        "c is 'not given' on rank 0 and 3 on ranks 1-2; give every rank the same"
    )


def test_an_old_mismatch_is_not_reported_for_a_new_absence() -> None:
    def again(rank: int, store: CountingStore) -> list[str]:
        with pytest.raises(GridMismatchError):
            meeting(store, rank, 3, tp=1 if rank < 2 else 2)
        if rank == 2:
            return []
        with pytest.raises(PeerTimeoutError, match="rank 2 did not arrive") as caught:
            meeting(store, rank, 3, seconds=1.0, tp=1)
        return [str(caught.value)]

    assert all(isinstance(found, list) for found in on_threads(3, again))


def test_rows_in_another_order_are_said_to_be() -> None:
    def ordered(rank: int, store: CountingStore) -> Meeting:
        groups = {"a": "tp", "b": "dp"} if rank else {"b": "dp", "a": "tp"}
        return meeting(store, rank, 2, groups=groups)

    for error in on_threads(2, ordered):
        assert "the rows of groups come in different orders" in str(error)
