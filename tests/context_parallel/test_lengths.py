"""Plans of who attends which documents on which group, run on paper and on real ranks."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import commgrid
from commgrid import GridSpec, GroupPlan, SpecError
from commgrid.collectives import all_reduce
from commgrid.context_parallel import (
    Costs,
    LengthGroups,
    LengthPlan,
    Mask,
    Turn,
    fixed_lengths,
    plan_lengths,
)
from commgrid.testing import run_on_ranks
from tests.sizes import full, some

WORLDS = [
    {"cp": 6},
    {"tp": 2, "cp": 6, "dp": 2},
    {"tp": 2, "cp": 4, "dp": 2, "pp": 2},
    {"tp": 3, "cp": 5, "pp": 2},
    {"cp": 8, "dp": 3},
]
COSTS = [Costs(), Costs(token=300.0), Costs(token=300.0, exchange=200.0)]


class Stuck(Exception):
    """Ranks that wait for each other."""


def run_on_paper(programs: Sequence[Sequence[Turn]], time: Any) -> list[float]:
    """When each rank is done, if every turn needs all of its ranks at once and holds them.

    Ranks go through their own lists, as processes that block in collectives do.

    Raises:
        Stuck: nobody can go on.
    """
    at, clock = [0] * len(programs), [0.0] * len(programs)
    while any(at[rank] < len(program) for rank, program in enumerate(programs)):
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            turn = program[at[rank]]
            members = turn.part.members
            if all(at[m] < len(programs[m]) and programs[m][at[m]] is turn for m in members):
                end = max(clock[m] for m in members) + time(turn)
                for m in members:
                    at[m] += 1
                    clock[m] = end
                break
        else:
            raise Stuck
    return clock


@cache
def mask_of(length: int, mask: Mask) -> torch.Tensor:
    """Which keys each query of a document attends."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    found = torch.ones(length, length, dtype=torch.bool)
    if mask.causal:
        found &= key <= query
    if mask.window is not None:
        found &= query - key < mask.window
    return found


def keys_missing(plan: LengthPlan, turn: Turn) -> int:
    """How many keys outside its own the rank with most of them attends."""
    whole = torch.block_diag(*(mask_of(length, plan.mask) for length in turn.lengths))
    counts = []
    for ranges in plan.ranges(turn):
        own = [position for start, stop in ranges for position in range(start, stop)]
        attended = whole[own].any(0)
        attended[own] = False
        counts.append(int(attended.sum()))
    return max(counts)


def check_plan(plan: LengthPlan, lengths: Sequence[int], limit: int) -> None:
    """Every document once, memory kept, the same order for all, and what it says of itself."""
    size = plan.groups.size
    assert sorted(i for turn in plan.turns for i in turn.documents) == list(range(len(lengths)))
    busy = [0.0] * size
    for turn in plan.turns:
        members = turn.part.members
        assert turn.documents == tuple(sorted(turn.documents))
        assert turn.lengths == tuple(lengths[i] for i in turn.documents)
        assert turn.pairs == sum(int(mask_of(n, plan.mask).sum()) for n in turn.lengths)
        held = plan.ranges(turn)
        assert len(held) == len(members)
        tokens = [sum(stop - start for start, stop in ranges) for ranges in held]
        assert sum(tokens) == turn.tokens == sum(turn.lengths)
        assert max(tokens) <= turn.tokens_per_rank <= min(limit, plan.tokens_per_rank)
        received = plan.received(turn)
        if plan.mask.window is None:
            assert received == keys_missing(plan, turn)
        else:  # counted by documents, which is at most too much
            assert keys_missing(plan, turn) <= received <= turn.tokens
        exchanged = plan.costs.exchange * received
        spent = plan.costs.token * turn.tokens / len(members)
        for member in members:
            busy[member] += spent + max(turn.pairs / len(members), exchanged)
    programs = [plan.of(position) for position in range(size)]
    clock = run_on_paper(programs, plan.time)
    assert plan.busy == pytest.approx(busy)
    assert plan.makespan == pytest.approx(max(clock))
    assert plan.idle == pytest.approx(1 - sum(busy) / size / max(clock), abs=1e-9)


def test_the_paper_run_finds_ranks_that_wait_for_each_other() -> None:
    plan = fixed_lengths([10] * 4, 2, 2, tokens_per_rank=5)
    run_on_paper([plan.turns, plan.turns], plan.time)
    with pytest.raises(Stuck):
        run_on_paper([plan.turns, plan.turns[::-1]], plan.time)


@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=16),
    size=st.integers(1, 8),
    sizes=st.sets(st.integers(1, 8)),
    room=st.integers(0, 60),
    costs=st.sampled_from(COSTS),
    mask=st.sampled_from([(True, None), (False, None), (True, 7)]),
)
def test_any_lengths_on_any_sizes(
    lengths: list[int],
    size: int,
    sizes: set[int],
    room: int,
    costs: Costs,
    mask: tuple[bool, int | None],
) -> None:
    groups = LengthGroups(size, sorted(part for part in sizes if part <= size))
    limit = -(-max(lengths) // size) + room
    given_all = {"tokens_per_rank": limit, "causal": mask[0], "window": mask[1], "costs": costs}
    plan = plan_lengths(lengths, groups, **given_all)
    check_plan(plan, lengths, limit)
    fixed = fixed_lengths(lengths, groups, size, **given_all)
    check_plan(fixed, lengths, limit)
    assert fixed.gain == pytest.approx(1)
    assert plan.gain == pytest.approx(fixed.makespan / plan.makespan)
    for part in groups.sizes:
        if max(lengths) <= part * limit:
            other = fixed_lengths(lengths, groups, part, **given_all)
            assert plan.makespan <= 1.005 * other.makespan
    assert plan == plan_lengths(tuple(lengths), groups, **given_all)


def long_tailed(seed: int, count: int, kind: str) -> list[int]:
    draw = random.Random(seed)
    if kind == "lognormal":
        drawn = [int(draw.lognormvariate(5, 1.4)) for _ in range(count)]
    else:
        drawn = [int(20 * draw.paretovariate(1.0)) for _ in range(count)]
    return [min(max(length, 1), 4000) for length in drawn]


@pytest.mark.parametrize("kind", ["lognormal", "zipf"])
def test_long_tailed_batches_leave_nobody_idle(kind: str) -> None:
    """And are faster than the best one size, where talk costs."""
    costs = Costs(token=750.0, exchange=250.0)  # as 6·h to 2·h of a block of width 125
    gains = []
    for seed in range(12 if full() else 2):
        lengths = long_tailed(seed, 256, kind)
        for size in some([4, 6, 8], 2):
            room = {"tokens_per_rank": -(-max(lengths) // size) + 200, "costs": costs}
            plan = plan_lengths(lengths, size, **room)
            programs = [plan.of(position) for position in range(size)]
            assert max(run_on_paper(programs, plan.time)) == pytest.approx(plan.makespan)
            assert plan.idle < 0.05
            best = min(
                fixed_lengths(lengths, size, part, **room).makespan
                for part in plan.groups.sizes if max(lengths) <= part * room["tokens_per_rank"]
            )  # fmt: skip
            gains.append(best / plan.makespan)
    assert min(gains) > 0.995
    assert sum(gains) / len(gains) > 1.05


def test_short_documents_stay_on_one_rank_and_long_ones_do_not() -> None:
    lengths = [4000] + [60 + 13 * i % 80 for i in range(80)]
    plan = plan_lengths(lengths, 4, tokens_per_rank=1024, costs=Costs(exchange=50_000.0))
    assert {turn.group for turn in plan.turns if 0 in turn.documents} == {"cp"}
    assert {turn.group for turn in plan.turns if 0 not in turn.documents} == {"cp_1"}
    assert plan.tokens_per_rank <= 1024


def test_a_part_that_leaves_ranks_out_keeps_them_busy() -> None:
    """4 of 6 ranks take the long document, the two others the short ones meanwhile."""
    lengths = [400] + [100] * 8
    groups = LengthGroups(6, sizes=[1, 4])
    plan = plan_lengths(lengths, groups, tokens_per_rank=100, costs=Costs(exchange=999.0))
    check_plan(plan, lengths, 100)
    long = next(turn for turn in plan.turns if 0 in turn.documents)
    assert (long.group, long.part.members) == ("cp_4_0", (0, 1, 2, 3))
    assert plan.of(4)[0].group == "cp_1"


def brute_force_positions(sizes: dict[str, int], axis: str) -> list[list[int]]:
    """The groups along one axis by looking at every rank's digits, tp fastest and pp slowest."""
    order = [name for name in ("tp", "cp", "dp", "pp") if name in sizes]
    world = 1
    for name in order:
        world *= sizes[name]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        rest, digits = rank, []
        for name in order:
            digits.append(-1 if name == axis else rest % sizes[name])
            rest //= sizes[name]
        groups.setdefault(tuple(digits), []).append(rank)
    return list(groups.values())


@pytest.mark.parametrize("sizes", WORLDS, ids=str)
@pytest.mark.parametrize("chosen", [(), (1, 2, 3), (4,), (1, 2, 3, 4)], ids=str)
def test_rows_make_every_part_beside_the_other_axes(
    sizes: dict[str, int], chosen: tuple[int, ...]
) -> None:
    groups = LengthGroups(sizes["cp"], chosen)
    wholes = brute_force_positions(sizes, "cp")
    world = len(wholes) * sizes["cp"]
    rows = groups.rows(timeout=600)
    spec = GridSpec.build(**sizes, order="tp-cp-dp-pp", groups=rows).resolve(world)
    plans = [GroupPlan.for_rank(spec, rank) for rank in range(world)]
    for whole in wholes:
        for size in groups.sizes:
            parts = groups.parts(size)
            covered = [member for part in parts for member in part.members]
            assert covered == list(range(size * (sizes["cp"] // size)))
            for part in parts:
                members = tuple(whole[position] for position in part.members)
                for rank in members:
                    assert plans[rank].groups[part.name] == members
    for rank, plan in enumerate(plans):
        for name in rows:
            assert plan.groups.get(name, (rank,)) is not None
            made = [c for c in plan.communicators if name in c.names]
            if rank in plan.groups.get(name, ()) and len(plan.groups[name]) > 1:
                assert [c.ranks for c in made] == [plan.groups[name]]
                assert made[0].options.timeout == 600.0


def test_parts_of_more_axes_than_one() -> None:
    groups = LengthGroups(8, of="dp_cp")
    spec = GridSpec.build(tp=2, cp=4, dp=2, groups=groups.rows()).resolve(16)
    plan = GroupPlan.for_rank(spec, 10)  # tp 0, cp 1, dp 1
    assert plan.groups["dp_cp"] == (0, 2, 4, 6, 8, 10, 12, 14)
    assert plan.groups["dp_cp_2"] == (8, 10)
    assert plan.groups["dp_cp_4"] == (8, 10, 12, 14)


def takes_its_turns(lengths: list[int], limit: int) -> list[tuple[str, float]]:
    """Sums something over the group of each of its turns, in the plan's order."""
    groups = LengthGroups(6)
    grid = commgrid.initialize(cp=6, dp=1, groups=groups.rows())
    plan = plan_lengths(lengths, groups, tokens_per_rank=limit)
    done = []
    for turn in plan.of(grid.get_local_rank("cp")):
        held = plan.ranges(turn)[grid.get_local_rank(turn.group)]
        tokens = torch.tensor(float(sum(stop - start for start, stop in held)))
        done.append((turn.group, all_reduce(tokens, turn.group).item()))
    commgrid.destroy()
    return done


def test_real_ranks_take_their_turns() -> None:
    lengths, limit = [90, 31, 22, 64, 5, 8, 40, 1, 17, 33, 12, 50], 24
    found = run_on_ranks(takes_its_turns, 6, lengths, limit)
    plan = plan_lengths(lengths, 6, tokens_per_rank=limit)
    assert {turn.group for turn in plan.turns} == {"cp", "cp_3", "cp_2", "cp_1"}
    for position, done in enumerate(found):
        assert done == [(turn.group, float(turn.tokens)) for turn in plan.of(position)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: plan_lengths([9, 50], 4, tokens_per_rank=12), "document 1 has 50 tokens.*give 13"),
        (lambda: fixed_lengths([9, 50], 4, 2, tokens_per_rank=20), "2 ranks .* give 25 or more"),
        (lambda: fixed_lengths([9], 4, 3, tokens_per_rank=20), "no parts of 3 ranks"),
        (lambda: plan_lengths([], 4, tokens_per_rank=12), "lengths is empty"),
        (lambda: plan_lengths([9], 4, tokens_per_rank=0), "tokens_per_rank=0"),
        (lambda: plan_lengths([9], 0, tokens_per_rank=9), "size=0: expected the number of ranks"),
        (lambda: LengthGroups(4, sizes=[2, 5]), "sizes has 5: expected 1 to 4"),
        (lambda: LengthGroups(4, sizes=[0]), "sizes has 0"),
        (lambda: Costs(exchange=-1.0), r"exchange=-1\.0"),
        (lambda: plan_lengths([9], 2, tokens_per_rank=9).of(2), "position 2 is outside 'cp'"),
    ],
)
def test_what_cannot_be_planned_is_said(call: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        call()
