"""The ranks of a group agree on what they are about to compute, the first time they do.

Each rank waits for messages whose sizes follow from the sharding and the shapes. Where one rank has
others, it would raise and the rest wait for it, so all tell each other first, and all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.objects import gathered
from commgrid.errors import ShapeError, SpecError
from commgrid.runtime.failures import GoneError, who_is_missing
from commgrid.runtime.torch_world import first_line, is_peer_failure

Backward = TypeVar("Backward", bound=Callable[..., Any])
Facts = tuple[tuple[str, str], ...]
"""What must be the same on all ranks: its name and what it is, in words."""

_MOST_KNOWN = 4096

# What the ranks of a communicator have agreed on; it is gone with the communicator.
_agreed: WeakKeyDictionary[ProcessGroup, set[object]] = WeakKeyDictionary()


@contextmanager
def named_peers(group: ProcessGroup) -> Iterator[None]:
    """Within it, torch's error about a rank that does not answer is one that names the rank.

    Raises:
        GoneError: a rank is gone, or did not call attention or its backward as the others did.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        ranks = dist.get_process_group_ranks(group)
        who = who_is_missing(f"commgrid/attention/late/{group.group_name}", ranks, "the call")
        raise GoneError(
            f"attention over group {group.group_desc!r} of {group.size()} ranks: {who} "
            f"({first_line(error)}); its ranks call attention equally often, with tensors of one "
            "sharding, and its backward"
        ) from error


def names_peers(backward: Backward) -> Backward:
    """A backward of a ctx with a `group`, within `named_peers`."""

    @wraps(backward)
    def named(ctx: Any, *gradients: Tensor) -> Any:
        with named_peers(ctx.group):
            return backward(ctx, *gradients)

    return cast("Backward", named)


def agree(group: ProcessGroup, about: str, facts: Facts, complaint: str | None) -> None:
    """Raises on all ranks of a group what is wrong on any of them.

    Collective the first time that facts are new, and costs nothing after that. So a rank whose
    facts alone are new later on raises, or waits until the group's timeout.

    Args:
        group: whose ranks compute together.
        about: what the message begins with.
        facts: the first one's text stands for what the rest is about.
        complaint: what is wrong on this rank.

    Raises:
        ShapeError: some rank has a complaint.
        SpecError: ranks have other facts.
    """
    known = _agreed.setdefault(group, set())
    if facts in known and complaint is None:
        return
    if group.size() > 1 and (complaint is None or facts[0] not in known):
        told = gathered((facts, complaint), group)
    else:
        told = [(facts, complaint)] * group.size()
        if complaint is not None:
            raise ShapeError(f"{about}: {complaint}")
    complaints = {text: rank for rank, (_, text) in reversed(list(enumerate(told))) if text}
    if complaints:
        text, rank = next(iter(sorted(complaints.items(), key=lambda item: item[1])))
        raise ShapeError(f"{about}: rank {rank} of the group: {text}")
    for rank, (theirs, _) in enumerate(told):
        for (name, first), (_, other) in zip(told[0][0], theirs, strict=True):
            if first != other:
                raise SpecError(
                    f"{about}: ranks 0 and {rank} of the group have other {name}: {first} and "
                    f"{other}; all must be given the same"
                )
    if len(known) > _MOST_KNOWN:
        known.clear()
    known.update((facts, facts[0]))
