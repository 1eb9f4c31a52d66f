"""What Megatron's options make of the groups table, and its known mistakes made right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import commgrid
import megatron_adapter
from commgrid import GroupPlan, SpecError
from commgrid.planning.yaml_keys import OPTIONS
from commgrid.testing import run_on_ranks
from megatron_adapter import MEGATRON_GROUPS, MegatronSizes
from megatron_adapter.spec import read_nccl_config
from tests.peers import parallel_state as theirs


def options(**given: Any) -> dict[str, dict[str, Any]]:
    """The options of every group's communicator, by group."""
    spec = MegatronSizes(16, tp=2, pp=2, **given).spec()
    plan = GroupPlan.for_rank(spec, 5)
    return {name: c.options.to_dict() for c in plan.communicators for name in c.names}


def test_nccl_options_reach_their_groups(tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text("dp_cp: {max_ctas: 8, min_ctas: 2}\nep_dp: {net_name: Socket}\n")
    nccl = read_nccl_config(str(path), ["ep_dp", "tp_ep_mp"])
    found = options(nccl=nccl, all_gather=True)
    assert found["dp_cp"]["nccl"] == {"max_ctas": 8, "min_ctas": 2}
    assert found["dp_cp_ag"] == found["intra_dp_cp"] == found["dp_cp"]
    assert found["edp"]["nccl"] == {"is_high_priority_stream": True, "net_name": "Socket"}
    assert found["ep_etp"]["nccl"] == {"is_high_priority_stream": True}
    assert not found["tp"]
    assert not found["dp"]
    several = options(nccl={"intra_dp_cp": {"max_ctas": 1}, "inter_ep_dp": {"max_ctas": 3}},
                      instances=2)  # fmt: skip
    assert several["intra_dp_cp"]["nccl"] == {"max_ctas": 1}
    assert several["inter_edp"]["nccl"] == {"max_ctas": 3}
    assert not several["dp_cp"]
    assert options(pipeline_backend="nccl")["pp"] == {"backend": "nccl"}
    other = options(pipeline_backend="ucc", backend="cpu:gloo,cuda:nccl")
    assert other["pp"] == {"backend": "ucc"}
    assert other["embedding"] == {"backend": "cpu:gloo,cuda:nccl"}


@pytest.mark.parametrize(("text", "said"), [
    ("dp_cp: 3", "dp_cp: 3: expected a mapping"),
    ("dp_cp: {max_cta: 3}", "unknown option 'max_cta'.*did you mean 'max_ctas'"),
    ("dq: {max_ctas: 3}", "'dq': Megatron has no such group"),
    ("dp: {net_name: TCP}", "net_name='TCP'; expected IB or socket"),
    ("dp: {max_ctas: many}", "max_ctas='many': expected int"),
])  # fmt: skip
def test_nccl_options_that_are_wrong(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=said):
        options(nccl=read_nccl_config(str(path), None))
    with pytest.raises(SpecError, match=r"none\.yaml: there is no such file"):
        read_nccl_config(str(tmp_path / "none.yaml"), None)


def test_who_shares() -> None:
    sizes = MegatronSizes(8, tp=2, pp=2, all_gather=True)
    groups = {
        share: {
            name: i
            for i, c in enumerate(GroupPlan.for_rank(sizes.spec(share=share), 3).communicators)
            for name in c.names
        }
        for share in OPTIONS["share"].words
    }
    assert sizes.spec() == sizes.spec(share="aliases")
    twins = ("dp_cp_gloo", "dp_gloo", "edp_gloo", "dp_cp_ag")
    for found in groups.values():
        for twin in twins:  # always their own
            assert [n for n, i in found.items() if i == found[twin] and n != twin] in (
                [], ["intra_dp_cp_gloo"], ["intra_edp_gloo"],
            )  # fmt: skip
        assert found["intra_dp_cp"] == found["dp_cp"]  # Megatron's are one object too
    assert groups["region"]["dp"] == groups["region"]["dp_cp"]
    assert groups["region"]["edp"] != groups["region"]["dp_cp"]
    assert groups["all"]["edp"] == groups["all"]["dp_cp"]
    assert groups["all"]["embedding"] == groups["all"]["pp"]
    assert groups["aliases"]["dp"] != groups["aliases"]["dp_cp"]
    assert groups["aliases"]["embedding"] != groups["aliases"]["pp"]
    names = {group.name for group in MEGATRON_GROUPS}
    assert set(groups["aliases"]) <= names | {"pp_edp_ep_etp"}  # no name that Megatron has not
    # As in Megatron, but for groups of one rank, of which it has many.
    together = [{n for n, i in groups["aliases"].items() if i == one}
                for one in set(groups["aliases"].values())]  # fmt: skip
    assert {frozenset(names) for names in together if len(names) > 1} == {
        frozenset({"intra_dp_cp", "dp_cp"}), frozenset({"intra_edp", "edp"}),
        frozenset({"intra_dist_opt", "pp_edp_ep_etp"}),
        frozenset({"intra_dp_cp_gloo", "dp_cp_gloo"}), frozenset({"intra_edp_gloo", "edp_gloo"}),
        frozenset({"cp", "ep", "gtp", "egtp", "position_embedding"}),
    }  # fmt: skip


def rest(rank: int, world: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Hybrid groups by size: Megatron's, and ours."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    theirs.initialize_model_parallel(hybrid_context_parallel=True, create_gloo_process_groups=False)
    ranks = dist.get_process_group_ranks
    wrong = {size: ranks(group) for size, group in theirs._HYBRID_DP_CP_GROUPS.items()}
    theirs.destroy_model_parallel()
    theirs._HYBRID_DP_CP_GROUPS.clear()
    megatron_adapter.install()
    theirs.initialize_model_parallel(hybrid_context_parallel=True, create_gloo_process_groups=False)
    right = {size: ranks(group) for size, group in theirs._HYBRID_DP_CP_GROUPS.items()}
    import megatron_adapter.parallel_state as mpu

    for size in (2, 4, 16):
        if size not in right:
            with pytest.raises(KeyError, match=f"group_size={size}: this rank is in no such group"):
                mpu.get_hybrid_data_context_parallel_groups(group_size=size)
    commgrid.shutdown()
    return wrong, right


def test_hybrid_groups_have_the_size_they_are_asked_by() -> None:
    """Of 10 ranks, 8 and 9 are the rest that groups of 4 leave; Megatron says 4 and means 2."""
    for rank in (0, 5, 9):
        ((wrong, right),) = run_on_ranks(rest, 1, rank, 10, backend=None)
        assert all(len(ranks) == size for size, ranks in right.items())
        assert right == {size: ranks for size, ranks in wrong.items() if len(ranks) == size}
        assert (4 in right) == (rank < 8)
        assert len(wrong[4]) == (4 if rank < 8 else 2)


def test_sizes_of_a_grid_are_found_again() -> None:
    from megatron_adapter.sizes_of import sizes_of

    for sizes in (
        MegatronSizes(16, tp=2, pp=2, cp=2),
        MegatronSizes(16, tp=2, pp=2, ep=4, etp=1),
        MegatronSizes(16, tp=2, ep=2, etp=1, instances=2),
        MegatronSizes(16, tp=2, pp=2, cp=2, etp=4, order="tp-cp-pp-ep-dp"),
        MegatronSizes(8, tp=2, ep=2, order="ep-tp-cp-dp-pp"),
        MegatronSizes(16, tp=2, pp=2, gtp=2, ep=2, etp=1, egtp=2),
        MegatronSizes(16, tp=2, cp=2, gtp=2, egtp=4, order="tp-cp-gtp_remat-ep-dp-pp"),
    ):
        again = sizes_of(sizes.spec(), sizes.world_size)
        assert again.spec() == sizes.spec()
