"""torch's fake backend, a little less fake: every rank is taken to have what this one has.

A fake all-reduce leaves what it was given, so that a count of ranks is 1. Here a sum is this rank's
number times the ranks, which is what programs check; maxima and gathers stay torch's: a gather is
so many copies. Messages of whole numbers, such as the shape of the next tensor, reach their rank if
it runs later; other messages have any content.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commgrid.rendezvous.timeouts import timeouts

_SUMS = ("allreduce", "allreduce_coalesced", "_reduce_scatter_base", "reduce_scatter")
"""Methods of a process group whose first argument holds what comes out."""


def pretend(folder: Path, patience: float = 60.0) -> None:
    """Makes the fake world of this process, until it ends, one of equal ranks.

    Args:
        folder: through which whole numbers go to ranks that run later.
        patience: seconds to wait for those of a lower rank.
    """
    for name in _SUMS:
        if name in vars(dist.ProcessGroup):
            setattr(dist.ProcessGroup, name, _summing(getattr(dist.ProcessGroup, name)))
    messages = _Messages(folder, patience)
    kind: Any = dist.ProcessGroup
    kind.send = messages.sending(kind.send)
    kind.recv = messages.receiving(kind.recv)


def _summing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(group: dist.ProcessGroup, found: Any, *args: Any, **options: Any) -> Any:
        work = method(group, found, *args, **options)
        given = [each for each in (*args, *options.values()) if hasattr(each, "reduceOp")]
        if not given or given[0].reduceOp == dist.ReduceOp.SUM:
            for tensor in found if isinstance(found, list | tuple) else [found]:
                tensor.mul_(group.size())
        return work

    return call


class _Messages:
    """Whole numbers on their way, each in a file."""

    def __init__(self, folder: Path, patience: float) -> None:
        self._folder, self._patience = folder, patience
        self._counts: Counter[tuple[int, int]] = Counter()

    def sending(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(group: dist.ProcessGroup, tensors: Any, peer: int, *args: Any) -> Any:
            if _is_whole(tensors[0]):
                path = self._next(dist.get_rank(), _global(group, peer))
                torch.save(tensors[0], path.with_suffix(".half"))
                path.with_suffix(".half").rename(path)
            return method(group, tensors, peer, *args)

        return call

    def receiving(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(group: dist.ProcessGroup, tensors: Any, peer: int, *args: Any) -> Any:
            work = method(group, tensors, peer, *args)
            if _is_whole(tensors[0]):
                source = _global(group, peer)
                path = self._next(source, dist.get_rank())
                until = time.monotonic() + (self._patience if source < dist.get_rank() else 0.0)
                while not path.exists() and time.monotonic() < until:
                    time.sleep(10 * timeouts().poll)
                if path.exists():
                    tensors[0].copy_(torch.load(path, weights_only=True))
            return work

        return call

    def _next(self, source: int, target: int) -> Path:
        number = self._counts[source, target]
        self._counts[source, target] += 1
        return self._folder / f"{source}_{target}_{number}.pt"


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _global(group: dist.ProcessGroup, peer: int) -> int:
    return dist.get_process_group_ranks(group)[peer]
