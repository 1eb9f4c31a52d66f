"""Context parallelism: attention over sequences that are cut over the ranks of a group.

Shardings, the balance behind them, choices and explanations are arithmetic; only attention imports
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commgrid.context_parallel.balance import Mask, balanced
from commgrid.context_parallel.choice import WAYS, Choice, choose
from commgrid.context_parallel.explanation import explain
from commgrid.context_parallel.sharding import SequenceSharding
from commgrid.on_demand import on_demand

if TYPE_CHECKING:
    from commgrid.context_parallel.parallel_attention import attention

__all__ = [
    "WAYS",
    "Choice",
    "Mask",
    "SequenceSharding",
    "attention",
    "balanced",
    "choose",
    "explain",
]

_LIVE = {
    "commgrid.context_parallel.parallel_attention": ("attention",),
}  # fmt: skip

__getattr__, __dir__ = on_demand(globals(), _LIVE)
