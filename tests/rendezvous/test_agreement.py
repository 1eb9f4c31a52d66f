"""Messages of an agreement, and the keys that it leaves, in virtual time."""

from collections.abc import Callable
from typing import Any

import pytest

from commgrid.errors import GridMismatchError, PeerFailedError, PeerTimeoutError
from commgrid.layout.rank_text import describe_ranks
from commgrid.layout.ranks import RankTuple
from commgrid.rendezvous.agreement import PHASES, Agreement
from commgrid.rendezvous.op import Protocol
from commgrid.rendezvous.round import REPORTERS, reports_first
from commgrid.rendezvous.start_decision import describe_mismatch, ranks_entry
from commgrid.rendezvous.world_epoch import FirstAgreement
from tests.rendezvous.simulator import Process, SimulatedStore, Simulation

LIMIT = 60.0


def agreement(
    rank: int, now: float, ranks: Any, *, limit: float = LIMIT, **given: Any
) -> Agreement:
    kept = ("phases", "server", "about", "where")
    more = {key: given.pop(key) for key in kept if key in given}
    name = given.pop("name", "g")
    return Agreement(
        name=name, me=rank, members=ranks, document=given, began=now, until=now + limit, **more
    )


def all_phases(made: Agreement) -> Protocol[str]:
    yield from made.compare()
    for _ in PHASES:
        yield from made.meet()
    return made.incarnation


def play(
    make: Callable[[int, float], Protocol[Any]], ranks: Any, store: SimulatedStore | None = None
) -> list[Process]:
    simulation = Simulation(store=store)
    for rank in ranks:
        simulation.start(rank, lambda now, r=rank: make(r, now))
    simulation.run()
    assert all(process.ended for process in simulation.processes), simulation.schedule()
    return simulation.processes


def errors(processes: list[Process]) -> list[str]:
    return [f"{type(p.error).__name__}: {p.error}" if p.error else "" for p in processes]


def test_every_agreement_has_a_name_of_its_own() -> None:
    def thrice(rank: int, now: float) -> Protocol[list[str]]:
        found = []
        for _ in range(3):
            found.append((yield from all_phases(agreement(rank, now, range(4)))))
        return found

    found = [process.result for process in play(thrice, range(4))]
    assert found == [["0.1", "0.2", "0.3"]] * 4


def test_every_difference_is_named_once() -> None:
    def differing(rank: int, now: float) -> Protocol[str]:
        name = "x" if rank == 5 else "y"
        return all_phases(agreement(rank, now, range(6), tp=rank // 3, label=name, same=1))

    for process in play(differing, range(6)):
        assert isinstance(process.error, GridMismatchError)
        text = str(process.error)
        assert "tp is 0 on ranks 0-2 and 1 on ranks 3-5" in text
        assert "label is 'x' on rank 5 and 'y' on ranks 0-4" in text
        assert "same" not in text.replace("give every rank the same", "")


def test_more_documents_than_are_told_apart() -> None:
    found = play(lambda r, now: all_phases(agreement(r, now, range(12), tp=r)), range(12))
    for process in found:
        assert "tp is 0 on rank 0 and 1 on rank 1" in str(process.error)
        assert "ranks 9-11 differ in further ways" in str(process.error)


def test_documents_describe_themselves() -> None:
    assert describe_ranks([5, 0, 1]) == "ranks 0-1, 5"
    holders = [('{"a": {"b": 1}}', [0]), ('{"a": {"b": 2}, "c": 3}', [1, 2])]
    assert describe_mismatch(holders) == (
        "ranks disagree: a.b is 1 on rank 0 and 2 on ranks 1-2; "
        "c is 'not given' on rank 0 and 3 on ranks 1-2; give every rank the same"
    )
    rows = [('{"a": 1, "b": 2}', [0]), ('{"b": 2, "a": 1}', [1])]
    assert "the rows of groups come in different orders" in describe_mismatch(rows)
    assert ranks_entry(RankTuple((3, 1))) == {"set": "1,3", "order": "3,1"}


def test_a_rank_with_a_longer_list_is_named() -> None:
    """Ranks 0 and 1 expect two ranks, and rank 2 three, in any order of arrival."""
    for late in range(3):
        simulation = Simulation()
        for rank in range(3):
            members = range(3 if rank == 2 else 2)
            simulation.start(
                rank, lambda now, r=rank, m=members: all_phases(agreement(r, now, m)),
                0.1 if rank == late else 0.0,
            )  # fmt: skip
        simulation.run()
        found = errors(simulation.processes)
        if late == 2:  # the others have agreed before it came
            assert found[:2] == ["", ""]
            assert "ranks 0-1 did not arrive" in found[2]
        else:
            for text in found:
                assert "GridMismatchError" in text
                assert "ranks is [0, 3, 1] on rank 2 and [0, 2, 1] on ranks 0-1" in text


def test_ranks_with_another_lowest_rank_wait_elsewhere_and_are_found() -> None:
    """Rank 0 counts four ranks, the others leave it out; its time is up first."""
    found = play(
        lambda r, now: all_phases(
            agreement(r, now, range(1, 4) if r else range(4), limit=LIMIT if r else 10.0)
        ),
        (0, 2, 3),
    )
    for process in found:
        assert isinstance(process.error, GridMismatchError), process.error
        assert "ranks is [0, 4, 1] on rank 0 and [1, 4, 1] on ranks 2-3" in str(process.error)


def test_an_absent_rank_is_said_to_wait_in_another_place() -> None:
    def elsewhere(rank: int, now: float) -> Protocol[str]:
        if rank == 2:
            return all_phases(agreement(2, now, range(2, 5), name="b", about="bridge 'b'"))
        return all_phases(agreement(rank, now, range(3)))

    for process in play(elsewhere, range(3))[:2]:
        assert isinstance(process.error, PeerTimeoutError)
        assert "rank 2 did not arrive within startup_timeout (ranks 0-1 did)" in str(process.error)
        assert "rank 2 waits in bridge 'b'" in str(process.error)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ((5,), "; rank 5 is on host b; is every"),
        ((0, 7), "; rank 0 is on host a; rank 7 is on host b; is every"),
        ((3, 4, 5), "; rank 3 is on host a; ranks 4-5 are on host b; is every"),
        ((4, 5, 6, 7), "did); is every"),  # no rank of the host has come
    ],
)
def test_the_host_of_an_absent_rank_is_named(missing: tuple[int, ...], told: str) -> None:
    """As ranks know that a launcher has started on the same host."""

    def on_hosts(rank: int, now: float) -> Protocol[str]:
        first = rank // 4 * 4
        host = "ab"[rank // 4], range(first, first + 4)
        return all_phases(agreement(rank, now, range(8), where=lambda: host))

    for process in play(on_hosts, [rank for rank in range(8) if rank not in missing]):
        assert isinstance(process.error, PeerTimeoutError)
        assert told in str(process.error)


def test_one_host_is_not_named() -> None:
    def on_one(rank: int, now: float) -> Protocol[str]:
        return all_phases(agreement(rank, now, range(4), where=lambda: ("a", range(4))))

    assert "host" not in str(play(on_one, range(3))[0].error)


def test_a_failure_ends_the_wait_at_once() -> None:
    def failing(rank: int, now: float) -> Protocol[None]:
        made = agreement(rank, now, range(4))
        yield from made.compare()
        if rank == 2:
            yield from made.give_up(ValueError("out of sockets"))
            return
        yield from made.meet()

    found = play(failing, range(4))
    for rank in (0, 1, 3):
        assert isinstance(found[rank].error, PeerFailedError)
        assert "rank 2 failed: ValueError: out of sockets" in str(found[rank].error)
        assert found[rank].over_at < 1.0


@pytest.mark.parametrize("late", [False, True])
def test_a_watch_ends_the_wait(late: bool) -> None:
    """A failure detector has lost a rank, which may live or not."""

    def interrupted(rank: int, now: float) -> Protocol[None]:
        made = agreement(rank, now, range(3))
        yield from made.compare()
        if rank == 0:
            yield from made.interrupt("rank 2 says nothing", late)
        if rank < 2:
            yield from made.meet()

    found = play(interrupted, range(3))
    kind = PeerTimeoutError if late else PeerFailedError
    for process in found[:2]:
        assert isinstance(process.error, kind)
        assert "rank 2 says nothing" in str(process.error)


def lost(rank: int, now: float, silent: int | None) -> Protocol[None]:
    """Rank 1 loses a connection; all others but `silent` read it and report."""
    made = agreement(rank, now, range(3))
    yield from made.compare()
    if rank == silent:
        return
    if rank == 1:
        yield from made.give_up(PeerTimeoutError("closed by peer"), lost=True)
        raise (yield from made.report())
    yield from made.meet()


def test_after_a_lost_connection_a_rank_that_does_not_report_is_named() -> None:
    found = play(lambda r, now: lost(r, now, silent=2), range(3))
    for process in found[:2]:
        assert "rank 2 did not report within 10 s after rank 1 failed" in str(process.error)


def test_a_lost_connection_of_living_ranks_names_nobody_as_gone() -> None:
    found = play(lambda r, now: lost(r, now, silent=None), range(3))
    for process in found:
        assert "rank 1 failed: PeerTimeoutError: closed by peer" in str(process.error)
        assert "all ranks have reported" in str(process.error)


def test_a_timeout_of_its_own_becomes_the_absence_that_caused_it() -> None:
    """Rank 1 is kept waiting in torch, by rank 2, until the deadline."""

    def kept(rank: int, now: float) -> Protocol[None]:
        made = agreement(rank, now, range(3), limit=10.0)
        yield from made.compare()
        if rank == 2:
            return
        if rank == 1:
            yield from made._wait("nothing", 9.5)
            raise (yield from made.give_up(PeerTimeoutError("timed out")))
        yield from made.meet()

    for process in play(kept, range(3))[:2]:
        assert "rank 2 did not get as far as 'created'" in str(process.error)


def test_ranks_that_speak_are_told_what_one_makes_of_it() -> None:
    def speaking(rank: int, now: float) -> Protocol[Any]:
        made = agreement(rank, now, range(4), phases=("hosts",))
        yield from made.compare()
        say = f"host {rank}".encode() if rank in (1, 3) else None
        return (yield from made.meet(lambda said: {"all": [*map(bytes.decode, said.values())]},
                                     say, (1, 3)))  # fmt: skip

    for process in play(speaking, range(4)):
        assert process.result["all"] == ["host 1", "host 3"]


def test_a_mismatch_of_before_is_not_an_absence_of_now() -> None:
    def again(rank: int, now: float) -> Protocol[None]:
        with pytest.raises(GridMismatchError):
            yield from agreement(rank, now, range(3), tp=1 if rank < 2 else 2).compare()
        if rank < 2:
            yield from agreement(rank, now, range(3), tp=1, limit=5.0).compare()

    for process in play(again, range(3))[:2]:
        assert "rank 2 did not arrive" in str(process.error)


def test_two_processes_as_one_rank_end_by_the_deadline() -> None:
    for first in (False, True):
        simulation = Simulation()
        for twin, rank in enumerate((0, 0, 1)):
            simulation.start(rank, lambda now, f=first, r=rank, t=twin: _twin(f, r, t, now))
        simulation.run()
        for process in simulation.processes:
            assert isinstance(process.error, PeerTimeoutError), process.error
            assert process.over_at <= LIMIT + 4.0


def _twin(first: bool, rank: int, twin: int, now: float) -> Protocol[str]:
    given: dict[str, Any] = {
        "name": "g", "me": rank, "members": range(3), "document": {}, "began": now,
        "until": now + LIMIT,
    }  # fmt: skip
    made = FirstAgreement(token=f"epoch {twin}", **given) if first else Agreement(**given)
    return all_phases(made)


def test_some_ranks_report_first_whatever_ranks_there_are() -> None:
    for ranks in (range(1, 257, 2), tuple(range(511, 383, -1)), range(16_384)):
        assert sum(reports_first(rank, ranks) for rank in ranks) == REPORTERS
    assert all(reports_first(rank, range(5)) for rank in range(5))


def test_nothing_is_left_but_the_number_of_the_last_one() -> None:
    store = SimulatedStore()
    for number in (1, 2, 3):
        play(lambda r, now: all_phases(agreement(r, now, range(70))), range(70), store)
        assert store.values == {"g@0/over": str(number).encode()}


@pytest.mark.parametrize("fault", ["differ", "absent", "failed"])
def test_a_failure_leaves_no_more(fault: str) -> None:
    def make(rank: int, now: float) -> Protocol[Any]:
        if fault == "differ":
            return all_phases(agreement(rank, now, range(4), server=0, odd=rank // 2))
        if fault == "absent":
            return all_phases(agreement(rank, now, range(5), server=0))
        return failing(agreement(rank, now, range(4), server=0), rank)

    def failing(made: Agreement, rank: int) -> Protocol[None]:
        yield from made.compare()
        if rank == 2:
            raise (yield from made.give_up(ValueError("out of sockets")))
        yield from made.meet()

    store = SimulatedStore()
    assert all(errors(play(make, range(4), store)))
    kept = {"g@0/over", *(f"g@0/1/phase {phase}/decision" for phase in range(3))}
    assert set(store.values) <= kept  # for a rank that comes late
    good = play(lambda r, now: all_phases(agreement(r, now, range(4))), range(4), store)
    assert errors(good) == [""] * 4
    assert store.values == {"g@0/over": b"2"}


def test_the_server_of_the_store_waits_for_the_others_to_read() -> None:
    """It would take the store away; a rank that never reads holds it for two seconds only."""

    def differing(rank: int, now: float) -> Protocol[Any]:
        return all_phases(agreement(rank, now, range(4), server=0, odd=rank // 2))

    simulation = Simulation()
    for rank in range(4):
        simulation.start(rank, lambda now, r=rank: differing(r, now))
    simulation.run()
    over = {process.rank: process.over_at for process in simulation.processes}
    assert over[0] >= max(over[1], over[2]) - 0.01
    assert over[0] < 2.0
