"""The megatron-core beside the adapter: what its functions take, and functions that take the same.

Arguments have moved between releases: `get_data_parallel_group(True, True)` means optimizer
instances up to 0.18, and weight rematerialisation from 0.19 on. The adapter's own functions take
an argument that has moved by name alone; beside a megatron-core they take it at its place there.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_adapter.errors import MegatronVersionError

SUPPORTED = ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""The versions of megatron-core that are tested; others may serve."""


@functools.cache
def signatures() -> dict[str, inspect.Signature]:
    """Signatures of the functions of megatron-core's parallel_state; none without megatron-core.

    They are read from its source, without annotations: importing megatron-core takes seconds.
    """
    try:
        found = importlib.util.find_spec("megatron.core")
        if found is None or found.origin is None:
            return {}
        tree = ast.parse(Path(found.origin).with_name("parallel_state.py").read_text("utf-8"))
    except (ImportError, OSError, SyntaxError, ValueError):
        return {}
    read = {
        node.name: _signature(node) for node in tree.body if isinstance(node, ast.FunctionDef)
    }  # fmt: skip
    return {name: signature for name, signature in read.items() if signature is not None}


def _signature(node: ast.FunctionDef) -> inspect.Signature | None:
    """The signature of a function in a source; None: a default in it is no literal."""
    for each in ast.walk(node.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    made: dict[str, Any] = {"__builtins__": {}}
    try:
        exec(f"def {node.name}({ast.unparse(node.args)}): ...", made)
    except Exception:
        return None
    return inspect.signature(made[node.name])


def shaped(
    name: str, function: Callable[..., Any], signature: inspect.Signature
) -> Callable[..., Any]:
    """A function with Megatron's signature that hands its arguments to the adapter's, by name.

    The adapter's further arguments follow, by name. Arguments that the adapter lacks must have
    their defaults.

    It is compiled: getters are called in every step, and binding arguments by hand costs more than
    what most of them do.

    Args:
        name: Megatron's, for errors.
        function: the adapter's.
        signature: of Megatron's.
    """
    mine, theirs = inspect.signature(function).parameters, signature.parameters
    taken = [
        mine[key].replace(kind=one.kind, default=one.default) if key in mine else one
        for key, one in theirs.items()
    ]
    by_name = inspect.Parameter.KEYWORD_ONLY
    taken += [one.replace(kind=by_name) for key, one in mine.items() if key not in theirs]
    taken.sort(key=lambda one: one.kind)
    if taken == list(mine.values()):
        return function
    empty = inspect.Parameter.empty
    plain = [
        one.replace(annotation=empty, default=empty if one.default is empty else _Default(one.name))
        for one in taken
    ]
    handed = ", ".join(f"{one}={one}" for one in mine)
    strange = [one for one in theirs.values() if one.name not in mine]
    given = ", ".join(f"{one.name!r}: {one.name}" for one in strange)
    made: dict[str, Any] = {
        "_defaults": {one.name: one.default for one in taken},
        "_function": function,
        "_refuse": functools.partial(_refuse_strange, name, strange),
    }
    check = f"_refuse({{{given}}}); " if strange else ""
    exec(f"def {name}{inspect.Signature(plain)}: {check}return _function({handed})", made)
    found: Callable[..., Any] = functools.wraps(function)(made[name])
    found.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        taken, return_annotation=inspect.signature(function).return_annotation
    )
    return found


class _Default:
    """A default in the text of a function: where its value is kept."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"_defaults[{self.name!r}]"


def _refuse_strange(
    function: str, strange: list[inspect.Parameter], given: dict[str, object]
) -> None:
    """Refuses a value for an argument that the adapter does not have."""
    kinds = inspect.Parameter
    idle: dict[Any, object] = {kinds.VAR_POSITIONAL: (), kinds.VAR_KEYWORD: {}}
    for one in strange:
        default, value = idle.get(one.kind, one.default), given[one.name]
        if value is not default and value != default:
            raise MegatronVersionError(
                f"{function}({one.name}={value!r}): the installed megatron-core has this argument, "
                f"and the adapter does not; leave it at its default, {default!r}, or use "
                f"megatron-core {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"
            )
