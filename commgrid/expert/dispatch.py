"""Tokens to the ranks of their experts, and the experts' outputs back.

| step of `dispatch` | of `combine`, in reverse order |
|---|---|
| `count_rows`: rows from each rank to each | |
| `permute`: a row per choice, by expert | `unpermute`: the sum per token |
| `exchange`: rows to their ranks of ep | `exchange`, the other way |
| `all_gather_from_group`: all rows of the etp ranks | `reduce_scatter_to_group`: each rank's rows of the sum |
| `reorder`: by expert, not by sender | `undo`, the other way |

The backward of every step is the step next to it. Weights travel with their rows: experts scale
their own outputs, which are not kept for backward.

In `count_rows` the host waits for the device, the one time in a layer. With `pad` every expert
gets its full capacity, sizes follow from shapes, and the host never waits.

Experts are shared out in order: of E experts on n ranks of ep, rank i has those from i·E/n on.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives import (
    all_gather,
    all_gather_from_group,
    all_to_all,
    reduce_scatter_to_group,
)
from commgrid.collectives.asynchronous import as_output, start_all_to_all
from commgrid.collectives.first_order import first_order
from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import ShapeError, SpecError
from commgrid.expert.permutation import (
    Order,
    Permutation,
    arrange,
    permute,
    permute_weights,
    reorder,
    sort_by_expert,
    undo,
    unpermute,
)
from commgrid.expert.router import Routing


@dataclass(frozen=True)
class RowTraffic:
    """The rows that this rank sends and receives, and their order.

    Args:
        send: to each rank of ep.
        receive: from each rank of ep.
        gathered: received by each rank of etp.
        counts: for each of this rank's experts, of all senders.
        order: from rows by sender, and of each by expert, to rows by expert; None: they are.
    """

    send: list[int]
    receive: list[int]
    gathered: list[int]
    counts: tuple[int, ...]
    order: Order | None


@dataclass(frozen=True)
class Dispatched:
    """The rows of a rank's experts.

    Args:
        rows: (rows, hidden), sorted by expert.
        weights: (rows,), by which the expert's output for each is to be multiplied.
        counts: how many rows each of this rank's experts has, in order.
        traffic, permutation: for the way back.
    """

    rows: Tensor
    weights: Tensor
    counts: tuple[int, ...]
    traffic: RowTraffic
    permutation: Permutation


@dataclass(frozen=True)
class Dispatcher:
    """Takes tokens to their experts by all-to-all over ep, and back.

    Args:
        num_experts: over all ranks of ep.
        ep: the group whose ranks share out the experts.
        etp: the group whose ranks share each of them, and gather each other's rows.
        pad: give every expert its full capacity of rows; for routings that have a capacity, the
            same one on all ranks.

    Raises:
        SpecError: experts that cannot be shared out.
    """

    num_experts: int
    ep: GroupRef
    etp: GroupRef
    pad: bool = False

    def __post_init__(self) -> None:
        if self.num_experts % self.ep.size:
            raise SpecError(
                f"{self.ep.owner}: num_experts={self.num_experts} cannot be shared equally among "
                f"the {self.ep.size} ranks of group {self.ep.name!r}; expected a multiple of "
                f"{self.ep.size}"
            )

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send each token to its experts; collective over ep and etp.

        Args:
            x: (tokens, hidden), this rank's; other ranks may have other numbers of them.
            routing: the experts and weights of each token.

        Raises:
            ShapeError: tokens and routing do not fit each other, or some rank's logits were not
                finite: each rank of ep and etp raises it, with `pad` only the faulty one.
        """
        _check(x, routing, self.num_experts, self.pad)
        capacity = routing.capacity if self.pad else None
        if capacity is None:
            sent, traffic = count_rows(routing, self.ep, self.etp)
        else:
            _assert_finite(routing, self.ep.owner)
            sent, traffic = _full(capacity, self.num_experts, self.ep, self.etp, x.device)
        permutation = arrange(
            routing.experts, self.num_experts, routing.kept, num_rows=sent, capacity=capacity
        )
        parts: tuple[Tensor, ...] = (
            permute(x, permutation),
            permute_weights(routing.weights, permutation),
        )
        parts = exchange(parts, self.ep, traffic.send, traffic.receive)
        rows, weights = (
            all_gather_from_group(part, self.etp, dim=0, sizes=traffic.gathered) for part in parts
        )
        if traffic.order is not None:
            rows, weights = reorder(rows, traffic.order), reorder(weights, traffic.order)
        return Dispatched(rows, weights, traffic.counts, traffic, permutation)

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """The sum over each token's experts; collective over ep and etp.

        Args:
            outputs: (rows, hidden), one for each of `dispatched.rows`, multiplied by its weight.
                Ranks of etp each have a part of the sum.

        Returns:
            (tokens, hidden), zero for a token all of whose choices were dropped.
        """
        traffic = dispatched.traffic
        if traffic.order is not None:
            outputs = undo(outputs, traffic.order)
        outputs = reduce_scatter_to_group(outputs, self.etp, dim=0, sizes=traffic.gathered)
        (outputs,) = exchange((outputs,), self.ep, traffic.receive, traffic.send)
        return unpermute(outputs, dispatched.permutation)


# -- the steps ---------------------------------------------------------------------------


def count_rows(routing: Routing, ep: GroupRef, etp: GroupRef) -> tuple[int, RowTraffic]:
    """Tell all ranks of ep and etp how many rows this one has for each expert.

    Returns:
        How many rows this rank sends in all, and the traffic.

    Raises:
        ShapeError: on every rank, when the logits of some were not finite.
    """
    experts, local = routing.num_experts, routing.num_experts // ep.size
    counts = routing.counts
    fault = torch.where(routing.finite, 0, dist.get_rank() + 1)  # 0, or 1 + the faulty rank
    told = torch.cat([counts.view(ep.size, local), fault.expand(ep.size, 1)], 1)
    found = all_gather(all_to_all(told, ep), etp)  # for this rank's experts, by sender
    numbers = torch.cat([counts, found.flatten()]).tolist()  # here the host waits
    sent, numbers = numbers[:experts], numbers[experts:]
    rows = [numbers[i : i + local + 1] for i in range(0, len(numbers), local + 1)]
    faulty = [row[-1] - 1 for row in rows if row[-1]]
    if faulty:
        raise ShapeError(
            f"{ep.owner}: the router's logits are NaN or infinite on ranks {sorted(faulty)}; look "
            "for such numbers in its weight and in the tokens it is given"
        )
    return sum(sent), _traffic(sent, [row[:-1] for row in rows], found[:, :-1], ep, etp)


def _traffic(
    sent: list[int], senders: list[list[int]], sizes: Tensor, ep: GroupRef, etp: GroupRef
) -> RowTraffic:
    """Work out the traffic.

    Args:
        sent: how many rows this rank sends for each expert.
        senders: how many rows each rank of etp, and of these each rank of ep, sends for each of
            this rank's experts.
        sizes: the same on the device, (senders, local experts).
    """
    local, n = len(senders[0]), ep.size
    totals = [sum(sender) for sender in senders]
    mine = etp.rank * n
    return RowTraffic(
        send=[sum(sent[i : i + local]) for i in range(0, len(sent), local)],
        receive=totals[mine : mine + n],
        gathered=[sum(totals[i : i + n]) for i in range(0, len(totals), n)],
        counts=tuple(map(sum, zip(*senders, strict=True))),
        order=sort_by_expert(sizes, sum(totals)) if min(len(senders), local) > 1 else None,
    )


def exchange(
    parts: Sequence[Tensor], group: GroupRef, send: Sequence[int], receive: Sequence[int]
) -> tuple[Tensor, ...]:
    """Rows to the ranks of the group, of several tensors at once.

    Args:
        parts: tensors of as many rows.
        send: how many rows go to each rank, in order.
        receive: how many come from each.
    """
    if group.size == 1:
        return tuple(parts)
    made: tuple[Tensor, ...] = _Exchange.apply(group.group, send, receive, *parts)  # type: ignore[no-untyped-call]
    return made


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, send: Sequence[int], receive: Sequence[int], *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        pending = [start_all_to_all(part, group, send, receive) for part in parts]
        return tuple(as_output(one.wait()) for one in pending)

    @staticmethod
    @first_order("expert dispatch")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pending = [start_all_to_all(g, ctx.group, ctx.receive, ctx.send) for g in gradients]
        return None, None, None, *(one.wait() for one in pending)


# -- checks ------------------------------------------------------------------------------


def _check(x: Tensor, routing: Routing, num_experts: int, pad: bool) -> None:
    if x.dim() != 2 or len(x) != len(routing.experts) or routing.num_experts != num_experts:
        raise ShapeError(
            f"tokens of shape {tuple(x.shape)} and a routing of {len(routing.experts)} tokens to "
            f"{routing.num_experts} experts; expected (tokens, hidden), of as many tokens, and "
            f"{num_experts} experts"
        )
    if pad and routing.capacity is None:
        raise SpecError("pad=True: the router has no capacity to pad to; give it capacity_factor=")


def _assert_finite(routing: Routing, owner: str) -> None:
    """Without asking the device: there it is a device-side assertion."""
    said = (
        f"{owner}: the router's logits are NaN or infinite on rank {dist.get_rank()}; look for "
        "such numbers in its weight and in the tokens it is given"
    )
    if routing.finite.device.type != "cpu":
        torch._assert_async(routing.finite, said)
    elif not routing.finite:
        raise ShapeError(said)


def _full(
    capacity: int, num_experts: int, ep: GroupRef, etp: GroupRef, device: torch.device
) -> tuple[int, RowTraffic]:
    """As `count_rows`, where every expert gets its full capacity from every rank."""
    shape = (ep.size * etp.size, num_experts // ep.size)
    senders = [[capacity] * shape[1]] * shape[0]
    sizes = torch.full(shape, capacity, device=device)
    sent = [capacity] * num_experts
    return sum(sent), _traffic(sent, senders, sizes, ep, etp)
