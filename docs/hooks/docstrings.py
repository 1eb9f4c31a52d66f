"""An extension of griffe, which reads the docstrings: what it would not see as it is meant."""

from __future__ import annotations

import importlib
import inspect
import re

import griffe

_MADE = ("megatron_adapter.parallel_state.getters",)
_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.M)


class ReadDocstrings(griffe.Extension):
    """Doctests get the section that griffe knows them by, and each argument a row.

    Functions that a module makes of a table are not in its text: they are looked up in the module.
    """

    def on_module_members(self, *, mod: griffe.Module, **_: object) -> None:
        if mod.path not in _MADE:
            return
        made = importlib.import_module(mod.path)
        for name in made.__all__:
            function = getattr(made, name)
            parameters = [
                griffe.Parameter(
                    each.name, annotation=str(each.annotation),
                    kind=griffe.ParameterKind.positional_or_keyword,
                    default=None if each.default is each.empty else repr(each.default),
                )
                for each in inspect.signature(function).parameters.values()
            ]  # fmt: skip
            found = griffe.Function(name, parameters=griffe.Parameters(*parameters), lineno=1)
            found.docstring = griffe.Docstring(function.__doc__, parent=found)
            mod.set_member(name, found)

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _one_by_one(_with_examples(obj.docstring.value))


def _with_examples(text: str) -> str:
    """The docstring with its doctests under `Examples:`, indented."""
    paragraphs = re.sub(r"^Example:$", "Examples:", text, flags=re.M).split("\n\n")
    for place, paragraph in enumerate(paragraphs):
        if paragraph.startswith(">>> "):
            lines = [f"    {line}" for line in paragraph.splitlines()]
            paragraphs[place] = "\n".join(["Examples:", *lines])
    return "\n\n".join(paragraphs)


def _one_by_one(text: str) -> str:
    """`tp, pp: sizes` as two arguments, or two errors, with the same text."""
    paragraphs = text.split("\n\n")
    for place, paragraph in enumerate(paragraphs):
        if paragraph.startswith(("Args:", "Raises:")):
            paragraphs[place] = _SEVERAL.sub(
                lambda found: "\n".join(
                    f"{found[1]}{name}{found[3]}" for name in found[2].split(", ")
                ),
                paragraph,
            )
    return "\n\n".join(paragraphs)
