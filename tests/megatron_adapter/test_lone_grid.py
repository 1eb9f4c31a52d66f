"""The module that needs no megatron-core, asked where a grid is alive that nobody chose."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
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
from megatron_adapter import AmbiguousGridError, MegatronSizeError, MegatronStateError, releases
from megatron_adapter.facade import shape
from megatron_adapter.releases import RELEASES
from tests.peers import parallel_state as theirs
from tests.waiting import comes, until_waits


def lone() -> None:
    grid = commgrid.initialize(tp=2, pp=2)
    if dist.get_rank() == 3:  # alone: no getter waits for another rank
        assert mpu.is_initialized()
        assert mpu.model_parallel_is_initialized()
        assert mpu.get_tensor_model_parallel_group() is grid.get_group("tp")
        assert mpu.get_data_parallel_group(with_context_parallel=True) is grid.get_group("dp_cp")
        assert mpu.get_model_parallel_group() is grid.get_group("pp_tp")
        assert mpu.get_pipeline_model_parallel_rank() == 1
        assert mpu.get_pipeline_model_parallel_prev_rank() == 1
        assert mpu.is_pipeline_last_stage()
        assert mpu.get_tensor_model_parallel_src_rank() == 2
        assert mpu.get_expert_model_parallel_world_size() == 1
        assert mpu.get_gtp_weight_remat_world_size() == 1
        assert mpu.get_gtp_weight_remat_global_ranks() == [3]
        with pytest.raises(MegatronStateError, match=r"embedding group .*\(every rank of the grid"):
            mpu.get_embedding_group()
        assert mpu.get_embedding_group(check_initialized=False) is None
    dist.barrier()
    assert not theirs.is_initialized()
    mpu.set_tensor_model_parallel_rank(7)
    assert mpu.get_tensor_model_parallel_rank() == 7
    with megatron_adapter.active(grid):
        assert mpu.get_tensor_model_parallel_rank() == 7
        assert mpu.get_embedding_group().size() == 2
    mpu.set_tensor_model_parallel_rank(None)
    mpu.destroy_model_parallel()
    assert mpu.get_tensor_model_parallel_rank() == grid.get_local_rank("tp")
    assert grid.check()
    other = commgrid.initialize(name="other")
    with pytest.raises(AmbiguousGridError, match="grids 'default', 'other' are alive; say whose"):
        mpu.get_tensor_model_parallel_group()
    assert mpu.is_initialized()
    commgrid.destroy("default")
    assert mpu.get_data_parallel_group() is other.get_group("dp")
    commgrid.destroy("other")
    assert not mpu.is_initialized()
    with pytest.raises(MegatronStateError, match="is not initialized"):
        mpu.get_data_parallel_group()
    commgrid.initialize(config={"axes": {"row": 2, "column": 2}, "order": "row-column"})
    assert not mpu.is_initialized()
    with pytest.raises(SpecError, match="Megatron cannot express a grid with row, column"):
        mpu.get_data_parallel_group()


def test_the_one_grid_that_is_alive_is_asked() -> None:
    run_on_ranks(lone, 4)


def sharded() -> None:
    """A grid of commgrid's own with the axis that Megatron calls gtp_remat."""
    grid = commgrid.initialize(tp=2, gtp=2, order="tp-gtp-cp-ep-dp-pp")
    assert mpu.get_gtp_weight_remat_group() is grid.get_group("gtp")
    full, replicas = (
        inspect.unwrap(mpu.get_data_parallel_group)(with_gtp_remat=full) for full in (True, False)
    )
    assert full is grid.get_group("dp_gtp")
    assert replicas is grid.get_group("dp")
    assert mpu.get_model_parallel_group() is grid.get_group("pp_gtp_tp")
    with megatron_adapter.active(grid):
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
    grid = inspect.unwrap(megatron_adapter.initialize_model_parallel)(
        2, 2 if first else 1, rank_offset=first, local_world_size=4
    )
    assert grid.get_ranks("dp_cp")[0] in range(first, first + 4)
    assert mpu.get_tensor_model_parallel_src_rank() == rank // 2 * 2
    assert mpu.get_pipeline_model_parallel_world_size() == (2 if first else 1)
    mpu.destroy_model_parallel()
    inside = inspect.unwrap(megatron_adapter.initialize_model_parallel)(
        rank_offset=2, local_world_size=4
    )
    assert (inside is None) == (rank not in range(2, 6))
    assert mpu.is_initialized() == (inside is not None)
    mpu.destroy_model_parallel()
    for given in ({"rank_offset": 1}, {"rank_offset": 6, "local_world_size": 3}):
        with pytest.raises(MegatronSizeError, match="within the 8 ranks of WORLD"):
            inspect.unwrap(megatron_adapter.initialize_model_parallel)(**given)


@pytest.mark.full
def test_a_part_of_the_world() -> None:
    run_on_ranks(part, 8)


def late() -> bool:
    """Whether this rank is a member; rank 3 calls `update_pg_timeout` when all others wait in it,
    and nobody is through before."""
    rank = dist.get_rank()
    grid = inspect.unwrap(megatron_adapter.initialize_model_parallel)(
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


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_arguments_stand_where_the_release_has_them(release: object) -> None:
    """Pure: the module as it is beside each release."""
    chosen = next(one for one in RELEASES if one is release)
    names = dict(vars(mpu))
    shape(names, chosen)
    for name, arguments in chosen.functions.items():
        parameters = list(inspect.signature(names[name]).parameters.values())
        found = [(one.name, one.default) for one in parameters[: len(arguments)]]
        text = [(n, "" if d is inspect.Parameter.empty else repr(d)) for n, d in found]
        assert tuple(text) == arguments, name
        assert all(one.kind is one.KEYWORD_ONLY for one in parameters[len(arguments) :]), name


def test_without_megatron_core_arguments_that_moved_come_by_name() -> None:
    names = dict(vars(mpu))
    shape(names, None)
    found = inspect.signature(names["get_data_parallel_group"]).parameters.values()
    kinds = {one.name: one.kind is one.KEYWORD_ONLY for one in found}
    assert kinds == {
        "with_context_parallel": False, "with_gtp_remat": True, "partial_data_parallel": True,
        "independent_all_gather": True,
    }  # fmt: skip
    with pytest.raises(TypeError, match="positional"):
        names["get_data_parallel_group"](True, True)
    order = list(inspect.signature(names["initialize_model_parallel"]).parameters.values())
    assert [one.name for one in order if one.kind is not one.KEYWORD_ONLY][-1] == (
        "hierarchical_context_parallel_sizes"
    )


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


@pytest.mark.full
def test_a_release_that_is_not_known_is_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.14 and 0.21 were taken for the newest, whose arguments stand elsewhere."""
    for version, known in (("0.14.0", False), ("0.21.0", False), ("0.16.1", True)):
        assert (releases.release_of(version) is not None) == known
    code = (
        "import importlib.metadata as m; m.version = lambda name: '0.14.0'\n"
        "import inspect, megatron_adapter.parallel_state as mpu\n"
        "print(inspect.signature(mpu.get_data_parallel_group))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "*, " in done.stdout, done.stderr  # what has moved comes by name


def forgotten() -> None:
    """Its groups, and their threads, lived until a getter was asked again."""
    grid = commgrid.initialize()
    held = weakref.ref(mpu.get_tensor_model_parallel_group())
    commgrid.destroy()
    del grid
    gc.collect()
    assert held() is None


def test_a_grid_that_is_gone_is_forgotten_at_once() -> None:
    run_on_ranks(forgotten, 1)
