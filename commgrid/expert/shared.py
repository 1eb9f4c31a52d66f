"""Shared expert: an MLP that sees every token, in addition to the routed experts."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.expert.experts import Activation
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel.init import Init, draw
from commgrid.tensor_parallel.linear import ParallelLayer
from commgrid.tensor_parallel.matmul import Layer, column_matmul, row_matmul


class SharedExpert(ParallelLayer):
    """An MLP without biases that sees every token, in addition to the routed experts.

    Its inner width is shared out over tp, as that of a column and a row-parallel layer is.

    Args:
        hidden: width of a token.
        ffn_hidden: width inside; the group's size must divide it.
        activation, gated: as GroupedExperts'.
        scaled: multiply the output by the sigmoid of a learned product with the token.
        init, init_down: fill the full weights in place; None: as nn.Linear.
        sequence_parallel, sequence_dim: as ColumnParallelLinear's; y is then sharded as x is.
        group: a group name, or a bare ProcessGroup.
        grid, device, dtype: as GroupedExperts'.

    Shapes:
        x, y: (*, hidden).

    Communication:
        Forward all-reduce of y, backward all-reduce of ∂x; with `sequence_parallel` an all-gather
        and a reduce-scatter each way.
    """

    shard_dims: ClassVar[dict[str, int]] = {"up": 0, "gate": 0, "down": 1}
    gate: nn.Parameter | None
    scale: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        *,
        activation: Activation = F.gelu,
        gated: bool = False,
        scaled: bool = False,
        init: Init | None = None,
        init_down: Init | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        group: str | ProcessGroup = "tp",
        grid: HyperCommGrid | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            f"SharedExpert({hidden}, {ffn_hidden})", group=group, grid=grid,
            sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.hidden, self.ffn_hidden, self.activation = hidden, ffn_hidden, activation
        self._init, self._init_down = init, init_down
        width = self._share("ffn_hidden", ffn_hidden)
        self.up = self._new_parameter(width, hidden)
        self.down = self._new_parameter(hidden, width)
        self.register_parameter("gate", self._new_parameter(width, hidden) if gated else None)
        self.register_parameter("scale", self._new_parameter(1, hidden) if scaled else None)
        self.partial = ("scale",) if sequence_parallel else ()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws this rank's slices of full weights determined by torch's global random state."""
        for name, shape, init in (
            ("up", (self.ffn_hidden, self.hidden), self._init),
            ("gate", (self.ffn_hidden, self.hidden), self._init),
            ("down", (self.hidden, self.ffn_hidden), self._init_down),
            ("scale", (1, self.hidden), self._init),
        ):
            parameter, bound = getattr(self, name), 1 / math.sqrt(shape[-1])
            if parameter is not None:
                uniform = partial(nn.init.uniform_, a=-bound, b=bound)
                draw(parameter, shape, init or uniform, self.shard_dims.get(name), self.group)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x, self.hidden)
        layers: list[Layer] = [
            (weight, None) for weight in (self.up, self.gate) if weight is not None
        ]
        inner = column_matmul(x, layers, self.group.group, self._sharded_dim)
        active = self.activation(inner[-1])
        active = active * inner[0] if self.gate is not None else active
        y = row_matmul(active, self.down, None, self.group.group, self._sharded_dim)
        return y if self.scale is None else y * torch.sigmoid(F.linear(x, self.scale))

    def extra_repr(self) -> str:
        return f"{self.hidden}, {self.ffn_hidden}, gated={self.gate is not None}, {self.group}"
