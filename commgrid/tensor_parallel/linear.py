"""Linear layers split over a group by output features (column) or input features (row).

Per rank, with n ranks in the group and x of shape (*, in_features):

| layer | weight | forward | communicates forward | backward |
|---|---|---|---|---|
| column | (out/n, in) | y_i = x A_iᵀ + b_i | gather y if `gather_output` | all-reduce ∂x |
| row | (out, in/n) | y = Σ x_i A_iᵀ + b | all-reduce y | gather ∂x if not `input_is_parallel` |
| column, `sequence_parallel` | (out/n, in) | y_i = x A_iᵀ + b_i | all-gather x | all-gather x, reduce-scatter ∂x |
| row, `sequence_parallel` | (out, in/n) | y = Σ x_i A_iᵀ + b | reduce-scatter y | all-gather ∂y |

A column layer followed by a row layer is one MLP or attention block with one all-reduce
each way (Megatron-LM, arXiv 1909.08053, section 3). With sequence parallelism the activations
outside the block are sharded along the sequence over the same ranks, and each all-reduce
becomes an all-gather and a reduce-scatter (arXiv 2205.05198, section 4.2).
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.collectives import gather_from_group, scatter_to_group
from commgrid.collectives.group_ref import GroupRef
from commgrid.equality.inputs import note
from commgrid.errors import ShapeError, SpecError
from commgrid.parameters import ShardedModule
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel.init import Init, draw
from commgrid.tensor_parallel.matmul import column_matmul, row_matmul

Output = Tensor | tuple[Tensor, Tensor | None]
"""y, or with `skip_bias_add` y without the bias, and the bias."""


class ParallelLayer(ShardedModule):
    """Base of linear layers over a group: their group, parameters and checks.

    Args:
        label: the layer's name in messages.
        group, grid: the layer's group and the grid to look it up in.
        sequence_parallel: whether activations outside it are sharded along the sequence.
        sequence_dim: which dim of the activations is the sequence.
        device, dtype: of its parameters.
    """

    def __init__(
        self,
        label: str,
        *,
        group: str | ProcessGroup,
        grid: HyperCommGrid | None,
        sequence_parallel: bool,
        sequence_dim: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.group = GroupRef(group, grid, owner=label)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self._device, self._dtype = device, dtype

    def _new_parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, device=self._device, dtype=self._dtype))

    def _share(self, what: str, count: int, advice: str = "") -> int:
        if count < 1 or count % self.group.size:
            raise ShapeError(
                f"{self.group.owner}: {what}={count} cannot be shared equally among the "
                f"{self.group.size} ranks of group {self.group.name!r}{advice}"
            )
        return count // self.group.size

    @property
    def _sharded_dim(self) -> int | None:
        """The dim along which activations outside are sharded."""
        return self.sequence_dim if self.sequence_parallel else None

    def _check_input(self, x: Tensor, width: int) -> None:
        if x.dim() == 0 or x.shape[-1] != width:
            raise ShapeError(
                f"{self.group.owner}: input of shape {tuple(x.shape)} should have {width} "
                f"features in its last dim on each of the {self.group.size} ranks of group "
                f"{self.group.name!r}"
            )
        last = x.dim() - 1
        if self.sequence_parallel and not -last - 1 <= self.sequence_dim < last:
            raise ShapeError(
                f"{self.group.owner}: input of shape {tuple(x.shape)} has no sequence in dim "
                f"{self.sequence_dim}; expected it before the features, or another sequence_dim"
            )

    def _check_sequence(self, x: Tensor) -> None:
        length = x.shape[self.sequence_dim] if self.sequence_parallel else 0
        if length % self.group.size:
            raise ShapeError(
                f"{self.group.owner}: the sequence of {length} in dim {self.sequence_dim} of shape "
                f"{tuple(x.shape)} cannot be shared equally among the {self.group.size} ranks of "
                f"group {self.group.name!r}, as sequence parallelism does; pad it to a multiple"
            )


class _ParallelLinear(ParallelLayer):
    """A weight that is a slice of a full one along one dim, and its bias."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def _set_up(
        self,
        in_features: int,
        out_features: int,
        rows: int,
        columns: int,
        *,
        bias: bool,
        skip_bias_add: bool,
        weight: nn.Parameter | bool | None,
        init: Init | None,
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.skip_bias_add = skip_bias_add
        self._init = init
        self._local_shape = (rows, columns)
        self._tied: list[nn.Parameter] = []  # another module's: a list, no parameter of its own
        own = self._new_parameter(rows, columns) if weight is None else None
        self.register_parameter("weight", own)
        if isinstance(weight, nn.Parameter):
            self.tie_weight(weight)
        self.register_parameter("bias", self._new_parameter(rows) if bias else None)
        self.reset_parameters()

    def tie_weight(self, weight: nn.Parameter) -> None:
        """Uses a weight that another module owns and draws.

        Again after `to_empty`, which gives every module a parameter of its own.

        Raises:
            ShapeError: it has another shape than this rank's part.
        """
        self.weight = self._check_weight(weight)
        self._tied = [weight]

    def _check_weight(self, weight: Tensor) -> nn.Parameter:
        if tuple(weight.shape) != self._local_shape:
            raise ShapeError(
                f"{self.group.owner}: a weight of shape {tuple(weight.shape)}, expected "
                f"{self._local_shape} on each of the {self.group.size} ranks of group "
                f"{self.group.name!r}"
            )
        return weight  # type: ignore[return-value]

    def _weight(self, given: Tensor | None) -> Tensor:
        weight = self.weight if given is None else given
        if weight is None:
            raise ShapeError(
                f"{self.group.owner} was made without a weight (weight=False); give each call one, "
                f"of shape {self._local_shape}"
            )
        return weight if given is None else self._check_weight(given)

    def reset_parameters(self) -> None:
        """Draws this rank's slice of a full weight determined by torch's global random state.

        Ranks of the group whose random states are equal get slices of one weight; without
        an `init` it is uniform within ±1/√in_features, as nn.Linear's, and so is the bias. A
        weight that another module owns is left to it, and nothing is drawn on the meta device.
        """
        bound = 1 / math.sqrt(self.in_features)
        uniform = partial(nn.init.uniform_, a=-bound, b=bound)
        shape = (self.out_features, self.in_features)
        if self._tied and self.weight is not self._tied[0]:
            raise SpecError(
                f"{self.group.owner}: its weight is no longer the one it was tied to, as after "
                "to_empty; call tie_weight with the owner's weight again"
            )
        if self.weight is not None and not self._tied:
            draw(self.weight, shape, self._init or uniform, self.shard_dims["weight"], self.group)
        if self.bias is not None:
            fill = uniform if self._init is None else nn.init.zeros_
            draw(self.bias, shape[:1], fill, self.shard_dims.get("bias"), self.group)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"sequence_parallel={self.sequence_parallel}, {self.group}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """y = x Aᵀ + b with A split by rows, so that each rank computes its part of y.

    Args:
        in_features: width of x, which is equal on all ranks.
        out_features: width of the full y; the group's size must divide it.
        bias: whether there is a b, split like y.
        gather_output: return the full y on every rank instead of this rank's part.
        skip_bias_add: return (y without b, b) for a caller that fuses the addition.
        sequence_parallel: x is this rank's slice of the sequence, y has all of it.
        sequence_dim: which dim of x is the sequence; 0 as in Megatron.
        weight: a parameter of this rank's shape that another module owns (tied embeddings);
            False: none, every call brings its own; None: a new one.
        init: fills the full weight in place; the bias is then zero. Of `torch.nn.init`'s usual
            ones a rank draws its slice only, of any other the full weight
            (`commgrid.tensor_parallel.init.Init`).
        group: a group name, or a bare ProcessGroup (which cannot be pickled).
        grid: the grid to look the name up in; None: the default one.
        device, dtype: as nn.Linear's. On "meta" nothing is drawn; `to_empty` and
            `reset_parameters` or `initialize_parameters` make it real.

    Shapes:
        x: (*, in_features); y: (*, out_features / n), or (*, out_features) gathered.
        With `sequence_parallel`, x has 1/n of y's length in `sequence_dim`.

    Communication:
        Forward none (all-gather of y with `gather_output`); backward all-reduce of ∂x, during
        the matmul for ∂A. With `sequence_parallel`: forward all-gather of x; backward all-gather
        of x during the matmul for ∂x, reduce-scatter of ∂x during the matmul for ∂A.

    Raises:
        ShapeError: the group's size does not divide out_features, or x has another width.
        GridNotInitializedError: called after its grid was destroyed.
    """

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        weight: nn.Parameter | bool | None = None,
        init: Init | None = None,
        group: str | ProcessGroup = "tp",
        grid: HyperCommGrid | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            f"{type(self).__name__}({in_features}, {out_features})", group=group, grid=grid,
            sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.gather_output = gather_output
        self._set_up(
            in_features, out_features, self._rows(out_features), in_features, bias=bias,
            skip_bias_add=skip_bias_add, weight=weight, init=init,
        )  # fmt: skip

    def _rows(self, out_features: int) -> int:
        return self._share("out_features", out_features)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Output:
        self._check_input(x, self.in_features)
        if not self.sequence_parallel:
            note(f"{self.group.owner}'s input", x, self.group)
        added = None if self.skip_bias_add else self.bias
        (y,) = column_matmul(
            x, [(self._weight(weight), added)], self.group.group, self._sharded_dim
        )  # fmt: skip
        if self.gather_output:
            y = gather_from_group(y, self.group, dim=-1)
        if not self.skip_bias_add:
            return y
        if self.gather_output and self.bias is not None:
            return y, gather_from_group(self.bias, self.group)
        return y, self.bias


class RowParallelLinear(_ParallelLinear):
    """y = x Aᵀ + b with A split by columns, so that each rank adds its part to y.

    Args:
        in_features: width of the full x; the group's size must divide it.
        out_features: width of y, which is equal on all ranks.
        bias: whether there is a b, equal on all ranks and added once.
        input_is_parallel: x is this rank's part already, as a column layer leaves it.
        skip_bias_add: return (y without b, b) for a caller that fuses the addition.
        sequence_parallel: y is this rank's slice of the sequence, of which x has all. The
            gradient of b is then a partial sum over the group.
        sequence_dim: which dim of y is the sequence; 0 as in Megatron.
        weight: a parameter of this rank's shape that another module owns; False: none, every
            call brings its own; None: a new one.
        init: fills the full weight in place; the bias is then zero.
        group: a group name, or a bare ProcessGroup (which cannot be pickled).
        grid: the grid to look the name up in; None: the default one.
        device, dtype: as nn.Linear's; "meta" as ColumnParallelLinear's.

    Shapes:
        x: (*, in_features / n), or (*, in_features) if not `input_is_parallel`;
        y: (*, out_features), of 1/n of x's length in `sequence_dim` with `sequence_parallel`.

    Communication:
        Forward all-reduce of y; backward none (all-gather of ∂x if not `input_is_parallel`).
        With `sequence_parallel`: forward reduce-scatter of y, backward all-gather of ∂y.

    Raises:
        ShapeError: the group's size does not divide in_features or the sequence, or x has
            another width.
        GridNotInitializedError: called after its grid was destroyed.
    """

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        weight: nn.Parameter | bool | None = None,
        init: Init | None = None,
        group: str | ProcessGroup = "tp",
        grid: HyperCommGrid | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            f"{type(self).__name__}({in_features}, {out_features})", group=group, grid=grid,
            sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.input_is_parallel = input_is_parallel
        self.partial = ("bias",) if sequence_parallel else ()
        self._set_up(
            in_features, out_features, out_features, self._share("in_features", in_features),
            bias=bias, skip_bias_add=skip_bias_add, weight=weight, init=init,
        )  # fmt: skip

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Output:
        if not self.input_is_parallel:
            self._check_input(x, self.in_features)
            note(f"{self.group.owner}'s input", x, self.group)
            x = scatter_to_group(x, self.group, dim=-1)
        self._check_input(x, self.in_features // self.group.size)
        self._check_sequence(x)
        added = None if self.skip_bias_add else self.bias
        y = row_matmul(x, self._weight(weight), added, self.group.group, self._sharded_dim)
        return (y, self.bias) if self.skip_bias_add else y
