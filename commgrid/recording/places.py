"""Places in programs: operation, group and line of an error or of a recorded call.

Those of an error are read from its traceback, so a call that succeeds costs nothing:

    train.py:31 in step            where the program called          ◄─┐
    collectives/plain.py           all_reduce(…, members)              │  outermost to innermost
    torch/…/distributed_c10d.py    all_reduce(…, group)  ◄── group     ▼
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch.distributed as dist

from commgrid.call_records.call import Group
from commgrid.health.frames import OWN, is_ours, is_programs
from commgrid.torch_compat import interposer as torch_calls
from commgrid.torch_compat.groups import backend_of
from commgrid.torch_compat.world import world_key

_GROUPS = ("group", "members", "process_group", "pg")  # names of arguments
_WAITED_FOR = "its_group"  # name of the argument of functions that only wait
_MOST_PLACES = 16  # of a stack, the innermost ones
_MOST_STACKS = 10_000
_PASSES_ON = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
"""Flags of a function that passes any arguments on, so the call is made further inside: torch's
decorators (`no_grad`, the hooks of an optimizer's step), calls of modules, autograd functions."""


@dataclass(frozen=True)
class Whereabouts:
    """The call in which a rank was.

    Args:
        operation: such as `all_reduce`; if it is not known, the function of commgrid or torch that
            was called; "": not known.
        group: the names of its communicator; "": not known.
        ranks: the communicator's ranks.
        line: where the program called: `train.py:31 in step`; "": not known.
    """

    operation: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    line: str = ""

    def __str__(self) -> str:
        known = [f"in {self.operation}"] if self.operation else []
        if self.group:
            known.append(f"on group {self.group!r}")
        if self.line:
            known.append(f"({self.line})" if known else f"at {self.line}")
        return " ".join(known) or "at an unknown place"


def whereabouts(error: BaseException) -> Whereabouts | None:
    """Return the call in which this rank was when it raised, None if it is not known."""
    line, called = _outer_line(error), ""
    on: tuple[str, dist.ProcessGroup] | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not is_ours(code.co_filename):
            if is_programs(code.co_filename):
                line = _line(code, number)
                called, on = "", None
            continue
        passes_on = code.co_flags & _PASSES_ON == _PASSES_ON
        if code.co_name != "named_failures" and not called and not passes_on:
            called = code.co_qualname
        group = _group_of(frame)
        if group is not None:
            on = code.co_name, group
        elif on is None and (group := _group_of(frame, (_WAITED_FOR,))) is not None:
            on = called, group
    if on is None:
        return Whereabouts(called, line=line) if called or line else None
    operation, held = on[0], group_of(on[1])
    return Whereabouts(operation.lstrip("_"), held.name.replace(",", ", "), held.ranks, line)


def _outer_line(error: BaseException) -> str:
    """The program's line that called the function in which an error was caught."""
    frame = error.__traceback__.tb_frame.f_back if error.__traceback__ is not None else None
    while frame is not None and not is_programs(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _line(frame.f_code, frame.f_lineno)


def _line(code: CodeType, number: int) -> str:
    return f"{Path(code.co_filename).name}:{number} in {code.co_name}"


def _group_of(frame: FrameType, names: Sequence[str] = _GROUPS) -> dist.ProcessGroup | None:
    """The group that a function was called on, if it has an argument of such a name."""
    for name in names:
        found = frame.f_locals.get(name)
        if isinstance(found, dist.ProcessGroup):
            return found
    return None


def group_of(its_group: dist.ProcessGroup) -> Group:
    """Return a communicator as records have it: with commgrid's names for its own, else torch's.

    The key has torch's name, which is the same on all members, and the world, since another world
    may have a group of that name.
    """
    name = described = backend = ""
    ranks: tuple[int, ...] = ()
    with suppress(RuntimeError, ValueError, KeyError):  # torch does not know of it, or not any more
        name, described = its_group.group_name, its_group.group_desc
        ranks = tuple(dist.get_process_group_ranks(its_group))
        backend = backend_of(its_group)
    called = described
    if described in ("", "undefined"):
        called = name or "?"
    elif name.startswith("commgrid/") and (owner := name.split("/", 2)[1]) != "default":
        called = f"{owner}:{described}"
    return Group(called, ranks, f"{name}@{world_key()}", backend)


def caller() -> str:
    """Return file, line and function of the program's innermost frame; called by listeners.

    On threads without one, such as autograd's, it is the innermost frame of commgrid.
    """
    for code, line in _program(sys._getframe(2)):
        return f"{Path(code.co_filename).name}:{line} {code.co_name}"
    return "?"


def _program(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """The program's frames from the innermost on; without any, that of commgrid."""
    found, own = list[tuple[CodeType, int]](), list[tuple[CodeType, int]]()
    while frame is not None:
        code = frame.f_code
        if _is_programs(code.co_filename):
            found.append((code, frame.f_lineno))
        elif not own and _is_own(code.co_filename):
            own.append((code, frame.f_lineno))
        frame = frame.f_back
    return found or own


_is_programs = cache(is_programs)


@cache
def _is_own(file: str) -> bool:
    return file.startswith(OWN) and file != torch_calls.__file__


class Stacks:
    """Numbers of stacks, by the instruction of each frame.

    Args:
        number: returns the number of a new stack, given file, line and function of each of the
            program's frames from the outermost on.
    """

    def __init__(self, number: Callable[[list[tuple[str, int, str]]], int]) -> None:
        self._number = number
        # The code objects are kept, so that no other gets the address of one.
        self._held: dict[tuple[int, ...], tuple[int, list[CodeType]]] = {}

    def __call__(self) -> int:
        """Return the number of the stack from which the caller was called."""
        codes: list[CodeType] = []
        at: list[int] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            codes.append(frame.f_code)
            at.append(frame.f_lasti)
            frame = frame.f_back
        key = (*map(id, codes), *at)
        held = self._held.get(key)
        return self._new(key, codes) if held is None else held[0]

    def _new(self, key: tuple[int, ...], codes: list[CodeType]) -> int:
        places = [
            (code.co_filename, line, code.co_name)
            for code, line in _program(sys._getframe(3))[:_MOST_PLACES]
        ]
        number = self._number(places[::-1])
        if len(self._held) >= _MOST_STACKS:
            self._held.clear()
        self._held[key] = number, codes
        return number
