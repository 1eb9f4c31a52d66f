"""A ProcessGroupCollection from a grid, against Megatron's own."""

from __future__ import annotations

import warnings
from dataclasses import fields

import pytest
import torch.distributed as dist

import commgrid
import megatron_adapter
from commgrid import SpecError, UnknownGroupError
from commgrid.testing import run_on_ranks
from tests.megatron_adapter.answers import plain
from tests.megatron_adapter.test_functions import unconnected
from tests.peers import parallel_state as theirs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.process_groups_config import ProcessGroupCollection


def collections() -> None:
    names = [field.name for field in fields(ProcessGroupCollection)]
    for given in (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2,
         "num_distributed_optimizer_instances": 2},
        {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]},
    ):  # fmt: skip
        with unconnected():
            theirs.initialize_model_parallel(**given)
        expected = ProcessGroupCollection.use_mpu_process_groups()
        expected = {name: plain(getattr(expected, name)) for name in names}
        theirs.destroy_model_parallel()
        theirs._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None
        grid = megatron_adapter.initialize_model_parallel(**given)
        found = megatron_adapter.process_group_collection(grid)
        assert {name: plain(getattr(found, name)) for name in names} == expected
        some = megatron_adapter.process_group_collection(grid, ["tp", "dp_cp"])
        assert some.tp is found.tp
        assert getattr(some, "pp", None) is None  # from 0.19 on a collection answers None itself
        with pytest.raises(UnknownGroupError, match=r"no field 'dpcp'.*did you mean 'dp_cp'"):
            megatron_adapter.process_group_collection(grid, ["dpcp"])
        megatron_adapter.destroy_model_parallel()


def test_every_field_is_megatrons() -> None:
    run_on_ranks(collections, 8)


def plain_grid() -> None:
    """Of a grid of commgrid's own, with what it lacks made beside it, and gone with it."""
    grid = commgrid.initialize(tp=2, pp=2)
    before = len(dist.distributed_c10d._world.pg_map)
    found = megatron_adapter.process_group_collection(grid)
    assert found.tp is grid.get_group("tp")
    assert plain(found.embd) == ("group", *grid.get_ranks("pp"))
    assert plain(found.expt_dp) == ("group", *grid.get_ranks("dp"))
    assert found.hcp is None
    assert megatron_adapter.process_group_collection(grid).embd is found.embd
    assert not theirs.is_initialized()
    assert len(dist.distributed_c10d._world.pg_map) > before
    commgrid.destroy()
    assert len(dist.distributed_c10d._world.pg_map) == 1
    rows = commgrid.initialize(config={"axes": {"row": 2, "column": 2}, "order": "row-column"})
    with pytest.raises(SpecError, match="Megatron cannot express a grid with row, column"):
        megatron_adapter.process_group_collection(rows)


def test_of_a_grid_that_was_made_for_something_else() -> None:
    run_on_ranks(plain_grid, 4)
