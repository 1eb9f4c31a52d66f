"""Tokens to the ranks of their experts, and the experts' outputs back.

| | step of `dispatch` | of `combine`, in reverse order |
|---|---|---|
| `alltoall` | `count_rows`: who sends how much to whom | |
| | `permute`: a row per choice, by expert | `unpermute`: the sum per token |
| | `exchange`: rows to their ranks of ep | `exchange`, the other way |
| | `gather_rows`: all rows of the etp ranks | `add_rows`: each rank's rows of the sum |
| | `sort_by_expert`: by expert, not by sender | `sort_by_expert`, the other way |
| `allgather` | `count_rows` | |
| | `gather_rows`: all tokens of the ep and etp ranks | `add_rows`: each rank's tokens of the sum |
| | `permute`: a row per choice of this rank's experts | `unpermute` |

`alltoall` sends what is needed. `allgather` sends everything to everyone, with less to arrange,
which pays in small worlds. The backward of every step is the step beside it. Weights travel
with their rows: experts scale what they compute, and nobody keeps their outputs for backward.

In `count_rows` the host waits for the device, the one time in a layer. With `pad` every expert
gets its full capacity, sizes follow from shapes, and the host never waits.

Experts are shared out in order: of E experts on n ranks of ep, rank i has those from i·E/n on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from commgrid.collectives import (
    all_gather,
    all_gather_from_group,
    all_to_all,
    reduce_scatter_to_group,
)
from commgrid.collectives.asynchronous import as_output, start_all_to_all
from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import ShapeError, SpecError
from commgrid.expert.permutation import Permutation, arrange, permute, permute_weights, unpermute
from commgrid.expert.router import Routing
from commgrid.planning.names import nearest


@dataclass(frozen=True)
class Traffic:
    """Who sends how many rows to whom, among the ranks of ep and etp.

    Args:
        sent: how many rows this rank sends for each expert.
        chunks: `chunks[t][s][e]`, how many rows the t-th rank of etp gets from the s-th rank of
            ep for the e-th of this rank's experts.
        tokens: `tokens[t][s]`, how many tokens the s-th of the ep ranks that the t-th rank of etp
            exchanges rows with has.
    """

    sent: list[int]
    chunks: list[list[list[int]]]
    tokens: list[list[int]]

    @property
    def send(self) -> list[int]:
        """Rows to each rank of ep."""
        local = len(self.sent) // len(self.chunks[0])
        return [sum(self.sent[first : first + local]) for first in range(0, len(self.sent), local)]

    def receive(self, etp_rank: int) -> list[int]:
        """Rows from each rank of ep."""
        return [sum(chunk) for chunk in self.chunks[etp_rank]]

    @property
    def gathered(self) -> list[int]:
        """Rows that each rank of etp has received."""
        return [sum(self.receive(rank)) for rank in range(len(self.chunks))]

    @property
    def senders(self) -> list[list[int]]:
        """Rows for each of this rank's experts, by sender."""
        return [chunk for chunks in self.chunks for chunk in chunks]

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows for each of this rank's experts, of all senders."""
        return tuple(sum(column) for column in zip(*self.senders, strict=True))


@dataclass(frozen=True)
class Dispatched:
    """What the experts of a rank are given.

    Args:
        rows: (rows, hidden), sorted by expert.
        weights: (rows,), by which the expert's output for each is to be multiplied.
        counts: how many rows each of this rank's experts has, in order.
        traffic, permutation: for the way back.
    """

    rows: Tensor
    weights: Tensor
    counts: tuple[int, ...]
    traffic: Traffic
    permutation: Permutation


class Dispatcher(Protocol):
    """Takes tokens to their experts and back."""

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Sends each token to its experts; collective over ep and etp.

        Args:
            x: (tokens, hidden), this rank's; other ranks may have other numbers of them.
            routing: where they go.

        Raises:
            ShapeError: tokens and routing do not fit each other, or some rank's logits were not
                finite: each rank of ep and etp raises it, with `pad` only the one that has them.
        """

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """The sum over each token's experts; collective over ep and etp.

        Args:
            outputs: (rows, hidden), one for each of `dispatched.rows`, multiplied by its weight.
                Ranks of etp each have a part of the sum.

        Returns:
            (tokens, hidden), zero for a token all of whose choices were dropped.
        """


@dataclass(frozen=True)
class AllToAll:
    """A Dispatcher: ranks of ep get the rows of their experts, ranks of etp each other's.

    Args:
        num_experts, ep, etp, pad: as `make_dispatcher`'s.
    """

    num_experts: int
    ep: GroupRef
    etp: GroupRef
    pad: bool = False

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        _check(x, routing, self.num_experts, self.pad)
        capacity = routing.capacity if self.pad else None
        if capacity is None:
            traffic = count_rows(routing, self.ep, self.etp)
        else:
            _assert_finite(routing, self.ep.owner)
            traffic = _full(capacity, self.num_experts, self.ep, self.etp)
        permutation = arrange(
            routing.experts, self.num_experts, routing.kept,
            num_rows=sum(traffic.sent), capacity=capacity,
        )  # fmt: skip
        parts: tuple[Tensor, ...] = (
            permute(x, permutation),
            permute_weights(routing.weights, permutation),
        )
        parts = exchange(parts, self.ep, traffic.send, traffic.receive(self.etp.rank))
        parts = gather_rows(parts, self.etp, traffic.gathered)
        rows, weights = sort_by_expert(parts, traffic.senders)
        return Dispatched(rows, weights, traffic.counts, traffic, permutation)

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        traffic = dispatched.traffic
        parts = sort_by_expert((outputs,), traffic.senders, back=True)
        del outputs  # nobody needs them any more, and they are large
        parts = add_rows(parts, self.etp, traffic.gathered)
        parts = exchange(parts, self.ep, traffic.receive(self.etp.rank), traffic.send)
        return unpermute(parts[0], dispatched.permutation)


@dataclass(frozen=True)
class AllGather:
    """A Dispatcher: each rank gets all tokens and takes the rows of its experts out of them.

    Args:
        num_experts, ep, etp, pad: as `make_dispatcher`'s.
    """

    num_experts: int
    ep: GroupRef
    etp: GroupRef
    pad: bool = False

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        _check(x, routing, self.num_experts, self.pad)
        traffic = count_rows(routing, self.ep, self.etp)
        local = self.num_experts // self.ep.size
        experts = routing.experts
        if routing.kept is not None:
            experts = experts.where(routing.kept, self.num_experts)
        parts: tuple[Tensor, ...] = (x, routing.weights, experts)
        parts = gather_rows(parts, self.ep, traffic.tokens[self.etp.rank])
        x, weights, experts = gather_rows(parts, self.etp, [sum(t) for t in traffic.tokens])
        experts = experts - self.ep.rank * local
        own = (experts >= 0) & (experts < local)
        permutation = arrange(experts, local, own, num_rows=sum(traffic.counts))
        rows, row_weights = permute(x, permutation), permute_weights(weights, permutation)
        return Dispatched(rows, row_weights, traffic.counts, traffic, permutation)

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        tokens = dispatched.traffic.tokens
        parts: tuple[Tensor, ...] = (unpermute(outputs, dispatched.permutation),)
        parts = add_rows(parts, self.etp, [sum(t) for t in tokens])
        (own,) = add_rows(parts, self.ep, tokens[self.etp.rank])
        return own


DISPATCHERS: dict[str, type[AllToAll] | type[AllGather]] = {
    "alltoall": AllToAll, "allgather": AllGather,
}  # fmt: skip


def make_dispatcher(
    kind: str, num_experts: int, ep: GroupRef, etp: GroupRef, *, pad: bool = False
) -> Dispatcher:
    """A dispatcher by name.

    Args:
        kind: "alltoall" or "allgather".
        num_experts: over all ranks of ep.
        ep: the group whose ranks share out the experts.
        etp: the group whose ranks share each of them.
        pad: give every expert its full capacity of rows; for routings that have a capacity, the
            same one on all ranks.

    Raises:
        SpecError: another name, experts that cannot be shared out, or a padded all-gather.
    """
    if kind not in DISPATCHERS:
        raise SpecError(
            f"dispatcher={kind!r}: expected one of {', '.join(DISPATCHERS)}"
            f"{nearest(kind, DISPATCHERS)}"
        )
    if num_experts % ep.size:
        raise SpecError(
            f"{ep.owner}: num_experts={num_experts} cannot be shared equally among the {ep.size} "
            f"ranks of group {ep.name!r}; expected a multiple of {ep.size}"
        )
    if pad and kind == "allgather":
        raise SpecError("pad=True: an 'allgather' dispatcher has nothing to pad; use 'alltoall'")
    return DISPATCHERS[kind](num_experts, ep, etp, pad)


# -- the steps ---------------------------------------------------------------------------


def count_rows(routing: Routing, ep: GroupRef, etp: GroupRef) -> Traffic:
    """Tells all ranks of ep and etp how many rows this one has for each expert.

    Raises:
        ShapeError: on every rank, when the logits of some were not finite.
    """
    experts, local = routing.num_experts, routing.num_experts // ep.size
    counts = routing.counts
    fault = torch.where(routing.finite, 0, dist.get_rank() + 1)  # 0, or who has it
    also = torch.stack([torch.full_like(fault, len(routing.experts)), fault])
    told = torch.cat([counts.view(ep.size, local), also.expand(ep.size, 2)], 1)
    found = all_gather(all_to_all(told, ep), etp)  # for this rank's experts, by sender
    numbers = torch.cat([counts, found.flatten()]).tolist()  # here the host waits
    sent, numbers = numbers[:experts], numbers[experts:]
    rows = [numbers[i : i + local + 2] for i in range(0, len(numbers), local + 2)]
    faulty = [row[-1] - 1 for row in rows if row[-1]]
    if faulty:
        raise ShapeError(
            f"{ep.owner}: the router's logits are NaN or infinite on ranks {sorted(faulty)}; look "
            "for such numbers in its weight and in the tokens it is given"
        )
    by_etp = [rows[i : i + ep.size] for i in range(0, len(rows), ep.size)]
    return Traffic(
        sent,
        [[row[:local] for row in senders] for senders in by_etp],
        [[row[local] for row in senders] for senders in by_etp],
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
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pending = [start_all_to_all(g, ctx.group, ctx.receive, ctx.send) for g in gradients]
        return None, None, None, *(one.wait() for one in pending)


def gather_rows(
    parts: Sequence[Tensor], group: GroupRef, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """The rows of all ranks of the group, in order.

    Args:
        parts: tensors of as many rows.
        sizes: how many each rank has.
    """
    return tuple(all_gather_from_group(part, group, dim=0, sizes=sizes) for part in parts)


def add_rows(parts: Sequence[Tensor], group: GroupRef, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """This rank's rows of the sum over the group.

    Args:
        parts: tensors of the rows of all ranks.
        sizes: how many of them are each rank's.
    """
    return tuple(reduce_scatter_to_group(part, group, dim=0, sizes=sizes) for part in parts)


def sort_by_expert(
    parts: Sequence[Tensor], senders: Sequence[Sequence[int]], *, back: bool = False
) -> tuple[Tensor, ...]:
    """From rows by sender, and of each by expert, to rows by expert, and of each by sender.

    Args:
        parts: tensors of as many rows.
        senders: for each sender, how many rows it has for each expert.
        back: the other way.
    """
    n, m = len(senders), len(senders[0])
    if n == 1 or m == 1:
        return tuple(parts)
    sizes = [size for sender in senders for size in sender]
    order = [s * m + e for e in range(m) for s in range(n)]
    if back:
        sizes = [sizes[i] for i in order]
        order = [e * n + s for s in range(n) for e in range(m)]
    pieces = [torch.split(part, sizes) for part in parts]
    return tuple(torch.cat([piece[i] for i in order]) for piece in pieces)


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


def _full(capacity: int, num_experts: int, ep: GroupRef, etp: GroupRef) -> Traffic:
    """The traffic where every expert gets its full capacity from every rank."""
    chunks = [[capacity] * (num_experts // ep.size)] * ep.size
    return Traffic([capacity] * num_experts, [chunks] * etp.size, [[0] * ep.size] * etp.size)
