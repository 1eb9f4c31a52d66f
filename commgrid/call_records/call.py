"""A call: a collective that one rank issues, or one half of a message.

The same for calls that ranks have recorded, for those of a dry record, and for programs that are
written by hand. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from commgrid.call_records.operations import TRANSFERS, Alike, alike

Handle = int | str
_EMPTY = -1  # the size of a tensor without elements; 0: not recorded, or sizes may differ


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """A communicator: what it is called, and its ranks in group order.

    Args:
        name: all its names with commas, for people; two communicators may have the same.
        ranks: global ones; none: not recorded.
        key: tells it from every other communicator of the job, the same on all its members; "": the
            name and the ranks do.
        backend: such as `gloo`; "": not recorded.
    """

    name: str
    ranks: tuple[int, ...]
    key: str = ""
    backend: str = field(default="", compare=False)

    @property
    def first(self) -> str:
        """Its first name."""
        return self.name.split(",")[0]

    @property
    def short(self) -> str:
        """The first name, and how many more it has.

        >>> Group("dp", (0, 1)).short, Group("tp,cp,ep", (0, 1)).short
        ('dp', 'tp +2')
        """
        more = self.name.count(",")
        return f"{self.first} +{more}" if more else self.first


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, or one half of a message.

    Args:
        group: on which communicator.
        operation: `send` or `recv`, or a collective such as `all_reduce`.
        peer: the global rank of a message's other side; None: any.
        shape, dtype, bytes: of the input, if known; of `recv` the output.
        root: the global rank that a broadcast, reduce, gather or scatter is about, where known.
        tag: a message's tag on gloo; 0 on backends that match messages by order alone.
        handle: what a `Wait` names; None: the call is waited for where it stands.
        number: the rank's earlier calls on the communicator, of all kinds; it names the call within
            one rank. None: counted in this program.
        where: file, line and function of the program.
        output: bytes of the output, if known and equal on all ranks.
        reduction: such as `SUM`, where known.
        turn: the number that matches calls of different ranks: of a collective, the rank's earlier
            collectives on the communicator; of a message, those in this direction and with this tag
            between the two. None: counted in this trace.
        began, issued, ended: seconds of the wall clock, of a recorded call; None where it had not
            come to that.
        thread: the number of the thread that issued it, within its process.
        waiting: whether a thread waits in it, of a recorded call.
        stack: places of the program from the outermost to `where`; empty: not recorded.
        sizes: of an all-to-all, the bytes for each member, then those from each; empty: not
            recorded.
    """

    group: Group
    operation: str
    peer: int | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: int = 0
    root: int | None = None
    tag: int = 0
    handle: Handle | None = None
    number: int | None = None
    where: str = ""
    output: int | None = None
    reduction: str = ""
    turn: int | None = None
    began: float = 0.0
    issued: float | None = None
    ended: float | None = None
    thread: int = 0
    waiting: bool = False
    stack: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def alike(self) -> Alike:
        """The properties that must agree on all ranks."""
        size = self.bytes or (math.prod(self.shape) or _EMPTY if self.shape else 0)
        return alike(self.operation, self.dtype, size, self.output, self.root, self.reduction)

    @property
    def is_transfer(self) -> bool:
        """Whether it is between two ranks alone."""
        return self.operation in TRANSFERS

    def recorded(self) -> dict[str, Any]:
        """The properties that are not the default, which means that nothing was recorded."""
        held = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, default) in held.items() if value != default}

    def said(self) -> str:
        """Operation, dtype and shape.

        >>> Call(Group("dp", ()), "reduce", None, (2, 3), "float32", root=1, reduction="MAX").said()
        'reduce of float32 [2, 3] (MAX) with root 1'
        """
        tensor = f" of {f'{self.dtype} '.lstrip()}{list(self.shape)}"
        reduction = "" if self.reduction in ("", "SUM") else f" ({self.reduction})"
        root = "" if self.root is None else f" with root {self.root}"
        return f"{self.operation}{tensor if self.dtype or self.shape else ''}{reduction}{root}"


def on_group(name: str, ranks: Sequence[int], rank: int | None) -> int | None:
    """The global rank of a member, by its place in the group.

    Raises:
        ValueError: the group has no such member.
    """
    if rank is not None and ranks:
        if not 0 <= rank < len(ranks):
            raise ValueError(f"member {rank} of the {len(ranks)} of {name}")
        return ranks[rank]
    return rank
