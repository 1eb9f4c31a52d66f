"""The module that needs no megatron-core."""

from __future__ import annotations

import gc
import inspect
import weakref
from datetime import timedelta

import numpy
import pytest
import torch.distributed as dist

import commgrid
import megatron_adapter
import megatron_adapter.parallel_state as mpu
from commgrid import SpecError
from commgrid.testing import run_on_ranks
from megatron_adapter import MegatronSizeError, MegatronStateError, MegatronVersionError
from megatron_adapter.installed import shaped
from megatron_adapter.lifecycle import initialize_model_parallel
from megatron_adapter.parallel_state import oddities
from tests.peers import parallel_state as theirs
from tests.waiting import comes, until_waits


def lone() -> None:
    """A grid of commgrid's own answers once it is chosen: then what it lacks is made beside it."""
    grid = commgrid.initialize(tp=2, pp=2)
    assert not mpu.is_initialized()
    assert not mpu.model_parallel_is_initialized()
    with pytest.raises(MegatronStateError, match=r"active or install.*\(every rank of the"):
        mpu.get_tensor_model_parallel_group()
    assert mpu.get_tensor_model_parallel_group(check_initialized=False) is None
    mpu.set_tensor_model_parallel_rank(7)
    with megatron_adapter.active(grid):
        assert mpu.is_initialized()
        assert mpu.get_tensor_model_parallel_rank() == 7  # set before there was a state
        mpu.set_tensor_model_parallel_rank(None)
        assert mpu.get_tensor_model_parallel_group() is grid.get_group("tp")
        assert mpu.get_data_parallel_group(with_context_parallel=True) is grid.get_group("dp_cp")
        assert mpu.get_model_parallel_group() is grid.get_group("pp_tp")
        assert mpu.get_pipeline_model_parallel_rank() == dist.get_rank() // 2
        assert mpu.get_tensor_model_parallel_src_rank() == dist.get_rank() // 2 * 2
        assert mpu.get_expert_model_parallel_world_size() == 1
        assert mpu.get_gtp_weight_remat_global_ranks() == [dist.get_rank()]
        assert mpu.get_embedding_group().size() == 2
    assert mpu.get_tensor_model_parallel_rank() == grid.get_local_rank("tp")  # the only one
    mpu.destroy_model_parallel()
    assert not mpu.is_initialized()
    assert grid.check()
    commgrid.destroy()
    other = commgrid.initialize(config={"axes": {"row": 2, "column": 2}, "order": "row-column"})
    with (
        pytest.raises(SpecError, match="Megatron cannot express a grid with row, column"),
        megatron_adapter.active(other),
    ):
        pass


def test_a_grid_of_commgrids_own_answers_once_it_is_chosen() -> None:
    run_on_ranks(lone, 4)


def sharded() -> None:
    """A grid of commgrid's own with the axis that Megatron calls gtp_remat."""
    grid = commgrid.initialize(tp=2, gtp=2, order="tp-gtp-cp-ep-dp-pp")
    with megatron_adapter.active(grid):
        assert mpu.get_gtp_weight_remat_group() is grid.get_group("gtp")
        full, replicas = (mpu.get_data_parallel_group(with_gtp_remat=one) for one in (True, False))
        assert full is grid.get_group("dp_gtp")
        assert replicas is grid.get_group("dp")
        assert mpu.get_model_parallel_group() is grid.get_group("pp_gtp_tp")
        assert dist.get_process_group_ranks(mpu.get_embedding_group()) == [dist.get_rank()]
        assert mpu.get_expert_data_parallel_world_size() == 2
    commgrid.destroy()
    behind = commgrid.initialize(gtp=2, order="tp-cp-gtp-ep-dp-pp", cp=2)
    with megatron_adapter.active(behind):
        ranks = dist.get_process_group_ranks
        assert ranks(mpu.get_gtp_weight_remat_group()) == list(behind.get_ranks("gtp"))
    commgrid.destroy()
    alone = commgrid.initialize(gtp=1, order="tp-gtp-cp-ep-dp-pp")
    with megatron_adapter.active(alone):
        assert mpu.get_gtp_weight_remat_world_size() == 1


def test_a_grid_with_sharded_weights() -> None:
    run_on_ranks(sharded, 4)


def sizes_first() -> None:
    """As Megatron's own test wants it: impossible sizes are a RuntimeError, initialized or not."""
    initialize = theirs.initialize_model_parallel
    megatron_adapter.install()
    initialize(numpy.int64(2), order="tp-cp-ep-dp-pp")
    assert commgrid.get_grid().spec.shape["tp"] == 2
    for function in (initialize, megatron_adapter.initialize_model_parallel):
        for given in ((3,), (1, 3), (1, 1, 2)):
            with pytest.raises(RuntimeError):
                function(*given)
        with pytest.raises(AssertionError, match="already initialized"):
            function(numpy.int64(2))
    theirs.destroy_model_parallel()
    for wrong in (numpy.float64(2), True, numpy.int64(0)):
        with pytest.raises(MegatronSizeError, match="expected a positive integer"):
            initialize(wrong)
    made = megatron_adapter.initialize_model_parallel(
        context_parallel_size=numpy.int32(2),
        hierarchical_context_parallel_sizes=[numpy.int64(2), 1],
    )
    assert made.size("hcp_0") == 2
    megatron_adapter.uninstall()
    mpu.destroy_model_parallel()


def test_sizes_are_checked_first_and_may_be_numpys() -> None:
    run_on_ranks(sizes_first, 2)


def part() -> None:
    """Two halves of a world start at once, each with its own first rank."""
    rank = dist.get_rank()
    first = rank // 4 * 4
    grid = megatron_adapter.initialize_model_parallel(
        2, 2 if first else 1, rank_offset=first, local_world_size=4
    )
    assert grid.get_ranks("dp_cp")[0] in range(first, first + 4)
    assert mpu.get_tensor_model_parallel_src_rank() == rank // 2 * 2
    assert mpu.get_pipeline_model_parallel_world_size() == (2 if first else 1)
    mpu.destroy_model_parallel()
    inside = megatron_adapter.initialize_model_parallel(rank_offset=2, local_world_size=4)
    assert (inside is None) == (rank not in range(2, 6))
    assert mpu.is_initialized() == (inside is not None)
    mpu.destroy_model_parallel()
    for given in ({"rank_offset": 1}, {"rank_offset": 6, "local_world_size": 3}):
        with pytest.raises(MegatronSizeError, match="within the 8 ranks of WORLD"):
            megatron_adapter.initialize_model_parallel(**given)


@pytest.mark.full
def test_a_part_of_the_world() -> None:
    run_on_ranks(part, 8)


def late() -> bool:
    """Whether this rank is a member; rank 3 calls `update_pg_timeout` when all others wait in it,
    and nobody is through before."""
    rank = dist.get_rank()
    grid = megatron_adapter.initialize_model_parallel(
        num_distributed_optimizer_instances=2, rank_offset=1, local_world_size=4
    )
    if grid is None:
        return False
    instance = mpu.get_intra_distributed_optimizer_instance_group()
    assert dist.get_process_group_ranks(instance) == [[1, 2], [3, 4]][rank // 3]
    grid.check()
    store = dist.distributed_c10d._get_default_store()
    if rank == 3:
        until_waits("rank 1", "rank 2", "rank 4")
        store.set("rank 3 calls", "")
    else:
        comes(f"rank {rank}")
    mpu.update_pg_timeout(timedelta(seconds=44))
    assert store.check(["rank 3 calls"])
    return True


def test_another_timeout_waits_for_every_optimizer_instance() -> None:
    """Of a part of the world, it waited for the rank's own instance alone."""
    assert run_on_ranks(late, 5) == [False, True, True, True, True]


def positional(function: object) -> list[str]:
    """The arguments that may come by place."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]


def test_without_megatron_core_arguments_that_moved_come_by_name() -> None:
    """Pure: the functions as they are without it."""
    assert positional(oddities.get_data_parallel_group) == ["with_context_parallel"]
    assert positional(oddities.get_expert_data_parallel_rank) == []
    assert positional(initialize_model_parallel)[-1] == "hierarchical_context_parallel_sizes"
    with pytest.raises(TypeError, match="positional"):
        oddities.get_data_parallel_group(True, True)


def test_a_function_takes_what_another_signature_says() -> None:
    def function(a: int, b: int = 2, *, c: int = 3, d: int = 4) -> tuple[int, ...]:
        return a, b, c, d

    def theirs(c: int = 9, a: int = 8, new: object = None, *, b: int, **more: object) -> None: ...

    found = shaped("function", function, inspect.signature(theirs))
    taken = str(inspect.signature(found)).replace("'", "")
    assert taken.startswith(
        "(c: int = 9, a: int = 8, new: object = None, *, b: int, d: int = 4, **more: object)"
    )
    assert found(5, b=7) == (8, 7, 5, 4)
    assert found(5, 6, None, b=7, d=0) == (6, 7, 5, 0)
    with pytest.raises(MegatronVersionError, match=r"function\(new=1\): .* its default, None, or"):
        found(new=1, b=7)
    with pytest.raises(MegatronVersionError, match=r"function\(more=\{'x': 1\}\)"):
        found(b=7, x=1)
    with pytest.raises(TypeError):
        found(5)
    assert shaped("function", function, inspect.signature(function)) is function


def outside() -> None:
    """Ranks 0 and 1 are in a, 2 and 3 in b; b alone has virtual stages, then a alone."""
    in_a = dist.get_rank() < 2
    for a, b in (({}, {"virtual_pipeline_model_parallel_size": 2}),
                 ({"virtual_pipeline_model_parallel_size": 2}, {})):  # fmt: skip
        for name, given, offset in (("a", a, 0), ("b", b, 2)):
            mpu.initialize_model_parallel(
                1, 2, **given, rank_offset=offset, local_world_size=2, name=name
            )
        own = a if in_a else b
        found = mpu.get_virtual_pipeline_model_parallel_world_size()
        assert found == own.get("virtual_pipeline_model_parallel_size")
        assert mpu.is_pipeline_first_stage() == (dist.get_rank() % 2 == 0)
        dist.barrier()
        mpu.destroy_model_parallel()


def test_virtual_stages_of_a_grid_without_this_rank_are_not_its_own() -> None:
    run_on_ranks(outside, 4)


def forgotten() -> None:
    """Its groups, and their threads, lived until a getter was asked again."""
    grid = commgrid.initialize()
    with megatron_adapter.active(grid):
        held = weakref.ref(mpu.get_tensor_model_parallel_group())
    commgrid.destroy()
    del grid
    gc.collect()
    assert held() is None


def test_a_grid_that_is_gone_is_forgotten_at_once() -> None:
    run_on_ranks(forgotten, 1)
