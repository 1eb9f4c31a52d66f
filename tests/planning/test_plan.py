"""Right ranks, all of them: plans against enumeration and against Megatron-core's own groups."""

import functools
import itertools
import math
import operator
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commgrid import GridSpec, GroupPlan, RankLayout, SpecError
from commgrid.planning.group import GroupDef
from commgrid.planning.yaml_keys import OPTIONS
from tests.enumeration import (
    coordinates,
    factorizations,
    groups_along,
    part_of_split,
    picked,
    subsets,
)

Groups = dict[int, tuple[int, ...]]


@functools.lru_cache(maxsize=4096)
def along(
    sizes: tuple[tuple[str, int], ...], ranks: Sequence[int], axes: tuple[str, ...]
) -> Groups:
    """`groups_along` of a region, which many specs have in common."""
    return groups_along(coordinates(dict(sizes), ranks), axes)


def enumerated(spec: GridSpec, definition: GroupDef) -> Groups:
    """Group of each rank that a row of the groups table means."""
    region = next(region for region in spec.regions if region.name == definition.region)
    groups = along(region.numbers, spec.grid_ranks, definition.axes)
    if definition.lists is not None:
        groups = {rank: tuple(listed) for listed in definition.lists for rank in listed}
    if definition.pick is not None:
        kept = {members: picked(members, definition.pick) for members in set(groups.values())}
        groups = {rank: kept[groups[rank]] for rank in groups if rank in kept[groups[rank]]}
    if definition.part is not None:
        groups = {
            rank: part_of_split(members, rank, *definition.part) for rank, members in groups.items()
        }
    return groups


def check_names(spec: GridSpec) -> None:
    """Every set of axes of a region has a name, spelled slowest axis first."""
    for region in spec.regions:
        for axes in subsets(region.axes):
            definition = spec.definitions["_".join(reversed(axes))]
            assert set(definition.axes) == set(axes)
            assert definition.pick is definition.part is definition.lists is None


def check_groups(spec: GridSpec, names: Sequence[str], ranks: Sequence[int]) -> None:
    """The groups with these names are those of enumeration, on these ranks."""
    plans = {rank: GroupPlan.for_rank(spec, rank).groups for rank in ranks}
    for name in names:
        expected = enumerated(spec, spec.definitions[name])
        for rank, groups in plans.items():
            assert groups.get(name) == expected.get(rank), (spec, rank, name)


def check_whole(spec: GridSpec) -> None:
    """Over all ranks: all groups of a name; members list their communicators in one order; each
    name has one communicator, with its ranks."""
    ranks = spec.grid_ranks
    check_names(spec)
    check_groups(spec, list(spec.definitions), ranks)
    layout = {region.name: spec.layout(region.name) for region in spec.regions}
    for name, definition in spec.definitions.items():
        every = sorted(set(enumerated(spec, definition).values()), key=lambda g: ranks.index(g[0]))
        assert definition.all_ranks(layout[definition.region]) == every, (spec, name)
    listed = {}
    for rank in ranks:
        plan = GroupPlan.for_rank(spec, rank)
        listed[rank] = [(c.names, c.ranks) for c in plan.communicators]
        assert len(set(listed[rank])) == len(listed[rank])
        named = {name: members for names, members in listed[rank] for name in names}
        assert named == dict(plan.groups)
        assert sum(len(names) for names, _ in listed[rank]) == len(named)
    for rank, peer in itertools.combinations(ranks, 2):
        ours = [c for c in listed[rank] if peer in c[1]]
        assert ours == [c for c in listed[peer] if rank in c[1]], (spec, rank, peer)


DENSE = ("tp", "cp", "dp", "pp")


def dense_specs(world: int) -> Iterator[GridSpec]:
    """All sizes and all orders that differ (axes of size 1 do not)."""
    for sizes in factorizations(world, len(DENSE)):
        given: dict[str, Any] = dict(zip(DENSE, sizes, strict=True))
        real = [axis for axis in DENSE if given[axis] > 1]
        for order in itertools.permutations(real):
            yield GridSpec.build(**given, order="-".join(order) or "dp").resolve(world)


@pytest.mark.full("8", "12", "14", "15", "16")
@pytest.mark.parametrize("world", range(1, 17))
def test_every_dense_spec_equals_enumeration(world: int) -> None:
    for spec in dense_specs(world):
        check_whole(spec)


def expert_orders(tp: int, pp: int, dp: int, ep: int, etp: int | None) -> Iterator[str]:
    """All orders that differ: an axis counts where it is above 1 in either region."""
    real = [axis for axis, sizes in {"tp": (tp, etp or 1), "ep": (ep,), "pp": (pp,)}.items()
            if max(sizes) > 1]  # fmt: skip
    for order in itertools.permutations([*real, "dp"]):
        yield "-".join([*order, *({"tp", "ep", "pp"} - set(real))])


@pytest.mark.nightly("12", "16")
@pytest.mark.full("1[01345]", "6", "8", "9")
@pytest.mark.parametrize("world", range(1, 17))
def test_every_spec_with_experts_equals_enumeration(world: int) -> None:
    checked = refused = 0
    for tp, pp, dp in factorizations(world, 3):
        for ep, etp in itertools.product(range(1, world + 1), (None, *range(1, world + 1))):
            sizes: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}
            if world % ((tp if etp is None else etp) * ep * pp):
                with pytest.raises(SpecError, match="does not divide"):
                    GridSpec.build(**sizes).resolve(world)
                continue
            for order in expert_orders(**sizes):
                refusal = ""
                try:
                    spec = GridSpec.build(**sizes, order=order).resolve(world)
                except SpecError as error:
                    refusal = str(error)
                if refusal:
                    assert "pp groups differ" in refusal
                    refused += 1
                    continue
                checked += 1
                if checked % 7 == 0:
                    check_whole(spec)
                else:
                    check_names(spec)
                    some = spec.grid_ranks if world <= 8 else (0, world - 1, checked % world)
                    check_groups(spec, list(spec.definitions), some)
    assert checked > 0
    assert refused == 0 or world > 2


@st.composite
def random_specs(draw: st.DrawFn) -> GridSpec:
    """Specs up to 4,096 ranks, sizes of any kind, with and without experts, tables, steps and lists
    of ranks."""
    sizes, room = {}, 4096
    for axis in draw(st.permutations(("tp", "cp", "dp", "pp", "node"))):
        sizes[axis] = draw(st.sampled_from([n for n in (1, 1, 2, 3, 4, 5, 8, 16) if n <= room]))
        room //= sizes[axis]
    order = draw(st.permutations(list(sizes)))
    world = math.prod(sizes.values())
    offset, step = draw(st.sampled_from([(0, 1), (2048, 1), (1, 2)]))
    ranks: Sequence[int] = range(offset, offset + world * step, step)
    if draw(st.booleans()):
        ranks = draw(st.randoms(use_true_random=False)).sample(ranks, world)
    regions = {}
    if draw(st.booleans()):
        inner = draw(st.sampled_from([n for n in range(1, 65) if (world // sizes["pp"]) % n == 0]))
        etp = draw(st.sampled_from([n for n in range(1, inner + 1) if inner % n == 0]))
        regions["expert"] = {
            "axes": {"etp": etp, "ep": inner // etp, "edp": -1}, "order": "etp-ep-edp",
        }  # fmt: skip
    return GridSpec.from_dict(
        {
            "axes": sizes, "order": "-".join(order), "regions": regions,
            "share": draw(st.sampled_from(OPTIONS["share"].words)),
            "groups": {"embedding": {"of": "pp", "pick": ["first", "last"]},
                       "fsdp": "dp_cp", "ag": {"of": "dp_cp", "own": True},
                       "levels": {"of": "dp_cp", "split": {"outer": -1, "inner": sizes["cp"]}}},
        }
    ).resolve(ranks=ranks)  # fmt: skip


@settings(suppress_health_check=list(HealthCheck))
@given(random_specs(), st.randoms(use_true_random=False))
def test_random_specs_equal_enumeration(spec: GridSpec, pick: random.Random) -> None:
    check_groups(spec, pick.sample(list(spec.definitions), 8), [pick.choice(spec.grid_ranks)])
    if spec.world_size <= 24:
        check_whole(spec)


MEGATRON_ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-pp-ep-dp")


@pytest.mark.full("4-2-16-*", "8-2-8-*")
@pytest.mark.parametrize("order", MEGATRON_ORDERS)
@pytest.mark.parametrize(("tp", "cp", "ep", "etp", "dp", "pp"), [
    (1, 1, 1, 1, 1, 1), (2, 1, 1, 2, 4, 2), (2, 2, 1, 2, 2, 2), (2, 2, 4, 1, 4, 2),
    (4, 1, 2, 4, 4, 1), (1, 4, 8, 1, 4, 2), (2, 1, 4, 2, 8, 4), (3, 1, 2, 3, 4, 5),
    (8, 2, 8, 1, 4, 4), (4, 2, 16, 2, 8, 2),
])  # fmt: skip
def test_every_group_megatron_names_agrees_with_its_rank_generator(
    order: str, tp: int, cp: int, ep: int, etp: int, dp: int, pp: int
) -> None:
    from tests.peers import RankGenerator

    world = tp * cp * dp * pp
    edp, rest = divmod(world, etp * ep * pp)
    assert rest == 0
    try:
        spec = GridSpec.build(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, order=order).resolve(
            world
        )
    except SpecError:
        # Megatron refuses these too: pp groups of its two generators differ.
        dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
        assert sorted(dense.get_ranks("pp")) != sorted(expert.get_ranks("pp"))
        return
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    names = {
        dense: ["tp", "pp", "dp", "cp", "tp-pp", "dp-cp", "tp-dp", "tp-dp-cp", "tp-cp"],
        expert: ["ep", "tp", "tp-ep", "tp-ep-pp", "dp", "pp"],
    }
    renamed = {"tp": "etp", "dp": "edp", "ep": "ep", "pp": "pp"}
    for generator, tokens in names.items():
        for token in tokens:
            axes = token.split("-")
            if generator is expert:
                axes = [renamed[axis] for axis in axes]
            name = spec.resolve_name(*axes)
            ours = {GroupPlan.for_rank(spec, rank).groups[name] for rank in range(world)}
            assert sorted(map(list, ours)) == sorted(generator.get_ranks(token)), (token, order)


def names_sharing(spec: GridSpec, rank: int = 0) -> set[frozenset[str]]:
    return {frozenset(c.names) for c in GroupPlan.for_rank(spec, rank).communicators}


def expected_sharing(spec: GridSpec, rank: int) -> set[frozenset[str]]:
    """Who shares, from the table of ranks alone: combinations of axes without a groups table."""
    together: dict[object, set[str]] = {}
    seen = set()
    for region in spec.regions:
        sizes = dict(region.numbers)
        for axes in subsets(region.axes):
            ranks = along(region.numbers, spec.grid_ranks, axes)[rank]
            name = "_".join(reversed(axes))
            key: object = {
                "aliases": name,
                "region": (region.name, frozenset(a for a in axes if sizes[a] > 1)),
                "all": ranks,
            }[spec.share]
            if name not in seen:  # pp is of both regions
                seen.add(name)
                together.setdefault(ranks if len(ranks) == 1 else key, set()).add(name)
    return set(map(frozenset, together.values()))


def covers(coarse: set[frozenset[str]], fine: set[frozenset[str]]) -> bool:
    """Whether names that share in `fine` do so in `coarse` too."""
    return all(any(names <= more for more in coarse) for names in fine)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_who_shares_equals_enumeration(world: int) -> None:
    cuts = [
        {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
        for tp, pp, cp, _ in factorizations(world, 4)
        for etp, ep, _ in [(None, 1, 1), *factorizations(world // pp, 3)]
    ]
    for number, cut in enumerate(cuts):
        spec, rank = GridSpec.build(**cut).resolve(world), number % world  # type: ignore[arg-type]
        found: list[set[frozenset[str]]] = []
        for share in OPTIONS["share"].words:
            shared = replace(spec, share=share)
            found.append(names_sharing(shared, rank))
            assert found[-1] == expected_sharing(shared, rank), (shared, rank)
        aliases, region, every = found
        assert covers(region, aliases)
        assert covers(every, region)


def test_by_default_nothing_shares_but_aliases_and_groups_of_one_rank() -> None:
    groups = {
        "fsdp": "dp_cp", "ends": {"of": "pp", "pick": ["first", "last"]},
        "head": {"of": "pp", "pick": ["first"]}, "levels": {"of": "tp", "split": {"x": 2, "y": 1}},
        "alone": {"of": "cp", "own": True}, "again": "alone", "slow": {"of": "cp", "timeout": 9},
    }  # fmt: skip
    spec = GridSpec.build(tp=2, pp=2, groups=groups).resolve(8)
    assert spec.share == "aliases"
    shared = {names for names in names_sharing(spec, 0) if len(names) > 1}
    assert shared == {
        frozenset({"dp_cp", "fsdp"}), frozenset({"cp", "head", "y"}), frozenset({"alone", "again"}),
    }  # fmt: skip
    assert {frozenset({"cp", "y"}), frozenset({"slow"})} <= names_sharing(spec, 7)  # no first stage
    check_whole(spec)


def test_hsdp_has_one_communicator_under_both_its_names() -> None:
    spec = GridSpec.build(tp=2, dp_replicate=2, dp_shard=2).resolve(8)
    shared = {names for names in names_sharing(spec) if len(names) > 1}
    assert {frozenset({"dp_replicate_dp_shard", "dp"})} <= shared
    assert frozenset({"cp", "pp", "pp_cp"}) in shared
    for names in shared - {frozenset({"cp", "pp", "pp_cp"})}:
        one, other = sorted(names, key=len)
        assert other == one.replace("dp", "dp_replicate_dp_shard")


def test_sharing_in_a_region_needs_an_axis_of_size_1() -> None:
    spec = GridSpec.build(tp=2, pp=2, ep=2, etp=1, share="region").resolve(8)
    shared = names_sharing(spec)
    # cp=1, so every name with cp is the name without it; etp=1 likewise among the experts'.
    assert frozenset({"tp", "cp_tp"}) in shared
    assert frozenset({"ep", "ep_etp"}) in shared
    # pp and pp_etp have the same ranks, but are names of different regions, run at once.
    plan = GroupPlan.for_rank(spec, 0)
    assert plan.groups["pp"] == plan.groups["pp_etp"]
    assert frozenset({"pp", "pp_cp"}) in shared


def test_share_all_is_one_communicator_a_rank_set_and_aliases_is_one_a_name() -> None:
    arguments = {
        "tp": 2,
        "pp": 2,
        "ep": 2,
        "groups": {"emb": {"of": "pp", "pick": ["first", "last"]}},
    }
    every = GridSpec.build(share="all", **arguments).resolve(8)  # type: ignore[arg-type]
    for rank in range(8):
        plan = GroupPlan.for_rank(every, rank)
        assert len(plan.communicators) == len(set(plan.groups.values()))
    single = GridSpec.build(share="aliases", cp=2, **arguments).resolve(16)  # type: ignore[arg-type]
    for rank in range(16):
        assert all(len(names) == 1 for names in names_sharing(single, rank))


def test_own_and_options_keep_communicators_apart() -> None:
    groups = {
        "fsdp": "dp_cp", "ag": {"of": "dp_cp", "own": True}, "slow": {"of": "dp_cp", "timeout": 9},
        "slow_too": "slow", "emb": {"of": "pp", "pick": ["first", "last"]},
    }  # fmt: skip
    for share in OPTIONS["share"].words:
        spec = GridSpec.build(tp=2, cp=2, pp=2, groups=groups, share=share).resolve(16)
        shared = names_sharing(spec)
        assert frozenset({"ag"}) in shared
        assert frozenset({"slow", "slow_too"}) in shared
        assert any({"fsdp", "dp_cp"} <= names for names in shared)
        # With pp = 2 the embedding group has pp's ranks, but not because an axis has size 1.
        assert (frozenset({"emb"}) in shared) == (share != "all")


def test_a_row_overrides_options_of_the_group_it_is_made_of() -> None:
    base = {"of": "dp", "backend": "gloo", "timeout": 9, "nccl": {"max_ctas": 2, "min_ctas": 1}}
    groups = {"base": base, "more": {"of": "base", "backend": "nccl", "nccl": {"max_ctas": 4}}}
    made = GridSpec.build(groups=groups).resolve(4).definitions["more"].options
    assert (made.backend, made.timeout) == ("nccl", 9.0)
    assert dict(made.nccl) == {"max_ctas": 4, "min_ctas": 1}


def test_an_embedding_group_leaves_out_the_middle_stages() -> None:
    spec = GridSpec.build(pp=4, groups={"emb": {"of": "pp", "pick": ["first", "last"]}}).resolve(8)
    assert GroupPlan.for_rank(spec, 1).groups["emb"] == (1, 7)
    assert "emb" not in GroupPlan.for_rank(spec, 3).groups
    one = GridSpec.build(pp=1, groups={"emb": {"of": "pp", "pick": ["first", "last"]}}).resolve(2)
    assert GroupPlan.for_rank(one, 1).groups["emb"] == (1,)


def test_split_names_its_parts_slowest_first() -> None:
    groups = {"levels": {"of": "cp", "split": {"ring": 2, "a2a": -1}}}
    spec = GridSpec.build(tp=2, cp=8, groups=groups).resolve(16)
    plan = GroupPlan.for_rank(spec, 5)
    assert plan.groups["cp"] == (1, 3, 5, 7, 9, 11, 13, 15)
    assert plan.groups["a2a"] == (1, 3, 5, 7)
    assert plan.groups["ring"] == (5, 13)


def test_only_what_is_named_connects() -> None:
    groups = {"ag": {"of": "dp_cp", "own": True}}

    def connecting(connect: str | list[str]) -> set[str]:
        spec = GridSpec.build(tp=2, cp=2, groups=groups, connect=connect).resolve(8)
        return {c.name for c in GroupPlan.for_rank(spec, 0).communicators if c.connect}

    assert connecting("axes") == {"tp", "cp", "dp", "ag"}  # pp has size 1
    assert connecting("none") == set()
    assert connecting(["dp_cp", "pp"]) == {"dp_cp"}
    assert {"dp_cp_tp", "tp", "ag"} <= connecting("all")


@pytest.mark.parametrize("world", [64, 1024, 16_384, 131_072])
def test_communicators_do_not_grow_with_the_world(world: int) -> None:
    counts = {}
    for share in OPTIONS["share"].words:
        spec = GridSpec.build(tp=8, pp=4, cp=2, ep=8, etp=1, share=share).resolve(world)
        counts[share] = len(GroupPlan.for_rank(spec, world - 1).communicators)
    # 15 names of dense axes and 14 of the experts' (pp is of both), one of them of one rank; with
    # 64 ranks dp is one rank too, and of edp 2 ranks are left.
    few, many = (28, 15, 8), (29, 23, 16)
    assert tuple(counts.values()) == (few if world == 64 else many)


def test_a_plan_of_a_million_ranks_is_small_and_quick() -> None:
    """Quick: no more calls than for a thousand. A walk over all ranks makes more, or takes
    memory for each."""

    def plan(world: int) -> GroupPlan:
        spec = GridSpec.build(tp=8, pp=4, cp=2, ep=8, etp=1).resolve(world)
        made = GroupPlan.for_rank(spec, world // 2 + 17)
        assert len(made.communicators) == 29
        return made

    plan(2**20)
    assert _calls(lambda: plan(2**20)) <= 1.02 * _calls(lambda: plan(2**10))
    tracemalloc.start()
    plan(2**20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6


def _calls(call: Callable[[], object]) -> int:
    """How many functions are entered, Python's and C's."""
    entered = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal entered
        entered += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("share", OPTIONS["share"].words)
def test_rows_made_of_an_own_group_have_their_own_ranks_and_options(share: str) -> None:
    groups = {
        "a": {"of": "pp", "own": True}, "alias": "a", "ends": {"of": "a", "pick": [0, "last"]},
        "halves": {"of": "a", "split": {"x": 2, "y": 2}}, "slow": {"of": "a", "timeout": 5},
    }  # fmt: skip
    spec = GridSpec.build(pp=4, share=share, groups=groups).resolve(4)
    plan = GroupPlan.for_rank(spec, 0)
    by_name = {name: c for c in plan.communicators for name in c.names}
    assert by_name["alias"] is by_name["a"]
    assert by_name["ends"].ranks == (0, 3)
    assert by_name["x"].ranks == (0, 2)
    assert by_name["y"].ranks == (0, 1)
    assert by_name["slow"].options.timeout == 5.0
    check_whole(spec)


def test_a_spec_of_some_ranks_resolves_to_itself() -> None:
    spec = GridSpec.build(tp=2, ranks=range(4)).resolve(8)
    assert spec.resolve(8) == spec == GridSpec.from_dict(spec.to_dict())
    assert spec.grid_ranks == range(4)


# -- over lists of ranks --------------------------------------------------------------------------

TABLE: dict[str, Any] = {
    "embedding": {"of": "pp", "pick": ["first", "last"]},
    "levels": {"of": "dp", "split": {"outer": 2, "inner": -1}},
    "fsdp": "dp_cp",
}


@pytest.mark.parametrize("share", OPTIONS["share"].words)
@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"tp": 2, "pp": 3}, (0, 1, 2, 4, 5, 7)),
        ({"tp": 2, "pp": 2}, (5, 2, 0, 7)),
        ({"cp": 2, "dp": 4, "pp": 2}, tuple(random.Random(1).sample(range(40), 16))),
        ({"tp": 2, "dp": 4, "ep": 4, "etp": 1}, tuple(random.Random(2).sample(range(9), 8))),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, (7, 6, 5, 4, 3, 2, 1, 0)),
    ],
)
def test_plans_over_lists_equal_enumeration(
    sizes: dict[str, int], ranks: tuple[int, ...], share: str
) -> None:
    groups = {**TABLE}
    if sizes.get("dp") != 4:
        del groups["levels"]
    spec = GridSpec.build(**sizes, ranks=ranks, groups=groups, share=share).resolve(64)  # type: ignore[arg-type]
    assert spec.grid_ranks == ranks
    check_whole(spec)


@pytest.mark.parametrize("share", OPTIONS["share"].words)
@pytest.mark.parametrize("ranks", [None, (7, 6, 0, 1, 3, 2, 4, 5)])
def test_rows_that_list_ranks(share: str, ranks: tuple[int, ...] | None) -> None:
    groups = {
        **TABLE, "some": {"ranks": [[4, 2, 1, 0], [3, 5]]}, "alias": "some",
        "slow": {"of": "some", "timeout": 9}, "apart": {"of": "some", "own": True},
        "ends": {"of": "some", "pick": ["first", "last"]},
        "pair": {"ranks": [[0, 1]], "timeout": 5}, "alone": {"ranks": [[6]]},
        "twin": {"ranks": [[4, 2, 1, 0], [3, 5]]},
    }  # fmt: skip
    spec = GridSpec.build(tp=2, dp=4, ranks=ranks, groups=groups, share=share).resolve(8)
    check_whole(spec)
    plan = GroupPlan.for_rank(spec, 2)
    assert plan.groups["some"] == plan.groups["twin"] == (4, 2, 1, 0)  # in the order of the list
    named = {name: c for c in plan.communicators for name in c.names}
    assert named["some"].names == ("some", "alias")  # its own, although twin has these ranks too
    assert {named[n].name for n in ("slow", "apart", "twin")} == {"slow", "apart", "twin"}
    assert named["slow"].options.timeout == 9.0
    assert named["some"].connect
    assert "ends" not in plan.groups
    assert GroupPlan.for_rank(spec, 0).groups["ends"] == (4, 0)
    pair = {n: c for c in GroupPlan.for_rank(spec, 3).communicators for n in c.names}
    assert pair["ends"].ranks == pair["some"].ranks == (3, 5)
    assert (pair["ends"] is pair["some"]) == (share != "aliases")
    assert "some" not in GroupPlan.for_rank(spec, 7).groups
    assert GridSpec.from_dict(spec.to_dict()) == spec
    assert spec.to_dict()["groups"]["some"] == {"ranks": [[4, 2, 1, 0], [3, 5]]}


def test_get_all_ranks_does_not_look_at_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """4.7 s at 4,096 ranks for four groups, when every rank's was made to find them."""
    groups = {**TABLE, "some": {"ranks": [[1, 2, 3], [9, 8]]}}
    spec = GridSpec.build(tp=8, dp=128, pp=4, groups=groups).resolve(4096)
    layout, calls = spec.layout("dense"), [0]
    group = RankLayout.group

    def counted(self: RankLayout, rank: int, *axes: str) -> object:
        calls[0] += 1
        return group(self, rank, *axes)

    monkeypatch.setattr(RankLayout, "group", counted)
    found = {
        n: spec.definitions[n].all_ranks(layout)
        for n in ("dp_tp", *TABLE, "outer", "some")
        if n != "levels"
    }
    assert calls == [0]
    assert [len(found[n]) for n in ("dp_tp", "embedding", "fsdp", "outer", "some")] == [
        4, 1024, 32, 2048, 2,
    ]  # fmt: skip
    assert found["dp_tp"] == [tuple(range(first, first + 1024)) for first in range(0, 4096, 1024)]
    assert all(b == a + 3072 for a, b in found["embedding"])
    assert sorted(map(operator.itemgetter(0), found["outer"])) == [g[0] for g in found["outer"]]
