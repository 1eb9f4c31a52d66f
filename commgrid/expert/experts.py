"""The experts of a rank, computed together.

Per rank, with E experts on n ranks of ep, each shared by m ranks of etp, and R rows sorted by
expert with their weights w:

| | shape | forward | backward |
|---|---|---|---|
| `up` | (E/n, ffn/m, hidden) | a = x upᵀ | ∂x = ∂a up, ∂up = ∂aᵀ x |
| `down` | (E/n, hidden, ffn/m) | y = (act(a) · w) downᵀ, a part of the sum over etp | ∂(act · w) = ∂y down, ∂down = ∂yᵀ (act(a) · w) |

Only x, a and w are kept between the two: act(a) is computed again, and may draw no random numbers.
Weights are applied to the inner activation, as Megatron does (`moe_apply_probs_on_input=False`),
which equals scaling y.
"""  # noqa: E501

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import as_output
from commgrid.collectives.first_order import first_order
from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import ShapeError, SpecError
from commgrid.parameters import ShardedModule, mark_parameters
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel.init import Init, draw, has_numbers, other_random_state, seed_of
from commgrid.tensor_parallel.matmul import add_product, buffer_of, wanted

Activation = Callable[[Tensor], Tensor]
"""Elementwise, such as F.gelu or F.silu."""


class GroupedExperts(ShardedModule):
    """This rank's experts, each an MLP without biases.

    Args:
        hidden: width of a token.
        ffn_hidden: width inside each expert; etp's size must divide it.
        num_experts: how many there are over all ranks of ep, whose size must divide it.
        activation: elementwise; called again in backward, so without dropout.
        gated: act(g) · u, where g and u are the two halves of x upᵀ (SwiGLU with F.silu,
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
        ShapeError: sizes that the groups do not divide, or rows that do not match `counts`.
        SpecError: an activation that has parameters or draws random numbers.
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
        if isinstance(activation, nn.Module) and any(
            p.requires_grad for p in activation.parameters()
        ):
            raise SpecError(
                f"{label}: activation={activation} has parameters, which would get no gradients; "
                "expected a function, or a module without any"
            )
        self.activation, self.gated = activation, gated
        self._init = {"up": init, "down": init_down}
        for name, shape in (("up", self._shapes[0]), ("down", self._shapes[1])):
            local = list(shape)
            local[self._etp_dim(name)] //= self.etp.size
            made = torch.empty(self.num_local_experts, *local, device=device, dtype=dtype)
            setattr(self, name, nn.Parameter(made))
        mark_parameters(self, region="expert")
        self.reset_parameters()

    @property
    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one expert's full `up` and `down`."""
        halves = (2,) if self.gated else ()
        return (*halves, self.ffn_hidden, self.hidden), (self.hidden, self.ffn_hidden)

    def _etp_dim(self, name: str) -> int:
        """The dim of one expert's parameter along which etp shares it."""
        return 1 if name == "down" or self.gated else 0

    @property
    def sliced_names(self) -> tuple[str, ...]:
        return "up", "down"

    def shards_of(self, name: str) -> tuple[tuple[int, GroupRef], ...]:
        return (0, self.group), (1 + self._etp_dim(name), self.etp)

    def reset_parameters(self) -> None:
        """Draws this rank's part of its experts.

        An expert's weights depend only on torch's global random state and the expert's number: each
        draws from its own random stream.
        """
        first = self.group.rank * self.num_local_experts
        for name, shape in zip(("up", "down"), self._shapes, strict=True):
            parameter, bound = getattr(self, name), 1 / math.sqrt(shape[-1])
            init = self._init[name] or partial(nn.init.uniform_, a=-bound, b=bound)
            if not has_numbers(parameter):
                continue
            seed = int(torch.randint(2**62, (), device="cpu"))
            for local in range(self.num_local_experts):
                with other_random_state(seed_of(f"{seed}/{first + local}")):
                    draw(parameter[local], shape, init, self._etp_dim(name), self.etp)

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
        x, up, down = _autocast(x, self.up, self.down)
        parts = pieces(counts, at_once(x, self.hidden, down.shape[2]), x.device)
        if torch.compiler.is_compiling():  # the compiler decides what is computed again
            return _traced(x, weights, up, down, parts, self._act)
        y: Tensor = _Experts.apply(x, weights, up, down, parts, self._act, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return y

    def _act(self, inner: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(inner).to(inner.dtype)
        gate, up = inner.chunk(2, -1)
        return (self.activation(gate) * up).to(inner.dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden}, {self.ffn_hidden}, {self.num_experts}, gated={self.gated}, "
            f"ep={self.group}, etp={self.etp}"
        )


# -- the matmuls -------------------------------------------------------------------------


@dataclass(frozen=True)
class RowBlock:
    """Rows that are taken through all steps together.

    Args:
        own: the range of rows.
        expert: the expert of all rows; None: rows of all experts, computed in one kernel.
        ends: for that kernel, (experts,) int32, the row after each expert's last.
        counts: how many rows each of these experts has.
    """

    own: slice
    expert: int | None
    ends: Tensor | None
    counts: tuple[int, ...]

    def times(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Each row times its expert's weight: (rows, i) and (experts, i, o) to (rows, o)."""
        if self.expert is None:
            return torch._grouped_mm(rows, weights.to(rows.dtype), offs=self.ends)
        return torch.mm(rows, weights[self.expert].to(rows.dtype), out=out)


def pieces(counts: Sequence[int], kernel: bool, device: torch.device) -> list[RowBlock]:
    """All rows at once where a kernel takes them; else each expert's, while they are in the cache.

    Args:
        counts: how many rows each expert has.
        kernel: whether `at_once`.
        device: of the rows.
    """
    stops = list(accumulate(counts))
    if kernel:
        ends = torch.tensor(stops, dtype=torch.int32).to(device, non_blocking=True)
        return [RowBlock(slice(None), None, ends, tuple(counts))]
    return [
        RowBlock(slice(stop - count, stop), expert, None, (count,))
        for expert, (count, stop) in enumerate(zip(counts, stops, strict=True))
    ]


class _Experts(torch.autograd.Function):
    """(act(x upᵀ) · weights) downᵀ, expert by expert.

    A backward for the inputs alone, a pipeline's first half, keeps the gradients of the inner
    activations for the second half, which is for the parameters alone and starts from the same ∂y.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, parts: list[RowBlock],
        act: Activation, keep: bool,
    ) -> Tensor:  # fmt: skip
        ctx.parts, ctx.act, ctx.halfway = parts, act, None
        before = _random_states(x) if keep else []
        up_t, down_t = up.flatten(1, -2).transpose(1, 2), down.transpose(1, 2)
        y = None if len(parts) == 1 else torch.empty_like(x)
        inners = []
        for part in parts:
            inner = part.times(x[part.own], up_t)
            active = _scaled(act(inner), weights[part.own])
            made = part.times(active, down_t, y[part.own] if y is not None else None)
            if keep:
                inners.append(inner)
        if keep and [*map(_content, before)] != [*map(_content, _random_states(x))]:
            raise SpecError(
                "GroupedExperts: the activation has drawn random numbers, and backward would draw "
                "others when it recomputes it; expected none, so put dropout behind the experts"
            )
        ctx.save_for_backward(x, weights, up, down, *inners)
        return as_output(made if y is None else y)

    @staticmethod
    @first_order("GroupedExperts")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, up, down, *inners = ctx.saved_tensors
        needs_x, needs_weights, needs_up, needs_down = wanted(ctx)[:4]
        dinners: list[Tensor | None] = [None] * len(inners)
        if ctx.halfway is not None and not needs_x and not needs_weights:
            start, version, kept = ctx.halfway
            dinners = kept if _is_same(start, dy) and version == dy._version else dinners
        ctx.halfway = None
        later = any(ctx.needs_input_grad[2:4]) and not needs_up and not needs_down
        if later and not dy.is_inference():
            ctx.halfway = dy, dy._version, []
        dy = dy.contiguous()
        dx = torch.empty_like(x) if needs_x and ctx.parts[0].expert is not None else None
        dweights = torch.empty_like(weights)
        dup = ExpertWeightGradient(ctx, up, dy) if needs_up else None
        ddown = ExpertWeightGradient(ctx, down, dy) if needs_down else None
        for part, inner, dinner in zip(ctx.parts, inners, dinners, strict=True):
            own = part.own
            with torch.enable_grad():
                inner = inner.detach().requires_grad_()
                active = ctx.act(inner)
            if dinner is None:
                dactive = part.times(dy[own], down)
                dweights[own] = (dactive * active.detach()).sum(-1, dtype=weights.dtype)
                dactive = _scaled(dactive, weights[own], out=dactive)
                (dinner,) = torch.autograd.grad(active, inner, dactive)
                del dactive
            if ddown is not None:
                ddown.add(part, dy[own], _scaled(active.detach(), weights[own]))
            if dup is not None:
                dup.add(part, dinner, x[own])
            if needs_x:
                made = part.times(dinner, up.flatten(1, -2), dx[own] if dx is not None else None)
                dx = made if dx is None else dx
            if ctx.halfway is not None:
                ctx.halfway[2].append(dinner)
        results = [into.result if into is not None else None for into in (dup, ddown)]
        return dx, dweights if needs_weights else None, *results, None, None, None


def _traced(
    x: Tensor, weights: Tensor, up: Tensor, down: Tensor, parts: list[RowBlock], act: Activation
) -> Tensor:
    """`_Experts` in plain operations, for torch.compile."""
    up_t, down_t = up.flatten(1, -2).transpose(1, 2), down.transpose(1, 2)
    made = []
    for part in parts:
        active = act(part.times(x[part.own], up_t))
        scaled = (active * weights[part.own].unsqueeze(1)).to(active.dtype)
        made.append(part.times(scaled, down_t))
    return torch.cat(made)


def _random_states(like: Tensor) -> list[Tensor]:
    """States of the default generators of the CPU and of the tensor's device."""
    states = [torch.get_rng_state()]
    if like.device.type not in ("cpu", "meta") and not (
        like.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        states.append(torch.get_device_module(like.device).get_rng_state(like.device))
    return states


def _content(state: Tensor) -> bytes:
    """Values of a tensor on the host, read without an operation that a mode could see or refuse."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two gradients are one and the same memory."""
    return (one.data_ptr(), one.shape, one.stride()) == (
        other.data_ptr(), other.shape, other.stride(),
    )  # fmt: skip


def _scaled(rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """rows · weights in the rows' dtype, multiplied in the wider one."""
    out = torch.empty_like(rows) if out is None else out
    return torch.mul(rows, weights.unsqueeze(1), out=out)


class ExpertWeightGradient:
    """∂W = ∂yᵀ x of each expert, of a weight (experts, …, i), of which … makes o.

    Args:
        ctx: of the running backward.
        weight: whose shape the gradient has.
        dy: whose dtype it is computed in.

    Attributes:
        result: the gradient of W; None: no piece was added, or it is in the reducer's buffer.
    """

    def __init__(self, ctx: Any, weight: Tensor, dy: Tensor) -> None:
        self._weight, self._dtype = weight, dy.dtype
        self._into = buffer_of(ctx, weight)
        self.result: Tensor | None = None

    def add(self, part: RowBlock, dy: Tensor, x: Tensor) -> None:
        """Those of a piece, from its rows (rows, o) and (rows, i)."""
        x = x.to(dy.dtype)
        if part.expert is None:
            made = torch._grouped_mm(dy.t(), x, offs=part.ends)
            for expert, count in enumerate(part.counts):
                if not count:
                    made[expert].zero_()  # which a kernel without any rows need not write
            made = made.view(self._weight.shape)
            if self._into is None:
                self.result = made
            else:
                self._into.add_(made)
            return
        if self._into is not None:
            add_product(self._into[part.expert].view(dy.shape[1], -1), dy, x)
            return
        if self.result is None:
            self.result = torch.empty_like(self._weight, dtype=self._dtype)
        torch.mm(dy.t(), x, out=self.result[part.expert].view(dy.shape[1], -1))


def at_once(rows: Tensor, *widths: int) -> bool:
    """Whether torch multiplies all experts in one kernel, and faster than a loop.

    It does on CUDA, in bf16, if every row begins at a multiple of 16 bytes.
    """
    aligned = all(width % 8 == 0 for width in widths)
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and len(rows) > 0


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The arguments of a matmul as autocast converts them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
