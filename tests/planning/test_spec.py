"""GridSpec: orders, regions, the groups table, and the way through dicts and YAML."""

import dataclasses
from inspect import signature
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import commgrid
from commgrid import GridSpec, SpecError, UnknownGroupError
from commgrid.layout.axis_names import ambiguity
from commgrid.layout.ranks import divisors
from commgrid.planning.yaml_keys import OPTIONS

DESIGN_YAML = """
axes: {tp: 4, cp: 2, dp: -1, pp: 2}
order: tp-cp-dp-pp
regions:
  expert: {axes: {etp: 1, ep: 8, edp: -1, pp: 2}, order: etp-ep-edp-pp}
create: all
connect: axes
share: aliases
groups:
  fsdp: dp_cp
  dp_cp: {timeout: 600, backend: nccl, nccl: {max_ctas: 16, is_high_priority_stream: true}}
  dp_cp_ag: {of: dp_cp, own: true}
  embedding: {of: pp, pick: [first, last]}
  cp_levels: {of: cp, split: {cp_ring: 1, cp_a2a: 2}}
"""


def test_the_example_of_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(DESIGN_YAML)
    spec = GridSpec.from_yaml(path)
    assert not spec.is_resolved
    resolved = spec.resolve(world_size=32)
    assert dict(resolved.regions[0].numbers) == {"tp": 4, "cp": 2, "dp": 2, "pp": 2}
    assert dict(resolved.regions[1].numbers) == {"etp": 1, "ep": 8, "edp": 2, "pp": 2}
    assert resolved.shape == {"tp": 4, "cp": 2, "dp": 2, "pp": 2, "etp": 1, "ep": 8, "edp": 2}
    assert resolved.table_names == (
        "fsdp", "dp_cp", "dp_cp_ag", "embedding", "cp_ring", "cp_a2a",
    )  # fmt: skip
    ag = resolved.definitions["dp_cp_ag"]
    assert (ag.own, ag.options.timeout, ag.options.backend) == ("dp_cp_ag", 600.0, "nccl")


def specs() -> list[GridSpec]:
    return [
        GridSpec.build(),
        GridSpec.build(tp=2, pp=3, order="pp-tp-dp"),
        GridSpec.build(tp=2, ep=4),
        GridSpec.build(tp=2, ep=4, etp=1, share="all", connect="none"),
        GridSpec.build(tp=2, ep=4, etp=1, share="region"),
        GridSpec.build(tp=2, ep=4).resolve(8),
        GridSpec.build(dp_replicate=2, tp=2, connect=["dp_cp"], create=["dp_cp", "tp"]),
        GridSpec.build(tp=2).resolve(ranks=range(8, 24, 2)),
        GridSpec.build(x=3, y=2, dp=2, order="x-y-dp"),
        GridSpec.from_dict({"axes": {"node": 2, "gpu": -1}, "order": "gpu-node"}),
        GridSpec.from_dict({"axes": {"tp": 2, "ep": 4}, "order": "tp-ep-dp"}),
        GridSpec.from_dict(
            {"axes": {"tp": 2}, "groups": {"a": "tp", "b": {"of": "a", "own": True}}}
        ),
    ]


@pytest.mark.parametrize("spec", specs(), ids=str)
def test_dict_and_yaml_round_trip(spec: GridSpec, tmp_path: Path) -> None:
    assert GridSpec.from_dict(spec.to_dict()) == spec
    path = tmp_path / "grid.yaml"
    path.write_text(spec.to_yaml())
    assert GridSpec.from_yaml(path) == spec


def test_megatrons_expert_region() -> None:
    spec = GridSpec.build(tp=2, cp=2, pp=2, ep=4, order="tp-cp-ep-dp-pp").resolve(32)
    expert = spec.regions[1]
    assert expert.axes == ("etp", "ep", "edp", "pp")
    assert dict(expert.numbers) == {"etp": 2, "ep": 4, "edp": 2, "pp": 2}  # cp folded into edp
    assert [r.name for r in GridSpec.build(tp=2).regions] == ["dense"]
    assert [r.name for r in GridSpec.build(tp=2, etp=1).regions] == ["dense", "expert"]
    late = GridSpec.build(tp=2, ep=2, etp=2, order="tp-cp-pp-ep-dp")
    assert late.regions[1].axes == ("etp", "pp", "ep", "edp")


def test_regions_need_not_factor_into_each_other() -> None:
    spec = GridSpec.from_dict(
        {
            "axes": {"tp": 3, "dp": -1},
            "regions": {"expert": {"axes": {"etp": 2, "ep": 3, "edp": -1}}},
        }
    ).resolve(12)
    assert spec.shape["dp"] == 4
    assert dict(spec.regions[1].numbers) == {"etp": 2, "ep": 3, "edp": 2}


@pytest.mark.parametrize("order", [None, "tp-cp-ep-dp-pp", "tp-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("experts", [{"ep": 4}, {"ep": 2, "etp": 1}, {"etp": 1}, {"ep": 1}])
def test_ep_under_axes_means_what_the_flag_means(
    experts: dict[str, int], order: str | None
) -> None:
    given = {} if order is None else {"order": order}
    spec = GridSpec.from_dict({"axes": {"tp": 2, "dp": -1, **experts}, **given}).resolve(16)
    flags = GridSpec.build(tp=2, **experts, **({"order": order} if order and "ep" in order else {}))
    assert spec == flags.resolve(16)


def test_ep_is_given_once() -> None:
    expert = {"expert": {"axes": {"ep": 2, "edp": -1}, "order": "ep-edp"}}
    with pytest.raises(SpecError, match=r"axes\.ep=2: the region expert is given as well; give ep"):
        GridSpec.from_dict({"axes": {"dp": -1, "ep": 2}, "regions": expert})


def test_a_region_of_another_size_is_said_with_what_would_fit() -> None:
    config = {
        "axes": {"tp": 2, "dp": 4},
        "regions": {"expert": {"axes": {"ep": 4, "edp": 4}, "order": "ep-edp"}},
    }
    with pytest.raises(SpecError, match=r"region expert: ep=4 · edp=4 = 16 is not the 8 ranks"):
        GridSpec.from_dict(config)


def test_a_size_that_is_given_is_known_before_the_ranks_are() -> None:
    assert GridSpec.build(tp=2, pp=2, ep=2).shape == {
        "tp": 2, "cp": 1, "dp": -1, "pp": 2, "etp": 2, "ep": 2, "edp": -1,
    }  # fmt: skip


def test_what_does_not_fit_is_said_at_once() -> None:
    """It took time in proportion to the ranks: here 13 s, and for 2 billion minutes."""
    with pytest.raises(SpecError, match="nearest that fit: tp=2, or tp=4, or 199999998"):
        GridSpec.build(tp=3).resolve(200_000_000)
    assert divisors(2**31 - 1) == [1, 2**31 - 1]
    assert all(divisors(n) == [d for d in range(1, n + 1) if n % d == 0] for n in range(1, 400))


def test_hsdp_parts_stand_in_for_dp() -> None:
    spec = GridSpec.build(tp=2, dp_replicate=2).resolve(16)
    assert spec.order == "tp-cp-dp_shard-dp_replicate-pp"
    assert spec.shape["dp_shard"] == 4
    definitions = spec.definitions
    assert definitions["dp"].same_as == "dp_replicate_dp_shard"
    assert definitions["dp_cp"].axes == definitions["dp_replicate_dp_shard_cp"].axes
    assert definitions[spec.resolve_name("cp", "dp")].axes == definitions["dp_cp"].axes
    assert GridSpec.build(dp_shard=2, dp=8).resolve(8).shape["dp_replicate"] == 4
    assert GridSpec.build(dp_shard=2).resolve(8).shape["dp_replicate"] == 4


def test_axes_of_size_1_may_be_left_out_of_the_order() -> None:
    assert GridSpec.build(tp=2, pp=2, order="pp-tp-dp").order == "pp-tp-cp-dp"
    assert GridSpec.from_dict({"axes": {"dp": 4}}).order == "tp-cp-dp-pp"


def test_names_are_found_in_any_order() -> None:
    spec = GridSpec.build(tp=2, cp=2, ep=2)
    for spelled in ("dp_cp_tp", "tp_dp_cp", "cp_tp_dp"):
        assert spec.resolve_name(spelled) == "dp_cp_tp"
    assert spec.resolve_name("etp", "ep") == "ep_etp"
    assert spec.resolve_name() == "pp_dp_cp_tp"
    with pytest.raises(
        UnknownGroupError, match=r"no group is named 'dp_cq'; did you mean 'dp_cp'\?"
    ):
        spec.resolve_name("dp_cq")
    with pytest.raises(UnknownGroupError):
        spec.resolve_name("tp_tp")
    with pytest.raises(UnknownGroupError):
        spec.resolve_name("tp_ep")  # of two regions


@given(
    st.lists(
        st.sampled_from(["a", "b", "c", "a_b", "b_c", "a_b_c", "c_c"]), unique=True, max_size=5
    )
)
def test_ambiguity_equals_enumeration(axes: list[str]) -> None:
    from itertools import permutations

    meanings: dict[str, set[frozenset[str]]] = {}
    for count in range(1, len(axes) + 1):
        for order in permutations(axes, count):
            meanings.setdefault("_".join(order), set()).add(frozenset(order))
    clash = any(len(found) > 1 for found in meanings.values())
    found = ambiguity(tuple((axis, (axis,)) for axis in axes))
    assert (found is not None) == clash
    if found:
        name, one, other = found
        assert {one, other} <= meanings[name]


def test_create_and_connect_lists_are_canonical() -> None:
    spec = GridSpec.build(
        create=["cp_dp", "tp"], connect=["cp_dp"], groups={"ag": {"of": "dp", "own": True}}
    )
    assert spec.create == ("dp_cp", "tp")
    assert spec.created_names == {"dp_cp", "tp", "ag"}
    assert spec.connecting_names == {"dp_cp"}
    assert GridSpec.build(groups={"ag": "dp_cp"}).connecting_names == {"tp", "cp", "dp", "pp", "ag"}


def test_resolve_needs_a_world() -> None:
    with pytest.raises(SpecError, match="world_size or ranks"):
        GridSpec.build().resolve()
    with pytest.raises(SpecError, match="ranks=4-11: the world has only ranks 0-7"):
        GridSpec.build().resolve(world_size=8, ranks=range(4, 12))


def test_initialize_takes_what_a_spec_is_built_from_with_the_same_defaults() -> None:
    """`initialize` finds out what was given by comparing with the defaults of `build`."""
    ours = signature(commgrid.initialize).parameters
    for name, parameter in signature(GridSpec.build).parameters.items():
        assert ours[name].default == parameter.default, name
        if name in OPTIONS and name != "axes":
            assert parameter.default == OPTIONS[name].default, name
    fields = {field.name: field.default for field in dataclasses.fields(GridSpec)}
    given = {key: option for key, option in OPTIONS.items() if key in fields and key != "regions"}
    assert {key: option.default for key, option in given.items()} == {
        key: fields[key] or None
        for key in given  # () stands for none
    }
    assert OPTIONS.keys() - given.keys() == {"axes", "order", "regions"}
