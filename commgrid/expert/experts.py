"""The experts of a rank, computed together, and the expert that sees every token.

Per rank, with E experts on n ranks of ep, each shared by m ranks of etp, and R rows sorted by
expert with their weights w:

| | shape | forward | backward |
|---|---|---|---|
| `up` | (E/n, ffn/m, hidden) | a = x upᵀ | ∂x = ∂a up, ∂up = ∂aᵀ x |
| `down` | (E/n, hidden, ffn/m) | y = (act(a) · w) downᵀ, a part of the sum over etp | ∂(act · w) = ∂y down, ∂down = ∂yᵀ (act(a) · w) |

Only x, a and w are kept between the two: act(a) is computed again. Weights are applied to the
inner activation, as Megatron does (`moe_apply_probs_on_input=False`), which equals scaling y.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from commgrid.errors import ShapeError
from commgrid.group_ref import GroupRef
from commgrid.parameters import ShardedModule
from commgrid.tensor_parallel.init import Init, draw, other_random_state, seed_of
from commgrid.tensor_parallel.linear import ParallelLayer
from commgrid.tensor_parallel.matmul import (
    Layer,
    claim_main_grad,
    column_matmul,
    row_matmul,
    wanted,
)

if TYPE_CHECKING:
    from commgrid.grid import HyperCommGrid

Activation = Callable[[Tensor], Tensor]
"""Elementwise, such as F.gelu or F.silu."""


class GroupedExperts(ShardedModule):
    """This rank's experts, each an MLP without biases.

    Args:
        hidden: width of a token.
        ffn_hidden: width inside each expert; etp's size must divide it.
        num_experts: how many there are over all ranks of ep, whose size must divide it.
        activation: elementwise.
        gated: act(g) · u, where g and u are the two halves of what `up` makes (SwiGLU with F.silu,
            arXiv 2002.05202).
        init, init_down: fill an expert's full (ffn_hidden, hidden), with `gated` (2, ffn_hidden,
            hidden), and (hidden, ffn_hidden) in place; None: as nn.Linear.
        ep: the group that shares out the experts, in order.
        etp: the group that shares each.
        grid: where to look names up; None: the default one.
        device, dtype: as nn.Linear's; on "meta" nothing is drawn.

    Shapes:
        x: (rows, hidden), sorted by expert; weights: (rows,); y: (rows, hidden), whose sum over etp
        is the experts' output. `up` is (local experts, 2, ffn_hidden / m, hidden) with `gated`.

    Communication:
        None.

    Raises:
        ShapeError: numbers that cannot be shared out, or rows that are not as many as `counts` say.
    """

    up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        num_experts: int,
        *,
        activation: Activation = F.gelu,
        gated: bool = False,
        init: Init | None = None,
        init_down: Init | None = None,
        ep: str | ProcessGroup = "ep",
        etp: str | ProcessGroup = "etp",
        grid: HyperCommGrid | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        label = f"GroupedExperts({hidden}, {ffn_hidden}, {num_experts})"
        self.group = GroupRef(ep, grid, owner=label)
        self.etp = GroupRef(etp, grid, owner=label)
        for key, value, group in (
            ("num_experts", num_experts, self.group), ("ffn_hidden", ffn_hidden, self.etp)
        ):  # fmt: skip
            if value < 1 or value % group.size:
                raise ShapeError(
                    f"{label}: {key}={value} cannot be shared equally among the {group.size} ranks "
                    f"of group {group.name!r}; expected a multiple of {group.size}"
                )
        self.hidden, self.ffn_hidden, self.num_experts = hidden, ffn_hidden, num_experts
        self.num_local_experts = num_experts // self.group.size
        self.activation, self.gated = activation, gated
        self._init = {"up": init, "down": init_down}
        for name, shape in (("up", self._shapes[0]), ("down", self._shapes[1])):
            local = list(shape)
            local[self._etp_dim(name)] //= self.etp.size
            made = torch.empty(self.num_local_experts, *local, device=device, dtype=dtype)
            setattr(self, name, nn.Parameter(made))
        self.reset_parameters()

    @property
    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one expert's full `up` and `down`."""
        halves = (2,) if self.gated else ()
        return (*halves, self.ffn_hidden, self.hidden), (self.hidden, self.ffn_hidden)

    def _etp_dim(self, name: str) -> int:
        """The dim of one expert's parameter along which etp shares it."""
        return 1 if name == "down" or self.gated else 0

    def shards_of(self, name: str) -> tuple[tuple[int, GroupRef], ...]:
        return (0, self.group), (1 + self._etp_dim(name), self.etp)

    def reset_parameters(self) -> None:
        """Draws this rank's experts, each from a random stream of its own.

        What an expert gets depends on torch's global random state and its number only, and a rank
        draws none but its own.
        """
        seed = int(torch.randint(2**62, ()))
        first = self.group.rank * self.num_local_experts
        for local in range(self.num_local_experts):
            with other_random_state(seed_of(f"{seed}/{first + local}")):
                for name, shape in zip(("up", "down"), self._shapes, strict=True):
                    bound = 1 / math.sqrt(shape[-1])
                    uniform = partial(nn.init.uniform_, a=-bound, b=bound)
                    one = getattr(self, name)[local]
                    draw(one, shape, self._init[name] or uniform, self._etp_dim(name), self.etp)

    def forward(self, x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        """The outputs, times the weights.

        Args:
            x: (rows, hidden), sorted by expert.
            weights: (rows,).
            counts: how many rows each local expert has.
        """
        if x.shape != (sum(counts), self.hidden) or len(counts) != self.num_local_experts:
            raise ShapeError(
                f"{self.group.owner}: rows of shape {tuple(x.shape)} and counts={list(counts)}; "
                f"expected {self.num_local_experts} counts that add up to the rows, and hidden "
                f"{self.hidden}"
            )
        segments = Segments(tuple(counts), x.device)
        x, up, down = _autocast(x, self.up, self.down)
        inner: Tensor = _Up.apply(x, up, segments)  # type: ignore[no-untyped-call]
        y: Tensor = _Down.apply(inner, weights, down, segments, self._act)  # type: ignore[no-untyped-call]
        return y

    def _act(self, inner: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(inner)
        gate, up = inner.chunk(2, -1)
        return self.activation(gate) * up

    def extra_repr(self) -> str:
        return (
            f"{self.hidden}, {self.ffn_hidden}, {self.num_experts}, gated={self.gated}, "
            f"ep={self.group}, etp={self.etp}"
        )


# -- the matmuls -------------------------------------------------------------------------


class Segments:
    """Which rows are which expert's.

    Args:
        counts: how many each has.
        device: of the rows.
    """

    def __init__(self, counts: tuple[int, ...], device: torch.device) -> None:
        self.counts = counts
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        self.ends = ends.to(device, non_blocking=True)  # the host need not wait

    def __iter__(self) -> Iterator[slice]:
        start = 0
        for count in self.counts:
            yield slice(start, start + count)
            start += count


class _Up(torch.autograd.Function):
    """x upᵀ, expert by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, segments: Segments) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.segments = segments
        return rows_matmul(x, up.flatten(1, -2).transpose(1, 2), segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, up = ctx.saved_tensors
        needs_x, needs_up = wanted(ctx)[:2]
        dx = rows_matmul(gradient, up.flatten(1, -2), ctx.segments) if needs_x else None
        dup = weight_gradients(up, gradient, x, ctx) if needs_up else None
        return dx, dup, None


class _Down(torch.autograd.Function):
    """(act(inner) · weights) downᵀ, expert by expert."""

    @staticmethod
    def forward(
        ctx: Any, inner: Tensor, weights: Tensor, down: Tensor, segments: Segments, act: Activation
    ) -> Tensor:
        ctx.save_for_backward(inner, weights, down)
        ctx.segments, ctx.act = segments, act
        return rows_matmul(_scaled(act(inner), weights), down.transpose(1, 2), segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inner, weights, down = ctx.saved_tensors
        needs_inner, needs_weights, needs_down = wanted(ctx)[:3]
        with torch.enable_grad():
            inner = inner.detach().requires_grad_()
            active = ctx.act(inner)
        dinner = dweights = ddown = None
        if needs_inner or needs_weights:
            dactive = rows_matmul(dy, down, ctx.segments)
            if needs_weights:
                products = dactive * active.detach()
                dweights = products.sum(-1, dtype=weights.dtype)
                del products
            if needs_inner:
                dactive = _scaled(dactive, weights, out=dactive)
                (dinner,) = torch.autograd.grad(active, inner, dactive)
            del dactive
        if needs_down:
            active = _scaled(active.detach(), weights)
            ddown = weight_gradients(down, dy, active, ctx)
        return dinner, dweights, ddown, None, None


def _scaled(rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """rows · weights in the rows' dtype, multiplied in the wider one."""
    out = torch.empty_like(rows) if out is None else out
    return torch.mul(rows, weights.unsqueeze(1), out=out)


def rows_matmul(rows: Tensor, weights: Tensor, segments: Segments) -> Tensor:
    """Each expert's rows times its weight.

    Args:
        rows: (rows, i), sorted by expert.
        weights: (experts, i, o).

    Returns:
        (rows, o).
    """
    weights = weights.to(rows.dtype)
    if _at_once(rows, weights.shape[2]):
        return torch._grouped_mm(rows, weights, offs=segments.ends)
    made = rows.new_empty(len(rows), weights.shape[2])
    for own, weight in zip(segments, weights, strict=True):
        torch.mm(rows[own], weight, out=made[own])
    return made


def weight_gradients(weight: Tensor, dy: Tensor, x: Tensor, ctx: Any) -> Tensor | None:
    """∂yᵀ x of each expert; None where it went into `weight.main_grad`.

    Args:
        weight: (experts, …, i), of which … makes o.
        dy: (rows, o). x: (rows, i).
        ctx: of the backward that is running, which has `segments`.
    """
    main = claim_main_grad(weight, ctx)
    if main is not None and main[0].dtype == dy.dtype and not _at_once(x, dy.shape[1]):
        into, beta = main[0].view(len(weight), dy.shape[1], -1), 0 if main[1] else 1
        for own, one in zip(ctx.segments, into, strict=True):
            one.addmm_(dy[own].t(), x[own], beta=beta)
        return None
    made = _weight_gradients(dy, x, ctx.segments).view(weight.shape)
    if main is None:
        return made
    _ = main[0].copy_(made) if main[1] else main[0].add_(made)
    return None


def _weight_gradients(dy: Tensor, x: Tensor, segments: Segments) -> Tensor:
    shape = (len(segments.counts), dy.shape[1], x.shape[1])
    if _at_once(x, dy.shape[1]):
        made = torch._grouped_mm(dy.t(), x, offs=segments.ends)
        for one, count in zip(made, segments.counts, strict=True):
            if not count:
                one.zero_()
        return made
    made = x.new_empty(shape)
    for own, one in zip(segments, made, strict=True):
        torch.mm(dy[own].t(), x[own], out=one)
    return made


def _at_once(rows: Tensor, width: int) -> bool:
    """Whether torch multiplies all experts in one kernel, faster than a loop: on CUDA in bf16,
    where each row begins at a multiple of 16 bytes."""
    aligned = rows.shape[1] % 8 == 0 and width % 8 == 0
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and len(rows) > 0


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast makes of the arguments of a matmul."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


# -- the shared expert -------------------------------------------------------------------


class SharedExpert(ParallelLayer):
    """An MLP without biases that sees every token, beside the routed experts.

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
        """Draws the full weights from torch's global random state and keeps this rank's slices."""
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
