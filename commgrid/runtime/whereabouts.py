"""Where an error comes from: which operation, on which group of the grid, called at which line.

It is read from the error's traceback, so that it costs nothing while all goes well:

    train.py:31 in step            where the program called          ◄─┐
    collectives/plain.py           all_reduce(…, members)              │  outermost to innermost
    torch/…/distributed_c10d.py    all_reduce(…, group)  ◄── group     ▼
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from commgrid.health.frames import is_ours, is_programs

_GROUPS = ("group", "members", "process_group", "pg")  # what the argument is called


@dataclass(frozen=True)
class Whereabouts:
    """The call in which a rank was.

    Args:
        operation: such as `all_reduce`; what it called of commgrid's or torch's, where no group is
            known; "": nothing of theirs.
        group: the names of its communicator; "": not known.
        ranks: who is in it.
        line: where the program called: `train.py:31 in step`; "": not known.
    """

    operation: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    line: str = ""

    def __str__(self) -> str:
        on = f" on group {self.group!r}" if self.group else ""
        if not self.operation:
            return f"at {self.line}"
        return f"in {self.operation}{on}" + (f" ({self.line})" if self.line else "")


def whereabouts(error: BaseException) -> Whereabouts | None:
    """Return the call in which this rank was when it raised, None if it is not known."""
    line, called = "", ""
    on: tuple[str, dist.ProcessGroup] | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not is_ours(code.co_filename):
            if is_programs(code.co_filename):
                line = f"{Path(code.co_filename).name}:{number} in {code.co_name}"
                called, on = "", None
            continue
        if code.co_name != "named_failures" and not called:
            called = getattr(code, "co_qualname", code.co_name)
        group = _group_of(frame)
        if group is not None:
            on = code.co_name, group
    if on is None:
        return Whereabouts(called, line=line) if called or line else None
    operation, group = on
    ranks: tuple[int, ...] = ()
    with suppress(RuntimeError, ValueError, KeyError):  # it was destroyed meanwhile
        ranks = tuple(dist.get_process_group_ranks(group))
    names = ", ".join((group.group_desc or group.group_name).split(","))
    return Whereabouts(operation.lstrip("_"), names, ranks, line)


def _group_of(frame: FrameType) -> dist.ProcessGroup | None:
    """The group that a function was called on, if it says."""
    for name in _GROUPS:
        found = frame.f_locals.get(name)
        if isinstance(found, dist.ProcessGroup):
            return found
    return None
