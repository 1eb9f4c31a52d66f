"""WORLD started by the program: torch's heartbeat monitor, and what commgrid says about it.

torch makes such a WORLD with a thread that writes a dump after a timeout, and ends the process when
the heartbeat's seconds are over. commgrid warns of it by the name of the variable that stops it.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch.distributed as dist

import commgrid
from tests.flags import meet
from tests.gpu.on_gpus import Where, programs_on_gpus
from tests.gpu.test_failures_on_gpus import (
    named,
    sleeps_in_an_all_reduce,
    survivors_of,
    variables,
)

SETTING = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def warned(where: Where, rank: int) -> list[str]:
    """Return the warnings of two grids on the program's WORLD."""
    dist.init_process_group(where.backend)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            commgrid.initialize(watch=True)
            commgrid.destroy()
    meet(rank, 2)
    return [str(each.message) for each in seen if SETTING in str(each.message)]


def test_the_variable_to_set_is_named_once(where: Where) -> None:
    if where.emulated:
        pytest.skip("needs CUDA: gloo has no heartbeat monitor")
    for said in programs_on_gpus(warned, 2, where):
        assert len(said) == 1, said


def set_as_it_says(rank: int) -> dict[str, str]:
    return {**variables(rank), SETTING: "0"}


def test_no_warning_where_it_is_set(where: Where) -> None:
    found = programs_on_gpus(warned, 2, where, where=where, environ=set_as_it_says)
    assert found == [[], []]


def with_the_programs_world(where: Where, rank: int) -> str:
    dist.init_process_group(where.backend)
    return sleeps_in_an_all_reduce(where, rank)


def test_survivors_outlive_the_heartbeat(where: Where, record_property: Any) -> None:
    found = survivors_of(
        with_the_programs_world, 2, 3, where, environ=set_as_it_says, timeout=150.0
    )
    record_property("found", named(2, found))
