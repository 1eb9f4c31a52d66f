"""Every function of megatron-core's parallel_state, on every rank, against Megatron's own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import commgrid
import megatron_adapter
import megatron_adapter.parallel_state as mpu
from tests.full import some
from tests.megatron_adapter.answers import answers, differences, public_functions
from tests.peers import parallel_state as theirs
from tests.ranks import run_on_ranks

PP_INSIDE = "tp-cp-pp-ep-dp"


def config(tp: int = 1, pp: int = 1, **more: Any) -> dict[str, Any]:
    short = {
        "vpp": "virtual_pipeline_model_parallel_size", "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
        "instances": "num_distributed_optimizer_instances", "gloo": "create_gloo_process_groups",
        "hcp": "hierarchical_context_parallel_sizes", "hybrid": "hybrid_context_parallel",
        "ag": "create_all_gather_group",
    }  # fmt: skip
    return {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
        **{short.get(key, key): value for key, value in more.items()},
    }  # fmt: skip


def middle(ranks: list[int]) -> list[int]:
    """Embeddings at both ends and in the middle, the last first."""
    return [ranks[-1], ranks[0], *ranks[1:2]] if len(ranks) > 2 else ranks[::-1]


def last(ranks: list[int]) -> list[int]:
    return ranks[-1:]


CONFIGS: dict[int, list[dict[str, Any]]] = {
    1: [config(), config(gloo=False, ag=True)],
    2: [
        config(), config(2), config(1, 2), config(cp=2), config(ep=2), config(2, etp=1, ep=2),
        config(1, 2, vpp=2), config(instances=2), config(cp=2, hcp=[2]), config(hybrid=True),
        config(order=PP_INSIDE, ag=True, gloo=False),
    ],
    4: [
        config(), config(2), config(2, 2), config(1, 4), config(1, 4, vpp=3), config(cp=4),
        config(cp=4, hcp=[2, 2]), config(2, cp=2, ag=True), config(ep=4), config(2, ep=2),
        config(2, ep=2, etp=1), config(1, 2, ep=2), config(2, 2, order=PP_INSIDE),
        config(1, 2, cp=2, etp=2, order=PP_INSIDE), config(instances=2),
        config(instances=4, gloo=False),
        config(hybrid=True), config(1, 4, get_embedding_ranks=middle),
        config(1, 4, get_position_embedding_ranks=last),
    ],
    8: [
        config(), config(2, 2), config(2, 2, cp=2), config(4, 2, vpp=2), config(2, 2, vpp=2),
        config(2, 2, ep=2), config(2, 2, ep=2, etp=1), config(2, 1, ep=4, etp=1),
        config(1, 2, ep=4), config(4, ep=4, etp=2), config(cp=8, hcp=[2, 4]),
        config(cp=4, hcp=[2, 2], hybrid=True), config(2, 2, order=PP_INSIDE),
        config(2, 2, cp=2, etp=4, order=PP_INSIDE),
        config(2, 2, ep=2, etp=1, order="tp-cp-ep-pp-dp"),
        config(instances=2), config(2, instances=2, ep=2, etp=1), config(1, 2, instances=2, ep=2),
        config(2, cp=2, instances=2), config(1, 2, cp=2, instances=4, ag=True),
        config(1, 4, get_embedding_ranks=middle, get_position_embedding_ranks=last),
        config(2, 2, gloo=False, ag=True), config(2, 2, order=PP_INSIDE, ag=True),
        config(order="tp-dp"), config(2, 2, order="TP-PP-DP"),
    ],
    16: [
        config(2, 2, cp=2, ep=2), config(2, 4, ep=2, etp=1), config(4, 2, vpp=2, cp=2),
        config(2, 2, ep=4, etp=1, instances=2), config(2, 2, cp=2, etp=4, order=PP_INSIDE),
        config(cp=8, hcp=[2, 2, 2]), config(2, 2, cp=2, instances=2, ag=True),
        config(2, hybrid=True), config(1, 4, ep=4, get_embedding_ranks=middle),
    ],
    64: [
        config(4, 4, cp=2, ep=8, etp=1), config(8, 2, cp=2, vpp=2, ep=4, etp=2),
        config(2, 4, ep=2, etp=1, instances=4),
        config(2, 2, cp=4, hcp=[2, 2], etp=8, order=PP_INSIDE),
    ],
}  # fmt: skip


def compare(given: dict[str, Any]) -> list[str]:
    """Initializes as Megatron, as Megatron on a grid, and asks all three modules."""
    theirs.initialize_model_parallel(**given)
    dist.barrier()  # or a rank destroys a group that another is still connecting
    expected = answers(theirs, theirs)
    theirs.destroy_model_parallel()
    getattr(theirs, "_HYBRID_DP_CP_GROUPS", {}).clear()  # these three are left over
    theirs._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None
    theirs._EMBEDDING_GLOBAL_RANKS = None
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)

    megatron_adapter.install()
    theirs.initialize_model_parallel(**given)
    try:
        installed = answers(theirs, theirs)
        own = answers(mpu, theirs)
    finally:
        theirs.destroy_model_parallel()
        megatron_adapter.uninstall()
    assert not commgrid.is_initialized()
    return [
        f"{given}, {which}: {line}"
        for which, found in (("installed", installed), ("mpu", own))
        for line in differences(found, expected)
    ]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_function_on_every_rank(world: int) -> None:
    def every() -> list[str]:
        return [line for given in some(CONFIGS[world], 4) for line in compare(given)]

    for rank, found in enumerate(run_on_ranks(every, world, timeout=240)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])


def every_rank(world: int, which: int) -> list[str]:
    create = theirs.create_group
    # A world of one process has nobody to connect gloo's groups to.
    theirs.create_group = lambda ranks, backend=None, **more: create(ranks, **more)
    found = []
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        found += [f"rank {rank}: {line}" for line in compare(CONFIGS[world][which])]
        commgrid.shutdown()
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("world", "which"), [(w, i) for w in (16, 64) for i in range(len(CONFIGS[w]))]
)
def test_every_function_on_every_rank_of_a_large_world(world: int, which: int) -> None:
    (found,) = run_on_ranks(every_rank, 1, world, which, init=None, timeout=240)
    assert not found, "\n".join(found[:20])


def test_there_are_enough_configurations() -> None:
    assert sum(map(len, CONFIGS.values())) >= 60


def test_no_function_is_missing_and_signatures_are_megatrons() -> None:
    for name, function in public_functions(theirs).items():
        if name == "initialize_model_parallel":
            continue
        mine = inspect.signature(getattr(mpu, name))
        expected = inspect.signature(function)
        assert list(mine.parameters) == list(expected.parameters), name
        for parameter, one in mine.parameters.items():
            other = expected.parameters[parameter]
            assert (one.default, one.kind) == (other.default, other.kind), (name, parameter)
    mine = inspect.signature(mpu.initialize_model_parallel).parameters
    expected = inspect.signature(theirs.initialize_model_parallel).parameters
    assert list(mine)[: len(expected)] == list(expected)
    for name, other in expected.items():
        assert mine[name].default == other.default, name
