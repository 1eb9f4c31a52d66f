"""Cross-entropy of logits that are split over a group by vocabulary.

Each rank needs three numbers per token from the others: the log-sum-exp of their logits, the
target's logit if they have it, and with label smoothing their logits' sum. One all-gather
brings them, and the softmax is only ever made a slice of rows at a time:

    loss = lse - (1 - ε) · logit[target] - ε · Σ logits / v

The softmax is made in backward, from the logits. Where these may be overwritten, forward leaves
exp(logit - largest of the row) in their place, so that backward need not take exp again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commgrid.collectives import Group
from commgrid.collectives.asynchronous import start_all_gather
from commgrid.collectives.first_order import first_order
from commgrid.collectives.group_ref import GroupRef
from commgrid.equality.inputs import note
from commgrid.errors import ShapeError
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel.embedding import check_indices

# Elements of the softmax made at once: what a core's cache holds, or what keeps a GPU busy.
_SLICE = {"cpu": 2**18}
_SLICE_ELSEWHERE = 2**25


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    vocabulary: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "none",
    overwrite_logits: bool = False,
    group: Group = "tp",
    grid: HyperCommGrid | None = None,
) -> Tensor:
    """F.cross_entropy of logits whose classes are shared out over a group.

    Memory beyond the logits: forward 3 numbers per token and rank, and 2 MiB; backward the
    gradient, of the logits' shape and dtype (none with `overwrite_logits`), and 2 MiB (on GPUs
    128 MiB). No rank ever has a tensor of the full vocabulary, nor a copy of its logits.

    Args:
        logits: (*, v'/n), this rank's part of the vocabulary, as VocabParallelHead leaves it;
            computed with in fp32 at least.
        target: (*), integers, equal on all ranks of the group.
        vocabulary: the vocabulary's size v without padding; None: nothing is padding. Columns
            past it count nowhere and get no gradient.
        label_smoothing: ε, the share of the target that is spread over all v classes.
        ignore_index: targets whose loss and gradient are zero.
        reduction: "none", "mean" over targets that are not ignored, or "sum".
        overwrite_logits: forward and backward write over the logits, as Megatron's loss does,
            which saves memory and time. No other operation may need the logits then; torch
            raises if another operation's backward does.
        group: the ranks that share the vocabulary, in group order.
        grid: where to look the group's name up; None: the default grid.

    Returns:
        The loss in fp32 (fp64 for fp64 logits), of target's shape, or () when reduced; equal on
        all ranks of the group. Its backward communicates nothing.

    Raises:
        ShapeError: a target outside 0 … v - 1, or of another shape than logits but for the last
            dim; a label_smoothing outside 0 … 1; another reduction.

    Example:
        >>> import commgrid, torch
        >>> grid = commgrid.initialize()
        >>> vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor([1.3863, 1.3863])
        >>> commgrid.shutdown()
    """
    who = "vocab_parallel_cross_entropy"
    ref = group if isinstance(group, GroupRef) else GroupRef(group, grid, owner=who)
    if logits.shape[:-1] != target.shape or logits.dim() == 0:
        raise ShapeError(
            f"{who}: logits of shape {tuple(logits.shape)} and target of shape "
            f"{tuple(target.shape)}; expected the same but for logits' last dim "
            f"(group {ref.name!r} of {ref.size} ranks)"
        )
    if not 0 <= label_smoothing <= 1:
        raise ShapeError(f"{who}: label_smoothing={label_smoothing}; expected 0 to 1")
    if reduction not in ("none", "mean", "sum"):
        raise ShapeError(f"{who}: reduction={reduction!r}; expected none, mean or sum")
    note(f"{who}'s target", target, ref)
    padded = logits.shape[-1] * ref.size
    size = padded if vocabulary is None else vocabulary
    if not 1 <= size <= padded:
        raise ShapeError(
            f"{who}: vocabulary={size}, but the {ref.size} ranks of group {ref.name!r} have "
            f"{padded} columns in all; expected at most as many"
        )
    ignored = target == ignore_index
    target = target.long().masked_fill(ignored, 0)
    check_indices(target, size, who, "targets", ref)
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, ignored, size, label_smoothing, overwrite_logits, ref
    )
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (~ignored).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        ignored: Tensor,
        vocabulary: int,
        smoothing: float,
        overwrite: bool,
        group: GroupRef,
    ) -> Tensor:
        flat, target, ignored = _rows(logits), target.reshape(-1), ignored.reshape(-1)
        columns = flat.shape[1]
        overwrite = overwrite and logits.is_contiguous()  # else `flat` is a copy
        start = group.rank * columns
        real = min(max(vocabulary - start, 0), columns)
        dtype = torch.promote_types(logits.dtype, torch.float32)

        mine = torch.zeros((3 if smoothing else 2, len(target)), dtype=dtype, device=logits.device)
        if real:
            column, here = _columns(target, start, real)
            chosen = flat.gather(1, column.unsqueeze(1)).squeeze(1).to(dtype)
            mine[1] = torch.where(here, chosen, 0.0)  # not times: a masked logit may be -inf
        else:
            mine[0] = -torch.inf
        # Numbers of half precision are not exact enough to be kept between forward and backward.
        largest = torch.zeros_like(mine[0]) if overwrite and flat.dtype == dtype else None
        for rows in _slices(flat) if real else []:
            part = flat[rows, :real].to(dtype)
            if smoothing:
                torch.sum(part, -1, out=mine[2, rows])
            if largest is None:
                torch.logsumexp(part, -1, out=mine[0, rows])
            else:
                _exp_(part, largest[rows], mine[0, rows])
        every = mine.unsqueeze(0)
        if group.size > 1:
            every = start_all_gather(every, group.group).wait()
        lse = torch.logsumexp(every[:, 0], 0)
        loss = lse - (1 - smoothing) * every[:, 1].sum(0)
        if smoothing:
            loss -= smoothing / vocabulary * every[:, 2].sum(0)
        ctx.save_for_backward(logits, target, ignored, lse, largest)
        ctx.start, ctx.real, ctx.vocabulary, ctx.smoothing = start, real, vocabulary, smoothing
        ctx.overwrite = overwrite
        return loss.masked_fill_(ignored, 0).view(logits.shape[:-1])

    @staticmethod
    @first_order("vocab_parallel_cross_entropy")
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, ignored, lse, largest = ctx.saved_tensors
        flat, real, smoothing = _rows(logits), ctx.real, ctx.smoothing
        scale = upstream.reshape(-1).masked_fill(ignored, 0).to(lse.dtype)
        gradient = flat if ctx.overwrite else torch.empty_like(flat)
        gradient[:, real:] = 0
        for rows in _slices(flat) if real else []:
            factor = scale[rows, None]
            if largest is not None:
                part = flat[rows, :real]
                part.mul_((largest - lse).exp_()[rows, None] * factor)
            else:
                part = torch.sub(flat[rows, :real].to(lse.dtype), lse[rows, None]).exp_()
                part.mul_(factor)
            if smoothing:
                part.sub_(smoothing / ctx.vocabulary * factor)
            column, here = _columns(target[rows], ctx.start, real)
            taken = (here * scale[rows]).mul_(smoothing - 1)
            part.scatter_add_(1, column.unsqueeze(1), taken.unsqueeze(1))
            if largest is None:
                gradient[rows, :real] = part
        return gradient.view(logits.shape), None, None, None, None, None, None


def _exp_(part: Tensor, largest: Tensor, lse: Tensor) -> None:
    """Of rows of logits: exp(logit - largest) in their place, the largest, the log-sum-exp."""
    torch.amax(part, -1, out=largest)
    largest.masked_fill_(largest == -torch.inf, 0)
    part.sub_(largest.unsqueeze(1)).exp_()
    torch.sum(part, -1, out=lse)
    lse.log_().add_(largest)


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _slices(flat: Tensor) -> list[slice]:
    """Runs of rows whose softmax is made at once."""
    at_once = _SLICE.get(flat.device.type, _SLICE_ELSEWHERE)
    step = max(1, at_once // max(1, flat.shape[1]))
    return [slice(start, start + step) for start in range(0, flat.shape[0], step)]


def _columns(target: Tensor, start: int, real: int) -> tuple[Tensor, Tensor]:
    """Each target's column on this rank, and whether it has one (else the column is 0)."""
    column = target - start
    here = (column >= 0) & (column < real)
    return column.mul_(here), here
