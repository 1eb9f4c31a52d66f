"""Keys of optimizer state as parts of names, and the names that are read from a checkpoint."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from commgrid.errors import SpecError
from commgrid.resharding.item import Path
from commgrid.resharding.naming import split_name

MASTER = "master"


def not_taken(stored: Iterable[str], updated: Container[str]) -> list[str]:
    """Names of an optimizer's entries that are of no parameter which is updated.

    Args:
        stored: names of a checkpoint.
        updated: parameters, of all ranks.

    Returns:
        Of options one for each parameter, `optimizer.param_groups.<parameter>`.
    """
    found: dict[str, None] = {}
    for kind in ("param_groups", "state"):
        prefix = f"optimizer.{kind}."
        for key in stored:
            if not key.startswith(prefix):
                continue
            name, _ = split_name(key.removeprefix(prefix), updated)
            if name not in updated:
                group = f"optimizer.param_groups.{name}"
                found[group if kind == "param_groups" or group in found else key] = None
    return list(found)


def copy_of(path: Path) -> Path:
    """The name of the fp32 copy of a parameter of the model."""
    return "optimizer", f"state.{path[-1]}.{MASTER}"


def text_of(parameter: str, key: Any) -> str:
    """A key of a parameter's state as part of a name.

    Raises:
        SpecError: it is none that can be read back.
    """
    if isinstance(key, str) and key.isprintable() and key[:1] not in ("", "[") and key != MASTER:
        return key
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(key)) == key:
            return f"[{key!r}]"
    raise SpecError(
        f"{parameter}: the optimizer's state has the key {key!r}; expected a text, a number, "
        "or a tuple of these"
    )


def key_of_text(text: str, own: Mapping[str, Any]) -> Any:
    """The key that a text is of; others write numbers as texts.

    Args:
        own: by text the keys that the optimizer has already.
    """
    if text[:1] == "[":
        with suppress(ValueError, SyntaxError):
            return ast.literal_eval(text[1:-1])
    return own.get(text, text)


def refuse_further_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps more than state of parameters and options of groups."""
    kept = [f"state[{key!r}]" for key in optimizer.state if not isinstance(key, Tensor)]
    own = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    if own or optimizer._optimizer_state_dict_post_hooks:
        more = optimizer.state_dict().keys() - {"state", "param_groups"}
        kept += [f"state_dict()[{key!r}]" for key in sorted(more, key=str)]
    if kept:
        raise SpecError(
            f"{type(optimizer).__name__} keeps {kept[0]}, which belongs to no parameter and would "
            "be lost; keep it in param_groups or in state[parameter], or give it as extra="
        )
