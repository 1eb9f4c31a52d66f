"""The adapter's functions with the arguments that one release of megatron-core gives them.

The functions themselves take every argument of every release, by name. Positions are a release's:
`get_data_parallel_group(True, True)` means optimizer instances up to 0.18, and weight
rematerialisation from 0.19 on. Where no megatron-core says which release is meant, an argument
that has moved is taken by name alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

from megatron_adapter.releases import NEWEST, Release, moved_arguments


def shape(names: MutableMapping[str, Any], release: Release | None) -> None:
    """Gives the functions of a module the places that a release gives their arguments.

    Args:
        names: the module's variables.
        release: None: arguments that stand elsewhere in some release are taken by name alone.
    """
    for name, arguments in (release or NEWEST).functions.items():
        if name not in names:
            continue
        function = inspect.unwrap(names[name])
        moved = frozenset() if release is not None else moved_arguments(name)
        own = [one.name for one in inspect.signature(function).parameters.values()]
        known = [argument for argument, _ in arguments]
        more = [one for one in own if one not in known] if name in _WITH_MORE or moved else []
        if known + more != own or moved & {*own}:
            fixed = [one for one in known if one not in moved]
            named = [one for one in known if one in moved] + more
            names[name] = _shaped(function, fixed, named)
        else:
            names[name] = function


_WITH_MORE = ("initialize_model_parallel",)
"""Functions that take commgrid's own arguments behind Megatron's."""


def _shaped(function: Callable[..., Any], fixed: list[str], named: list[str]) -> Callable[..., Any]:
    """A function that takes some arguments by place, others by name, and hands all on by name.

    It is compiled: getters are called in every step, and binding arguments by hand costs more than
    what most of them do.
    """
    parameters = inspect.signature(function).parameters
    defaults = {name: parameters[name].default for name in fixed + named}

    def listed(names: list[str]) -> list[str]:
        needed = inspect.Parameter.empty
        return [n if defaults[n] is needed else f"{n}=_defaults[{n!r}]" for n in names]

    taken = ", ".join(listed(fixed) + ["*"] * bool(named) + listed(named))
    handed = ", ".join(f"{name}={name}" for name in fixed + named)
    made: dict[str, Any] = {"_defaults": defaults, "_function": function}
    name = function.__name__
    exec(f"def {name}({taken}): return _function({handed})", made)
    shaped: Callable[..., Any] = functools.wraps(function)(made[name])
    by_place, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    given = [parameters[one].replace(kind=by_place) for one in fixed]
    given += [parameters[one].replace(kind=by_name) for one in named]
    returned = inspect.signature(function).return_annotation
    shaped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        given, return_annotation=returned
    )
    return shaped
