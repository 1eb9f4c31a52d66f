"""After a collective has failed: ranks report at the store, and silent ones are named.

A rank whose collective fails knows that a connection was closed, and often not by which rank. So it
reports, and breaks its own connections. Ranks that wait for it then fail and report as well:

    rank 3 killed ─► rank 2: closed by peer ─► reports, breaks its own ─► rank 1: closed by peer …
                                               observes: all but rank 3 have reported ─► decides

The first rank to report observes. If one rank is absent it decides `settle` after the last report;
if several are, `arrive` after the first, since one may wait for another. If all absent ranks are
over, having ended their part in order, it decides at once. A rank that has failed itself decides
at once, with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from commgrid.layout.rank_text import pack
from commgrid.rendezvous.arrival_bitmap import Arrival, arrive, arrived, counters
from commgrid.rendezvous.op import Add, Drop, Get, Now, Protocol, Put, WaitKey
from commgrid.rendezvous.round import (
    Decision,
    conclude,
    decision_of,
    decoded,
    drop,
    drop_left,
    leave,
    said,
    tidy,
)
from commgrid.rendezvous.timeouts import timeouts

Blame = Callable[[Sequence[int], Mapping[int, bytes]], Mapping[str, Any]]
"""Makes the `text` of a decision, and what else it says, from the absent ranks and words of ranks.

An absent rank may have left words when it ended.
"""
ENDED = b"ended without an error, and without this call"
"""Words of an absent rank that is over, unless it has left others."""


def failures_of(identity: str) -> str:
    """Return the key of the round about a grid's failure.

    Args:
        identity: of the grid.
    """
    return f"commgrid/failures/{identity}"


class Failure:
    """One rank's part in finding out about one failure. Its methods are protocols.

    Args:
        at: key of the round.
        me: this process's rank.
        members: ranks that may have failed.
    """

    def __init__(self, at: str, me: int, members: Sequence[int]) -> None:
        self._at, self._me, self._members = at, me, members
        self._observes, self._arrival = False, Arrival.EARLY

    def post(self, text: str) -> Protocol[str]:
        """Decide with a text, unless there is a decision; return the text that stands."""
        stands = yield from conclude(self._at, {"kind": "failed", "text": text})
        return str(stands["text"])

    def read(self, until: float) -> Protocol[Decision | None]:
        """Return the decision, or None if there is none until then."""
        key = f"{self._at}/decision"
        found = (yield Get((key,)))[0]
        if found is None and until > (yield Now()):
            found = yield WaitKey(key, until)
        return None if found is None else decoded(found)

    def told_by(self, ranks: Sequence[int], until: float) -> Protocol[str | None]:
        """Return the decision's text if there is one, or will be since one of `ranks` has reported.

        Others than the members ask, such as ranks of another grid whose connection to one of
        `ranks` was closed: it may live, and have ended its communicators after a failure.
        """
        reports = yield Get((
            f"{self._at}/decision", *(f"{self._at}/said/{rank}" for rank in ranks)
        ))  # fmt: skip
        told = any(report is not None for report in reports)
        decision = (yield from self.read(until)) if told else None
        return None if decision is None else str(decision["text"])

    def report(self, words: bytes) -> Protocol[None]:
        """Report, before this rank breaks its connections.

        Args:
            words: for the rank that decides.
        """
        yield Put(f"{self._at}/said/{self._me}", words)
        self._observes = (yield Add(f"{self._at}/reports", 1)) == 1
        self._arrival = yield from arrive(self._at, self._me, self._members)

    def end(self, words: bytes) -> Protocol[None]:
        """Leave words at the end of the program, which may be while another rank waits for it.

        Args:
            words: how it ended.
        """
        yield Put(f"{self._at}/ended/{self._me}", words)

    def over(self) -> Protocol[None]:
        """End this rank's part in order, which may be while another rank waits for it.

        The last rank to do so deletes the marks of all.
        """
        at = f"{self._at}/over"
        if (yield from arrive(at, self._me, self._members)) is Arrival.LAST:
            yield Drop(tuple(counters(at, self._members)))

    def find_out(self, blame: Blame) -> Protocol[Decision]:
        """Return the decision after this rank has reported: its `text`, and the `absent` ranks.

        Args:
            blame: called on the rank that decides.
        """

        def decide(absent: Sequence[int], _: bool) -> Protocol[Mapping[str, Any]]:
            here = [rank for rank in self._members if rank not in {*absent}]
            words = yield from said(self._at, here)
            words |= dict.fromkeys((yield from arrived(f"{self._at}/over", absent)), ENDED)
            ended = yield Get(tuple(f"{self._at}/ended/{rank}" for rank in absent))
            words |= {r: each for r, each in zip(absent, ended, strict=True) if each is not None}
            return {"kind": "failed", "absent": pack(absent), **blame(absent, words)}

        if self._arrival is Arrival.LAST:
            decision = yield from conclude(self._at, (yield from decide((), False)))
        elif self._observes:
            absent = yield from self._absent()
            decision = yield from conclude(self._at, (yield from decide(absent, True)))
        else:
            until = (yield Now()) + timeouts().arrive + timeouts().leave
            decision = yield from decision_of(self._at, self._me, self._members, until, decide)
        yield from tidy(self._leave())
        return decision

    def leave(self, absent: Iterable[int], serves: bool) -> Protocol[None]:
        """Leave with the decision. The process that serves the store waits for others to read it.

        Args:
            absent: ranks that the decision names as absent.
            serves: whether this process serves the store.
        """
        at, gone = f"{self._at}/heard", set(absent)
        if serves:
            gone |= {*(yield from arrived(f"{self._at}/over", self._members))}
        until = (yield Now()) + timeouts().leave
        yield from leave(at, self._me, self._members, gone, serves, until)
        if serves:
            yield from drop_left(at, self._members)
            yield Drop(tuple(counters(f"{self._at}/over", self._members)))

    def _leave(self) -> Protocol[None]:
        """Leave; the last rank to do so deletes the keys but for the decision."""
        if (yield Add(f"{self._at}/gone", 1)) >= (yield Add(f"{self._at}/reports", 0)):
            yield from drop(self._at, self._members, decision=False)
            words = (f"{self._at}/said/{rank}" for rank in self._members)
            over = counters(f"{self._at}/over", self._members)
            yield Drop((f"{self._at}/reports", f"{self._at}/gone", *words, *over))

    def _absent(self) -> Protocol[list[int]]:
        """Observe until all have reported, or time is up; return the absent ranks."""
        began = last = yield Now()
        pause, absent = timeouts().settle / 20, list(self._members)
        while True:
            here = {*(yield from arrived(self._at, self._members))}
            before, absent = absent, [rank for rank in self._members if rank not in here]
            now = yield Now()
            last = now if absent != before else last
            limit = began + timeouts().arrive
            if len(absent) <= 1:
                limit = min(limit, last + timeouts().settle)
            if absent == (yield from arrived(f"{self._at}/over", absent)) or now >= limit:
                return absent
            found = yield WaitKey(f"{self._at}/decision", min(now + pause, limit))
            if found is not None:
                return absent
            pause = min(2 * pause, timeouts().settle / 2)
