"""Plain Python values over a group, pickled; torch's own object collectives need numpy.

`gathered` returns every rank's value on every rank. `at_first` combines them on one rank: the
values go to the group's first rank, and one answer, or one error that names the failed ranks,
comes back to all, so that no rank continues after another has failed. Work that
takes longer than a collective may, such as a slow disk, runs in `while_others_wait`.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.plain import all_gather, all_to_all, broadcast
from commgrid.errors import CommGridError
from commgrid.layout.rank_text import describe_ranks
from commgrid.store.client import Asked
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.groups import host_device

Value = TypeVar("Value")
Answer = TypeVar("Answer")


def gathered(value: Value, group: ProcessGroup) -> list[Value]:
    """Return every rank's value, in group order. Collective.

    Raises:
        CommGridError: on all ranks, if a rank's value cannot be pickled.
    """
    cause, told = _pickled(lambda: value)
    mine = as_tensor(told, host_device(group))
    lengths = _lengths(len(mine), group)
    padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
    rows = all_gather(padded, group).view(len(lengths), -1)
    found = [
        pickle.loads(as_bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)
    ]
    text = _who(dist.get_process_group_ranks(group), [error for _, error in found])
    if text is not None:
        raise CommGridError(
            f"a value for all ranks cannot be pickled: {text}; give plain data"
        ) from cause
    return [one for one, _ in found]


def at_first(
    group: ProcessGroup | None,
    mine: Callable[[], Value],
    whole: Callable[[list[Value]], Answer],
    failed: Callable[[str], Exception],
) -> Answer:
    """Return `whole(values)` on every rank, computed on the first from each rank's `mine()`.

    Collective over the group.

    Args:
        group: None: this process alone.
        mine: called on every rank; its value is pickled.
        whole: called on the group's first rank, unless `mine` has failed on any rank.
        failed: makes the error that every rank raises from a text such as `rank 3: OSError: …`.

    Raises:
        Exception: the result of `failed`; on a rank that failed, its own error is the cause.
    """
    cause, told = _pickled(mine)
    packed = _gather_at_first(told, group) if group is not None else [told]
    answer = told  # of any length, on the ranks that receive it
    if packed is not None:
        ranks = dist.get_process_group_ranks(group) if group is not None else [_own_rank()]

        def combined() -> Answer:
            found = [pickle.loads(one) for one in packed]
            text = _who(ranks, [error for _, error in found])
            if text is not None:
                raise _Reported(text)
            return whole([one for one, _ in found])

        error, answer = _pickled(combined, f"rank {ranks[0]}: ")
        cause = cause or (None if isinstance(error, _Reported) else error)
    if group is not None:
        answer = _broadcast(answer, group)
    value, text = pickle.loads(answer)
    if text is not None:
        raise failed(text) from cause
    return value  # type: ignore[no-any-return]


@contextmanager
def while_others_wait(
    group: ProcessGroup | None, seconds: float, *, at_whole: bool = False
) -> Iterator[None]:
    """Let the other ranks of `at_first` wait for this block, however long it takes.

    It is part of `mine` or `whole`, and calls no collective. Meanwhile a thread tells the others
    that this rank still works, so that none waits in one collective for long.

    Args:
        group: as `at_first` has it.
        seconds: between two signs of life, less than a collective may take.
        at_whole: whether the block is part of `whole`, for which the others wait already.

    Raises:
        RuntimeError: torch's, as from a collective: another rank is gone.
    """
    if group is None:
        yield
        return
    say, device = _say_length if at_whole else _lengths, host_device(group)
    index = None if device.type == "cpu" else torch.accelerator.current_device_index()
    ended = threading.Event()

    def run() -> None:
        if index is not None:
            torch.accelerator.set_device_index(index)
        while not ended.wait(seconds):
            say(_WORKING, group)

    signs = Asked(run, lasts=True)
    try:
        yield
    except Exception:
        ended.set()
        signs.is_over(threading.TIMEOUT_MAX)
        raise
    finally:  # at Ctrl-C no rank waits for the others
        ended.set()
    signs.is_over(threading.TIMEOUT_MAX)
    signs.answer()


_WORKING = -1
"""The length of a value that is not there yet, and is going to be told again."""


class _Reported(Exception):
    """Errors of several ranks, each with its ranks already."""


def _pickled(make: Callable[[], Any], who: str = "") -> tuple[Exception | None, bytes]:
    """A pickle of (value, None); or the error, and a pickle of (None, its text)."""
    try:
        return None, pickle.dumps((make(), None))
    except _Reported as error:
        return error, pickle.dumps((None, str(error)))
    except Exception as error:
        return error, pickle.dumps((None, f"{who}{_told(error)}"))


def _told(error: Exception) -> str:
    """The error as text, with its type unless it is one of commgrid's."""
    own = isinstance(error, CommGridError)
    return f"{error}" if own else f"{type(error).__name__}: {error}"


def _who(ranks: list[int], errors: list[str | None]) -> str | None:
    """Each error with the ranks that raised it; None: no rank did."""
    having: dict[str, list[int]] = {}
    for rank, error in zip(ranks, errors, strict=True):
        if error is not None:
            having.setdefault(error, []).append(rank)
    lines = [f"{describe_ranks(who)}: {error}" for error, who in having.items()]
    more = f"; and {len(lines) - 4} other errors" if len(lines) > 4 else ""
    return "; ".join(lines[:4]) + more if lines else None


def _own_rank() -> int:
    return torch_world.world_rank() if torch_world.is_initialized() else 0


# -- transport ---------------------------------------------------------------------------


def _gather_at_first(data: bytes, group: ProcessGroup) -> list[bytes] | None:
    mine = as_tensor(data, host_device(group))
    while min(lengths := _lengths(len(mine), group)) == _WORKING:
        pass
    others = [0] * (group.size() - 1)
    is_first = group.rank() == 0
    received = all_to_all(
        mine, group, send=[len(mine), *others],
        receive=lengths if is_first else [0, *others],
    )  # fmt: skip
    if not is_first:
        return None
    return [as_bytes(one) for one in torch.split(received, lengths)]


def _broadcast(told: bytes, group: ProcessGroup) -> bytes:
    data = as_tensor(told, host_device(group))
    while (length := _say_length(len(data), group)) == _WORKING:
        pass
    if group.rank() > 0:
        data = data.new_empty(length)
    return as_bytes(broadcast(data, group))


def _lengths(mine: int, group: ProcessGroup) -> list[int]:
    """The length of every rank's value."""
    told: list[int] = all_gather(torch.tensor([mine], device=host_device(group)), group).tolist()
    return told


def _say_length(mine: int, group: ProcessGroup) -> int:
    """The length of the first rank's value."""
    return int(broadcast(torch.tensor([mine], device=host_device(group)), group))


def as_tensor(data: bytes, device: torch.device) -> Tensor:
    """Bytes as a tensor of uint8, on a device."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def as_bytes(data: Tensor) -> bytes:
    """The bytes of a tensor of uint8, on any device."""
    raw = bytearray(len(data))
    torch.frombuffer(raw, dtype=torch.uint8).copy_(data)
    return bytes(raw)
