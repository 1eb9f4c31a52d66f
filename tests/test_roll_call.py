"""Who is left: ranks as threads at one store, each with its own part in a call."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
from torch.distributed import HashStore

from commgrid.errors import CommGridError, PeerTimeoutError
from commgrid.planning.rank_lists import unpack
from commgrid.runtime.roll_call import Call, RollCall
from tests.waiting import until

LONG = 600.0  # who waits for it does not end within the test's time


def conclude(here: Sequence[int], said: Sequence[str]) -> dict[str, Any]:
    return {"said": list(said)}


def call(
    store: HashStore,
    world: int,
    calling: Sequence[int],
    knows: Mapping[int, Sequence[int]],
    grace: float = LONG,
    ranks: tuple[int, ...] | None = None,
    after: str = "g/0",
) -> list[Any]:
    """What each of `calling` is told: the verdict, or the error."""

    def one(rank: int) -> Any:
        calls = RollCall(store, rank, range(world), knows.get(rank, ()))
        about, deadline = Call("g", after, ranks), monotonic() + 2 * LONG
        try:
            return dict(calls.answer(about, f"{rank} says", conclude, grace, deadline))
        except CommGridError as error:
            return error

    with ThreadPoolExecutor(len(calling)) as threads:
        return list(threads.map(one, calling))


def test_who_has_ended_is_not_waited_for() -> None:
    """Two have seen it, the others have not."""
    for verdict in call(HashStore(), 5, [0, 1, 2, 4], {2: [3], 4: [3]}):
        assert (unpack(verdict["here"]), unpack(verdict["ended"])) == ({0, 1, 2, 4}, {3})
        assert verdict["said"] == ["0 says", "1 says", "2 says", "4 says"]


def test_more_than_thirty_have_seen_it() -> None:
    """A roll has two bits for a rank: each that comes for it twice would be another rank's."""
    calling = [rank for rank in range(45) if rank != 20]
    for verdict in call(HashStore(), 45, calling, {rank: [20] for rank in calling}):
        assert (unpack(verdict["here"]), unpack(verdict["ended"])) == ({*calling}, {20})


def test_who_comes_itself_has_not_ended() -> None:
    """A connection that something on the way has closed is no death."""
    store = HashStore()
    with ThreadPoolExecutor(1) as thread:
        last = thread.submit(call, store, 4, [3], {})
        until(lambda: store.check(["commgrid/rebuild/1/said/3"]), "rank 3 comes")
        verdicts = call(store, 4, [0, 1, 2], {2: [3], 0: [3]})
        for verdict in (*verdicts, *last.result()):
            ended = unpack(verdict["ended"])
            assert (unpack(verdict["here"]), ended) == ({0, 1, 2, 3}, set())


def test_who_is_only_missing_gets_the_grace() -> None:
    """Rank 2 comes while the others wait, and is counted; or never, and the grace ends."""
    for verdict in call(HashStore(), 4, [0, 1], {0: [3]}, grace=0.6):
        assert (unpack(verdict["here"]), unpack(verdict["ended"])) == ({0, 1}, {3})
    store = HashStore()
    with ThreadPoolExecutor(1) as thread:
        early = thread.submit(call, store, 4, [0, 1], {0: [3]})
        until(lambda: store.check([f"commgrid/rebuild/1/said/{rank}" for rank in (0, 1)]), "both")
        for verdict in (*call(store, 4, [2], {}), *early.result()):
            assert (unpack(verdict["here"]), unpack(verdict["ended"])) == ({0, 1, 2}, {3})


def test_certain_ranks_of_which_one_has_ended() -> None:
    for error in call(HashStore(), 4, [0, 1, 2], {0: [3]}, ranks=(0, 1, 2, 3)):
        with pytest.raises(PeerTimeoutError, match=r"the process of rank 3 has ended \(ranks 0-2"):
            raise error


def test_certain_ranks_of_which_one_has_ended_and_one_is_late() -> None:
    store = HashStore()
    calls = RollCall(store, 0, range(4), [3])
    with pytest.raises(
        PeerTimeoutError,
        match=r"the process of rank 3 has ended, ranks 1-2 did not come within timeout \(rank 0 c",
    ):
        calls.answer(Call("g", "g/0", (0, 1, 2, 3)), "", conclude, LONG, monotonic() + 0.5)


def test_the_next_call_is_a_call_of_its_own() -> None:
    """What is known of the last one is taken from the store, and nobody who came is missed."""
    store = HashStore()
    calling, knows = [0, 1, 2], {0: [3]}
    for number in range(4):
        for verdict in call(store, 4, calling, knows, after=f"g/{number}"):
            assert unpack(verdict["ended"]) == {3}
        knows = {rank: [3] for rank in calling}
    kept = store.num_keys()
    call(store, 4, calling, knows, after="g/4")
    assert store.num_keys() == kept
