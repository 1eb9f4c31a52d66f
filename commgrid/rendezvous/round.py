"""One rendezvous round: every member arrives, one writes the decision, and all read the same one.

    member 0   arrives ─ waits ───────────────────────────► reads the decision
    member 1   arrives ─ waits ───────────────────────────► reads the decision
    member 2             arrives last ─ writes the decision

When the time is up an elected member decides instead, from the list of absent members. Meanwhile
one observer looks, once in a lease, whether all have arrived and the last of them has ended before
it could decide; the next round then names that one. Any process may decide earlier that the
round fails. The first decision stands, so that every wait ends with the same one on all members
unless the store is lost.

The keys of a round at `R`:

    R/<block>, R/blocks   arrivals      R/said/<rank>   what a member has to say
    R/decision            JSON          R/observer, R/elected/<n>   elections
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from commgrid.rendezvous.arrival_bitmap import Arrival, arrive, arrived, counters
from commgrid.rendezvous.op import Add, Cas, Drop, Get, Now, Protocol, Put, StoreLostError, WaitKey
from commgrid.rendezvous.timeouts import timeouts

Decision = dict[str, Any]
"""`kind` is "agreed", or the name of a failure (`commgrid.rendezvous.start_decision`)."""
Decide = Callable[[Sequence[int], bool], Protocol[Mapping[str, Any]]]
"""Makes a round's decision, given its absent members, and whether the time is up. If it is up and
none is absent, the last member to arrive has ended before it could decide."""
REPORTERS = 16
"""Members that look for the absent ones right at the deadline; the others do a margin later. If all
of them did at once, the store would be slow for the elected one."""


def round_(
    at: str,
    me: int,
    members: Sequence[int],
    until: float,
    decide: Decide,
    *,
    say: bytes | None = None,
    sweep: Sequence[str] = (),
    await_decision: Callable[[str, float], Protocol[bytes | None]] | None = None,
) -> Protocol[Decision]:
    """Take part in a round: arrive, and return the decision.

    Args:
        at: key of the round.
        me: this process's rank.
        members: ranks that are expected.
        until: time at which an elected member decides without the absent ones.
        decide: makes the decision.
        say: left for the member that decides; see `said`.
        sweep: earlier rounds of the same members that are over.
        await_decision: waits for the decision's key, as `WaitKey` does.

    Raises:
        StoreLostError: the store has ended or does not answer.
    """
    if say is not None:
        yield Put(f"{at}/said/{me}", say)
    arrival = yield from arrive(at, me, members, sweep)
    if arrival is Arrival.LAST:
        return (yield from conclude(at, (yield from decide((), False))))
    return (yield from decision_of(at, me, members, until, decide, await_decision))


def decision_of(
    at: str,
    me: int,
    members: Sequence[int],
    until: float,
    decide: Decide,
    await_decision: Callable[[str, float], Protocol[bytes | None]] | None = None,
    looks: bool = True,
) -> Protocol[Decision]:
    """Wait for a round's decision; when the time is up, elect a member that makes it.

    Args:
        looks: whether a member decides if all have arrived and the last one has not; see `round_`
            for the others.
    """
    key, wait = f"{at}/decision", await_decision or _wait
    now = yield Now()
    left = max(until - now, 0.0)
    found = None
    if not reports_first(me, members):
        until += timeouts().margin_of(left)
    elif looks:
        found = yield from wait(key, min(until, now + timeouts().lease))
        if found is None and (yield Add(f"{at}/observer", 1)) == 1:
            while found is None and (now := (yield Now())) < until:
                if len((yield from arrived(at, members))) == len(members):
                    # The last one has ended before it could decide.
                    return (yield from conclude(at, (yield from decide((), False))))
                found = yield WaitKey(key, min(until, now + timeouts().lease))
    if found is None:
        found = yield from wait(key, until)
    turn = 0
    while found is None:
        turn += 1
        if (yield Add(f"{at}/elected/{turn}", 1)) == 1:
            came = set((yield from arrived(at, members)))
            absent = [rank for rank in members if rank not in came]
            return (yield from conclude(at, (yield from decide(absent, True))))
        found = yield WaitKey(key, (yield Now()) + timeouts().lease)
    return decoded(found)


def reports_first(me: int, members: Sequence[int]) -> bool:
    """Whether this member is one of the `REPORTERS`, which are spread over all members."""
    return me not in members or members.index(me) % max(len(members) // REPORTERS, 1) == 0


def conclude(at: str, decision: Mapping[str, Any]) -> Protocol[Decision]:
    """Write a round's decision unless there is one; return the standing one."""
    return decoded((yield Cas(f"{at}/decision", b"", json.dumps(decision).encode())))


def said(at: str, members: Sequence[int]) -> Protocol[dict[int, bytes]]:
    """Return the words of some members in a round, by rank; silent ones are left out."""
    found = yield Get(tuple(f"{at}/said/{rank}" for rank in members))
    return {rank: text for rank, text in zip(members, found, strict=True) if text is not None}


def leave(
    at: str, me: int, members: Sequence[int], gone: Iterable[int], serves: bool, until: float
) -> Protocol[None]:
    """Leave the store, or what is read there. The process that serves it waits for the others.

    Args:
        at: key of the place.
        me: this process's rank.
        members: ranks that leave.
        gone: members that do not leave any more. The process that serves the store marks them; if
            one is alive after all, its own mark counts no more.
        serves: whether this process serves the store.
        until: time at which it stops waiting.
    """
    arrivals = set()
    # By one process alone: a counter has room for two marks of a rank.
    for rank in sorted({me, *(gone if serves else ())}):
        arrivals.add((yield from arrive(at, rank, members)))
    if Arrival.LAST in arrivals:
        yield Put(f"{at}/all", b"")
    elif serves:
        yield WaitKey(f"{at}/all", until)


def drop_left(at: str, members: Sequence[int]) -> Protocol[None]:
    """Delete the keys of `leave`."""
    yield Drop((f"{at}/all", *counters(at, members)))


def drop(at: str, members: Sequence[int], decision: bool = True) -> Protocol[None]:
    """Delete the keys of a round that is over, except words; its decision only if `decision`."""
    yield Drop((
        f"{at}/observer", f"{at}/elected/1", f"{at}/elected/2", *counters(at, members),
        *[f"{at}/decision"] * decision,
    ))  # fmt: skip


def tidy(protocol: Protocol[None]) -> Protocol[None]:
    """Run a protocol that only cleans up, after a decision: the store may be lost meanwhile, with
    the rank that serves it, and changes nothing."""
    with suppress(StoreLostError):
        yield from protocol


def forget(*keys: str) -> Protocol[None]:
    """Delete keys that are of no use any more; if the store is lost, that changes nothing."""
    with suppress(StoreLostError):
        yield Drop(keys)


def is_good(decision: Mapping[str, Any]) -> bool:
    """Whether a decision lets all members go on."""
    return bool(decision["kind"] == "agreed")


def decoded(value: bytes) -> Decision:
    """Return the decision that a key holds."""
    return dict(json.loads(value))


def _wait(key: str, until: float) -> Protocol[bytes | None]:
    found: bytes | None = yield WaitKey(key, until)
    return found
