"""Where threads stand, how a process stands, and what that says of who is waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commgrid.call_analysis.diagnosis import diagnose
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace
from tests.call_analysis.test_event import done, trace, waits

TP = Group("tp", (0, 1), "tp", "gloo")
DP = Group("dp", (0, 1), "dp", "gloo")
ON_DEVICE = Group("tp", (0, 1), "tp", "nccl")


def kinds(*found: Trace, patience: float = 1.0) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.kind, each.ranks) for each in diagnose(found, patience).causes]


# -- what is over is not waited for --------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        done(TP, "send", peer=1),
        done(TP, "send", peer=1, ended=None),
        done(TP, "all_reduce", ended=None),
        done(TP, "broadcast", root=0),
    ],
    ids=["sent", "sent without a wait", "asynchronous", "a root's broadcast"],
)
@pytest.mark.parametrize("state", ["running", "killed", "ended", ""])
def test_only_a_thread_that_waits_waits(call: Call, state: str) -> None:
    """Rank 1 comes 20 s later; rank 0 has gone on."""
    found = (trace(0, call, state=state), trace(1, groups=(TP,)))
    assert kinds(*found) == ([("killed", (0,))] if state == "killed" else [])
    assert kinds(trace(0, replace(call, ended=None, waiting=True)), trace(1, groups=(TP,))) == [
        ("not entered", (1,))
    ]


def test_on_a_device_an_ended_wait_is_no_end() -> None:
    """A host's wait ends at once; what is not there is waited for, if the call needs it."""
    alone = trace(1, groups=(ON_DEVICE,))
    assert kinds(trace(0, done(ON_DEVICE)), alone) == [("not entered", (1,))]
    assert kinds(trace(0, done(ON_DEVICE, ended=None)), alone) == []
    assert kinds(trace(0, done(ON_DEVICE, "broadcast", root=0)), alone) == []
    assert kinds(trace(0, done(ON_DEVICE, "broadcast", root=1)), alone) == [("not entered", (1,))]
    assert kinds(trace(0, done(ON_DEVICE), state="ended"), alone) == []


def test_a_call_that_has_not_come_back_is_waited_in() -> None:
    inside = done(TP, issued=None, ended=None)
    assert kinds(trace(0, inside), trace(1, groups=(TP,))) == [("not entered", (1,))]


def test_a_record_that_is_older_than_the_wait_accuses_nobody() -> None:
    """While a job runs, ranks are read one after the other: rank 1 at 5 s, rank 0 at 41 s."""
    mine = trace(0, waits(TP, at=4.5))
    assert kinds(mine, trace(1, groups=(TP,), at=5.0)) == []
    assert kinds(mine, trace(1, groups=(TP,), at=5.6)) == [("not entered", (1,))]


def test_a_rank_that_has_just_been_let_go_has_not_stopped() -> None:
    """Rank 0 was read right when rank 1 came, which had ended the call when it was read."""
    last = done(TP, at=40.8, ended=40.9)
    assert kinds(trace(0, waits(TP)), trace(1, last)) == []
    early = done(TP, at=2.0, ended=2.1)
    assert kinds(trace(0, waits(TP)), trace(1, early)) == [("stopped", (0,))]
    assert diagnose([trace(0, waits(TP)), trace(1, early)]).causes[0].exclude == (0,)


# -- processes -----------------------------------------------------------------------------

STATES = {
    "running": ("not entered", "has not entered", "error", ()),
    "stopped": ("not entered", "has not entered", "error", ()),
    "": ("not entered", "has not entered", "error", ()),
    "silent": ("silent rank", "was not seen for", "unknown", ()),
    "killed": ("killed", "was killed before", "error", (1,)),
    "ended": ("ended early", "ended without entering", "error", (1,)),
}


@pytest.mark.parametrize("state", STATES)
def test_a_finding_says_how_the_process_stands(state: str) -> None:
    at = 1.5 if state in ("killed", "silent") else 41.0
    found = diagnose([trace(0, waits(TP)), trace(1, done(DP), at=at, state=state)])
    kind, text, severity, exclude = STATES[state]
    (cause,) = found.causes
    assert (cause.kind, cause.ranks, cause.severity, cause.exclude) == (
        kind, (1,), severity, exclude,
    )  # fmt: skip
    assert cause.text.startswith(f"rank 1 {text}"), cause.text
    assert found.is_open == (severity == "unknown")
    held = found.as_dict()
    assert (held["severity"], held["exclude"]) == (severity, [*exclude])
    assert (held["causes"][0]["severity"], held["causes"][0]["exclude"]) == (severity, [*exclude])


def test_a_killed_rank_comes_first_and_one_that_was_told_to_stop_is_no_cause() -> None:
    """Rank 2 was killed; the launcher stopped rank 3 within a second, and then all others."""
    every = Group("all", (0, 1, 2, 3), "all", "gloo")
    found = [
        trace(0, waits(every, at=10.0), at=11.2, state="stopped"),
        trace(1, waits(every, at=10.1), at=11.2, state="killed"),
        trace(2, groups=(every,), at=10.0, state="killed"),
        trace(3, groups=(every,), at=10.3, state="stopped"),
    ]
    assert kinds(*found) == [("killed", (2,))]


def test_if_all_were_killed_at_once_none_was_first() -> None:
    found = [
        trace(0, waits(TP, at=40.9), state="killed"), trace(1, groups=(TP,), state="killed")
    ]  # fmt: skip
    assert kinds(*found) == []
    assert kinds(found[0], replace(found[1], at=30.0)) == [("killed", (1,))]


def test_a_killed_rank_is_named_though_none_has_come_to_wait_for_it() -> None:
    """The launcher stopped the others at once."""
    found = diagnose([trace(0, done(TP), state="stopped"), trace(1, done(TP), state="killed")])
    (cause,) = found.causes
    assert (cause.kind, cause.ranks, cause.exclude) == ("killed", (1,), (1,))
    assert str(found) == "rank 1 was killed; its last call was tp all_reduce 0 at a.py:1 f"
    everyone = [trace(rank, done(TP), state="killed") for rank in range(2)]
    assert not diagnose(everyone)


def test_a_rank_that_was_killed_within_a_call_comes_first() -> None:
    """It had waited for rank 1 for a moment; after a long wait, rank 1 is the cause."""
    other = trace(1, groups=(TP,), state="stopped", at=42.0)
    assert kinds(trace(0, waits(TP, at=40.0), state="killed"), other) == [
        ("killed", (0,)), ("not entered", (1,))
    ]  # fmt: skip
    assert kinds(trace(0, waits(TP, at=20.0), state="killed"), other) == [("not entered", (1,))]


def test_a_rank_that_waits_for_a_moment_waits_all_the_same() -> None:
    """Rank 1 came late into a call, and waits there for rank 2; rank 0 waits for rank 1."""
    every = Group("all", (0, 1, 2), "all", "gloo")
    pair = Group("pair", (1, 2), "pair", "gloo")
    found = diagnose(
        [trace(0, waits(every)), trace(1, waits(pair, at=40.9)), trace(2, groups=(every, pair))]
    )
    assert {each.ranks for each in found.causes} == {(2,)}


def test_a_rank_that_waited_before_it_ended_is_not_the_cause() -> None:
    """Rank 1's call timed out, and it ended; rank 2 did not come."""
    every = Group("all", (0, 1, 2), "all", "gloo")
    pair = Group("pair", (1, 2), "pair", "gloo")
    found = [
        trace(0, waits(every, at=2.0)),
        trace(1, waits(pair), state="ended", at=31.0),
        trace(2, groups=(every, pair)),
    ]
    assert kinds(*found)[0] == ("not entered", (2,))
    assert diagnose(found).waiting == {0: (1, 2), 1: (2,)}


def test_a_missing_record_is_not_checked() -> None:
    found = diagnose([trace(0, waits(TP))])
    assert (found.missing, found.is_open, found.causes[0].severity) == ((1,), True, "unknown")
    assert found.causes[0].exclude == ()


STACKS = """Thread 0x00007f1 (most recent call first):
  File "/opt/lib/python3.12/threading.py", line 331 in wait
  File "/home/me/prefetch.py", line 9 in fetch

Current thread 0x00007f2 (most recent call first):
  File "/opt/lib/python3.12/site-packages/torch/utils/data/dataloader.py", line 7 in __next__
  File "/home/me/loader.py", line 88 in load
  File "/home/me/train.py", line 12 in <module>
"""


def test_stacks_say_where_an_absent_rank_is() -> None:
    found = diagnose([trace(0, waits(TP)), trace(1, done(DP), stacks=STACKS)])
    assert str(found).startswith(
        "rank 1 has not entered tp all_reduce 0, for which rank 0 has waited 40 s at a.py:1 f; it "
        "is in loader.py:88 load; its last call was dp all_reduce 0 at a.py:1 f"
    )


def test_a_flight_recorder_without_waits_is_read_with_stacks() -> None:
    """An asynchronous call has not ended: whether a thread waits for it, stacks may show."""
    mine = trace(0, done(TP, ended=None), knows_waits=False)
    absent = trace(1, groups=(TP,), knows_waits=False)
    assert kinds(mine, absent) == [("not entered", (1,))]
    assert kinds(replace(mine, stacks=STACKS), absent) == []
    inside = STACKS.replace("torch/utils/data/dataloader.py", "torch/distributed/c10d.py")
    assert kinds(replace(mine, stacks=inside), absent) == [("not entered", (1,))]
    on_device = trace(0, done(ON_DEVICE, ended=None), knows_waits=False, stacks=STACKS)
    assert kinds(on_device, trace(1, groups=(ON_DEVICE,))) == [("not entered", (1,))]


# -- threads -------------------------------------------------------------------------------


def test_two_threads_on_two_groups_are_no_circle() -> None:
    """Each rank has a thread for tp and one for dp; one of them waits long, the other computes."""
    found = (
        trace(0, done(TP, thread=1), done(DP, thread=2), waits(TP, at=40.5, thread=1)),
        trace(1, done(TP, thread=1), done(DP, thread=2), waits(DP, at=40.5, thread=2)),
    )
    assert kinds(*found) == []
    told = diagnose(found, patience=0.1)
    assert {each.kind for each in told.causes} == {"not entered"}


def test_a_circle_of_all_threads_is_a_deadlock() -> None:
    """Thread 2 of each rank waits for thread 1 of the other, which waits as well."""
    found = (
        trace(0, waits(TP, thread=1), waits(TP, thread=2, turn=1)),
        trace(1, waits(DP, thread=1), waits(DP, thread=2, turn=1)),
    )
    assert kinds(*found) == [("deadlock", (0, 1))]


def test_a_thread_that_has_never_used_the_group_leaves_it_open() -> None:
    """Rank 0 has a thread with a group of its own; those that use tp and dp wait in a circle."""
    alone = Group("own", (0,), "own", "gloo")
    before = (done(TP, at=0.5), done(DP, at=0.6))
    mine = trace(0, *before, waits(TP), done(alone, thread=7))
    found = diagnose([mine, trace(1, *before, waits(DP))])
    assert [(each.kind, each.severity) for each in found.causes] == [
        ("possible deadlock", "unknown")
    ]
    assert found.is_open
    assert str(found).startswith("cannot tell: ranks 0-1 wait for each other: ")


# -- clocks --------------------------------------------------------------------------------


def steps(lag: float, ahead: float = 0.0, host: str = "other", pause: float = 0.02) -> list[Trace]:
    """Twenty steps of two blocking sums each; rank 1 comes late, by a clock that is ahead."""
    found: list[list[Any]] = [[], []]
    for step in range(20):
        for late, turn in ((lag, 2 * step), (0.0, 2 * step + 1)):
            at = step * (lag + pause) + (lag if turn % 2 else 0.0)
            for rank, began in enumerate((at, at + late)):
                own = ahead if rank else 0.0
                ended = at + late + 0.001
                found[rank].append(
                    done(DP, at=began + own, ended=ended + own, turn=turn, number=turn)
                )
    return [trace(rank, *calls, host=("one", host)[rank]) for rank, calls in enumerate(found)]


@pytest.mark.parametrize("ahead", [0.06, -0.06, 7.0, -3600.0])
def test_a_clock_that_is_ahead_makes_no_rank_slow(ahead: float) -> None:
    assert kinds(*steps(lag=0.0, ahead=ahead)) == []
    assert kinds(*steps(lag=0.3, ahead=ahead), patience=1e9) == [("slow rank", (1,))]


def test_within_a_host_clocks_agree() -> None:
    assert kinds(*steps(lag=0.3, host="one")) == [("slow rank", (1,))]
    (cause,) = diagnose(steps(lag=0.3, host="one")).causes
    assert (cause.severity, cause.exclude) == ("warning", (1,))


def test_without_common_ends_hosts_are_not_compared() -> None:
    """Broadcasts only, which end on their root before others enter."""
    found = [
        replace(each, calls=tuple(replace(c, operation="broadcast", root=0) for c in each.calls))
        for each in steps(lag=0.3)
    ]
    assert kinds(*found) == []
