"""torch's fake backend, a little less fake: every rank is taken to have what this one has.

A fake all-reduce leaves what it was given, so that a count of ranks is 1. Here a sum is this rank's
number times the ranks, and a product its power, which is what programs check; maxima and gathers
stay torch's: a gather is so many copies. Messages and broadcasts of whole numbers, such as the
shape of the next tensor or a pickled object, reach ranks that run later; others have any content.
Functional collectives do not come through Python, and stay torch's.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Container
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commgrid.call_records.operations import methods
from commgrid.rendezvous.timeouts import timeouts


def pretend(folder: Path, earlier: Container[int], patience: float = 60.0) -> None:
    """Makes the fake world of this process, until it ends, one of equal ranks.

    Args:
        folder: through which whole numbers go to ranks that run later.
        earlier: ranks that began before this one; others' numbers are not waited for.
        patience: seconds to wait for a number.
    """
    for name, operation in methods():
        # The first argument of one that reduces holds what comes out.
        if operation.reduces and name in vars(dist.ProcessGroup):
            setattr(dist.ProcessGroup, name, _reducing(getattr(dist.ProcessGroup, name)))
    messages = _Messages(folder, earlier, patience)
    kind: Any = dist.ProcessGroup
    kind.send = messages.sending(kind.send)
    kind.recv = messages.receiving(kind.recv)
    kind.broadcast = messages.broadcasting(kind.broadcast)


def _reducing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(group: dist.ProcessGroup, found: Any, *args: Any, **options: Any) -> Any:
        work = method(group, found, *args, **options)
        given = [each for each in (*args, *options.values()) if hasattr(each, "reduceOp")]
        operation = given[0].reduceOp if given else dist.ReduceOp.SUM
        scatters = "scatter" in method.__name__
        many = isinstance(found, list | tuple)
        for number, tensor in enumerate(found if many else [found]):
            tensor = tensor.detach()  # torch's own take parameters too
            if scatters:  # torch 2.11's fake backend leaves it unset
                parts = args[0][number] if many else args[0]
                if not isinstance(parts, list | tuple):
                    parts = parts.chunk(group.size())
                tensor.copy_(parts[group.rank()].detach().view_as(tensor))
            if operation == dist.ReduceOp.SUM:
                tensor.mul_(group.size())
            elif operation == dist.ReduceOp.PRODUCT:
                tensor.pow_(group.size())
        return work

    return call


class _Messages:
    """Whole numbers on their way, each in a file."""

    def __init__(self, folder: Path, earlier: Container[int], patience: float) -> None:
        self._folder, self._earlier, self._patience = folder, earlier, patience
        self._counts: Counter[tuple[int, int | str]] = Counter()

    def sending(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(group: dist.ProcessGroup, tensors: Any, peer: int, *args: Any) -> Any:
            if _is_whole(tensors[0]):
                _write(tensors[0], self._next(dist.get_rank(), _global(group, peer)))
            return method(group, tensors, peer, *args)

        return call

    def receiving(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(group: dist.ProcessGroup, tensors: Any, peer: int, *args: Any) -> Any:
            work = method(group, tensors, peer, *args)
            if _is_whole(tensors[0]):
                source = _global(group, peer)
                self._read(tensors[0], source, self._next(source, dist.get_rank()))
            return work

        return call

    def broadcasting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(group: dist.ProcessGroup, tensors: Any, *args: Any, **options: Any) -> Any:
            work = method(group, tensors, *args, **options)
            given = [each for each in (*args, *options.values()) if hasattr(each, "rootRank")]
            if _is_whole(tensors[0]) and given:
                source = _global(group, given[0].rootRank)
                name = hashlib.sha256(group.group_name.encode()).hexdigest()[:16]
                path = self._next(source, name)
                if source == dist.get_rank():
                    _write(tensors[0], path)
                else:
                    self._read(tensors[0], source, path)
            return work

        return call

    def _read(self, tensor: torch.Tensor, source: int, path: Path) -> None:
        """Fill a tensor with the numbers that a rank has sent, if they come."""
        until = time.monotonic() + (self._patience if source in self._earlier else 0.0)
        while not path.exists() and time.monotonic() < until:
            time.sleep(10 * timeouts().poll)
        if path.exists():
            tensor.copy_(torch.load(path, weights_only=True))

    def _next(self, source: int, target: int | str) -> Path:
        """Return the file of the next message from a rank to another, or to a group."""
        number = self._counts[source, target]
        self._counts[source, target] += 1
        return self._folder / f"{source}_{target}_{number}.pt"


def _write(tensor: torch.Tensor, path: Path) -> None:
    torch.save(tensor, path.with_suffix(".half"))
    path.with_suffix(".half").rename(path)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _global(group: dist.ProcessGroup, peer: int) -> int:
    return dist.get_process_group_ranks(group)[peer]
