"""The matcher: which calls of different ranks belong together, and which ranks have not come."""

from __future__ import annotations

import pytest

from commgrid.call_analysis.diagnosis import diagnose
from commgrid.call_analysis.event import match
from commgrid.call_analysis.program import crossed_group, from_traces, whole
from commgrid.call_analysis.standing import Standings
from commgrid.call_analysis.verification import check
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace

ALL = Group("dp", (0, 1, 2, 3), "dp@1", "gloo")


def done(group: Group, operation: str = "all_reduce", at: float = 1.0, **about: object) -> Call:
    """A call that was waited for."""
    given = {"began": at, "issued": at, "ended": at + 0.1, "where": "a.py:1 f", **about}
    return Call(group, operation, **given)  # type: ignore[arg-type]


def waits(group: Group, operation: str = "all_reduce", at: float = 1.0, **about: object) -> Call:
    """A call in which a thread waits."""
    return done(group, operation, at, **{"ended": None, "waiting": True, **about})


def trace(rank: int, *calls: Call, at: float = 41.0, **about: object) -> Trace:
    given = {"state": "running", "host": "one", "at": at, **about}
    groups = tuple({call.group: None for call in calls})
    return Trace(rank, calls, **{"groups": groups, **given})  # type: ignore[arg-type]


def test_two_grids_in_turn_under_one_name_are_two_communicators() -> None:
    """Training on dp 2, evaluation on dp 4; the first has issued more calls on some ranks."""
    first = [Group("dp", (0, 1), "dp@1"), Group("dp", (2, 3), "dp@1 b")]
    second = Group("dp", (0, 1, 2, 3), "dp@2")
    found = [
        trace(
            rank,
            *[done(first[rank // 2], shape=(2,), bytes=8)] * (1 + rank // 2),
            done(second, "all_gather", at=9.0, dtype="int64"),
        )
        for rank in range(4)
    ]
    assert not diagnose(found)
    assert check(from_traces([*found])).finishes


def test_one_key_with_equal_ranks_after_a_restart_is_another_communicator() -> None:
    """A rebuild over the same ranks: the calls of before do not count."""
    before, after = Group("dp", (0, 1), "dp@1"), Group("dp", (0, 1), "dp@2")
    found = [
        trace(0, done(before), waits(after, at=9.0)),
        trace(1, done(before), done(before, at=2.0, ended=None)),
    ]
    (cause,) = diagnose(found).causes
    assert (cause.kind, cause.ranks, cause.turn) == ("not entered", (1,), 0)


def test_members_that_one_rank_does_not_know_are_anothers() -> None:
    known, unknown = Group("dp", (0, 1, 2), "k"), Group("dp", (), "k")
    found = match({0: [done(known)], 1: [done(unknown)]})
    (event,) = found.events.values()
    assert (event.needs, found.absent(event)) == ((0, 1, 2), (2,))


def test_a_communicator_that_was_not_recorded_is_not_matched() -> None:
    """As where the table of a record is full: calls on several share the name."""
    nowhere = Group("?", ())
    found = [
        trace(0, waits(nowhere, "all_reduce")),
        trace(1, done(nowhere, "broadcast"), done(nowhere, "barrier")),
    ]
    assert not diagnose(found)


def test_only_groups_that_torch_numbers_can_be_crossed() -> None:
    def made(key: str) -> list[Trace]:
        return [trace(rank, groups=(Group("3", (0, rank + 1), key),)) for rank in range(2)]

    assert crossed_group(made("commgrid/default/1/dp")) is None
    found = crossed_group(made("3@2"))
    assert found is not None
    assert found.text.startswith("group 3 has ranks [0, 1] on rank 0 and [0, 2] on rank 1")


def test_messages_meet_by_tag() -> None:
    """Received in another order than sent, of two sizes: right on gloo."""
    sent = [done(ALL, "send", peer=1, tag=tag, shape=(tag,), bytes=4 * tag) for tag in (7, 8)]
    taken = [done(ALL, "recv", peer=0, tag=tag, shape=(tag,), bytes=4 * tag) for tag in (8, 7)]
    others = [trace(rank, groups=(ALL,)) for rank in (2, 3)]
    assert not diagnose([trace(0, *sent), trace(1, *taken), *others])
    wrong = [done(ALL, "recv", peer=0, tag=8, shape=(9,), bytes=36)]
    (cause,) = diagnose([trace(0, *sent), trace(1, *wrong), *others]).causes
    assert (cause.kind, cause.ranks) == ("other size", (0, 1))


def test_a_wrong_tag_is_a_message_that_never_comes() -> None:
    found = [
        trace(0, done(ALL, "send", peer=1, tag=7, ended=None)),
        trace(1, waits(ALL, "recv", peer=0, tag=8)),
        *[trace(rank, groups=(ALL,)) for rank in (2, 3)],
    ]
    (cause,) = diagnose(found).causes
    assert (cause.kind, cause.ranks, cause.waiting) == ("not entered", (0,), (1,))


def test_a_partner_beyond_the_kept_calls_is_there() -> None:
    """Rank 1 has issued 90 calls and 5 messages, and keeps the last call alone."""
    pair = Group("pp", (0, 1), "pp")
    mine = [waits(pair, "recv", peer=1, turn=4), done(pair, turn=70)]
    last = done(pair, turn=89, at=40.5)
    kept = {"dropped": 94, "entered": {pair: 90}, "sent": {(pair, "send", 1, 0, 0): 5}}
    assert not diagnose([trace(0, *mine), trace(1, last, **kept)])
    kept["sent"] = {(pair, "send", 1, 0, 0): 4}
    (cause,) = diagnose([trace(0, *mine), trace(1, last, **kept)]).causes
    assert (cause.kind, cause.ranks, cause.operation) == ("not entered", (1,), "recv")


@pytest.mark.parametrize("rules", ["nccl", "gloo", "strict"])
def test_recorded_turns_match_where_counts_would_not(rules: str) -> None:
    """A part of two programs, from turn 3 on: rank 1's record begins one call later."""
    pair = Group("tp", (0, 1))
    calls = [Call(pair, "all_reduce", shape=(n,), turn=n) for n in (3, 4, 5)]
    found = match({0: calls, 1: calls[1:]})
    assert [len(event.sides) for event in found.events.values()] == [1, 2, 2]
    assert check({0: calls[1:], 1: calls[1:]}, rules).finishes


def test_programs_with_tags_are_played_by_the_rules_of_the_backend() -> None:
    pair = Group("pp", (0, 1))
    programs = {
        0: [Call(pair, "send", 1, (n,), tag=n, handle=n, turn=0) for n in (1, 2)],
        1: [Call(pair, "recv", 0, (n,), tag=n, turn=0) for n in (2, 1)],
    }
    assert check(programs, "gloo").finishes
    assert check(programs, "nccl").kind == "differs"


def test_threads_of_a_rank_are_programs_of_their_own() -> None:
    """Listed as they were issued: in one sequence, each rank's second call would never come."""
    tp, dp = Group("tp", (0, 1)), Group("dp", (0, 1))
    one, other = Call(tp, "all_reduce", thread=1), Call(dp, "all_reduce", thread=2)
    assert check({0: [one, other], 1: [other, one]}, "strict").finishes
    alone = [Call(group, "all_reduce") for group in (tp, dp)]
    assert check({0: alone, 1: alone[::-1]}, "gloo").kind == "circle"
    late = [one, Call(dp, "all_reduce", thread=1)]
    found = check({0: [*late, other], 1: [late[1], one, other]}, "gloo")
    assert (found.kind, len(found.places)) == ("circle", 2)


# -- what is not known of programs ---------------------------------------------------------

PAIR = Group("tp", (0, 1), "tp", "gloo")


def status(*found: Trace) -> tuple[bool, int]:
    """Whether what is known finishes, and how many calls are left out."""
    known = whole(Standings(found))
    left_out = sum(len(trace.calls) for trace in found) - sum(len(trace.calls) for trace in known)
    return check(from_traces(known), "gloo").finishes, left_out


@pytest.mark.parametrize("state", ["running", "killed", "stopped", "silent", "ended", ""])
def test_a_program_that_goes_on_or_was_cut_may_issue_the_rest(state: str) -> None:
    found = (
        trace(0, done(PAIR), done(PAIR, at=2.0), state=state),
        trace(1, done(PAIR), state=state),
    )
    assert status(*found) == ((False, 0) if state in ("ended", "") else (True, 1))


def test_a_dry_run_was_recorded_to_its_end() -> None:
    group = Group("tp", (0, 1), "tp", "fake")
    found = (trace(0, done(group), done(group, at=2.0)), trace(1, done(group)))
    assert status(*found) == (False, 0)


def test_what_is_not_recorded_is_left_out_of_programs() -> None:
    unknown = done(Group("?", ()))
    anyone = [done(PAIR, "recv"), done(PAIR, "send", peer=1)]
    found = (trace(0, unknown, anyone[1]), trace(1, anyone[0], unknown), trace(2))
    assert status(*found) == (True, 4)
    assert status(trace(0, done(PAIR)), trace(1, lost=True)) == (True, 1)
    assert status(trace(0, done(PAIR)), trace(1, over=True)) == (True, 1)
    assert status(trace(0, done(PAIR)), trace(1, done(PAIR), over=True)) == (True, 0)


def test_ranks_in_a_deadlock_issue_nothing_more() -> None:
    """The job runs, or was stopped: what the ranks wait for is never issued."""
    other = Group("dp", (0, 1), "dp", "gloo")
    found = (trace(0, waits(PAIR)), trace(1, waits(other)))
    assert status(*found) == (False, 0)
    alone = done(Group("own", (1,), "own"), thread=1)
    assert status(found[0], trace(1, waits(other), alone)) == (True, 2)
