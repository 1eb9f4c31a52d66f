"""Everything that a parallel_state module answers, in a form that can be compared."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from types import ModuleType
from typing import Any

import torch.distributed as dist

CANDIDATES: dict[str, tuple[Any, ...]] = {
    "check_initialized": (True, False),
    "with_context_parallel": (True, False),
    "partial_data_parallel": (True, False),
    "partial_expert_data_parallel": (True, False),
    "independent_all_gather": (True, False),
    "with_gtp_remat": (True, False),
    "with_egtp_remat": (True, False),
    "tp_only_amax_red": (True, False),
    "ignore_virtual": (True, False),
    "vp_stage": (None, 0, 1, 2),
    "group_size": (1, 2, 4, 8, 16, 32),
}
"""What each parameter of a getter is tried with; one that is not here fails the test."""

NOT_STATE = {"get_nccl_options", "get_global_memory_buffer"}


def public_functions(module: ModuleType) -> dict[str, Any]:
    """Every function that a module defines for others."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_")
        and value.__module__.startswith(("megatron.core.parallel_state", "megatron_adapter"))
    }  # fmt: skip


def answers(module: ModuleType, theirs: ModuleType) -> dict[str, Any]:
    """What every getter says, for every combination of its arguments.

    Args:
        module: megatron-core's parallel_state, or one with the same functions.
        theirs: megatron-core's, which says what there is to ask.
    """
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for call, name, given in questions(theirs):
            try:
                answer = plain(getattr(module, name)(**given))
            except Exception as error:
                kinds = (AssertionError, KeyError, RuntimeError)
                answer = next((k.__name__ for k in kinds if isinstance(error, k)), repr(error))
            found[call] = answer
    return found


@functools.cache
def questions(theirs: ModuleType) -> list[tuple[str, str, dict[str, Any]]]:
    """Every getter of Megatron's as it is when first asked, with all arguments: `f(x=1)`, f, x."""
    found = []
    for name in getters(theirs):
        parameters = list(inspect.signature(getattr(theirs, name)).parameters)
        for values in itertools.product(*(CANDIDATES[parameter] for parameter in parameters)):
            given = dict(zip(parameters, values, strict=True))
            call = f"{name}({', '.join(f'{k}={v}' for k, v in given.items())})"
            found.append((call, name, given))
    return found


def plain(value: Any) -> Any:
    """A value in which groups are their global ranks, in order."""
    if isinstance(value, dist.ProcessGroup):
        return ("group", *dist.get_process_group_ranks(value))
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def getters(module: ModuleType) -> list[str]:
    """The functions that say something about the state."""
    return [
        name for name in public_functions(module)
        if name.startswith(("get_", "is_", "has_", "model_")) and name not in NOT_STATE
    ]  # fmt: skip


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Where two sets of answers differ."""
    return [
        f"{call}: {mine.get(call)!r}, Megatron says {theirs.get(call)!r}"
        for call in {**theirs, **mine} if mine.get(call) != theirs.get(call)
    ]  # fmt: skip
