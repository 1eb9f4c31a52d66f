"""A watched grid: whoever waits for a rank that is gone or stopped is told which, and goes on."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.failures import named_failures
from commgrid.health.channel import ControlChannel, _logged, neighbours_of
from commgrid.health.detector import Watch
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.hosts import outward_address
from commgrid.testing import run_on_ranks
from commgrid.torch_compat.world import Numbering
from tests.flags import meet
from tests.killing import KILLED, kill_me, run_killable
from tests.waiting import comes, until, until_threads_wait, until_waits
from tests.watched import CASES, check


@pytest.mark.full("left-*", "raised-in a step", "killed-in a bridge", "*others*", "stopped-*")
@pytest.mark.parametrize(("how", "where"), CASES)
def test_a_rank_that_fails_is_named_by_all_others(how: str, where: str, tmp_path: Path) -> None:
    check(how, where, tmp_path)


def test_every_rank_is_reached_in_few_steps() -> None:
    for count in (1, 2, 3, 7, 8, 100, 1024):
        linked: dict[int, set[int]] = {place: set() for place in range(count)}
        for place in range(count):
            for other in neighbours_of(place, count):
                assert other != place
                linked[place].add(other)
                linked[other].add(place)
        assert max(map(len, linked.values())) <= 2 * count.bit_length()
        reached, steps = {0}, 0
        while len(reached) < count:
            reached |= {other for place in reached for other in linked[place]}
            steps += 1
        assert steps <= count.bit_length() // 2 + 1


def cycles() -> tuple[list[str], int]:
    """What is left in the store, and how many threads, after grids have come and gone."""
    commgrid.join()
    for _ in range(5):
        commgrid.initialize(tp=2, watch=True, connect="none")
        commgrid.destroy()
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    dist.barrier()
    left = [key for key in store.list_keys() if "/watch/" in key]
    dist.barrier()
    return left, sum("commgrid links" in each.name for each in threading.enumerate())


def test_nothing_is_left_and_leaving_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    for left, threads in run_on_ranks(cycles, 4, backend=None, launcher="torchrun"):
        assert (left, threads) == ([], 0)
    assert "gone" not in capfd.readouterr().err


def rebuilt(rank: int) -> bool:
    grid = commgrid.initialize(watch=True)
    assert grid.watch is not None
    if rank == 2:
        grid.abort()
        return True
    again = commgrid.rebuild(ranks=[0, 1])
    meet(rank, 2)  # a rank that ended at once would be gone for the other
    return again is not None and again.watch is not None


def waits_for_one_that_never_connected() -> tuple[int, int]:
    """How many of a grid's groups of two have ended what waits on them once the other is gone.

    Of two ranks that never talked one waits for the other to connect, by chance either.
    """
    grid = commgrid.initialize(watch=True, connect="none", timeout=3000)
    if grid.rank == 1:
        until_waits("rank 0")
        kill_me()
    ended: list[str] = []

    def waits(group: dist.ProcessGroup) -> None:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            ended.append(f"{error}")

    pairs = [each.group for each in grid.communicators if len(each.ranks) == 2]
    waiting = [threading.Thread(target=waits, args=(group,), daemon=True) for group in pairs]
    for each in waiting:
        each.start()
    until_threads_wait(waiting)
    comes("rank 0")
    for each in waiting:
        each.join(100.0)  # a fifth of the timeout is 600 s
    found = len(pairs), len(ended)
    grid.abort()
    return found


@pytest.mark.full
def test_who_waits_for_a_dead_rank_to_connect_is_woken() -> None:
    found, killed = run_killable(waits_for_one_that_never_connected, 2)
    assert killed == KILLED
    assert found[0] == found[1] > 5


def test_a_grid_that_is_rebuilt_is_watched_as_before() -> None:
    per_rank = [(rank,) for rank in range(3)]
    more: Any = {"backend": None, "launcher": "torchrun"}
    assert all(run_on_ranks(rebuilt, 3, per_rank=per_rank, **more))


def different(rank: int) -> str:
    commgrid.join()
    try:
        commgrid.initialize(watch=rank == 0, startup_timeout=20)
    except commgrid.GridMismatchError as error:
        return str(error)
    return "nothing"


def test_all_are_watched_or_none() -> None:
    ranks = run_on_ranks(different, 2, backend=None, launcher="torchrun", per_rank=[(0,), (1,)])
    assert all("watch" in said for said in ranks), ranks


class Counted:
    """A store in this process that counts calls."""

    host, port = "127.0.0.1", 9  # where ranks are reached

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.calls = 0

    def set(self, key: str, value: bytes) -> None:
        self.calls += 1
        self.kept[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls += 1
        return [self.kept[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        self.calls += 1
        return self.kept.pop(key, None) is not None


class Group:
    """A communicator that this test says has waited too long, or not."""

    def __init__(
        self, name: str, ranks: list[int], calls: int, error: str,
        waits: bool | None = None, held: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.ranks = name, ranks
        self._calls, self._error, self._waits, self._held = calls, error, waits, held

    def calls(self) -> int:
        return self._calls

    def error(self) -> str:
        return self._error

    def held(self) -> int:
        return self._held

    def waits(self) -> bool | None:
        return self._waits


def watches(
    count: int, groups: dict[int, list[Group]], timeout: float = 30.0
) -> tuple[Counted, list[Watch]]:
    store = Counted()
    made = [
        Watch(
            "grid", range(count), timeout, lambda *_: None, groups.get(rank, []),
            Numbering(rank, store),
        )
        for rank in range(count)
    ]  # fmt: skip
    for each in made:
        each.tell_address()
    for each in made:
        each.connect("secret")
    for each in made:
        each.begin()
    return store, made


def test_all_hear_of_a_loss_and_the_store_is_asked_three_times() -> None:
    store, made = watches(50, {})
    assert (store.calls, store.kept) == (3 * 50, {})
    made[17]._links._say_goodbye = lambda: None  # type: ignore[method-assign]
    made[17].close()
    others = [each for rank, each in enumerate(made) if rank != 17]
    for each in others:
        assert each.read(60) == "rank 17 is gone: its process has ended"
        assert not each.late
    assert store.calls == 3 * 50
    for each in others:
        each.close()


def test_a_process_that_stood_still_blames_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than a rank may be silent: it could not have heard a sign of life meanwhile."""
    stood, looks = 0.0, [0, 0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood, sleep=time.sleep)
    monkeypatch.setattr("commgrid.health.channel.time", clock)
    _, made = watches(2, {}, 2.0)

    def looked(rank: int) -> None:
        looks[rank] += 1

    for rank, each in enumerate(made):
        each._links._look = partial(looked, rank)
    until(lambda: min(looks) > 1, "both have looked")
    before, stood = list(looks), 3.0
    until(lambda: all(now > then + 1 for now, then in zip(looks, before, strict=True)), "again")
    assert [each.failure for each in made] == [None, None]
    for each in made:
        each.close()


def test_who_waits_for_another_group_is_not_to_blame() -> None:
    groups = {  # rank 3 waits for 2 in tp, and 1 for 3 in dp: 2 has gone elsewhere
        1: [Group("dp", [1, 3], 4, "timeout")],
        2: [Group("dp", [0, 2], 4, ""), Group("tp", [2, 3], 6, "")],
        3: [Group("tp", [2, 3], 7, "timeout"), Group("dp", [1, 3], 3, "")],
    }
    _, made = watches(4, groups)
    for each in made:
        said = each.read(60)
        assert said is not None
        assert "rank 2 has not come to call 7 on tp, for which rank 3 has waited 30 s" in said
        assert "test_detector.py" in said
        assert each.late
    for each in made:
        each.close()


@pytest.mark.parametrize("answers", [True, False])
def test_no_answer_is_not_as_many_calls(answers: bool) -> None:
    """Rank 1 has made as many calls, and says so, or its thread stands still."""
    _, made = watches(2, {0: [Group("tp", [0, 1], 5, "timeout")], 1: [Group("tp", [0, 1], 5, "")]})
    if not answers:
        made[1]._late_call.hear = lambda *_: None  # type: ignore[method-assign]
    said = made[0].read(60)
    assert said is not None
    every = "every member has made as many calls on it" in said
    silent = "rank 1 did not answer how many calls they have made" in said
    assert (every, silent) == (answers, not answers), said
    for each in made:
        each.close()


def said_of(groups: dict[int, list[Group]], count: int, timeout: float = 30.0) -> str:
    """What all ranks are told."""
    _, made = watches(count, groups, timeout)
    found = {each.read(60) for each in made}
    for each in made:
        each.close()
    (said,) = found
    assert said is not None
    return said


def test_of_equal_calls_the_member_that_waits_for_nothing_is_named() -> None:
    """A late stage: messages are not counted, and all members had made as many calls."""
    said = said_of({
        0: [Group("pp", [0, 1, 2], 1, "", waits=False), Group("tp", [0, 3], 9, "", waits=False)],
        1: [Group("pp", [0, 1, 2], 1, "timeout", waits=True)],
        2: [Group("pp", [0, 1, 2], 1, "", waits=True)],
    }, 4)  # fmt: skip
    assert "a call or message on pp, for which rank 1 has waited 30 s after call 1" in said
    assert "rank 0 waits for nothing; it is at" in said
    assert "test_detector.py" in said


def test_of_members_behind_the_one_that_waits_itself_is_not_named() -> None:
    said = said_of({
        0: [Group("dp", [0, 1, 2], 5, "timeout", waits=True)],
        1: [Group("dp", [0, 1, 2], 4, "", waits=False), Group("tp", [1, 3], 7, "", waits=True)],
        2: [Group("dp", [0, 1, 2], 4, "", waits=False)],
    }, 4)  # fmt: skip
    assert said.startswith("rank 2 has not come to call 5 on dp"), said


def test_a_member_that_waits_elsewhere_is_not_named() -> None:
    said = said_of({
        0: [Group("pp", [0, 1], 1, "", waits=False), Group("tp", [0, 2], 9, "", waits=True)],
        1: [Group("pp", [0, 1], 1, "timeout", waits=True)],
    }, 3)  # fmt: skip
    assert "every member has made as many calls on it" in said


def test_a_member_that_cannot_say_whether_it_waits_is_not_named() -> None:
    said = said_of({
        0: [Group("pp", [0, 1], 1, "", waits=None)],
        1: [Group("pp", [0, 1], 1, "timeout", waits=True)],
    }, 2)  # fmt: skip
    assert "every member has made as many calls on it" in said


def test_a_call_that_no_device_has_got_is_late_as_well() -> None:
    """NCCL connects a transport within the call, and torch's watchdog does not know of it."""
    said = said_of({
        0: [Group("dp", [0, 1], 4, "", held=4)],
        1: [Group("dp", [0, 1], 3, "", waits=False)],
    }, 2, timeout=2.0)  # fmt: skip
    assert "rank 1 has not come to call 4 on dp, for which rank 0 has waited 2 s" in said


def test_a_call_that_is_held_for_a_while_is_not_late() -> None:
    _, made = watches(2, {0: [Group("dp", [0, 1], 4, "", held=4)]}, 3000.0)
    seen = made[0]._late_call
    until(lambda: seen._held.get("dp", (0, 0.0))[0] == 4, "the held call is seen")
    made[0]._communicators[0]._held = 0  # type: ignore[attr-defined]
    until(lambda: seen._held["dp"][0] == 0, "and that it is over")
    for each in made:
        assert each.failure is None
        each.close()


def test_of_two_held_calls_each_has_its_time() -> None:
    both = [Group("tp", [0, 1], 2, "", held=2), Group("dp", [0, 1], 4, "", held=4)]
    said = said_of({
        0: both,
        1: [Group("tp", [0, 1], 1, "", waits=False), Group("dp", [0, 1], 3, "", waits=False)],
    }, 2, timeout=2.0)  # fmt: skip
    assert "rank 1 has not come to call 2 on tp, for which rank 0 has waited 2 s" in said


def test_a_rank_that_was_dropped_fails_with_that() -> None:
    """Its neighbour's word for it names no ended rank."""
    _, made = watches(2, {})
    made[1]._heard({"kind": "failed", "text": "rank 1 was stopped", "late": True})
    assert made[1].read(60) == "rank 1 was stopped"
    for each in made:
        each.close()


def test_ranks_are_asked_where_they_are() -> None:
    _, made = watches(3, {})
    assert "it is at test_detector.py" in made[0].where([2])
    both = made[0].where([1, 2])
    assert "rank 1 is at test_detector.py" in both
    assert "rank 2 is at" in both
    for each in made:
        each.close()


@pytest.mark.full
def test_ranks_that_wait_for_each_other_are_both_named() -> None:
    groups = {
        0: [Group("tp", [0, 1], 5, "timeout"), Group("dp", [0, 1], 3, "")],
        1: [Group("tp", [0, 1], 4, ""), Group("dp", [0, 1], 4, "timeout")],
    }
    _, made = watches(2, groups)
    for each in made:
        said = each.read(60)
        assert said is not None
        assert "ranks have waited 30 s for each other: rank 0 in call 5 on tp for rank 1" in said
        assert "rank 1 in call 4 on dp for rank 0" in said
    for each in made:
        each.close()


class Two:
    """Two linked processes in one, and what each of them hears and misses."""

    def __init__(self, silent_after: float = 60.0, address: str = "127.0.0.1") -> None:
        self.heard: list[tuple[int, Any]] = []
        self.lost: list[tuple[int, int, str]] = []
        self.links = [
            ControlChannel(
                me, range(2), address, silent_after,
                hear=partial(self._hear, me), lost=partial(self._lose, me),
                look=lambda: None,
            )
            for me in range(2)
        ]  # fmt: skip
        for me, links in enumerate(self.links):
            links.connect({1 - me: self.links[1 - me].address}, "secret")

    def _hear(self, me: int, message: dict[str, Any]) -> None:
        self.heard.append((me, message["text"]))

    def _lose(self, me: int, rank: int, how: str) -> None:
        self.lost.append((me, rank, how))

    def until(self, found: Any) -> None:
        until(found, f"{self.heard}, {self.lost}")


def test_what_one_tells_the_other_hears_once() -> None:
    two = Two()
    two.links[0].tell({"kind": "failed", "text": "ä" * 10_000})
    two.links[0].tell({"kind": "failed", "text": "second"})
    two.until(lambda: len(two.heard) == 2)
    two.links[1].tell({"kind": "failed", "text": "back"})  # behind what came twice
    two.until(lambda: (0, "back") in two.heard)
    assert two.heard == [(1, "ä" * 10_000), (1, "second"), (0, "back")]
    for each in two.links:
        each.close()
        each.close()
    assert two.lost == []


def test_a_closed_link_to_a_living_rank_is_made_again() -> None:
    """As where something between the two has cut it."""
    two = Two()
    for each in two.links[0]._all():
        each.connection.shutdown(socket.SHUT_RDWR)
    two.links[0].tell({"kind": "failed", "text": "told later"})

    def told() -> bool:
        two.links[1].tell({"kind": "failed", "text": "back"})
        return (0, "back") in two.heard

    two.until(told)
    assert two.lost == []
    for each in two.links:
        each.close()


def test_a_refusal_by_this_host_says_nothing_about_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host's name means 127.0.1.1 there, and the other's port is refused here."""
    monkeypatch.setenv("COMMGRID_HOST", "host-a")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    lost: list[tuple[int, str]] = []
    made = ControlChannel(
        0, range(2), "127.0.0.1", 60.0,
        hear=lambda message: None, lost=lambda rank, how: lost.append((rank, how)),
        look=lambda: None,
    )  # fmt: skip
    made.connect({1: f"127.0.0.1 {port} host-b"}, "secret")
    made.close()
    assert lost == []
    assert outward_address() != "127.0.1.1"


def test_a_rank_that_stood_still_learns_that_it_was_dropped() -> None:
    """It would take the neighbour that dropped it for one that has ended."""
    two = Two()
    two.until(lambda: all(each._all() for each in two.links))
    asleep = threading.Event()
    two.links[1]._look = lambda: asleep.wait(30)  # its thread stands still from now on
    two.links[0].silent_after = 2 * timeouts().beat
    two.until(lambda: (0, 1, "silent") in two.lost)
    asleep.set()
    two.until(lambda: any(me == 1 and "rank 1 was stopped" in text for me, text in two.heard))
    assert [each for each in two.lost if each[0] == 1] == []
    for each in two.links:
        each.close()


def test_a_callback_that_raises_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    two = Two()

    def raising(message: Any) -> None:
        two.links[1]._hear = partial(two._hear, 1)
        raise KeyError("text")

    two.links[1]._hear = _logged(raising)
    two.links[0].tell({"kind": "failed", "text": "first"})
    two.links[0].tell({"kind": "failed", "text": "second"})
    two.until(lambda: (1, "second") in two.heard)
    assert "a callback of the links between ranks failed" in caplog.text
    for each in two.links:
        each.close()


def test_an_address_that_is_not_this_hosts_is_an_error() -> None:
    with pytest.raises(commgrid.CommGridError, match=r"opened on 192\.0\.2\.1.*watch=False"):
        Two(address="192.0.2.1")


def test_links_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 on loopback: {error}")
    two = Two(address="::1")
    two.links[1].tell({"kind": "failed", "text": "told"})
    two.until(lambda: bool(two.heard))
    for each in two.links:
        each.close()
    assert two.heard == [(0, "told")]


def test_strangers_are_not_heard() -> None:
    two = Two()
    host, port, _ = two.links[0].address.split()
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"kind": "hello", "secret": "x", "by": 1}\n',
        b"[]\n",
    ):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
            stranger.settimeout(30)
            assert stranger.recv(10) == b""  # it is sent away
    for each in two.links:
        each.close()
    assert (two.heard, two.lost) == ([], [])


def aborts() -> str:
    """Rank 0 aborts the grid while rank 1 waits for it."""
    grid = commgrid.initialize(tp=2, watch=True)
    if grid.rank == 0:
        grid.abort()
        meet(dist.get_rank(), 2)
        return ""
    with pytest.raises(commgrid.PeerFailedError) as told, named_failures(grid):
        dist.all_reduce(torch.ones(1), group=grid.get_group("tp"))
    meet(dist.get_rank(), 2)
    return str(told.value)


def test_an_abort_names_its_rank() -> None:
    _, told = run_on_ranks(aborts, 2, check=False)
    assert "rank 0 has aborted grid 'default'" in told
