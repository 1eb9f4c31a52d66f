"""Attention heads shared out over a group, also where there are fewer key/value heads than ranks.

With n ranks, H query heads, K key/value heads of size d, and x of shape (*, hidden):

| | weight | q | k, v | communicates forward | backward |
|---|---|---|---|---|---|
| n divides K | (H·d/n, hidden), (2·K·d/n, hidden) | H/n heads | K/n heads | as the column layer | as the column layer |
| K divides n | the same | H/n heads | 1 head | and all-gather of all k, v | and reduce-scatter of ∂k, ∂v |

In the second case each rank computes a part of a key/value head and n/K ranks use it whole, so
every weight still exists once, and nothing about its gradient, checkpoint or initial values
depends on n. Grouped-query attention: arXiv 2305.13245.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.collectives import all_gather_from_group
from commgrid.equality.inputs import note
from commgrid.errors import ShapeError
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel.init import Init, draw
from commgrid.tensor_parallel.linear import ParallelLayer
from commgrid.tensor_parallel.matmul import Layer, as_own, column_matmul


class QKVParallelLinear(ParallelLayer):
    """Queries, keys and values of this rank's heads.

    Args:
        hidden: width of x, which is equal on all ranks.
        num_heads: query heads H in all; the group's size must divide it.
        num_kv_heads: key/value heads K in all, a divisor of H; None: H. The group's size must
            divide it, or it the group's size.
        head_size: d; None: hidden / num_heads.
        bias: whether each has a bias.
        sequence_parallel: x is this rank's slice of the sequence; q, k, v have all of it.
        sequence_dim: which dim of x is the sequence.
        init: fills the full weights (H·d, hidden) and (2·K·d, hidden) in place; the biases are
            then zero. None: as nn.Linear.
        group: a group name, or a bare ProcessGroup (which cannot be pickled).
        grid: the grid to look the name up in; None: the default one.
        device, dtype: as nn.Linear's; "meta" as ColumnParallelLinear's.

    Shapes:
        x: (*, hidden); q: (*, H / n, d); k and v: (*, max(K / n, 1), d), which
        `F.scaled_dot_product_attention(…, enable_gqa=True)` takes once heads come before the
        sequence. The rows of the key/value weight run (head, k then v, d).

    Raises:
        ShapeError: heads that cannot be shared out, or x of another width.
        GridNotInitializedError: called after its grid was destroyed.
    """

    shard_dims: ClassVar[Mapping[str, int]] = {
        "q_weight": 0, "q_bias": 0, "kv_weight": 0, "kv_bias": 0,
    }  # fmt: skip
    q_weight: nn.Parameter
    q_bias: nn.Parameter | None
    kv_weight: nn.Parameter
    kv_bias: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        init: Init | None = None,
        group: str | ProcessGroup = "tp",
        grid: HyperCommGrid | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        super().__init__(
            f"QKVParallelLinear({hidden}, {num_heads}, num_kv_heads={num_kv_heads})",
            group=group, grid=grid, sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim, device=device, dtype=dtype,
        )  # fmt: skip
        self.hidden, self.num_heads, self.num_kv_heads = hidden, num_heads, num_kv_heads
        self._check_heads(head_size)
        self.head_size = hidden // num_heads if head_size is None else head_size
        self._init = init
        self._full = {"q": num_heads * self.head_size, "kv": 2 * num_kv_heads * self.head_size}
        for name, rows in self._full.items():
            share = self._share(f"rows of the {name} weight", rows)
            setattr(self, f"{name}_weight", self._new_parameter(share, hidden))
            made = self._new_parameter(share) if bias else None
            self.register_parameter(f"{name}_bias", made)
        self.reset_parameters()

    def _check_heads(self, head_size: int | None) -> None:
        heads, kv_heads, size = self.num_heads, self.num_kv_heads, self.group.size
        self._share("num_heads", heads)
        wrong = ""
        if kv_heads < 1 or heads % kv_heads:
            wrong = f"num_kv_heads={kv_heads} does not divide num_heads={heads}"
        elif kv_heads % size and size % kv_heads:
            wrong = (
                f"num_kv_heads={kv_heads} neither is a multiple of the {size} ranks of group "
                f"{self.group.name!r} nor divides them"
            )
        elif head_size is None and self.hidden % heads:
            wrong = f"hidden={self.hidden} is no multiple of num_heads={heads}; give head_size"
        if wrong:
            raise ShapeError(f"{self.group.owner}: {wrong}")

    def reset_parameters(self) -> None:
        """Draws this rank's rows of full weights determined by torch's global random state."""
        bound = 1 / math.sqrt(self.hidden)
        uniform = partial(nn.init.uniform_, a=-bound, b=bound)
        for name, rows in self._full.items():
            weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
            draw(weight, (rows, self.hidden), self._init or uniform, 0, self.group)
            if bias is not None:
                draw(bias, (rows,), nn.init.zeros_ if self._init else uniform, 0, self.group)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._check_input(x, self.hidden)
        if not self.sequence_parallel:
            note(f"{self.group.owner}'s input", x, self.group)
        layers: list[Layer] = [(self.q_weight, self.q_bias), (self.kv_weight, self.kv_bias)]
        q, kv = column_matmul(x, layers, self.group.group, self._sharded_dim)
        if self.num_kv_heads < self.group.size:
            whole = all_gather_from_group(kv, self.group, dim=-1)
            head = self.group.rank * self.num_kv_heads // self.group.size
            kv = whole.narrow(-1, head * 2 * self.head_size, 2 * self.head_size)
        k, v = kv.view(*kv.shape[:-1], -1, 2, self.head_size).unbind(-2)
        return as_own(q, *q.shape[:-1], -1, self.head_size), as_own(k), as_own(v)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden}, {self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_size={self.head_size}, bias={self.q_bias is not None}, "
            f"sequence_parallel={self.sequence_parallel}, {self.group}"
        )
