"""The meeting itself, on threads and a store in memory: what it costs, and whom it names."""

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore, TCPStore  # type: ignore[attr-defined]

from commgrid.errors import (
    CommGridError,
    GridMismatchError,
    PeerFailedError,
    PeerTimeoutError,
)
from commgrid.planning.rank_lists import describe_ranks, pack, unpack
from commgrid.planning.ranks import RankTuple
from commgrid.runtime.agreement import Meeting
from commgrid.runtime.diagnosis import describe_mismatch
from commgrid.runtime.roll import Line, Roll
from tests.waiting import until

FOREVER = 1000.0  # seconds, for which no thread may last


class CountingStore:
    """A store that counts one rank's calls."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    timeout = timedelta(seconds=300)

    def clone(self) -> "CountingStore":
        made = CountingStore(self.store.clone())
        made.calls = self.calls
        return made

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[name] += name not in ("set_timeout", "clone")  # which ask the store nothing
            return getattr(self.store, name)(*args)

        return call


class Killed(BaseException):
    """What stands for a process that is gone: nobody hears of it."""


class MortalStore(CountingStore):
    """A store whose process ends after so many calls, other than waiting."""

    def __init__(self, store: Any, left: int) -> None:
        super().__init__(store)
        self.left = left

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.store.wait(keys, timeout)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.left -= name != "set_timeout"
        if self.left < 0:
            raise Killed
        return getattr(self.store, name)  # type: ignore[no-any-return]


class MortalLine(Line):
    """A line whose process ends where it waits in vain."""

    def within(self, key: str, seconds: float) -> bool:
        if not super().within(key, 0.1):
            self._store.left = 0
            raise Killed
        return True


def on_threads(
    world: int, task: Callable[[int, CountingStore], Any], shared: Any = None
) -> list[Any]:
    """Runs `task(rank, store)` on a thread a rank; exceptions are results too."""
    shared = shared or HashStore()
    found: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            found[rank] = task(rank, CountingStore(shared))
        except (CommGridError, Killed) as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return found


def meeting(store: Any, rank: int, world: int, seconds: float = 10.0, **document: Any) -> Meeting:
    return Meeting(
        store, name="test", rank=rank, ranks=range(world), document=document,
        deadline=time.monotonic() + seconds,
    )  # fmt: skip


def all_phases(rank: int, store: CountingStore, world: int) -> int:
    made = meeting(store, rank, world, size=2)
    made.meet()
    made.meet()
    return sum(store.calls.values())


@pytest.mark.parametrize("world", [8, 96])
def test_calls_do_not_grow_with_the_world(world: int) -> None:
    calls = on_threads(world, lambda rank, store: all_phases(rank, store, world))
    # Most look whether a meeting is open, wait for it, read it, come, wait and read the verdict;
    # who comes after its first one reads its number, too, and looks whether it is over. Then each
    # phase is coming, waiting and reading. Few ranks look up to 13 times before they wait, which
    # four of these calls do.
    looking = 4 * 13 if world == 8 else 0
    more = 1 + 3 * -(-world // 30)  # the first, and in each phase the last of every 30
    assert sorted(calls)[world - 1 - more] <= 14 + looking
    assert max(calls) <= 45 + looking


@pytest.mark.full("True")
@pytest.mark.parametrize("first_is_here", [True, False])
def test_who_is_missing_is_said_where_those_that_look_first_are_gone(first_is_here: bool) -> None:
    """Of 64 ranks every fourth looks at the deadline, the others a while later."""
    gone = [rank for rank in range(0, 64, 4) if rank or not first_is_here]
    deadlines: list[float] = []  # one for all, from when all threads run
    start = threading.Barrier(64 - len(gone), lambda: deadlines.append(time.monotonic() + 3.0))

    def come(rank: int, store: CountingStore) -> bool:
        """Whether this rank gave up, and not before the deadline."""
        if rank in gone:
            return False
        start.wait(60)
        with pytest.raises(PeerTimeoutError, match="did not arrive") as told:
            Meeting(
                store, name="test", rank=rank, ranks=range(64), document={}, deadline=deadlines[0]
            )
        for each in gone:
            assert re.search(rf"\b{each}\b", str(told.value))
        return time.monotonic() >= deadlines[0]

    assert sum(on_threads(64, come)) == 64 - len(gone)


def test_some_look_first_whatever_ranks_a_grid_has() -> None:
    """Of ranks that are all odd, none did."""
    for ranks in (range(1, 257, 2), RankTuple(range(511, 383, -1))):
        graces = [
            made._grace
            for made in on_threads(len(ranks), lambda i, store, ranks=ranks: Meeting(
                store, name="test", rank=ranks[i], ranks=ranks, document={},
                deadline=time.monotonic() + 20,
            ))
        ]  # fmt: skip
        assert graces.count(0.0) == 16
        assert set(graces) == {0.0, 1.0}


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
    def failing(rank: int, store: CountingStore) -> None:
        made = meeting(store, rank, 4, seconds=FOREVER)
        if rank == 2:
            made.give_up(ValueError("out of sockets"))
            return
        made.meet()
        raise AssertionError("not reached")

    found = on_threads(4, failing)
    for rank in (0, 1, 3):
        assert isinstance(found[rank], PeerFailedError)
        assert "rank 2 failed: ValueError: out of sockets" in str(found[rank])


def test_a_rank_that_stops_half_way_is_named() -> None:
    def stopping(rank: int, store: CountingStore) -> None:
        made = meeting(store, rank, 4, seconds=2.0)
        if rank != 1:
            made.meet()

    found = on_threads(4, stopping)
    assert found[1] is None
    for rank in (0, 2, 3):
        assert isinstance(found[rank], PeerTimeoutError)
        assert "rank 1 did not get as far as 'created'" in str(found[rank])


class EndingStore(CountingStore):
    """A store whose server ends after so many calls of this rank."""

    def __init__(self, store: Any, left: int) -> None:
        super().__init__(store)
        self.left = left

    def clone(self) -> "EndingStore":
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.left -= name != "set_timeout"
        if self.left < 0:
            raise DistNetworkError("Connection reset by peer")
        return getattr(self.store, name)  # type: ignore[no-any-return]


@pytest.mark.full
def test_a_store_that_goes_away_is_not_a_missing_rank() -> None:
    """Whichever call of it finds out."""

    def ends(calls: int, _: CountingStore) -> int:
        def one(rank: int, store: CountingStore) -> int:
            made = meeting(EndingStore(store, calls) if rank else store, rank, 2, seconds=2.0)
            made.meet()
            made.meet()
            return calls

        with pytest.raises(PeerTimeoutError, match=r"stopped answering \(Connection reset by peer"):
            raise on_threads(2, one)[1]
        return calls

    assert on_threads(12, ends) == [*range(12)]


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
            meeting(store, rank, 3, seconds=2.0, tp=1)
        return [str(caught.value)]

    assert all(isinstance(found, list) for found in on_threads(3, again))


def test_rows_in_another_order_are_said_to_be() -> None:
    def ordered(rank: int, store: CountingStore) -> Meeting:
        groups = {"a": "tp", "b": "dp"} if rank else {"b": "dp", "a": "tp"}
        return meeting(store, rank, 2, groups=groups)

    for error in on_threads(2, ordered):
        assert "the rows of groups come in different orders" in str(error)


def keys(store: Any) -> list[str]:
    return sorted(key.removeprefix("/") for key in store.list_keys())


def test_a_ready_meeting_leaves_its_last_verdict_and_no_more_with_each() -> None:
    shared = HashStore()
    left = []
    for _ in range(3):
        on_threads(70, lambda rank, store: all_phases(rank, store, 70), shared)
        left.append(keys(shared))
    assert [len(found) for found in left] == [len(left[0])] * 3
    assert len(left[0]) <= 10
    assert [key for key in left[2] if "/3/" in key] == [
        "test@0/3/ready/0", "test@0/3/ready/1", "test@0/3/ready/2", "test@0/3/ready/blocks",
        "test@0/3/ready/verdict",
    ]  # fmt: skip
    assert not [key for key in left[2] if "/2/" in key or "/1/" in key]


@pytest.mark.parametrize("seed", range(12))
def test_a_restart_meets_afresh_wherever_the_processes_before_were_lost(seed: int) -> None:
    """The store stays, as a launcher's does, with all that two lost attempts have left there."""
    shared, chance, world = HashStore(), random.Random(seed), 3

    def lost(limits: list[int]) -> Callable[[int, CountingStore], Any]:
        def attempt(rank: int, store: CountingStore) -> Any:
            mortal = MortalStore(store, limits[rank])
            time.sleep(pauses[rank])  # makes another order of their calls
            made = Meeting(
                mortal, name="test", rank=rank, ranks=range(world), document={}, line=
                MortalLine(mortal, world), deadline=time.monotonic() + FOREVER,
            )  # fmt: skip
            made.meet()
            return made.incarnation

        return attempt

    before = set()
    for _ in range(2):
        pauses = [chance.choice((0.0, 0.05)) for _ in range(world)]
        limits = [chance.choice((0, 1, 2, 3, 4, 5, 6, 8, 10)) for _ in range(world)]
        before |= {x for x in on_threads(world, lost(limits), shared) if isinstance(x, str)}

    def restarted(rank: int, store: CountingStore) -> str:
        time.sleep(0.1 * chance.random())  # makes another order of their calls
        # A lease of the lost ones, which is not waited for, would be longer than threads may last.
        made = meeting(store, rank, world, seconds=FOREVER)
        made.meet()
        made.meet()
        return made.incarnation

    numbers = on_threads(world, restarted, shared)
    assert len(set(numbers)) == 1
    assert isinstance(numbers[0], str)
    assert numbers[0] not in before


def test_whoever_opens_may_never_come() -> None:
    """Nobody has opened the meeting: one of those who wait finds out who else does."""

    def waiting(rank: int, store: CountingStore) -> None:
        if rank not in (0, 4):
            meeting(store, rank, 6, seconds=2.0)

    found = on_threads(6, waiting)
    for rank in (1, 2, 3, 5):
        assert isinstance(found[rank], PeerTimeoutError)
        assert "ranks 0, 4 did not arrive within startup_timeout (ranks 1-3, 5 did)" in str(
            found[rank]
        )


def test_two_processes_as_one_rank() -> None:
    shared = HashStore()

    def doubled(rank: int, store: CountingStore) -> None:
        meeting(store, (0, 0, 1)[rank], 3, seconds=2.0)

    for error in on_threads(3, doubled, shared):
        assert isinstance(error, PeerTimeoutError)


@pytest.mark.parametrize("seed", range(20))
def test_lists_of_ranks_read_back(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice((1, 5, 64, 1000, 16_384))
    ranks = set(chance.sample(range(size), chance.randint(0, size)))
    assert unpack(pack(ranks)) == ranks
    assert len(pack(ranks)) <= max(64, size // 4 + 2)
    assert len(pack(range(0, 16_384, 2))) < 20


def test_a_roll_says_who_is_here() -> None:
    ranks = range(3, 200, 3)
    roll = Roll(HashStore(), "roll", ranks)
    comings = [roll.come(rank).name for rank in ranks]
    assert comings == ["EARLY"] * (len(ranks) - 1) + ["LAST"]
    assert roll.come(30).name == "AGAIN"
    assert roll.come(1).name == "EARLY"
    assert roll.here(range(10)) == [1, 3, 6, 9]


def test_a_roll_waits_for_the_last_of_every_thirty() -> None:
    """Ranks 0 to 60 fill two counters and begin a third; each of them is late once."""
    ranks = range(61)
    for late in ranks:
        roll = Roll(HashStore(), "roll", ranks)
        others = [roll.come(rank).name for rank in ranks if rank != late]
        assert others == ["EARLY"] * 60, late
        assert roll.come(late).name == "LAST"


def test_a_process_too_many_does_not_touch_its_neighbour() -> None:
    """Two of them come as rank 1 and as rank 2 while the first ones' marks are there."""
    store = HashStore()
    roll = Roll(store, "roll", range(4))
    assert [roll.come(rank).name for rank in (1, 2)] == ["EARLY", "EARLY"]
    undo, store_add = [], store.add

    class Slow(CountingStore):
        def add(self, key: str, value: int) -> int:
            if value < 0:  # has marked itself, and is slow to take that back
                undo.append((key, value))
                return 0
            return int(store_add(key, value))

    assert Roll(Slow(store), "roll", range(4)).come(1).name == "AGAIN"
    assert roll.come(0).name == "EARLY"
    assert roll.here(range(4)) == [0, 1, 2]
    assert roll.come(3).name == "LAST"
    store_add(*undo[0])
    assert roll.here(range(4)) == [0, 1, 2, 3]


def test_a_longer_list_that_comes_when_the_others_are_done() -> None:
    shared = HashStore()

    first = CountingStore(shared)
    began = threading.Thread(target=lambda: all_phases(0, first, 2))
    began.start()
    until(lambda: shared.check(["test@0/1/opening"]), "the first rank opens")

    class Joined(CountingStore):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            all_phases(1, CountingStore(shared), 2)
            began.join(60)
            return bytes(self.store.compare_set(key, expected, desired))

    with pytest.raises(GridMismatchError, match=r"ranks is \[0, 3, 1\] on rank 2 and \[0, 2, 1\]"):
        meeting(Joined(shared), 2, 3, seconds=FOREVER, size=2)


def waiting_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("commgrid waits")}


def test_a_failed_start_holds_neither_the_store_nor_threads() -> None:
    """Over a real store, whose client serves one call at a time: the first rank waits in vain for
    the other, and comes again."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = waiting_threads()  # of other tests
    for _ in range(3):
        with pytest.raises(PeerTimeoutError, match="rank 1 did not arrive"):
            meeting(store, 0, 2, seconds=0.3)
        assert store.add("anything", 1) > 0
    found = on_threads(2, lambda rank, counting: all_phases(rank, counting, 2), store)
    assert all(isinstance(calls, int) for calls in found), found
    until(lambda: not waiting_threads() - before, "the end of its threads")


def test_a_connection_that_breaks_early_blames_nobody_else() -> None:
    has_failed = threading.Event()

    def early(rank: int, store: CountingStore) -> None:
        made = meeting(store, rank, 3, seconds=FOREVER)
        if rank == 2:
            failed = made.give_up(PeerTimeoutError("closed by peer"))
            has_failed.set()
            raise failed
        assert has_failed.wait(60)
        made.meet()

    found = on_threads(3, early)
    assert str(found[2]) == "closed by peer"
    for rank in (0, 1):
        assert "rank 2 failed: PeerTimeoutError: closed by peer" in str(found[rank])


def test_whoever_opens_may_be_lost_after_it_has_come() -> None:
    is_lost = threading.Event()

    def lost(rank: int, store: CountingStore) -> None:
        if rank == 0:
            mortal = MortalStore(store, 100)
            try:
                Meeting(
                    mortal, name="test", rank=0, ranks=range(3), document={"size": 2},
                    line=MortalLine(mortal, 3), deadline=time.monotonic() + 60,
                )  # fmt: skip
            finally:
                is_lost.set()
        assert is_lost.wait(60)
        meeting(store, rank, 3, seconds=2.0, size=2)

    for error in on_threads(3, lost)[1:]:
        assert "ranks 0-2 have all come, and rank 0, who says so" in str(error)


def test_cycles_that_fail_in_between_leave_no_more() -> None:
    shared, left = HashStore(), []
    for _ in range(3):
        on_threads(4, lambda rank, store: all_phases(rank, store, 4), shared)
        on_threads(4, lambda rank, store: meeting(store, rank, 4, odd=rank // 2), shared)
        on_threads(4, lambda rank, store: all_phases(rank, store, 4), shared)
        left.append(len(keys(shared)))
    assert left == [left[0]] * 3
