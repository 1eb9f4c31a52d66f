"""`install`: a grid behind `megatron.core.parallel_state` itself.

Megatron's getters read variables of their module, so setting those is seen by every module,
also by one that imported a getter by name. A function must do something else in two cases:
`initialize_model_parallel` and `destroy_model_parallel` make and end a grid, and while several
grids are alive and none is chosen every function that asks for state raises. Those functions
are given other code, which whoever holds them runs too, and their own code back at the end.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import is_initialized, live_grids
from megatron_adapter import lifecycle, parallel_state
from megatron_adapter.errors import AmbiguousGridError, MegatronStateError, MegatronVersionError
from megatron_adapter.parallel_state import buffers, dense, expert, pipeline
from megatron_adapter.state import STORE, VARIABLES, initial

SUPPORTED = ("0.15.3", "0.16.1")
"""The versions of megatron-core that are tested; others of these two series may serve."""

_MODULE = "megatron.core.parallel_state"
_SINCE_0_16 = {
    "_EXPERT_MODEL_PARALLEL_RANKS", "_HYBRID_DP_CP_GROUPS", "_DATA_PARALLEL_GROUP_WITH_CP_AG",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER",
}  # fmt: skip
_TARGETS = "_commgrid_targets"


class Installation:
    """An installed megatron-core whose state is a grid's.

    Args:
        module: `megatron.core.parallel_state`.
    """

    def __init__(self, module: ModuleType) -> None:
        self.variables = vars(module)
        self._module = module
        self._before = {name: self.variables[name] for name in VARIABLES if name in self.variables}
        self.names = frozenset(self._before)
        # Megatron's own function objects, whatever comes to stand under their names later.
        self._functions = _own_functions(module)
        self._redirected: dict[str, tuple[CodeType, Any, Any]] = {}
        self.variables[_TARGETS] = {}
        for name, target in _LIFECYCLE.items():
            self._redirect(name, target)

    def _redirect(self, name: str, target: Callable[..., Any]) -> None:
        """Makes one of Megatron's functions call another, with the arguments it would take."""
        function = self._functions[name]
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            return target(**signature.bind(*args, **kwargs).arguments)

        self._redirected[name] = (
            function.__code__, function.__defaults__, function.__kwdefaults__
        )  # fmt: skip
        self.variables[_TARGETS][name] = call
        text = f"def {name}(*args, **kwargs): return {_TARGETS}[{name!r}](*args, **kwargs)"
        made: dict[str, Any] = {}
        exec(text, made)
        function.__defaults__ = function.__kwdefaults__ = None
        function.__code__ = made[name].__code__
        function.__signature__ = signature  # type: ignore[attr-defined]

    def _restore(self, name: str) -> None:
        """Gives a function its own code back."""
        function = self._functions[name]
        function.__code__, function.__defaults__, function.__kwdefaults__ = (
            self._redirected.pop(name)
        )  # fmt: skip
        del function.__signature__  # type: ignore[attr-defined]

    def publish(self, values: dict[str, Any] | None) -> None:
        """Shows these variables; None: every function that asks for state raises."""
        for name in self._redirected.keys() - _LIFECYCLE:
            self._restore(name)
        shown = initial() if values is None else values
        for name in self._before:
            self.variables[name] = shown[name]
        if values is None:
            for name in _STATEFUL & self._functions.keys():
                self._redirect(name, getattr(parallel_state, name))
        elif shown["_DATA_PARALLEL_GROUP"] is not None and shown["_GLOBAL_MEMORY_BUFFER"] is None:
            self._module._set_global_memory_buffer()

    def close(self) -> None:
        """Leaves Megatron as it was."""
        for name in list(self._redirected):
            self._restore(name)
        self.variables.update(self._before)
        del self.variables[_TARGETS]


def _own_functions(module: ModuleType) -> dict[str, FunctionType]:
    """The functions that a module defines itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__globals__ is vars(module)
    }  # fmt: skip


def _initialize(**given: Any) -> None:
    """What Megatron's `initialize_model_parallel` does once installed."""
    name = inspect.signature(lifecycle.initialize_model_parallel).parameters["name"].default
    if STORE.states or is_initialized(name):
        alive = ", ".join(repr(grid.name) for grid in live_grids())
        raise MegatronStateError(
            f"model parallel is already initialized: grid {alive} is alive; end it with "
            "destroy_model_parallel, or commgrid.destroy where it is not Megatron's, before another"
        )
    lifecycle.initialize_model_parallel(**given)


_LIFECYCLE: dict[str, Callable[..., Any]] = {
    "initialize_model_parallel": _initialize,
    "destroy_model_parallel": lifecycle.destroy_model_parallel,
}
_STATEFUL = {
    *dense.__all__, *expert.__all__, *pipeline.__all__,
    *(name for name in vars(buffers) if name.endswith("_buffer")),
    "create_group", "update_pg_timeout",
}  # fmt: skip
"""Megatron's public functions that ask for or set state of a grid."""


_installation: Installation | None = None


def install(grid: HyperCommGrid | None = None) -> None:
    """Puts a grid behind megatron-core's parallel state, for every module that uses it.

    With no grid alive, Megatron's own `initialize_model_parallel` makes one when it is called,
    and its `destroy_model_parallel` ends it: one line at the top of a program is all it takes.
    With several grids, install each, and choose with `megatron_adapter.active`.

    Args:
        grid: alive; every rank of it calls this. None: the one that is alive, if there is one.

    Raises:
        MegatronVersionError: megatron-core is not installed, of another version, or has state
            that the adapter does not know, which is listed.
        MegatronStateError: Megatron's own state is initialized, or the grid was destroyed.
        AmbiguousGridError: several grids are alive and none was given.
        SpecError: Megatron cannot express the grid.
    """
    global _installation
    chosen = grid if grid is not None else _only_grid()
    if _installation is None:
        module = load_megatron()
        if module.model_parallel_is_initialized() or module.is_initialized():
            raise MegatronStateError(
                "megatron-core's model parallel state is initialized already, by its own groups; "
                "call install before initialize_model_parallel, or destroy_model_parallel first"
            )
        state = None if chosen is None else STORE.state_of(chosen)
        _installation = Installation(module)
        STORE.follow(_installation)
    else:
        state = None if chosen is None else STORE.state_of(chosen)
    if state is not None:
        STORE.add(state)


def uninstall() -> None:
    """Leaves megatron-core as it was before `install`; grids stay alive. Twice is fine.

    What was created for Megatron beside a grid that was given to `install` is destroyed, unless a
    ProcessGroupCollection was made of it: then it lives as long as the grid. A grid that Megatron's
    `initialize_model_parallel` made lives on until `destroy_model_parallel` or
    `commgrid.destroy`, and the next `install` finds it.
    """
    global _installation
    if _installation is None:
        return
    STORE.follow(None)
    _installation.close()
    _installation = None
    for state in [state for state in STORE.states if not state.owns_grid]:
        STORE.remove(state)


def _only_grid() -> HyperCommGrid | None:
    """The grid that is alive; None: there is none."""
    alive = live_grids()
    if len(alive) > 1:
        names = ", ".join(repr(one.name) for one in alive)
        raise AmbiguousGridError(
            f"grids {names} are alive; say which one is meant: megatron_adapter.install(grid)"
        )
    return alive[0] if alive else None


def load_megatron() -> ModuleType:
    """megatron-core's parallel_state, if it is one that the adapter knows.

    Raises:
        MegatronVersionError: listing what does not match.
    """
    try:
        module = importlib.import_module(_MODULE)
        found: str = importlib.import_module("megatron.core").__version__
    except ImportError as error:
        raise MegatronVersionError(
            f"megatron-core cannot be imported ({error}); pip install megatron-core=="
            f"{SUPPORTED[-1]}"
        ) from error
    problems = differences(module)
    if found.split(".")[:2] not in [known.split(".")[:2] for known in SUPPORTED]:
        problems.insert(0, f"its version is {found}, known are {', '.join(SUPPORTED)}")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise MegatronVersionError(
            f"megatron-core {found} is not one that the adapter knows:{listed}\n"
            f"use megatron-core {' or '.join(SUPPORTED)}"
        )
    return module


def differences(module: ModuleType) -> list[str]:
    """What a parallel_state has that the adapter does not know, and the other way round."""
    state = {n for n in vars(module) if re.fullmatch(r"_[A-Z][A-Z0-9_]*", n)}
    state |= {"_global_process_group_list"} & vars(module).keys()
    state.discard(_TARGETS)
    found = [f"variable {name} is not known" for name in sorted(state.difference(VARIABLES))]
    missing = set(VARIABLES) - state - _SINCE_0_16
    found += [f"variable {name} is missing" for name in sorted(missing)]
    theirs = inspect.signature(module.initialize_model_parallel).parameters
    ours = inspect.signature(lifecycle.initialize_model_parallel).parameters
    found += [
        f"initialize_model_parallel has a parameter {name}" for name in theirs if name not in ours
    ]
    own = _own_functions(module)
    found += [
        f"function {name} is not known"
        for name in own if not name.startswith("_") and not hasattr(parallel_state, name)
    ]  # fmt: skip
    found += [f"function {name} was replaced by another" for name in _LIFECYCLE if name not in own]
    return found
