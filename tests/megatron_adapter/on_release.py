"""What runs where megatron-core is another release; see `wheels.on_release`."""

from __future__ import annotations

import inspect
import itertools
import math
import os
from dataclasses import fields
from typing import Any

import megatron.core
import numpy
import pytest
from megatron.core import process_groups_config
from megatron.core.hyper_comm_grid import HyperCommGrid as TheirGrid

import megatron_adapter
import megatron_adapter.parallel_state as mpu
from commgrid.testing import run_on_ranks
from megatron_adapter.installation import differences
from megatron_adapter.releases import release_of
from tests.megatron_adapter import test_functions, test_gpt, test_hyper_comm_grid
from tests.peers import parallel_state as theirs
from tests.sizes import some


def table() -> list[str]:
    """Where the table of this release is not what the release has."""
    release = release_of(megatron.core.__version__)
    assert release is not None
    found = differences(theirs, release)
    own = set(test_functions.public_functions(theirs))
    found += [f"function {name} is missing" for name in release.functions.keys() - own]
    named = [field.name for field in fields(process_groups_config.ProcessGroupCollection)]
    if sorted(named) != sorted(release.fields):
        found.append(f"a collection has fields {named}")
    for name, arguments in release.grid.items():
        known = [argument.lstrip("*") for argument, _ in arguments if argument != "*"]
        asked, mine = (
            list(inspect.signature(getattr(kind, name)).parameters)
            for kind in (TheirGrid, megatron_adapter.HyperCommGrid)
        )
        if asked != known or not {*known} - {"kwargs"} <= {*mine}:
            found.append(f"HyperCommGrid.{name} takes {asked}, the adapter's {mine}")
    return found + test_functions.strange_signatures()


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


def losses(given: str, world: int) -> list[dict[str, list[float]]]:
    """The example's losses with Megatron's own groups, and with commgrid's, on every rank.

    The GPT of 0.15 asks the state for groups also where it was handed a collection.
    """
    first = megatron.core.__version__.startswith("0.15.")
    kinds = ("megatron", "commgrid") if first else ("megatron", "commgrid", "collection")
    found: list[Any] = run_on_ranks(test_gpt.losses, world, given, kinds, timeout=400)
    return found
