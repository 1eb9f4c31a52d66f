"""Agreement: the ranks of a group compare the arguments of a call before they exchange tensors.

Each rank waits for messages whose sizes and order follow from the sharding and the shapes. So every
attention call begins with one small all-gather of a row from each rank: its arguments, or its
complaint about them. Unequal rows are an error on all ranks.

On the CPU the rows are compared before anything else is sent. If the group has no CPU backend, the
host does not wait for them: they are compared by the first call or backward after their arrival.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.plain import all_gather
from commgrid.errors import ShapeError, SpecError
from commgrid.health.culprit import who_is_missing
from commgrid.runtime.named_failures import GoneError
from commgrid.store.search import first_line
from commgrid.torch_compat.groups import host_device
from commgrid.torch_compat.peer_errors import is_peer_failure

Backward = TypeVar("Backward", bound=Callable[..., Any])
Facts = tuple[tuple[str, str], ...]
"""Name and value of each argument that must be equal on all ranks."""

_ROW, _DIGEST, _COMPLAINT, _FACT = 1024, 16, 400, 200
"""Bytes of a row; of its digest, its complaint and each of at most 3 facts, cut to that length."""


class _Told(NamedTuple):
    """The rows of one call.

    Args:
        rows: (ranks, _ROW), on the host.
        here: whether they have arrived.
        about, names: for the error; `names` of the facts.
    """

    rows: Tensor
    here: Callable[[], bool]
    about: str
    names: tuple[str, ...]


# Calls whose rows have not been compared yet; gone with the communicator.
_under_way: WeakKeyDictionary[ProcessGroup, deque[_Told]] = WeakKeyDictionary()
_num_calls: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
_connected: WeakSet[ProcessGroup] = WeakSet()


def agree(group: ProcessGroup, about: str, facts: Facts, complaint: str | None) -> None:
    """Raise on all ranks of a group if any of them has other facts or a complaint.

    Collective. A CUDA graph is not captured with it: replays would compare the same rows again.

    Args:
        group: whose ranks compute together.
        about: beginning of the message.
        facts: at most 3.
        complaint: what is wrong on this rank.

    Raises:
        ShapeError: some rank has a complaint.
        SpecError: ranks have other facts.
    """
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if group.size() > 1 and not captured:
        _num_calls[group] = _num_calls.get(group, 0) + 1
        calls = _under_way.setdefault(group, deque())
        calls.append(_started(group, about, facts, complaint))
        compare(group)
    if complaint is not None:
        raise ShapeError(f"{about}: {complaint}")


def connect(group: ProcessGroup) -> None:
    """Connect the ranks of a group, where this is its first use. Collective."""
    if group not in _connected:
        all_gather(torch.zeros(1, device=host_device(group)), group)
        _connected.add(group)


def compare(group: ProcessGroup) -> None:
    """Compare the rows of earlier calls that have come since.

    Raises:
        ShapeError, SpecError: as `agree`.
    """
    calls = _under_way.get(group, deque())
    while calls and calls[0].here():
        told = calls.popleft()
        if not torch.equal(told.rows, told.rows[:1].expand_as(told.rows)):
            calls.clear()
            raise _difference(told)


def _started(group: ProcessGroup, about: str, facts: Facts, complaint: str | None) -> _Told:
    """Start the all-gather of a call; on the CPU it is over."""
    device = host_device(group)
    row = _row(facts, complaint).to(device, non_blocking=True)
    rows, names = all_gather(row, group).view(group.size(), -1), tuple(name for name, _ in facts)
    if device.type == "cpu":
        return _Told(rows, lambda: True, about, names)
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    copied = torch.get_device_module(device).Event()
    copied.record()
    return _Told(host, copied.query, about, names)


@lru_cache(maxsize=256)
def _row(facts: Facts, complaint: str | None) -> Tensor:
    """Facts and complaint as bytes."""
    digest = hashlib.blake2b(repr((facts, complaint)).encode(), digest_size=_DIGEST).digest()
    fields = [((complaint or ""), _COMPLAINT), *((text, _FACT) for _, text in facts)]
    said = b"".join(text.encode()[:size].ljust(size, b"\0") for text, size in fields)
    return torch.frombuffer(bytearray((digest + said).ljust(_ROW, b"\0")), dtype=torch.uint8)


def _difference(told: _Told) -> ShapeError | SpecError:
    """The error for rows that are not equal."""
    fields = [_fields(row) for row in told.rows]
    for rank, (complaint, *_) in enumerate(fields):
        if complaint:
            return ShapeError(f"{told.about}: rank {rank} of the group: {complaint}")
    own = [row.tolist() for row in told.rows]
    rank = next(rank for rank, row in enumerate(own) if row != own[0])
    pairs = zip(told.names, fields[0][1:], fields[rank][1:], strict=False)
    name, first, other = next(
        (pair for pair in pairs if pair[1] != pair[2]), ("arguments", "its own", "its own")
    )
    return SpecError(
        f"{told.about}: ranks 0 and {rank} of the group have other {name}: {first} and {other}; "
        "all must be given the same; make each batch's sharding from data that all ranks read, "
        "such as a data loader's with one seed"
    )


def _fields(row: Tensor) -> list[str]:
    """The complaint and the facts' texts in a row."""
    data = bytes(row.tolist())
    edges = [_DIGEST, *range(_DIGEST + _COMPLAINT, _ROW, _FACT)]
    parts = [data[start:stop] for start, stop in pairwise(edges)]
    return [part.rstrip(b"\0").decode(errors="ignore") for part in parts]


# -- ranks that do not answer -------------------------------------------------------------


@contextmanager
def named_peers(group: ProcessGroup | None, peers: Sequence[int] | None = None) -> Iterator[None]:
    """Turn torch's error about a rank that does not answer into one with the rank's name.

    Args:
        group: None: of one rank, where nothing is sent.
        peers: group ranks that are waited for within it; None: all.

    Raises:
        GoneError: a rank is gone, or did not call attention or its backward as the others did.
    """
    try:
        yield
    except RuntimeError as error:
        if group is None or not is_peer_failure(error):
            raise
        compare(group)
        ranks = dist.get_process_group_ranks(group)
        call = f"{group.group_name}/{_num_calls.get(group, 0)}"  # a later one may fail, too
        awaited = ranks if peers is None else [ranks[peer] for peer in peers]
        who = who_is_missing(f"commgrid/attention/late/{call}", ranks, "the call", awaited)
        raise GoneError(
            f"attention over group {group.group_desc!r} of {group.size()} ranks: {who} "
            f"({first_line(error)}); its ranks call attention equally often, with tensors of one "
            "sharding, and its backward"
        ) from error


def names_peers(backward: Backward) -> Backward:
    """A backward of a ctx with a `group` or None, within `named_peers`, after `compare`."""

    @wraps(backward)
    def named(ctx: Any, *gradients: Tensor) -> Any:
        with named_peers(ctx.group):
            if ctx.group is not None:
                compare(ctx.group)
            return backward(ctx, *gradients)

    return cast("Backward", named)
