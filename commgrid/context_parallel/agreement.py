"""The ranks of a group agree on what they are about to compute, the first time they do.

Each rank waits for messages whose sizes follow from the sharding and the shapes. Where one rank has
others, it would raise and the rest wait for it, so all tell each other first, and all raise.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from commgrid.collectives.objects import gathered
from commgrid.errors import ShapeError, SpecError

Facts = tuple[tuple[str, str], ...]
"""What must be the same on all ranks: its name and what it is, in words."""

_MOST_KNOWN = 4096

# What the ranks of a communicator have agreed on; it is gone with the communicator.
_agreed: WeakKeyDictionary[ProcessGroup, set[object]] = WeakKeyDictionary()


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
