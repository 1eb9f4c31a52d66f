"""Asynchronous collectives, so that computation continues while they run.

Each takes a live `ProcessGroup` of more than one rank and returns a `Pending`, whose `wait()`
gives the result. They are what `collectives` and the layers are written with.

On the CPU, ranks exchange their slices and add them up themselves, in group order: gloo's own
reduce-scatter takes several times longer (4 ranks, 16 MB: 87 ms against 17 ms).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.errors import ShapeError
from commgrid.torch_compat.ended_groups import follow, wait_unless_broken

# torch 2.13 renames these two and warns of the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Pending:
    """A collective under way.

    Args:
        work: torch's handle; None: done already.
        finish: returns the result once the handle is done.
        group: whose ranks take part.
    """

    work: dist.Work | None
    finish: Callable[[], Tensor]
    group: ProcessGroup

    def __post_init__(self) -> None:
        if self.work is not None and not torch.compiler.is_compiling():
            follow(self.work, self.group)

    def wait(self) -> Tensor:
        """The result, once it has arrived (on CUDA: once the stream may use it)."""
        if self.work is not None and not torch.compiler.is_compiling():
            wait_unless_broken(self.work, self.group)
        return self.finish()


def start_all_reduce_(
    tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Pending:
    """The sum over the group, written into the contiguous `tensor` itself."""
    return Pending(dist.all_reduce(tensor, op, group, async_op=_beside()), lambda: tensor, group)


def start_all_gather(
    tensor: Tensor, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None
) -> Pending:
    """Every rank's tensor joined along `dim`, in which they may differ.

    Args:
        sizes: the extent of every rank's tensor in `dim`; None: all equal.

    Raises:
        ShapeError: sizes of another number of ranks, or another one for this rank.
    """
    if sizes is not None and (
        len(sizes) != group.size() or sizes[group.rank()] != tensor.shape[dim]
    ):
        raise ShapeError(
            f"sizes={list(sizes)} are not those of the {group.size()} ranks of group "
            f"{group.group_desc!r}, of which rank {group.rank()} has a tensor of shape "
            f"{tuple(tensor.shape)}, to be joined along dim {dim}; "
            "expected each rank's length, in the group's order"
        )
    if sizes is not None and len(set(sizes)) > 1:
        return _start_uneven_all_gather(tensor, group, dim, sizes)
    tensor = tensor.contiguous()
    parts = tensor.new_empty((group.size(), *tensor.shape))
    work = _all_gather_single(parts.flatten(0, 1), tensor, group, async_op=_beside())
    if dim in (0, -tensor.dim()):
        return Pending(work, lambda: parts.flatten(0, 1), group)
    return Pending(work, lambda: torch.cat(parts.unbind(), dim), group)


def start_all_gather_(buffer: Tensor, group: ProcessGroup) -> Pending:
    """Fills a flat buffer of which this rank has filled its own of n equal parts."""
    own = buffer.chunk(group.size())[group.rank()]
    work = _all_gather_single(buffer, own, group, async_op=_beside())
    return Pending(work, lambda: buffer, group)


def start_reduce_scatter_(buffer: Tensor, group: ProcessGroup) -> Pending:
    """Sums a flat buffer of n equal parts; only this rank's part is then the sum."""
    return _start_reduce_scatter(buffer, group, buffer.chunk(group.size())[group.rank()])


def start_reduce_scatter(
    tensor: Tensor, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None
) -> Pending:
    """This rank's slice along `dim` of the sum.

    Args:
        sizes: the extent of every rank's slice; None: equal ones.

    Raises:
        ShapeError: the group's size does not divide the dim, or the sizes do not add up to it.
    """
    each = shares(tensor, group, dim, sizes)
    if sizes is not None and len(set(sizes)) > 1:
        return _start_uneven_reduce_scatter(tensor, group, dim, sizes)
    if dim not in (0, -tensor.dim()):
        tensor = torch.cat(torch.split(tensor, each[0], dim))
    tensor = tensor.contiguous()
    own = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    return _start_reduce_scatter(tensor, group, own)


def _start_reduce_scatter(tensor: Tensor, group: ProcessGroup, own: Tensor) -> Pending:
    """Into `own`, which may be the own part of `tensor`."""
    if tensor.device.type != "cpu":
        work = _reduce_scatter_single(own, tensor, group=group, async_op=_beside())
        return Pending(work, lambda: own, group)
    parts = torch.empty_like(tensor)
    work = dist.all_to_all_single(parts, tensor, group=group, async_op=_beside())
    shape = (group.size(), *own.shape)
    return Pending(work, lambda: torch.sum(parts.view(shape), 0, out=own), group)


def start_all_to_all(
    tensor: Tensor, group: ProcessGroup, send: Sequence[int], receive: Sequence[int]
) -> Pending:
    """Exchange rows of dim 0: `send[i]` rows to rank i, `receive[i]` from it, in group order."""
    tensor = tensor.contiguous()
    received = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    work = dist.all_to_all_single(
        received, tensor, list(receive), list(send), group=group, async_op=_beside()
    )
    # The lambda keeps the sent tensor alive as long as the handle: gloo does not.
    return Pending(work, lambda: (received, tensor)[0], group)


def _start_uneven_all_gather(
    tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int]
) -> Pending:
    rows = tensor.movedim(dim, 0).contiguous()
    if rows.device.type == "cpu":  # gloo gathers equal shapes only
        copies = rows.expand(group.size(), *rows.shape).flatten(0, 1)
        pending = start_all_to_all(copies, group, [len(rows)] * group.size(), sizes)
        return Pending(pending.work, lambda: pending.finish().movedim(0, dim), group)
    whole = rows.new_empty((sum(sizes), *rows.shape[1:]))
    work = dist.all_gather(list(torch.split(whole, list(sizes))), rows, group, async_op=_beside())
    return Pending(work, lambda: whole.movedim(0, dim), group)


def _start_uneven_reduce_scatter(
    tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int]
) -> Pending:
    rows = tensor.movedim(dim, 0).contiguous()
    own = sizes[group.rank()]
    if rows.device.type == "cpu":
        pending = start_all_to_all(rows, group, sizes, [own] * group.size())
        shape = (group.size(), own, *rows.shape[1:])
        return Pending(
            pending.work, lambda: pending.finish().view(shape).sum(0).movedim(0, dim), group
        )
    part = rows.new_empty((own, *rows.shape[1:]))
    parts = list(torch.split(rows, list(sizes)))
    work = dist.reduce_scatter(part, parts, group=group, async_op=_beside())
    return Pending(work, lambda: part.movedim(0, dim), group)


def _beside() -> bool:
    """Whether collectives are asynchronous; torch.compile supports only blocking calls.

    Under torch.compile the returned handle may be a tensor (torch 2.11).
    """
    return not torch.compiler.is_compiling()


def as_output(made: Tensor) -> Tensor:
    """A forward's output `made` by in-place writes, as received tensors are: a view if compiled.

    torch 2.11 compiles an autograd.Function with such an output so that it silently gets no
    gradient; a view of the output does. In eager mode, returns the tensor itself, and the caller
    may write into it.
    """
    return made.view_as(made) if torch.compiler.is_compiling() else made


def shares(
    tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int] | None = None
) -> Sequence[int]:
    """Elements of `dim` for each rank of a group: as `sizes` says; None: equally many.

    Raises:
        ShapeError: the group's size does not divide the dim, or there is not one size for each
            rank, or they do not add up.
    """
    if sizes is None:
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] % group.size():
            raise ShapeError(
                f"dim {dim} of a tensor of shape {tuple(tensor.shape)} cannot be shared equally "
                f"among the {group.size()} ranks of group {group.group_desc!r}; expected a "
                "multiple of it"
            )
        return [int(tensor.shape[dim]) // group.size()] * group.size()
    if len(sizes) != group.size() or sum(sizes) != tensor.shape[dim]:
        raise ShapeError(
            f"sizes={list(sizes)} do not share dim {dim} of a tensor of shape "
            f"{tuple(tensor.shape)} among the {group.size()} ranks of group {group.group_desc!r}; "
            "expected a length for each rank, which add up to the dim"
        )
    return sizes
