"""`install`: a grid behind `megatron.core.parallel_state` itself.

Megatron's getters read variables of their module, so setting those is seen by every module,
also if it imported a getter by name. A function must do something else in three cases:
`initialize_model_parallel` and `destroy_model_parallel` make and end a grid, two functions are
mistaken, and while several grids are alive and none is chosen every function that asks for state
raises. Those functions are given other code, also where they were imported before, and their
own code back at the end.

No release is written down here: functions take what the installed ones take, and what they read
is read from their code.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import is_initialized, live_grids
from megatron_adapter import lifecycle
from megatron_adapter.errors import AmbiguousGridError, MegatronStateError, MegatronVersionError
from megatron_adapter.grid_state import VARIABLES, initial
from megatron_adapter.installed import SUPPORTED, shaped
from megatron_adapter.module_code import ModuleCode
from megatron_adapter.parallel_state import getters, oddities, rank_groups
from megatron_adapter.state import STORE

_MODULE = "megatron.core.parallel_state"
_TARGETS = "_commgrid_targets"


class Installation:
    """An installed megatron-core whose state is a grid's.

    Args:
        module: `megatron.core.parallel_state`.
        code: the module's.
    """

    def __init__(self, module: ModuleType, code: ModuleCode) -> None:
        self.variables = vars(module)
        self._module = module
        self._before = {name: self.variables[name] for name in VARIABLES if name in self.variables}
        self.names = frozenset(self._before)
        # Megatron's own function objects; their names may get others later.
        self._functions = code.functions
        self._stateful = {
            name for name in self._functions.keys() - _REPLACED.keys()
            if not name.startswith("_") and code.touched_by(name) & self.names
        }  # fmt: skip
        destroy = self._functions["destroy_model_parallel"]
        self._destroy = FunctionType(destroy.__code__, self.variables, argdefs=destroy.__defaults__)
        self._destroy.__kwdefaults__ = destroy.__kwdefaults__
        self._redirected: dict[str, tuple[CodeType, Any, Any]] = {}
        self.variables[_TARGETS] = {}
        for name in _REPLACED.keys() & self._functions.keys():
            signature = inspect.signature(self._functions[name])
            self._redirect(name, shaped(name, _REPLACED[name], signature))

    def _redirect(self, name: str, target: Callable[..., Any]) -> None:
        """Makes one of Megatron's functions call another with its arguments."""
        function = self._functions[name]
        signature = inspect.signature(function)
        self._redirected[name] = (
            function.__code__, function.__defaults__, function.__kwdefaults__
        )  # fmt: skip
        self.variables[_TARGETS][name] = target
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
            for name in self._stateful:
                self._redirect(name, _OF_SEVERAL.get(name, _ask_which))
        elif shown["_DATA_PARALLEL_GROUP"] is not None and shown["_GLOBAL_MEMORY_BUFFER"] is None:
            self._module._set_global_memory_buffer()

    def end_others(self) -> None:
        """Runs Megatron's own `destroy_model_parallel` where there are no groups that it could end.

        It ends what belongs to no grid: symmetric memory, NCCL's expert library.
        """
        shown = {name: self.variables[name] for name in self.names}
        self.variables.update((name, initial()[name]) for name in self.names)
        try:
            self._destroy()
        except Exception as error:  # the state goes all the same, as Megatron's does
            said = f"megatron-core's own destroy_model_parallel failed: {error}"
            warnings.warn(said, RuntimeWarning, stacklevel=4)
        finally:
            self.variables.update(shown)

    def close(self) -> None:
        """Leaves Megatron as it was."""
        for name in list(self._redirected):
            self._restore(name)
        self.variables.update(self._before)
        del self.variables[_TARGETS]


def _initialize(**given: Any) -> None:
    """What Megatron's `initialize_model_parallel` does once installed."""
    lifecycle.check_sizes(given)
    if STORE.states or is_initialized(lifecycle.PARAMETERS["name"].default):
        alive = ", ".join(repr(grid.name) for grid in live_grids())
        raise MegatronStateError(
            f"model parallel is already initialized: grid {alive} is alive; end it with "
            "destroy_model_parallel, or commgrid.destroy where it is not Megatron's, before another"
        )
    lifecycle.initialize_model_parallel(**given)


_initialize.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [one for one in lifecycle.PARAMETERS.values() if one.name not in lifecycle.OWN]
)


def _destroy() -> None:
    """What Megatron's `destroy_model_parallel` does once installed."""
    _ = STORE.current  # raises where a grid must be chosen first
    if _installation is not None:
        _installation.end_others()
    lifecycle.destroy_model_parallel()


_REPLACED: dict[str, Callable[..., Any]] = {
    "initialize_model_parallel": _initialize,
    "destroy_model_parallel": _destroy,
    # Megatron's own are mistaken; see docs/from_megatron.md.
    "create_all_gather_groups": rank_groups.create_all_gather_groups,
    "get_hybrid_data_context_parallel_groups": oddities.get_hybrid_data_context_parallel_groups,
}
"""Megatron's functions that do something else while it is installed."""


def _ask_which(*_: object, **__: object) -> object:
    """Raise, while several grids are alive and none is chosen."""
    return STORE.current


_OF_SEVERAL: dict[str, Callable[..., Any]] = {
    "is_initialized": oddities.is_initialized,
    "model_parallel_is_initialized": oddities.model_parallel_is_initialized,
}
"""Functions that have an answer also then."""


_installation: Installation | None = None


def install(grid: HyperCommGrid | None = None) -> None:
    """Puts a grid behind megatron-core's parallel state, for every module that uses it.

    With no grid alive, Megatron's own `initialize_model_parallel` makes one when it is called,
    and its `destroy_model_parallel` ends it: one line at the top of a program is all it takes.
    With several grids, install each, and choose with `megatron_adapter.active`.

    Args:
        grid: alive; every rank of it calls this. None: the only live grid, if there is one.

    Raises:
        MegatronVersionError: megatron-core is not installed, or one of its functions that the
            adapter knows reads state that the adapter does not set, which is listed.
        MegatronStateError: Megatron's own state is initialized, or the grid was destroyed.
        AmbiguousGridError: several grids are alive and none was given.
        SpecError: Megatron cannot express the grid.
    """
    global _installation
    chosen = grid if grid is not None else _only_grid()
    if _installation is None:
        module, code = load_megatron()
        if module.model_parallel_is_initialized() or module.is_initialized():
            raise MegatronStateError(
                "megatron-core's model parallel state is initialized already, by its own groups; "
                "call install before initialize_model_parallel, or destroy_model_parallel first"
            )
        state = None if chosen is None else STORE.state_of(chosen)
        _installation = Installation(module, code)
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


def load_megatron() -> tuple[ModuleType, ModuleCode]:
    """megatron-core's parallel_state, if a grid can be put behind it.

    Raises:
        MegatronVersionError: listing why not.
    """
    try:
        module = importlib.import_module(_MODULE)
        version: str = importlib.import_module("megatron.core").__version__
    except ImportError as error:
        raise MegatronVersionError(
            f"megatron-core cannot be imported ({error}); pip install megatron-core=="
            f"{_INSTALLABLE}, or one of {', '.join(SUPPORTED)}"
        ) from error
    code = ModuleCode(module)
    if problems := unfit(module, code):
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise MegatronVersionError(
            f"no grid can be put behind the parallel state of megatron-core {version}:{listed}\n"
            f"use megatron-core {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"
        )
    return module, code


_NEEDED = ("initialize_model_parallel", "destroy_model_parallel", "model_parallel_is_initialized")
_INSTALLABLE = "0.16.1"
"""The newest release that installs on every Python that commgrid runs on."""


def unfit(module: ModuleType, code: ModuleCode) -> list[str]:
    """Reasons why a parallel_state would answer wrongly for a grid.

    Its own initialization no longer runs. A getter of the supported releases must not read
    variables that only this initialization sets. A further getter may, and finds them not set.
    """
    own = code.functions
    found = [f"function {name} is missing" for name in _NEEDED if not hasattr(module, name)]
    found += [
        f"function {name} was replaced by another"
        for name in (*_NEEDED, *_REPLACED) if hasattr(module, name) and name not in own
    ]  # fmt: skip
    if found:
        return list(dict.fromkeys(found))
    made = code.set_by("initialize_model_parallel") - {*VARIABLES}
    for name in sorted({*getters.__all__, *oddities.__all__} & own.keys() - _REPLACED.keys()):
        touched = code.touched_by(name)
        if strange := sorted(touched & made):
            found.append(
                f"function {name} reads {', '.join(strange)}, which only Megatron's own "
                "initialize_model_parallel sets"
            )
        elif name == "model_parallel_is_initialized" and not touched & {*VARIABLES}:
            found.append(f"function {name} reads none of the variables that the adapter sets")
    return found
