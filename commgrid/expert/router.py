"""Router: which experts see a token, and with which weight.

    logits = x Wᵀ                                    (tokens, num_experts), in fp32
    scores = softmax(logits) or sigmoid(logits)
    choice = the top_k of scores (+ bias), within the best groups of experts where limited
    weight = the chosen scores, of softmax over the chosen logits or over all, of sigmoid normalized

| to keep experts evenly loaded | | from |
|---|---|---|
| `aux_loss` | coefficient · E · Σ over experts of (share of choices · mean score) | Switch, arXiv 2101.03961 section 2.2 |
| `z_loss` | coefficient · mean of logsumexp(logits)² | ST-MoE, arXiv 2202.08906 section 2 |
| `bias_rate` | a bias for the choice alone, moved against the load after each step | arXiv 2408.15664 |
| `capacity_factor` | an expert takes so many times its even share, by weight, and the rest is dropped | Switch |

Backward adds the gradients of both losses to those of the weight and the tokens, as if the two were
part of the model's loss; `parameters.loss_owner.py` has the factor, where that is multiplied.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commgrid.collectives import Group, all_reduce
from commgrid.collectives.plain import resolve
from commgrid.errors import CommGridError, ShapeError, SpecError
from commgrid.layout.axis_names import check_word
from commgrid.parameters.loss_owner import LossOwner

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """Where tokens go.

    Args:
        experts: (tokens, top_k), each token's experts, the best first.
        weights: (tokens, top_k), fp32, how much each expert's output counts; 0 where dropped.
        kept: (tokens, top_k), which choices are within the experts' capacity; None: all.
        num_experts: number of experts over all ranks.
        capacity: most tokens that an expert takes; None: any number.
        losses: the balancing losses by name: this rank's part, to be summed over `group`, and
            over `cp` averaged, or summed with `summed_loss`.
        finite: (), whether all logits were finite; if not, a dispatcher raises on all ranks.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    num_experts: int
    capacity: int | None
    losses: Mapping[str, Tensor]
    finite: Tensor

    @property
    def counts(self) -> Tensor:
        """(num_experts,), how many tokens go to each expert."""
        return count(self.experts, self.num_experts, self.kept)


def count(experts: Tensor, num_experts: int, kept: Tensor | None = None) -> Tensor:
    """(num_experts,), number of choices of each expert, without those where `kept` is false.

    Unlike `torch.bincount` it does not wait for the device.
    """
    ones = torch.ones_like(experts) if kept is None else kept.to(experts.dtype)
    counts = torch.zeros(num_experts, dtype=experts.dtype, device=experts.device)
    return counts.scatter_add_(0, experts.flatten(), ones.flatten())


class Router(LossOwner):
    """Chooses each token's experts.

    Args:
        hidden: width of a token.
        num_experts: how many experts there are, over all ranks.
        top_k: how many of them a token goes to.
        score: "softmax", or "sigmoid", whose chosen scores are divided by their sum.
        softmax_over: "chosen": the weights of a token add up to 1; "all": the chosen ones' share of
            a softmax over all experts.
        num_groups, top_groups: experts form `num_groups` groups of equal size, and a token goes to
            experts of the best `top_groups` only, rated by the sum of their best scores, with
            softmax_over="chosen" of their best logits, as in megatron-core.
        scale: factor of all weights.
        aux_loss, z_loss: coefficients of the losses above; 0: none.
        summed_loss: True: the model's loss is a sum over tokens, to be divided later, as
            `GradientReducer.finish(count=…)` does; these losses are then multiplied by their
            number. False: it is a mean. None: a mean, and `finish(count=…)` raises.
        bias_rate: how far `update_bias` moves each expert's bias; 0: there is none.
        capacity_factor: above 0; None: nothing is dropped.
        device, dtype: of the weight; logits are computed in fp32, or fp64 for fp64 weights.

    Shapes:
        x: (tokens, hidden). weight: (num_experts, hidden).

    Raises:
        SpecError: numbers that do not fit each other.
        ShapeError: tokens of another width.

    Example:
        >>> router = Router(hidden=4, num_experts=8, top_k=2)
        >>> routing = router(torch.randn(5, 4))
        >>> routing.experts.shape, routing.weights.sum(1).round(decimals=5).tolist()
        (torch.Size([5, 2]), [1.0, 1.0, 1.0, 1.0, 1.0])
    """

    bias: Tensor | None
    seen: Tensor

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        softmax_over: str = "chosen",
        num_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        aux_loss: float = 0.0,
        z_loss: float = 0.0,
        summed_loss: bool | None = None,
        bias_rate: float = 0.0,
        capacity_factor: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_word("score=", score, SCORES)
        check_word("softmax_over=", softmax_over, ("chosen", "all"))
        if not 1 <= top_k <= num_experts:
            raise SpecError(
                f"top_k={top_k} of num_experts={num_experts}: expected 1 to {num_experts}"
            )
        for key, number, least in (
            ("num_groups", num_groups, 1), ("aux_loss", aux_loss, 0), ("z_loss", z_loss, 0),
            ("bias_rate", bias_rate, 0),
        ):  # fmt: skip
            if not least <= number < math.inf:
                raise SpecError(f"{key}={number}: expected {least} or more")
        if not 0 < scale < math.inf:
            raise SpecError(f"scale={scale}: expected above 0")
        if num_experts % num_groups or not 1 <= top_groups <= num_groups:
            raise SpecError(
                f"num_groups={num_groups}, top_groups={top_groups}: expected a divisor of "
                f"num_experts={num_experts}, and 1 to {num_groups}"
            )
        if top_k % top_groups or top_k > top_groups * (num_experts // num_groups):
            raise SpecError(
                f"top_k={top_k} cannot be chosen from top_groups={top_groups} groups of "
                f"{num_experts // num_groups} experts; expected a multiple of {top_groups}, at "
                f"most {top_groups * (num_experts // num_groups)}"
            )
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise SpecError(
                f"capacity_factor={capacity_factor}: expected above 0, such as 1.25, or None, with "
                "which no token is dropped"
            )
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.score, self.softmax_over, self.scale = score, softmax_over, scale
        self.num_groups, self.top_groups = num_groups, top_groups
        self.aux_loss, self.z_loss, self.summed_loss = aux_loss, z_loss, summed_loss
        self.bias_rate = bias_rate
        self.capacity_factor = capacity_factor
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        bias = torch.zeros(num_experts, dtype=exact, device=device) if bias_rate else None
        self.register_buffer("bias", bias)
        self.register_buffer(
            "seen", torch.zeros(num_experts, dtype=torch.int64, device=device), persistent=False
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from torch's global random state, as nn.Linear; the bias is 0."""
        if not self.weight.is_meta:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
            self.seen.zero_()
            if self.bias is not None:
                self.bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Moves the bias with the rest, in its own precision: its steps are small."""
        bias = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.bias is not None and self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self

    def forward(
        self,
        x: Tensor,
        group: Group | None = None,
        *,
        cp: Group | None = None,
        num_tokens: int | None = None,
    ) -> Routing:
        """Routes this rank's tokens.

        Args:
            x: (tokens, hidden).
            group: the ranks with other tokens of the same loss, whose gradients are summed, such as
                `tp` under sequence parallelism. The auxiliary losses are those of all tokens of
                `group` and `cp`; each rank has its part of them. None: this rank alone.
            cp: the ranks with other tokens of the same sequences, such as `cp`. Over them gradients
                are averaged, or with `summed_loss` divided by the count.
            num_tokens: number of tokens that the capacity is a share of; None: that of x.
        """
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise ShapeError(
                f"Router({self.hidden}, {self.num_experts}): tokens of shape {tuple(x.shape)}; "
                f"expected (tokens, {self.hidden})"
            )
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(exact), self.weight.to(exact))
        scores = torch.sigmoid(logits) if self.score == "sigmoid" else torch.softmax(logits, -1)
        experts = self._choose(logits, scores)
        weights = self._weigh(logits, scores, experts) * self.scale
        capacity = self.capacity(len(x) if num_tokens is None else num_tokens)
        kept = None if capacity is None else self._within(capacity, experts, weights)
        if kept is not None:
            weights = weights * kept
        losses = {}
        if self.training and torch.is_grad_enabled():
            losses = self._losses(logits, scores, experts, group, cp)
        for loss in losses.values():
            weights = self.attach(weights, loss)
        recomputing = torch._C._current_graph_task_id() != -1  # for a checkpoint, within backward
        if self.bias_rate and self.training and not recomputing:
            self.seen += count(experts, self.num_experts, kept)
        detached = {name: loss.detach() for name, loss in losses.items()}
        finite = logits.detach().isfinite().all()
        return Routing(experts, weights, kept, self.num_experts, capacity, detached, finite)

    # -- the choice -----------------------------------------------------------------------

    def _choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        """The experts of each token, (tokens, top_k); gradients do not pass."""
        # Softmax keeps the order of the logits, which tell close ones better apart; but not that
        # of sums, by which groups are rated.
        plain = self.score == "softmax" and self.bias is None
        summed = self.top_groups < self.num_groups and self.softmax_over == "all"
        rated = (logits if plain and not summed else scores).detach()
        if self.bias is not None:
            rated = rated + self.bias
        if self.top_groups < self.num_groups:
            of_groups = rated.view(len(rated), self.num_groups, self.num_experts // self.num_groups)
            best = of_groups.topk(self.top_k // self.top_groups, -1).values.sum(-1)
            groups = best.topk(self.top_groups, -1).indices
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
            rated = of_groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
        return rated.topk(self.top_k, -1).indices

    def _weigh(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        if self.score == "sigmoid":
            chosen = scores.gather(1, experts)
            return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if self.top_k > 1 else chosen
        if self.softmax_over == "all":
            return scores.gather(1, experts)
        return torch.softmax(logits.gather(1, experts), -1)

    # -- balance --------------------------------------------------------------------------

    def capacity(self, num_tokens: int) -> int | None:
        """Most choices that an expert takes out of `num_tokens` tokens'; None: any number."""
        if self.capacity_factor is None:
            return None
        share = num_tokens * self.top_k / self.num_experts
        return max(math.ceil(share * self.capacity_factor), 1)

    def _within(self, capacity: int, experts: Tensor, weights: Tensor) -> Tensor:
        """Mask, in the shape of `experts`, of choices within capacity: by weight, ties by order."""
        kept = torch.zeros_like(experts, dtype=torch.bool).flatten()
        order = weights.detach().flatten().argsort(descending=True, stable=True)
        by_expert = order[experts.flatten()[order].argsort(stable=True)]
        counts = count(experts, self.num_experts)
        first = counts.cumsum(0) - counts
        place = torch.arange(len(by_expert), device=experts.device)
        place = place - first[experts.flatten()[by_expert]]
        kept[by_expert] = place < capacity
        return kept.view_as(experts)

    def _losses(
        self,
        logits: Tensor,
        scores: Tensor,
        experts: Tensor,
        group: Group | None,
        cp: Group | None,
    ) -> dict[str, Tensor]:
        """This rank's part of the losses over all tokens of `group` and `cp`."""
        losses: dict[str, Tensor] = {}
        if not self.aux_loss and not self.z_loss:
            return losses
        if self.bias is not None or self.top_groups < self.num_groups:
            experts = scores.topk(self.top_k, -1).indices  # what tokens want by themselves
        counts = count(experts, self.num_experts)
        for others in (group, cp):
            counts = counts if others is None else all_reduce(counts, others)
        tokens = (counts.sum() / self.top_k).clamp(min=1).to(scores.dtype)
        mean = 1 if cp is None else resolve(cp).size()  # an average over cp divides by it
        scale = tokens if self.summed_loss else mean
        if self.aux_loss:
            if self.score == "sigmoid":
                scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            share = counts.to(scores.dtype) / (tokens * self.top_k)
            average = scores.sum(0) / tokens
            losses["aux_loss"] = scale * self.aux_loss * self.num_experts * (share * average).sum()
        if self.z_loss:
            square = logits.logsumexp(-1).square().sum() / tokens
            losses["z_loss"] = scale * self.z_loss * square
        return losses

    @property
    def added(self) -> str:
        return " and ".join(name for name in ("aux_loss", "z_loss") if getattr(self, name))

    @torch.no_grad()
    def update_bias(self, group: Group | None = None) -> None:
        """After a step: experts with more tokens than the mean are chosen less often, others more.

        Args:
            group: all ranks that have tokens of their own, such as `dp_cp_tp`; None: this rank
                alone, for a job of one.

        Raises:
            CommGridError: the router has no bias (bias_rate=0).
        """
        if self.bias is None:
            raise CommGridError("update_bias: the router was made without a bias; give bias_rate=")
        seen = self.seen if group is None else all_reduce(self.seen, group)
        load = seen.to(self.bias.dtype)
        self.bias += self.bias_rate * torch.sign(load.mean() - load)
        self.seen.zero_()

    def extra_repr(self) -> str:
        return f"{self.hidden}, {self.num_experts}, top_k={self.top_k}, score={self.score!r}"
