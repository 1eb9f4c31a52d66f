"""A mixture of experts on one process, token by token: what the layer is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A layer, and how many ranks share what.

    Args:
        ep, etp, tp: sizes; the rest of the ranks is data parallel.
        sequence_parallel: whether tokens are sharded over tp outside the layer.
        options: further arguments of MoELayer.
    """

    ep: int = 1
    etp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    hidden: int = 4
    ffn: int = 6
    num_experts: int = 8
    top_k: int = 2
    options: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str) -> Any:
        """An option of the layer; None if it is not given."""
        return dict(self.options).get(name)


def choose(logits: Tensor, case: Case) -> list[dict[int, Tensor]]:
    """For each token its experts, each with its weight; `logits` are those of one rank's tokens."""
    chosen: list[dict[int, Tensor]] = []
    for token in logits:
        best = sorted(range(case.num_experts), key=lambda e: -token[e].item())[: case.top_k]
        if case.get("softmax_over") == "all":
            weights = torch.softmax(token, 0)[best]
        else:
            weights = torch.softmax(token[best], 0)
        chosen.append(dict(zip(best, weights.unbind(), strict=True)))
    factor = case.get("capacity_factor")
    if factor is not None:
        room = max(math.ceil(len(logits) * case.top_k / case.num_experts * factor), 1)
        for e in range(case.num_experts):
            takers = [t for t in range(len(logits)) if e in chosen[t]]
            takers.sort(key=lambda t: -chosen[t][e].item())
            for t in takers[room:]:
                del chosen[t][e]
    return chosen


def mixture(tokens: Tensor, full: dict[str, Tensor], case: Case) -> Tensor:
    """The outputs for one rank's tokens, (tokens, hidden)."""
    chosen = choose(tokens @ full["router.weight"].t(), case)
    rows = []
    for x, experts in zip(tokens, chosen, strict=True):
        y = torch.zeros_like(x)
        for e, weight in experts.items():
            y = y + weight * mlp(x, full["experts.up"][e], full["experts.down"][e], case)
        rows.append(y)
    return torch.stack(rows) if rows else tokens.new_zeros(tokens.shape)


def mlp(x: Tensor, up: Tensor, down: Tensor, case: Case) -> Tensor:
    """One expert, of one token."""
    if case.get("gated"):
        return (F.silu(x @ up[0].t()) * (x @ up[1].t())) @ down.t()
    return F.gelu(x @ up.t()) @ down.t()


def balance(tokens: Tensor, full: dict[str, Tensor], case: Case) -> Tensor:
    """The auxiliary losses of tokens whose load is to be balanced together."""
    logits = tokens @ full["router.weight"].t()
    chosen = [set(one) for one in choose(logits, Case(num_experts=case.num_experts))]
    share = torch.tensor(
        [sum(e in one for one in chosen) / (2 * len(chosen)) for e in range(case.num_experts)],
        dtype=tokens.dtype,
    )
    mean = torch.softmax(logits, -1).mean(0)
    aux = (case.get("aux_loss") or 0.0) * case.num_experts * (share * mean).sum()
    return aux + (case.get("z_loss") or 0.0) * logits.logsumexp(-1).square().mean()
