"""Where Megatron-core is mistaken and the adapter is not; each runs on the release it is about."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import commgrid
import megatron_adapter
from commgrid.testing import run_on_ranks
from tests.megatron_adapter.test_functions import config
from tests.peers import parallel_state as theirs

ranks = dist.get_process_group_ranks


def _begin(rank: int, world: int, given: dict[str, Any], *, ours: bool) -> None:
    """One rank of a world on the fake backend, with Megatron's own groups or with the adapter's."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    if ours:
        megatron_adapter.install()
    theirs.initialize_model_parallel(**{"create_gloo_process_groups": False, **given})


def _end(*, ours: bool) -> None:
    theirs.destroy_model_parallel()
    if ours:
        megatron_adapter.uninstall()
        commgrid.shutdown()
    else:
        getattr(theirs, "_HYBRID_DP_CP_GROUPS", {}).clear()
    dist.destroy_process_group()


def hybrid_groups_beside_sharded_weights() -> None:
    """Of 8 ranks with gtp 2, dp_cp has 4; Megatron answers it for 8, and nothing for 4."""
    given = config(gtp=2, hybrid=True)
    hybrid = theirs.get_hybrid_data_context_parallel_groups
    for rank in (0, 3, 6):
        _begin(rank, 8, given, ours=False)
        assert hybrid(group_size=8).size() == 4
        with pytest.raises(KeyError):
            hybrid(group_size=4)
        _end(ours=False)
        _begin(rank, 8, given, ours=True)
        assert ranks(hybrid(group_size=4)) == ranks(
            theirs.get_data_parallel_group(with_context_parallel=True, with_gtp_remat=False)
        )
        assert hybrid(group_size=2).size() == 2
        with pytest.raises(KeyError, match="group_size=8: this rank is in no such group"):
            hybrid(group_size=8)
        _end(ours=True)


def all_gather_groups() -> None:
    """Megatron's function takes the default order; these have pp inside, or begin at rank 4."""
    cases = (
        (config(2, 2, ep=2, etp=1, order="tp-cp-ep-pp-dp"), 8, 3),
        (config(1, 2, ep=2, first=4, count=4), 8, 5),
    )
    for given, world, rank in cases:
        _begin(rank, world, given, ours=False)
        dense, expert = _made()
        assert dense is None or ranks(dense) != ranks(_dp_cp())
        _end(ours=False)
        _begin(rank, world, given, ours=True)
        dense, expert = _made()
        assert ranks(dense) == ranks(_dp_cp())
        assert ranks(expert) == ranks(theirs.get_expert_data_parallel_group())
        assert dense is not _dp_cp()
        assert expert is not theirs.get_expert_data_parallel_group()
        assert theirs._global_process_group_list[-2:] == [dense, expert]
        _end(ours=True)


def _made() -> Any:
    return theirs.create_all_gather_groups(for_expert_parallelism=True)


def _dp_cp() -> Any:
    return theirs.get_data_parallel_group(with_context_parallel=True)


def an_order_without_tp() -> None:
    _begin(0, 4, {}, ours=False)
    _end(ours=False)
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    with pytest.raises(ValueError, match="not in list"):
        theirs.initialize_model_parallel(1, 2, order="dp-pp", create_gloo_process_groups=False)
    theirs.destroy_model_parallel()
    dist.destroy_process_group()
    _begin(1, 4, config(1, 2, order="dp-pp"), ours=True)
    assert ranks(theirs.get_data_parallel_group()) == [0, 1]
    assert ranks(theirs.get_pipeline_model_parallel_group()) == [1, 3]
    _end(ours=True)


def an_order_in_capitals() -> None:
    for order in ("TP-CP-EP-DP-PP", "tp-cp-ep-dp-pp"):
        given = config(2, gtp=2, egtp=2, ep=2, order=order)
        found = []
        for ours in (False, True):
            _begin(5, 8, given, ours=ours)
            found.append([
                ranks(theirs.get_tensor_model_parallel_group()),
                ranks(theirs.get_gtp_weight_remat_group()),
                ranks(theirs.get_expert_gtp_weight_remat_group()),
            ])  # fmt: skip
            _end(ours=ours)
        assert found[1] == [[4, 5], [5, 7], [1, 5]]
        assert (found[0] == found[1]) == (order == order.lower())


def what_destroy_leaves() -> None:
    run_on_ranks(_left_behind, 2)


def _left_behind() -> None:
    before = {name: value for name, value in vars(theirs).items() if name.isupper()}
    groups = dist.distributed_c10d._world.pg_map
    megatron_adapter.install()
    theirs.initialize_model_parallel(2)
    assert len(groups) > 5
    theirs.destroy_model_parallel()
    assert len(groups) == 1
    megatron_adapter.uninstall()
    assert {name: value for name, value in vars(theirs).items() if name.isupper()} == before
    theirs.initialize_model_parallel(2)
    dist.barrier()
    theirs.destroy_model_parallel()
    assert len(groups) > 5
    assert {name: value for name, value in vars(theirs).items() if name.isupper()} != before
