"""Use of a module's variables by its functions, read from their code."""

from __future__ import annotations

import dis
import inspect
from types import CodeType, FunctionType, ModuleType


class ModuleCode:
    """A module's own functions, and what they touch.

    Args:
        module: imported; its functions as they are now.
    """

    def __init__(self, module: ModuleType) -> None:
        self._variables = vars(module)
        found = {
            name: inspect.unwrap(value)
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__name__ == name
        }
        self.functions: dict[str, FunctionType] = {
            name: function
            for name, function in found.items()
            if function.__globals__ is vars(module) and not function.__code__.co_freevars
        }
        """Functions of its own, without their decorators."""
        used = {name: _globals(function.__code__) for name, function in self.functions.items()}
        self._used = {name: read | stored for name, (read, stored) in used.items()}
        self._stored = {name: stored for name, (_, stored) in used.items()}

    def touched_by(self, function: str) -> set[str]:
        """The variables that a function reads or sets, itself or in functions that it calls."""
        return {name for one in self._reached_by(function) for name in self._used[one]}

    def set_by(self, function: str) -> set[str]:
        """The variables that it assigns so, and empty lists, dicts and sets that it may fill."""
        assigned = {name for one in self._reached_by(function) for name in self._stored[one]}
        return assigned | {
            name for name in self.touched_by(function)
            if isinstance(value := self._variables.get(name), list | dict | set) and not value
        }  # fmt: skip

    def _reached_by(self, function: str) -> set[str]:
        reached, left = {function}, [function]
        while left:
            more = (self._used[left.pop()] & self.functions.keys()) - reached
            reached |= more
            left += more
        return reached


def _globals(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the global names that code reads, and the ones that it sets or deletes."""
    read: set[str] = set()
    stored: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            read.add(instruction.argval)
        elif instruction.opname.endswith("_GLOBAL"):
            stored.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            inner_read, inner_stored = _globals(inner)
            read |= inner_read
            stored |= inner_stored
    return read, stored
