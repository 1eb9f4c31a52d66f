"""Linear layers split over a group by output features (column) or input features (row).

Per rank, with n ranks in the group and x of shape (*, in_features):

| layer | weight | forward | communicates forward | backward |
|---|---|---|---|---|
| column | (out/n, in) | y_i = x A_iᵀ + b_i | gather y if `gather_output` | all-reduce ∂x |
| row | (out, in/n) | y = Σ x_i A_iᵀ + b | all-reduce y | gather ∂x if not `input_is_parallel` |

A column layer followed by a row layer is one MLP or attention block with one all-reduce
each way (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.collectives import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    scatter_to_group,
)
from commgrid.errors import ShapeError
from commgrid.group_ref import GroupRef
from commgrid.tensor_parallel.init import ShardedModule

if TYPE_CHECKING:
    from commgrid.grid import HyperCommGrid

Init = Callable[[Tensor], object]
"""Fills a full weight in place from torch's global random state."""


class _ParallelLinear(ShardedModule):
    """What both layers share: parameters that are slices of a full weight along one dim."""

    sharded_features: str
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init: Init | None,
        group: str | ProcessGroup,
        grid: HyperCommGrid | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        label = f"{type(self).__name__}({in_features}, {out_features})"
        self.in_features, self.out_features = in_features, out_features
        self.group = GroupRef(group, grid, owner=label)
        self._init = init
        share = self._share(label)
        rows, columns = (
            (share, in_features)
            if self.sharded_features == "out_features"
            else (out_features, share)
        )
        options = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(rows, columns, **options))  # type: ignore[arg-type]
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, **options))  # type: ignore[arg-type]
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _share(self, label: str) -> int:
        features: int = getattr(self, self.sharded_features)
        if features < 1 or features % self.group.size:
            raise ShapeError(
                f"{label}: {self.sharded_features}={features} cannot be shared equally among the "
                f"{self.group.size} ranks of group {self.group.name!r}"
            )
        return features // self.group.size

    def reset_parameters(self) -> None:
        """Draws the full weight from torch's global random state and keeps this rank's slice.

        Ranks of the group whose random states are equal get slices of one weight; without
        an `init` it is nn.Linear's, uniform within ±1/√in_features, and so is the bias.
        """
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            full = torch.empty(self.out_features, self.in_features, dtype=self.weight.dtype)
            if self._init is None:
                full.uniform_(-bound, bound)
            else:
                self._init(full)
            self.weight.copy_(self._slice("weight", full))
            if self.bias is not None:
                full = torch.empty(self.out_features, dtype=self.bias.dtype)
                full.uniform_(-bound, bound) if self._init is None else full.zero_()
                self.bias.copy_(self._slice("bias", full))

    def _slice(self, name: str, full: Tensor) -> Tensor:
        dim = self.shard_dims.get(name)
        return full if dim is None else full.chunk(self.group.size, dim)[self.group.rank]

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.group}"
        )

    def _check_width(self, x: Tensor, width: int) -> None:
        if x.dim() == 0 or x.shape[-1] != width:
            raise ShapeError(
                f"{self.group.owner}: input of shape {tuple(x.shape)} should have {width} "
                f"features in its last dim on each of the {self.group.size} ranks of group "
                f"{self.group.name!r}"
            )


class ColumnParallelLinear(_ParallelLinear):
    """y = x Aᵀ + b with A split by rows, so that each rank computes its part of y.

    Args:
        in_features: width of x, which is equal on all ranks.
        out_features: width of the full y; the group's size must divide it.
        bias: whether there is a b, split like y.
        gather_output: return the full y on every rank instead of this rank's part.
        init: fills the full weight in place; the bias is then zero.
        group: a group name, or a bare ProcessGroup (which cannot be pickled).
        grid: the grid to look the name up in; None: the default one.
        device, dtype: as nn.Linear's.

    Shapes:
        x: (*, in_features); y: (*, out_features / n), or (*, out_features) gathered.

    Communication:
        Forward none (all-gather of y with `gather_output`); backward all-reduce of ∂x.

    Raises:
        ShapeError: the group's size does not divide out_features, or x has another width.
    """

    sharded_features = "out_features"
    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        init: Init | None = None,
        group: str | ProcessGroup = "tp",
        grid: HyperCommGrid | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.gather_output = gather_output
        super().__init__(
            in_features, out_features, bias=bias, init=init, group=group, grid=grid,
            device=device, dtype=dtype,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        self._check_width(x, self.in_features)
        y = F.linear(copy_to_group(x, self.group), self.weight, self.bias)
        return gather_from_group(y, self.group, dim=-1) if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
    """y = x Aᵀ + b with A split by columns, so that each rank adds its part to y.

    Args:
        in_features: width of the full x; the group's size must divide it.
        out_features: width of y, which is equal on all ranks.
        bias: whether there is a b, equal on all ranks and added once.
        input_is_parallel: x is this rank's part already, as a column layer leaves it.
        init: fills the full weight in place; the bias is then zero.
        group: a group name, or a bare ProcessGroup (which cannot be pickled).
        grid: the grid to look the name up in; None: the default one.
        device, dtype: as nn.Linear's.

    Shapes:
        x: (*, in_features / n), or (*, in_features) if not `input_is_parallel`;
        y: (*, out_features).

    Communication:
        Forward all-reduce of y; backward none (all-gather of ∂x if not `input_is_parallel`).

    Raises:
        ShapeError: the group's size does not divide in_features, or x has another width.
    """

    sharded_features = "in_features"
    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        init: Init | None = None,
        group: str | ProcessGroup = "tp",
        grid: HyperCommGrid | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.input_is_parallel = input_is_parallel
        super().__init__(
            in_features, out_features, bias=bias, init=init, group=group, grid=grid,
            device=device, dtype=dtype,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            self._check_width(x, self.in_features)
            x = scatter_to_group(x, self.group, dim=-1)
        self._check_width(x, self.in_features // self.group.size)
        y = reduce_from_group(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias
