"""What runs where megatron-core is another release; see `wheels.on_release`."""

from __future__ import annotations

import inspect
import itertools
import math
import os
from dataclasses import fields
from typing import Any
from unittest import mock

import megatron.core
import numpy
import pytest
from megatron.core import process_groups_config
from megatron.core.hyper_comm_grid import HyperCommGrid as TheirGrid

import commgrid
import megatron_adapter
import megatron_adapter.parallel_state as mpu
from commgrid import UnknownGroupError
from commgrid.testing import run_on_ranks
from megatron_adapter import AmbiguousGridError, MegatronVersionError, installation
from megatron_adapter.collection import FIELDS
from megatron_adapter.installation import unfit
from megatron_adapter.module_code import ModuleCode
from tests.megatron_adapter import (
    test_collection,
    test_functions,
    test_gpt,
    test_hyper_comm_grid,
)
from tests.peers import parallel_state as theirs
from tests.sizes import some


def table() -> list[str]:
    """What of this release the adapter does not know."""
    found = unfit(theirs, ModuleCode(theirs))
    found += [f"{name} is missing" for name in sorted(missing())]
    named = {field.name for field in fields(process_groups_config.ProcessGroupCollection)}
    found += [f"a collection has a field {name}" for name in sorted(named - FIELDS.keys())]
    for name, function in vars(TheirGrid).items():
        if not inspect.isfunction(function) or (name.startswith("_") and name not in _CALLED):
            continue
        asked, mine = (
            inspect.signature(getattr(kind, name)).parameters
            for kind in (TheirGrid, megatron_adapter.HyperCommGrid)
        )
        if not {*asked} - {"kwargs"} <= {*mine}:
            found.append(f"HyperCommGrid.{name} takes {[*asked]}, the adapter's {[*mine]}")
    return found + test_functions.strange_signatures()


_CALLED = ("__init__", "_gen_rank_enum")
"""Private methods that Megatron's own programs call."""


def missing() -> set[str]:
    """The functions of this release that the adapter's module lacks."""
    own = test_functions.public_functions(theirs).keys() - test_functions.INTERNAL
    return own - vars(mpu).keys()


def what_a_release_adds() -> list[str]:
    """Why 0.19.2 would be refused by an adapter that knows nothing of sharded weights."""
    known = tuple(name for name in installation.VARIABLES if "GTP" not in name)
    with mock.patch.object(installation, "VARIABLES", known):
        return unfit(theirs, ModuleCode(theirs))


def grids() -> None:
    """Every enumeration of Megatron's HyperCommGrid, and of its views where it has them."""
    os.environ["WORLD_SIZE"] = "32"
    for shape, names, offset in test_hyper_comm_grid.SHAPES:
        pair = [kind(shape, names, offset) for kind in (TheirGrid, megatron_adapter.HyperCommGrid)]
        _compare_enumerations(pair, names, {})
        if not hasattr(TheirGrid, "register_view"):
            continue
        size = math.prod(shape)
        for grid in pair:
            grid.register_view("flat", [size], ["all"])
            grid.register_view("half", [2, numpy.int64(size // 2)], ["x", "y"])
            with pytest.raises(KeyError):
                grid.get_rank_enum("x", view="none")
            with pytest.raises(ValueError, match=r"already registered|registered already"):
                grid.register_view("flat", [size], ["all"])
        _compare_enumerations(pair, ["all"], {"view": "flat"})
        _compare_enumerations(pair, ["x", "y"], {"view": "half"})


def _compare_enumerations(pair: list[Any], names: list[str], view: dict[str, str]) -> None:
    theirs, mine = pair
    for count in range(1, len(names) + 1):
        for dims in itertools.permutations(names, count):
            if not view:
                order = sorted(dims, key=names.index, reverse=True)
                assert mine._gen_rank_enum(order) == theirs._gen_rank_enum(order), dims
            if hasattr(theirs, "get_rank_enum"):
                asked = [grid.get_rank_enum(list(dims), **view) for grid in (mine, theirs)]
                assert asked[0] == asked[1], (dims, view)


def functions(world: int, count: int) -> int:
    """Every function on every rank; of how many configurations."""
    configs = some(test_functions.configs_here(world), count)

    def every() -> list[str]:
        return [line for given in configs for line in test_functions.compare(given)]

    for rank, found in enumerate(run_on_ranks(every, world, timeout=400)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
    return len(configs)


def large_world(world: int) -> int:
    """The same on every rank of a world that there is only the fake backend for."""
    count = len(test_functions.configs_here(world))
    for which in range(count):
        (found,) = run_on_ranks(
            test_functions.every_rank, 1, world, which, backend=None, timeout=400
        )
        assert not found, "\n".join(found[:20])
    return count


def newer_state() -> None:
    """What 0.15 has no variables for, asked through the adapter's own module."""
    for rank, found in enumerate(run_on_ranks(_newer_state, 4, timeout=300)):
        assert found == [True, rank // 2 * 2, 2], (rank, found)


def _newer_state() -> list[object]:
    before = set(vars(theirs))
    megatron_adapter.install()
    mpu.initialize_model_parallel(
        create_all_gather_group=True, hybrid_context_parallel=True, expert_model_parallel_size=2
    )
    found: list[object] = [mpu.has_separate_all_gather_group()]
    found.append(mpu.get_expert_model_parallel_src_rank())
    found.append(mpu.get_hybrid_data_context_parallel_groups(group_size=2).size())
    mpu.destroy_global_symmetric_memory_buffer()
    megatron_adapter.uninstall()
    mpu.destroy_model_parallel()
    assert set(vars(theirs)) == before
    return found


def collections() -> None:
    """A collection of a grid beside Megatron's own."""
    run_on_ranks(test_collection.collections, 8, timeout=300, check=False)


def losses(given: str, world: int) -> list[dict[str, list[float]]]:
    """The example's losses with Megatron's own groups, and with commgrid's, on every rank.

    The GPT of 0.15 asks the state for groups also where it was handed a collection.
    """
    first = megatron.core.__version__.startswith("0.15.")
    kinds = ("megatron", "commgrid") if first else ("megatron", "commgrid", "collection")
    found: list[Any] = run_on_ranks(test_gpt.losses, world, given, kinds, timeout=400, check=False)
    return found


def vendors() -> None:
    """The copy that `wheels.vendors` makes, on four ranks."""
    for rank, found in enumerate(run_on_ranks(_vendors, 4, timeout=300, check=False)):
        assert not found, f"rank {rank}: {found}"


def _vendors() -> list[str]:
    getters = "get_ring_group", "get_ring_and_tensor_size"
    found = [
        line
        for given in ({}, test_functions.config(2), test_functions.config(2, ep=2))
        for line in test_functions.compare(given)
        if not any(name in line for name in getters)
    ]
    megatron_adapter.install()
    for module in (theirs, mpu):
        with pytest.raises(MegatronVersionError, match=r"initialize_model_parallel\(rings=2\):"):
            module.initialize_model_parallel(2, rings=2)
    assert not commgrid.is_initialized()
    theirs.initialize_model_parallel(1, 2, rings=1)
    grid = commgrid.get_grid()
    assert theirs.get_pipeline_model_parallel_group() is grid.get_group("pp")
    assert mpu.get_data_parallel_group() is grid.get_group("dp_cp")  # as its default is there
    assert grid.spec.regions[0].axes == ("tp", "cp", "pp", "dp")
    with pytest.raises(AssertionError, match="not initialized"):
        theirs.get_data_parallel_group_gloo()  # not by default
    with pytest.raises(AssertionError, match="no rings"):
        theirs.get_ring_group()
    collection = megatron_adapter.process_group_collection(grid)
    assert collection.pp is grid.get_group("pp")
    with pytest.raises(UnknownGroupError, match="no field 'ring'"):
        megatron_adapter.process_group_collection(grid, ["ring"])
    megatron_adapter.initialize_model_parallel(name="other")
    with pytest.raises(AmbiguousGridError):
        theirs.get_ring_and_tensor_size()
    busy = mock.patch.object(theirs.SymmetricMemoryManager, "destroy", side_effect=OSError("busy"))
    with (
        megatron_adapter.active("other"), busy,
        pytest.warns(RuntimeWarning, match="own destroy_model_parallel failed: busy"),
    ):  # fmt: skip
        theirs.destroy_model_parallel()
    assert not commgrid.is_initialized("other")
    ended = len(theirs._RINGS_ENDED)
    theirs.destroy_model_parallel()
    assert len(theirs._RINGS_ENDED) == ended + 1  # what its own function ends besides
    assert not commgrid.is_initialized()
    megatron_adapter.uninstall()
    return found
