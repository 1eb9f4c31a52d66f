"""Every function of megatron-core's parallel_state, on every rank, against Megatron's own."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import commgrid
import megatron_adapter
import megatron_adapter.parallel_state as mpu
from commgrid.testing import run_on_ranks
from tests.megatron_adapter.answers import answers, differences, public_functions
from tests.peers import parallel_state as theirs
from tests.sizes import some

PP_INSIDE = "tp-cp-pp-ep-dp"


def config(tp: int = 1, pp: int = 1, **more: Any) -> dict[str, Any]:
    short = {
        "vpp": "virtual_pipeline_model_parallel_size", "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
        "instances": "num_distributed_optimizer_instances", "gloo": "create_gloo_process_groups",
        "hcp": "hierarchical_context_parallel_sizes", "hybrid": "hybrid_context_parallel",
        "ag": "create_all_gather_group", "gtp": "gtp_remat_size", "egtp": "expert_gtp_remat_size",
        "first": "rank_offset", "count": "local_world_size",
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


PARTS: dict[int, list[dict[str, Any]]] = {
    4: [config(count=2), config(2, first=1, count=2), config(1, 2, vpp=2, first=2, count=2)],
    8: [
        config(2, 2, first=4, count=4), config(1, 2, cp=2, first=2, count=4),
        config(2, ep=2, etp=1, first=1, count=4, get_position_embedding_ranks=last),
        config(1, 2, instances=2, first=4, count=4),
    ],
}  # fmt: skip
"""Grids on some ranks of the world, from 0.17 on."""

SHARDED: dict[int, list[dict[str, Any]]] = {
    2: [config(gtp=2), config(egtp=2), config(gtp=2, egtp=2)],
    4: [
        config(2, gtp=2), config(gtp=2, cp=2), config(1, 2, gtp=2, egtp=2), config(ep=2, egtp=2),
        config(2, ep=2, etp=1, gtp=2), config(gtp=4, ep=2, egtp=2), config(gtp=2, egtp=4),
        config(1, 2, vpp=2, gtp=2, egtp=2), config(gtp=2, order=PP_INSIDE), config(egtp=2),
        config(gtp=2, egtp=2, order="tp-dp"), config(gtp=2, first=2, count=2),
    ],
    8: [
        config(2, 2, gtp=2, egtp=2), config(2, cp=2, gtp=2, ep=2, etp=1),
        config(2, gtp=2, ep=2, egtp=2, etp=1), config(cp=4, hcp=[2, 2], gtp=2),
        config(1, 4, gtp=2, egtp=2, get_embedding_ranks=middle),
        config(2, 2, gtp=2, etp=4, order=PP_INSIDE),
        config(2, 2, gtp=2, egtp=2, order="tp-cp-gtp_remat-ep-dp-pp"),
        config(1, 2, gtp=2, ep=2, order="gtp_remat-tp-ep-cp-dp-pp"), config(1, 2, cp=2, egtp=2),
    ],
    16: [
        config(2, 2, cp=2, gtp=2, ep=2, egtp=2), config(1, 2, gtp=4, ep=4, egtp=2, etp=1),
        config(2, 2, gtp=2, ep=2, etp=1, egtp=4, vpp=2),
    ],
    64: [config(4, 4, gtp=2, ep=4, etp=1, egtp=2), config(2, 2, cp=2, gtp=4, ep=8, etp=1)],
}  # fmt: skip
"""With weights sharded and gathered again, from 0.19 on."""


def configs_here(world: int) -> list[dict[str, Any]]:
    """The configurations of a world that the imported megatron-core has arguments for."""
    taken = inspect.signature(theirs.initialize_model_parallel).parameters
    listed = [*CONFIGS[world], *PARTS.get(world, []), *SHARDED.get(world, [])]
    return [given for given in listed if given.keys() <= {*taken}]


UNUSED = {name: value for name, value in vars(theirs).items() if name.isupper()}
"""Megatron's variables before anybody initialized it."""


@contextlib.contextmanager
def unconnected() -> Iterator[None]:
    """Within it Megatron makes its own groups with a backend that connects nobody.

    They are asked for their ranks, and gloo connects all pairs of some 50 groups on each of eight
    ranks.
    """
    create = theirs.create_group

    def create_group(ranks: Any, backend: Any = None, **more: Any) -> Any:
        return create(ranks, backend="fake", **more)

    theirs.create_group = create_group
    try:
        yield
    finally:
        theirs.create_group = create


def compare(given: dict[str, Any]) -> list[str]:
    """Initializes as Megatron, as Megatron on a grid, and asks all three modules."""
    with unconnected():
        theirs.initialize_model_parallel(**given)
    expected = answers(theirs, theirs)
    theirs.destroy_model_parallel()
    vars(theirs).update(UNUSED)  # it leaves lists of ranks and more
    getattr(theirs, "_HYBRID_DP_CP_GROUPS", {}).clear()
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
        if not is_departure(given, line)
    ]


def is_departure(given: dict[str, Any], line: str) -> bool:
    """Whether Megatron is known to be mistaken there; see docs/from_megatron.md."""
    sharded = given.get("gtp_remat_size", 1) > 1
    return sharded and line.startswith("get_hybrid_data_context_parallel_groups(")


@pytest.mark.nightly("8")
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_function_on_every_rank(world: int) -> None:
    def every() -> list[str]:
        return [line for given in some(configs_here(world), 4) for line in compare(given)]

    for rank, found in enumerate(run_on_ranks(every, world, timeout=300)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])


def every_rank(world: int, which: int) -> list[str]:
    create = theirs.create_group
    # A world of one process has nobody to connect gloo's groups to.
    theirs.create_group = lambda ranks, backend=None, **more: create(ranks, **more)
    found = []
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        found += [f"rank {rank}: {line}" for line in compare(configs_here(world)[which])]
        commgrid.shutdown()
        dist.destroy_process_group()
    return found


@pytest.mark.nightly("16-[1-9]*", "64-[013]")
@pytest.mark.full("16-0")
@pytest.mark.parametrize(
    ("world", "which"), [(w, i) for w in (16, 64) for i in range(len(CONFIGS[w]))]
)
def test_every_function_on_every_rank_of_a_large_world(world: int, which: int) -> None:
    if which >= len(configs_here(world)):
        pytest.skip("this megatron-core has no such argument")
    (found,) = run_on_ranks(every_rank, 1, world, which, backend=None, timeout=300)
    assert not found, "\n".join(found[:20])


def test_there_are_enough_configurations() -> None:
    assert sum(map(len, CONFIGS.values())) >= 60


def strange_signatures() -> list[str]:
    """Where functions of the adapter's module do not take what Megatron's take, where they take it.

    Commgrid's own arguments come by name, after Megatron's. The adapter has nothing for what
    Megatron's own initialization alone calls.
    """
    found = []
    for name, function in public_functions(theirs).items():
        if name in INTERNAL:
            continue
        mine = inspect.signature(getattr(mpu, name)).parameters
        expected = inspect.signature(function).parameters
        more = list(mine.values())[len(expected) :]
        same = list(mine)[: len(expected)] == list(expected)
        same = same and all(
            (one.default, one.kind) == (mine[key].default, mine[key].kind)
            for key, one in expected.items()
        )
        by_name = all(one.kind is one.KEYWORD_ONLY for one in more)
        if not same or not by_name:
            found.append(f"{name}{inspect.signature(getattr(mpu, name))}")
    return found


INTERNAL = {
    "get_nccl_options", "overwrite_nccl_comm_cfgs", "default_embedding_ranks",
    "default_position_embedding_ranks", "generate_masked_orthogonal_rank_groups",
    "create_hierarchical_groups", "create_hybrid_dp_cp_groups",
}  # fmt: skip


def test_no_function_is_missing_and_signatures_are_megatrons() -> None:
    assert not strange_signatures()
