"""torch's all-to-all of equal shares, on NCCL communicators that do not block.

A grid's communicators connect within a time because NCCL answers "in progress" and torch waits for
it. One call of torch's does not: `all_to_all_single` without sizes (seen in 2.11 with NCCL 2.28),
which is then an error, "NCCL operation in progress". With the sizes of each rank's share it waits
as all others do, so these are filled in. It can go when torch waits in that call as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor

_METHODS = ("alltoall_base", "all_to_all_single")  # torch 2.11 has the first, and later the other
_groups: WeakSet[dist.ProcessGroup] = WeakSet()


def fill_in_sizes(group: dist.ProcessGroup) -> None:
    """From now on an all-to-all without sizes on this group is one of equal sizes."""
    _groups.add(group)
    for name in _METHODS:
        method = vars(dist.ProcessGroup).get(name)
        if method is not None and not hasattr(method, "fills_in_sizes"):
            mended = _filling(getattr(dist.ProcessGroup, name))
            mended.fills_in_sizes = True  # type: ignore[attr-defined]
            setattr(dist.ProcessGroup, name, mended)


def _filling(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        if group in _groups and len(args) >= 4 and not args[2] and not args[3]:
            output, given, _, _, *more = args
            args = (output, given, _shares(output, group), _shares(given, group), *more)
        return method(group, *args, **options)

    return call


def _shares(tensor: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Of equal ranks; none where it cannot be shared equally, which torch then says."""
    each, rest = divmod(tensor.shape[0] if tensor.dim() else 0, group.size())
    return [] if rest or not each else [each] * group.size()
