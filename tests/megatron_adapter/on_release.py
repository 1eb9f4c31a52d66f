"""What runs where megatron-core is another release; see `wheels.on_release`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import megatron.core
from megatron.core import process_groups_config

import megatron_adapter
import megatron_adapter.parallel_state as mpu
from megatron_adapter.installation import differences
from megatron_adapter.releases import release_of
from tests.full import some
from tests.megatron_adapter import test_functions
from tests.peers import parallel_state as theirs
from tests.ranks import run_on_ranks


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
    return found + test_functions.strange_signatures()


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
        (found,) = run_on_ranks(test_functions.every_rank, 1, world, which, init=None, timeout=400)
        assert not found, "\n".join(found[:20])
    return count


def newer_state() -> None:
    """What 0.15 has no variables for, asked through the adapter's own module."""
    for rank, found in enumerate(run_on_ranks(_newer_state, 4, timeout=100)):
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
    """The example's losses with Megatron's own groups, and with commgrid's, on every rank."""
    from tests.megatron_adapter import test_gpt

    kinds = ("megatron", "commgrid", "collection")
    found: list[Any] = run_on_ranks(test_gpt.losses, world, given, kinds, timeout=400)
    return found
