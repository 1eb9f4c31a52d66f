"""The check before a run against every interleaving, and known bad programs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from commgrid import SpecError
from commgrid.call_analysis.program import Batch, Programs, Step, Wait, calls_of
from commgrid.call_analysis.rules import RULES
from commgrid.call_analysis.verification import check
from commgrid.call_records.call import Call, Group
from tests.call_analysis.brute_force import World, fewest
from tests.sizes import full

PROGRAMS = 500


def random_programs(chance: random.Random) -> dict[int, list[Step]]:
    """Two to four ranks that issue the same events, nearly in one order, some waited for later."""
    ranks = list(range(chance.randint(2, 4)))
    groups = [
        Group(f"g{i}", tuple(sorted(chance.sample(ranks, chance.randint(2, len(ranks))))))
        for i in range(chance.randint(2, 4))
    ]
    events = []
    for k in range(chance.randint(1, 5)):
        group = chance.choice(groups)
        if chance.random() < 0.5:
            events.append((k, group, None))
        else:
            events.append((k, group, tuple(chance.sample(group.ranks, 2))))
    if is_ring := chance.random() < 0.3:  # where circles are long
        events = ring(ranks, chance)
    untidy, loose = chance.random() * 1.5, chance.random()
    programs: dict[int, list[Step]] = {}
    for rank in ranks:
        own = [e for e in events if rank in (e[2] or e[1].ranks) and chance.random() > 0.01]
        if is_ring and chance.random() < 0.9:
            own.sort(key=lambda event: event[0] != rank)
        else:
            own.sort(key=lambda event: event[0] + chance.random() * untidy * len(events))
        programs[rank] = one_program(rank, own, loose, chance)
    return programs


def ring(ranks: list[int], chance: random.Random) -> list:  # type: ignore[type-arg]
    """A message or a collective between each rank and the next."""
    groups = [Group(f"r{i}", (i, (i + 1) % len(ranks))) for i in ranks]
    pairs = chance.random() < 0.5
    return [(k, group, group.ranks if pairs else None) for k, group in enumerate(groups)]


def one_program(rank: int, own: list, loose: float, chance: random.Random) -> list[Step]:  # type: ignore[type-arg]
    steps: list[Step] = []
    open_: list[int] = []
    for k, group, pair in own:
        handle = k if chance.random() < loose else None
        shape = (3,) if chance.random() < 0.02 else (2,)
        if pair is None:
            call = Call(group, "all_reduce", shape=shape, handle=handle)
        else:
            operation = "send" if pair[0] == rank else "recv"
            peer = pair[1] if pair[0] == rank else pair[0]
            tag = k % 2 if chance.random() < 0.95 else 2
            call = Call(group, operation, peer, shape, tag=tag, handle=handle)
        last = steps[-1] if steps else None
        if pair and isinstance(last, Batch | Call) and chance.random() < 0.4:
            inner = last.calls if isinstance(last, Batch) else (last,)
            if inner[-1].peer is not None and inner[-1].group == group:
                steps[-1] = Batch((*inner, call))
                open_ += [k] * (handle is not None)
                continue
        steps.append(call)
        open_ += [k] * (handle is not None)
        if open_ and chance.random() < 0.3:
            waited = tuple(open_) if chance.random() < 0.3 else (open_[0],)
            steps.append(Wait() if len(waited) == len(open_) and chance.random() < 0.5
                         else Wait(waited))  # fmt: skip
            open_ = [each for each in open_ if each not in waited]
    if open_ and chance.random() < 0.8:
        steps.append(Wait(tuple(open_)))
    return steps


def test_random_programs_end_as_in_every_interleaving() -> None:
    """All ways end in one state, the same that one look finds; a reason is as short as can be."""
    seen: Counter[tuple[str, str | None]] = Counter()
    included = 0
    for seed in range(PROGRAMS if full() else PROGRAMS // 5):
        programs = random_programs(random.Random(seed))
        tags = {call.tag for steps in programs.values() for s in steps for call in calls_of(s)}
        if tags <= {0} and check(programs, "strict").finishes:
            included += 1
            assert all(check(programs, rules).finishes for rules in RULES), seed
        for rules in RULES:
            world = World(programs, rules)
            ends = world.ends()
            assert len(ends) == 1, (seed, rules)
            found = check(programs, rules)
            assert found.finishes == world.is_finished(next(iter(ends))), (seed, rules)
            seen[rules, found.kind] += 1
            if found.finishes:
                continue
            length = len(found.places) if found.kind == "circle" else 1
            assert length == fewest(programs, rules), (seed, rules, str(found))
            part = World(found.programs, rules)
            assert not part.is_finished(part.one_end()), (seed, rules)
            again = check(found.programs, rules)
            assert (again.kind, len(again.places)) == (found.kind, len(found.places))
    assert included >= 10
    for rules in RULES:  # none of it is empty
        assert min(seen[rules, None], seen[rules, "circle"]) >= 5, seen
        assert seen[rules, "never issued"] + seen[rules, "differs"] >= 5, seen


# -- known bad ones ---------------------------------------------------------------------

TP, DP = Group("tp", (0, 1)), Group("dp", (0, 1))
PP3, ALL = Group("pp", (0, 1, 2)), Group("all", (0, 1, 2, 3))
PAIRS = [Group(f"p{i}", (i, (i + 1) % 4)) for i in range(4)]


def reduce(group: Group, handle: object = None, **about: object) -> Call:
    return Call(group, "all_reduce", handle=handle, **about)  # type: ignore[arg-type]


def send(group: Group, peer: int, handle: object = None, **about: object) -> Call:
    return Call(group, "send", peer, handle=handle, **about)  # type: ignore[arg-type]


def recv(group: Group, peer: int, handle: object = None, **about: object) -> Call:
    return Call(group, "recv", peer, handle=handle, **about)  # type: ignore[arg-type]


CIRCLE, NEVER, DIFFERS = "circle", "never issued", "differs"
Found = tuple[str, int] | None
BAD: dict[str, tuple[Programs, tuple[Found, Found, Found]]] = {
    # name: the programs, and what is found under nccl, gloo and strict, with the reason's length
    "two names in opposite order": (
        {0: [reduce(TP), reduce(DP)], 1: [reduce(DP), reduce(TP)]},
        ((CIRCLE, 2), (CIRCLE, 2), (CIRCLE, 2)),
    ),
    "the same beside each other, which only one queue for all cannot": (
        {0: [reduce(TP, 1), reduce(DP, 2), Wait()], 1: [reduce(DP, 1), reduce(TP, 2), Wait()]},
        (None, None, (CIRCLE, 2)),
    ),
    "waited for in opposite order, each before the other is issued": (
        {0: [reduce(TP, 1), Wait((1,)), reduce(DP)], 1: [reduce(DP, 1), Wait(), reduce(TP)]},
        ((CIRCLE, 2), (CIRCLE, 2), (CIRCLE, 2)),
    ),
    "both send first": (
        {0: [send(TP, 1), recv(TP, 1)], 1: [send(TP, 0), recv(TP, 0)]},
        ((CIRCLE, 2), (CIRCLE, 2), (CIRCLE, 2)),
    ),
    "both receive first": (
        {0: [recv(TP, 1), send(TP, 1)], 1: [recv(TP, 0), send(TP, 0)]},
        ((CIRCLE, 2), (CIRCLE, 2), (CIRCLE, 2)),
    ),
    "both isend first, which gloo lets pass": (
        {r: [send(TP, 1 - r, 1), recv(TP, 1 - r, 2), Wait()] for r in range(2)},
        ((CIRCLE, 2), None, (CIRCLE, 2)),
    ),
    "a ring of blocking sends": (
        {r: [send(ALL, (r + 1) % 4), recv(ALL, (r - 1) % 4)] for r in range(4)},
        ((CIRCLE, 4), (CIRCLE, 4), (CIRCLE, 4)),
    ),
    "a ring of receives on three ranks": (
        {r: [recv(PP3, (r - 1) % 3), send(PP3, (r + 1) % 3)] for r in range(3)},
        ((CIRCLE, 3), (CIRCLE, 3), (CIRCLE, 3)),
    ),
    "a ring of collectives on overlapping groups": (
        {r: [reduce(PAIRS[r]), reduce(PAIRS[r - 1])] for r in range(4)},
        ((CIRCLE, 4), (CIRCLE, 4), (CIRCLE, 4)),
    ),
    "1F1B whose steady state sends both ways first": (
        {
            0: [send(PP3, 1), send(PP3, 1), recv(PP3, 1), recv(PP3, 1)],
            1: [recv(PP3, 0), send(PP3, 2), send(PP3, 0), recv(PP3, 0), recv(PP3, 2), send(PP3, 0)],
            2: [recv(PP3, 1), send(PP3, 1)],
        },
        ((CIRCLE, 2), (CIRCLE, 2), (CIRCLE, 2)),
    ),
    "1F1B whose stages disagree on the warmup": (
        {
            0: [send(TP, 1), recv(TP, 1), send(TP, 1), recv(TP, 1)],
            1: [recv(TP, 0), recv(TP, 0), send(TP, 0), send(TP, 0)],
        },
        ((CIRCLE, 2), (CIRCLE, 2), (CIRCLE, 2)),
    ),
    "a collective against a message": (
        {0: [reduce(TP), send(TP, 1)], 1: [recv(TP, 0), reduce(TP)]},
        ((CIRCLE, 2), (CIRCLE, 2), (CIRCLE, 2)),
    ),
    "a batch against a collective of its communicator, beside each other": (
        {
            0: [Batch((send(TP, 1, 1),)), reduce(TP, 2), Wait()],
            1: [reduce(TP, 2), Batch((recv(TP, 0, 1),)), Wait()],
        },
        ((CIRCLE, 2), None, (CIRCLE, 2)),
    ),
    "two batches in opposite order": (
        {
            0: [Batch((send(TP, 1, 1),)), Batch((recv(TP, 1, 2),)), Wait()],
            1: [Batch((send(TP, 0, 1),)), Batch((recv(TP, 0, 2),)), Wait()],
        },
        ((CIRCLE, 2), None, (CIRCLE, 2)),
    ),
    "a rank that skips a collective": (
        {0: [reduce(TP), reduce(TP), reduce(DP)], 1: [reduce(TP), reduce(DP)]},
        ((NEVER, 1), (NEVER, 1), (NEVER, 1)),
    ),
    "a send without a receive": (
        {0: [send(TP, 1), reduce(TP)], 1: [reduce(TP)]},
        ((NEVER, 1), (NEVER, 1), (NEVER, 1)),
    ),
    "a receive from the wrong rank": (
        {0: [send(PP3, 1)], 1: [recv(PP3, 2)], 2: []},
        ((NEVER, 1), (NEVER, 1), (NEVER, 1)),
    ),
    "another operation at one place": (
        {0: [reduce(TP), Call(TP, "all_gather")], 1: [Call(TP, "all_gather"), reduce(TP)]},
        ((DIFFERS, 1), (DIFFERS, 1), (DIFFERS, 1)),
    ),
    "two shapes in opposite order on one communicator": (
        {
            0: [reduce(TP, 1, shape=(4,)), reduce(TP, 2, shape=(8,)), Wait()],
            1: [reduce(TP, 1, shape=(8,)), reduce(TP, 2, shape=(4,)), Wait()],
        },
        ((DIFFERS, 1), (DIFFERS, 1), (DIFFERS, 1)),
    ),
    "another dtype": (
        {r: [reduce(TP, shape=(4,), dtype=("float32", "bfloat16")[r])] for r in range(2)},
        ((DIFFERS, 1), (DIFFERS, 1), (DIFFERS, 1)),
    ),
    "another root": (
        {r: [Call(TP, "broadcast", root=r)] for r in range(2)},
        ((DIFFERS, 1), (DIFFERS, 1), (DIFFERS, 1)),
    ),
    "a message of another size": (
        {0: [send(TP, 1, shape=(4,))], 1: [recv(TP, 0, shape=(5,))]},
        ((DIFFERS, 1), (DIFFERS, 1), (DIFFERS, 1)),
    ),
    "a tag that only gloo looks at": (
        {0: [send(TP, 1, tag=3)], 1: [recv(TP, 0, tag=4)]},
        (None, (NEVER, 1), None),
    ),
    "a message to itself that is waited for first": (
        {0: [send(TP, 0), recv(TP, 0)], 1: []},
        ((CIRCLE, 1), (CIRCLE, 1), (CIRCLE, 1)),
    ),
    "two groups in opposite order behind much that is right": (
        {
            r: [reduce(ALL), *[reduce(TP) for _ in range(r < 2)] * 3,
                *([reduce(PAIRS[0]), reduce(TP)] if r == 0 else
                  [reduce(TP), reduce(PAIRS[0])] if r == 1 else []), reduce(ALL)]
            for r in range(4)
        },
        ((CIRCLE, 2), (CIRCLE, 2), (CIRCLE, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_known_bad_program_has_the_shortest_reason(name: str) -> None:
    programs, wanted = BAD[name]
    for rules, kind in zip(RULES, wanted, strict=True):
        found = check(programs, rules)
        length = len(found.places) if found.kind == CIRCLE else 1
        assert (None if found.finishes else (found.kind, length)) == kind, (rules, str(found))
        world = World(programs, rules)
        assert world.is_finished(world.one_end()) == found.finishes
        if kind is not None:
            assert fewest(programs, rules) == length
            assert found.draw().count("[") >= 1


def test_a_reason_names_ranks_calls_and_places() -> None:
    found = check(
        {
            0: [reduce(TP, where="a.py:12"), reduce(DP, where="a.py:15")],
            1: [reduce(DP, where="b.py:40"), reduce(TP, where="b.py:44")],
        }
    )
    assert str(found).splitlines()[1:] == [
        "  rank 0 waits in tp all_reduce 0 (a.py:12) for rank 1, which comes to it at b.py:44, "
        "after dp all_reduce 0",
        "  rank 1 waits in dp all_reduce 0 (b.py:40) for rank 0, which comes to it at a.py:15, "
        "after tp all_reduce 0",
    ]
    assert found.draw().splitlines() == [
        "rank 0  [tp all_reduce 0]  dp all_reduce 0",
        "rank 1  [dp all_reduce 0]  tp all_reduce 0",
    ]
    again = found.as_dict()
    assert again["places"][1]["where"] == "b.py:40"


def test_the_first_of_several_causes_is_named() -> None:
    """A rank that leaves out the second of four: what is missing is the fourth, it parts before."""
    calls = [reduce(TP, where=f"a.py:{i}") for i in range(4)]
    found = check({0: calls, 1: [calls[0], *calls[2:]]})
    assert found.places[0].why == (
        "rank 0 issues tp all_reduce 3 (a.py:3), which rank 1 never does; the first that come from "
        "other places are tp all_reduce 1 (a.py:1) and, on rank 1, tp all_reduce 1 (a.py:2)"
    )


def test_programs_that_no_rank_could_issue_are_refused() -> None:
    with pytest.raises(SpecError, match=r"rules='ncc': expected one of .*did you mean 'nccl'"):
        check({}, "ncc")
    with pytest.raises(SpecError, match=r"takes from anybody.*Name the sender"):
        check({0: [Call(TP, "recv")], 1: []})
    with pytest.raises(SpecError, match=r"rank 2 issues all_reduce on tp of ranks \[0, 1\]"):
        check({2: [reduce(TP)], 0: [], 1: []})
    with pytest.raises(SpecError, match=r"send on tp with rank 5, which is not one of its ranks"):
        check({0: [send(TP, 5)], 1: []})
    with pytest.raises(SpecError, match=r"waits for 7, which it has not issued"):
        check({0: [Wait((7,))]})
    with pytest.raises(SpecError, match=r"ranks \[1\] of tp have no program"):
        check({0: [reduce(TP)]})
    assert check({}).finishes


def test_many_ranks_are_quick() -> None:
    """256 ranks with 60 calls each: seconds mean that something grows with the square."""
    everyone = Group("dp", tuple(range(256)))
    pairs = [Group("tp", (r, r + 1)) for r in range(0, 256, 2)]
    programs = {r: [reduce(pairs[r // 2]), reduce(everyone)] * 30 for r in range(256)}
    found = check(programs)
    assert (found.finishes, found.calls) == (True, 15_360)
    programs[7] = [*programs[7][:40], reduce(everyone), reduce(pairs[3]), *programs[7][42:]]
    found = check(programs)
    assert (found.kind, len(found.places)) == (CIRCLE, 2)
