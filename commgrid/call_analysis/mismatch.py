"""Calls that members of a communicator have made at the same turn, and that do not go together.

Lines never decide: ranks may make one call from several. They only say which of two ranks has left
out a call, or made one too early, once the calls themselves do not go together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from commgrid.call_analysis.event import Ledger
from commgrid.call_analysis.finding import Finding, said
from commgrid.call_records.call import Call, Group
from commgrid.call_records.operations import Alike

KINDS_OF_CALLS = (
    "skipped call", "extra call", "other order", "other operation", "other root",
    "other reduction", "other dtype", "other shape", "other size",
    "other members",
)  # fmt: skip
"""Kinds of findings about calls that do not go together."""

_DIFFERS = {
    "operation": "other operation", "root": "other root", "reduction": "other reduction",
    "dtype": "other dtype", "size": "other shape",
}  # fmt: skip
_AHEAD = 8  # calls within which two that were swapped are found


def mismatches(ledger: Ledger) -> Iterator[Finding]:
    """The first of each communicator, and of each pair of ranks that send to each other."""
    for group, held in ledger.turns.items():
        found = _first_of(group, held)
        if found is not None:
            yield found
    yield from _transfers(ledger)


def _first_of(group: Group, held: Mapping[int, Mapping[int, Call]]) -> Finding | None:
    """The first turn of a communicator at which members' collectives differ."""
    for turn in sorted({turn for calls in held.values() for turn in calls}):
        calls = {rank: each[turn] for rank, each in held.items() if turn in each}
        kinds = {rank: call.alike for rank, call in calls.items()}
        if len(set(kinds.values())) > 1:
            return _explain(group, held, turn, calls, kinds)
    return None


def _explain(
    group: Group,
    held: Mapping[int, Mapping[int, Call]],
    turn: int,
    calls: Mapping[int, Call],
    kinds: Mapping[int, Alike],
) -> Finding:
    counts = Counter(kinds.values())
    # If both kinds are as frequent, the rank that has gone on has left a call out.
    best = max(counts.values())
    usual = next(k for k in (kinds[r] for r in sorted(kinds)) if counts[k] == best)
    odd = sorted(rank for rank in calls if kinds[rank] != usual)
    same = sorted(rank for rank in calls if kinds[rank] == usual)
    kind, who = _kind(held, turn, odd[0], same[0], calls, kinds)
    even = len(odd) == len(same)
    if who in same and even:
        odd, same = same, odd
    elif who in same and kind == "skipped call":
        kind = "extra call"
    mine, theirs = calls[odd[0]], calls[same[0]]
    began = min(call.began for call in calls.values())
    if kind == "skipped call":
        text = (
            f"{said(odd)} skipped {group.first} {theirs.operation} {turn} of {theirs.where}, "
            f"which {said(same)} issued: went on with {mine.said()} at {mine.where}"
        )
    elif kind == "extra call":
        text = (
            f"{said(odd)} issued {group.first} {mine.said()} {turn} at {mine.where}, which "
            f"{said(same)} did not: there it is {theirs.said()} at {theirs.where}"
        )
    else:
        text = (
            f"{said(odd)} and {said(same)} issued different calls as {group.first} {turn} "
            f"({kind}): {mine.said()} at {mine.where} on {said(odd)}, {theirs.said()} at "
            f"{theirs.where} on {said(same)}"
        )
    return Finding(
        kind, tuple(odd), group.name, group.ranks, mine.operation, turn,
        (mine.where, theirs.where), tuple(same), began, None, text,
    )  # fmt: skip


def _kind(
    held: Mapping[int, Mapping[int, Call]],
    turn: int,
    odd: int,
    same: int,
    calls: Mapping[int, Call],
    kinds: Mapping[int, Alike],
) -> tuple[str, int]:
    """Return the kind of the finding, and which of two ranks is the odd one."""
    for rank, other in ((odd, same), (same, odd)):
        mine, theirs = held[rank], held[other]
        next_here, later = mine.get(turn + 1), theirs.get(turn + 1)
        if later is not None and _like(mine[turn], later):
            if next_here is not None and _like(next_here, theirs[turn]):
                return "other order", rank
            following = (theirs.get(turn + 2), next_here)
            if following[0] is None or following[1] is None or _like(following[0], following[1]):
                return "skipped call", rank
        if later is None and _left_out(mine, turn, theirs[turn]):
            if any(_like(mine[t], theirs[turn]) for t in _after(mine, turn)):
                return "other order", rank
            return "skipped call", rank
    first, second = kinds[odd], kinds[same]
    differs = [name for name in Alike._fields if getattr(first, name) != getattr(second, name)]
    return _DIFFERS[min(differs, key=list(_DIFFERS).index)], odd


def _after(calls: Mapping[int, Call], turn: int) -> list[int]:
    return [t for t in range(turn + 1, turn + 1 + _AHEAD) if t in calls]


def _like(one: Call, other: Call) -> bool:
    return one.where == other.where and one.alike == other.alike


def _left_out(calls: Mapping[int, Call], turn: int, missing: Call) -> bool:
    """Whether, the last time that a rank made its call of a turn, the missing one came before."""
    for t in range(turn - 1, 0, -1):
        if t not in calls or t - 1 not in calls:
            return False
        if _like(calls[t], calls[turn]):
            return _like(calls[t - 1], missing)
    return False


def _transfers(ledger: Ledger) -> Iterator[Finding]:
    """Sends and receives of two ranks that belong together, and are of different size or type."""
    for (group, operation, source, target), sent in ledger.transfers.items():
        if operation != "send":
            continue
        taken = ledger.transfers.get((group, "recv", source, target), {})
        for turn in sorted(sent.keys() & taken.keys()):
            one, other = sent[turn], taken[turn]
            if one.alike == other.alike:
                continue
            kind = "other dtype" if one.dtype != other.dtype else "other size"
            text = (
                f"rank {source} sends what rank {target} does not expect ({kind}): {group.first} "
                f"send {turn} is {one.said()} at {one.where}, the recv is "
                f"{other.said()} at {other.where}"
            )
            yield Finding(
                kind, (source, target), group.name, group.ranks, "send", turn,
                (one.where, other.where), (), min(one.began, other.began), None, text,
            )  # fmt: skip
            break
