"""Tokens laid out as rows, one for each chosen expert, sorted by expert; and back.

    tokens      t0 → e1, e0    t1 → e1, e2    t2 → e0, e1            top_k = 2, 3 experts
    rows        e0: t0 t2 | e1: t0 t1 t2 | e2: t1                    `permute`
    tokens      t0 + t0, t1 + t1, t2 + t2                            `unpermute`

The two are each other's backward. Within an expert, tokens keep their order. A dropped choice has
no row. With `capacity` every expert has that many rows, and unused ones are zero; their
number then depends on shapes alone, so the host need not wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commgrid.collectives.asynchronous import as_output
from commgrid.collectives.first_order import first_order
from commgrid.expert.router import count


@dataclass(frozen=True)
class Permutation:
    """The choice that each row holds.

    Args:
        choices: (rows,), the choice of each row, counted through (tokens, top_k).
        top_k: choices of a token.
        by_token: (n,), the rows by token.
        starts: (tokens,), where each token's begin among them.
        counted: (n,), which of them count; None: all.
        padding: (rows,), which rows hold no choice; None: every row holds one.
    """

    choices: Tensor
    top_k: int
    by_token: Tensor
    starts: Tensor
    counted: Tensor | None = None
    padding: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """(rows,), the token of each row."""
        return self.choices // self.top_k


def arrange(
    experts: Tensor,
    num_experts: int,
    kept: Tensor | None = None,
    *,
    num_rows: int | None = None,
    capacity: int | None = None,
) -> Permutation:
    """Sorts choices by expert.

    Args:
        experts: (tokens, top_k), each from 0 to below `num_experts`; where dropped, anything.
        kept: (tokens, top_k), which choices get a row; None: all.
        num_rows: how many those are, known on the host; not needed without `kept`, nor with
            `capacity`.
        capacity: rows of every expert, at least as many as any has; None: as many as it has.

    Example:
        >>> made = arrange(torch.tensor([[1, 0], [1, 2], [0, 1]]), 3)
        >>> made.tokens.tolist(), made.by_token.tolist(), made.starts.tolist()
        ([0, 2, 0, 1, 2, 1], [2, 0, 3, 5, 1, 4], [0, 2, 4])
    """
    top_k = experts.shape[1]
    keys = experts.flatten() if kept is None else experts.where(kept, num_experts).flatten()
    keys, order = keys.sort(stable=True)  # the dropped ones last
    places = torch.arange(len(order), device=order.device)
    starts = places[::top_k]
    if capacity is None:
        if kept is None:
            by_token = torch.empty_like(order).scatter_(0, order, places)
            return Permutation(order, top_k, by_token, starts)
        choices, many = order[:num_rows], kept.sum(1)
        return Permutation(choices, top_k, choices.argsort(), many.cumsum(0) - many)
    counts = count(keys, num_experts + 1)
    first = counts.cumsum(0) - counts
    rows = torch.where(keys < num_experts, keys * capacity + places - first[keys], -1)
    choices = order.new_full((num_experts * capacity + 1,), -1)  # the last for the dropped ones
    choices = choices.scatter_(0, rows.remainder(len(choices)), order)[:-1]
    by_token = torch.empty_like(order).scatter_(0, order, rows)
    return Permutation(
        choices.clamp(min=0), top_k, by_token.clamp(min=0), starts, by_token >= 0, choices < 0
    )


def permute(x: Tensor, permutation: Permutation) -> Tensor:
    """A token for each row.

    Args:
        x: (tokens, hidden).

    Returns:
        (rows, hidden).
    """
    moved: Tensor = _Move.apply(x, permutation, _to_rows, _to_tokens)  # type: ignore[no-untyped-call]
    return moved


def unpermute(rows: Tensor, permutation: Permutation) -> Tensor:
    """The sum of each token's rows.

    Args:
        rows: (rows, hidden).

    Returns:
        (tokens, hidden), zero for a token without any row.
    """
    moved: Tensor = _Move.apply(rows, permutation, _to_tokens, _to_rows)  # type: ignore[no-untyped-call]
    return moved


def permute_weights(weights: Tensor, permutation: Permutation) -> Tensor:
    """The weight of each row's choice, zero for padding.

    Args:
        weights: (tokens, top_k).

    Returns:
        (rows,).
    """
    flat, choices = weights.flatten(), permutation.choices
    if permutation.padding is not None:
        choices = choices.where(~permutation.padding, len(flat))
        flat = torch.cat([flat, flat.new_zeros(1)])
    return flat.index_select(0, choices)


@dataclass(frozen=True)
class Order:
    """A new order of rows.

    Args:
        index: (rows,), the place before of the row at each place.
        inverse: (rows,), the place that the row at each place goes to.
    """

    index: Tensor
    inverse: Tensor


def sort_by_expert(sizes: Tensor, num_rows: int) -> Order:
    """From rows by sender, and of each by expert, to rows by expert, and of each by sender.

    Args:
        sizes: (senders, experts), how many rows each sender has for each expert.
        num_rows: their sum, known on the host.

    Example:
        >>> sort_by_expert(torch.tensor([[1, 2], [1, 0], [2, 1]]), 7).index.tolist()
        [0, 3, 4, 5, 1, 2, 6]
    """
    lengths = sizes.t().flatten()
    first = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes).t().flatten()
    shift = first - (lengths.cumsum(0) - lengths)  # from a piece's new place to its old one
    places = torch.arange(num_rows, device=sizes.device)
    index = places + shift.repeat_interleave(lengths, output_size=num_rows)
    return Order(index, torch.empty_like(index).scatter_(0, index, places))


def reorder(rows: Tensor, order: Order) -> Tensor:
    """The rows, (rows, …), in the new order."""
    moved: Tensor = _Move.apply(rows, order, _forth, _back)  # type: ignore[no-untyped-call]
    return moved


def undo(rows: Tensor, order: Order) -> Tensor:
    """The rows, (rows, …), in the order before."""
    moved: Tensor = _Move.apply(rows, order, _back, _forth)  # type: ignore[no-untyped-call]
    return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Permutation | Order, step: Any, back: Any) -> Tensor:
        ctx.how, ctx.back = how, back
        moved: Tensor = step(x, how)
        return as_output(moved)

    @staticmethod
    @first_order("expert dispatch")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient, ctx.how), None, None, None


def _to_rows(x: Tensor, permutation: Permutation) -> Tensor:
    if not len(x):
        return x.new_zeros(len(permutation.choices), x.shape[1])
    rows = x.index_select(0, permutation.tokens)
    if permutation.padding is not None:
        rows.masked_fill_(permutation.padding.unsqueeze(1), 0)
    return rows


def _to_tokens(rows: Tensor, permutation: Permutation) -> Tensor:
    if not len(rows) or not len(permutation.starts):
        return rows.new_zeros(len(permutation.starts), rows.shape[1])
    counted = None if permutation.counted is None else permutation.counted.to(rows.dtype)
    return F.embedding_bag(
        permutation.by_token, rows, permutation.starts, mode="sum", per_sample_weights=counted
    )


def _forth(rows: Tensor, order: Order) -> Tensor:
    return rows.index_select(0, order.index)


def _back(rows: Tensor, order: Order) -> Tensor:
    return rows.index_select(0, order.inverse)
