"""`install`: a grid behind `megatron.core.parallel_state` itself.

Megatron's getters read variables of their module, so setting those is seen by every module,
also if it imported a getter by name. A function must do something else in three cases:
`initialize_model_parallel` and `destroy_model_parallel` make and end a grid, two functions are
mistaken, and while several grids are alive and none is chosen every function that asks for state
raises. Those functions are given other code, also where they were imported before, and their
own code back at the end.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import is_initialized, live_grids
from megatron_adapter import lifecycle, parallel_state
from megatron_adapter.errors import AmbiguousGridError, MegatronStateError, MegatronVersionError
from megatron_adapter.grid_state import VARIABLES, initial
from megatron_adapter.parallel_state import buffers, getters, oddities, rank_groups
from megatron_adapter.releases import (
    NEWEST,
    SUPPORTED,
    Arguments,
    Release,
    release_here,
    release_of,
)
from megatron_adapter.state import STORE

_MODULE = "megatron.core.parallel_state"
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
        # Megatron's own function objects; their names may get others later.
        self._functions = _own_functions(module)
        self._redirected: dict[str, tuple[CodeType, Any, Any]] = {}
        self.variables[_TARGETS] = {}
        for name in _REPLACED.keys() & self._functions.keys():
            self._redirect(name, _REPLACED[name])

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
        for name in self._redirected.keys() - _REPLACED.keys():
            self._restore(name)
        shown = initial() if values is None else values
        for name in self._before:
            self.variables[name] = shown[name]
        if values is None:
            for name in (_STATEFUL - _REPLACED.keys()) & self._functions.keys():
                self._redirect(name, inspect.unwrap(getattr(parallel_state, name)))
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
    lifecycle.check_sizes(given)
    if STORE.states or is_initialized(lifecycle.DEFAULTS["name"]):
        alive = ", ".join(repr(grid.name) for grid in live_grids())
        raise MegatronStateError(
            f"model parallel is already initialized: grid {alive} is alive; end it with "
            "destroy_model_parallel, or commgrid.destroy where it is not Megatron's, before another"
        )
    lifecycle.initialize_model_parallel(**given)


def _destroy() -> None:
    """What Megatron's `destroy_model_parallel` does once installed."""
    _ = STORE.current  # raises where a grid must be chosen first
    for module, name in release_here().ends:
        target: Any = sys.modules.get(module)  # what was never imported has nothing to end
        for part in name.split("."):
            target = getattr(target, part, None)
        try:
            if target is not None:
                target()
        except Exception as error:  # the state goes all the same, as Megatron's does
            warnings.warn(f"{module}.{name}() failed: {error}", RuntimeWarning, stacklevel=3)
    lifecycle.destroy_model_parallel()


_REPLACED: dict[str, Callable[..., Any]] = {
    "initialize_model_parallel": _initialize,
    "destroy_model_parallel": _destroy,
    # Megatron's own are mistaken (see `departures`).
    "create_all_gather_groups": rank_groups.create_all_gather_groups,
    "get_hybrid_data_context_parallel_groups": oddities.get_hybrid_data_context_parallel_groups,
}
"""Megatron's functions that do something else while it is installed."""
_STATEFUL = {
    *getters.__all__, *oddities.__all__,
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
        grid: alive; every rank of it calls this. None: the only live grid, if there is one.

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
    """Restore megatron-core as it was before `install`; grids stay alive. It may be called twice.

    Groups that were created for Megatron beside a grid given to `install` are destroyed, unless a
    ProcessGroupCollection was made of them: then they live as long as the grid. A grid that
    Megatron's `initialize_model_parallel` made lives on until `destroy_model_parallel` or
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
    """megatron-core's parallel_state, if the adapter knows its release.

    Raises:
        MegatronVersionError: listing what does not match.
    """
    try:
        module = importlib.import_module(_MODULE)
        found: str = importlib.import_module("megatron.core").__version__
    except ImportError as error:
        raise MegatronVersionError(
            f"megatron-core cannot be imported ({error}); pip install megatron-core=="
            f"{_INSTALLABLE}, or one of {', '.join(SUPPORTED)}"
        ) from error
    release = release_of(found)
    problems = differences(module, release)
    if release is None:
        problems.insert(0, f"its version is {found}, known are {', '.join(SUPPORTED)}")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise MegatronVersionError(
            f"megatron-core {found} is not one that the adapter knows:{listed}\n"
            f"use megatron-core {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"
        )
    return module


_INSTALLABLE = "0.16.1"
"""The newest release that installs on every Python that commgrid runs on."""


def differences(module: ModuleType, release: Release | None = None) -> list[str]:
    """The names that a parallel_state has beyond a release, and the needed ones that it lacks.

    Args:
        module: `megatron.core.parallel_state`.
        release: None: the newest.
    """
    known = release or NEWEST
    state = {n for n in vars(module) if re.fullmatch(r"_[A-Z][A-Z0-9_]*", n)}
    state |= {"_global_process_group_list"} & vars(module).keys()
    state.discard(_TARGETS)
    found = [f"variable {name} is not known" for name in sorted(state - known.variables)]
    found += [f"variable {name} is missing" for name in sorted(known.variables - state)]
    own = _own_functions(module)
    for name, function in own.items():
        if name in known.functions:
            found += _other_arguments(name, function, known.functions[name])
    found += [
        f"function {name} is not known"
        for name in own if not name.startswith("_") and name not in known.functions
    ]  # fmt: skip
    replaced = [name for name in _REPLACED if name in known.functions and name not in own]
    return found + [f"function {name} was replaced by another" for name in replaced]


def _other_arguments(name: str, function: FunctionType, known: Arguments) -> list[str]:
    """How a function's arguments differ from those of a release."""
    parameters = inspect.signature(function).parameters
    added = [f"{name} has a parameter {one}" for one in parameters if one not in dict(known)]
    defaults = ((one, parameter.default) for one, parameter in parameters.items())
    empty = inspect.Parameter.empty
    theirs = tuple((one, "" if value is empty else repr(value)) for one, value in defaults)
    if added or theirs == known:
        return added
    words = [", ".join(one + "=" * bool(v) + v for one, v in a) for a in (theirs, known)]
    return [f"{name} takes ({words[0]}), known is ({words[1]})"]
