"""Torch's attention kernels on rectangles, forward with a log-sum-exp and backward from one.

| device | dtype | kernel |
|---|---|---|
| CPU | any | `_scaled_dot_product_flash_attention_for_cpu` |
| CUDA | bf16, fp16 | `_flash_attention_forward`, many rectangles in a call (`VarlenCall`) |
| | of one document | `_scaled_dot_product_cudnn_attention` where torch itself would take it |
| CUDA | fp32 | `_scaled_dot_product_efficient_attention` |
| else | any | matrix products |

A head of keys serves its group of query heads without a copy: torch's flash kernels take them as
they are, the efficient one is called for each query head of the groups in turn. But for flash on
CUDA every rectangle is a call, small ones too: on the CPU one call with a mask over eight documents
of eight tokens takes as long as eight calls, and reads all the pairs between them for nothing.

cuDNN's takes half of flash's time on an H100, and builds a plan for each shape that it meets. So it
is for rectangles that are the same in every step, those of a sequence of one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from commgrid.context_parallel.tiles import Tile
from commgrid.context_parallel.varlen import VarlenCall, varlen_calls

_ops = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of another are summed."""
    return torch.promote_types(dtype, torch.float32)


def readable(x: Tensor) -> Tensor:
    """The tensor with its last dim contiguous. Torch's kernels require it; those for the CPU read
    other memory instead of refusing another stride."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Within it, operations on tensors like `x` keep their dtypes."""
    kind = x.device.type
    is_known = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if is_known else nullcontext()


def _allowed(tile: Tile, device: torch.device) -> Tensor:
    """The mask of a tile, (queries, keys); True: attended."""
    rows, columns = (torch.arange(size, device=device) for size in tile.size)
    behind = (tile.offset or 0) + rows[:, None] - columns
    allowed = behind >= 0
    return allowed if tile.window is None else allowed & (behind < tile.window)


def _bias(tile: Tile, like: Tensor, align: int = 1) -> Tensor | None:
    """0 and minus infinity, for a kernel that takes a mask as something to add.

    Args:
        tile: a whole or causal one needs none.
        like: whose dtype and device.
        align: rows start at a multiple of so many numbers.
    """
    if tile.offset is None or tile.is_causal:
        return None
    allowed = _allowed(tile, like.device)
    room = -(-allowed.shape[1] // align) * align
    bias = like.new_zeros(allowed.shape[0], room)[:, : allowed.shape[1]]
    return bias.masked_fill_(~allowed, -torch.inf)


# -- kernels ------------------------------------------------------------------------------


def _in_rows(tensor: Tensor) -> Tensor:
    """(batch, heads, rows, head_size) as (batch · rows, heads, head_size)."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _by_head(tensor: Tensor, batch: int) -> Tensor:
    """The way back."""
    return tensor.view(batch, -1, *tensor.shape[1:]).transpose(1, 2)


class Kernel(Protocol):
    """One of torch's attention kernels."""

    @staticmethod
    def parts(tiles: Sequence[Tile]) -> Sequence[Any]:
        """The parts that the kernel takes one after the other, each a tile or a `VarlenCall`."""
        return tiles

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, part: Any, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the part's queries over its keys; minus infinity over none."""

    @staticmethod
    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Any,
        scale: float,
    ) -> Gradients:  # fmt: skip
        """The part's share of the gradients of its queries, keys and values."""


def kernel_for(q: Tensor) -> type[Kernel]:
    """The kernel for tensors like these."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    if q.device.type == "cpu":
        return _OnCpu
    if q.device.type == "cuda" and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return _Flash
    if q.device.type == "cuda" and q.dtype == torch.float32 and q.shape[-1] % 4 == 0:
        return _Efficient
    return _Products


class _OnCpu(Kernel):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.is_causal, attn_mask=_bias(tile, q), scale=scale
        )
        return out, lse

    @staticmethod
    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile,
        scale: float,
    ) -> Gradients:  # fmt: skip
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, tile.is_causal, attn_mask=_bias(tile, q), scale=scale
        )
        return dq, dk, dv


class _Flash(Kernel):
    """Rows of all heads, one sequence after the other: (batch · rows, heads, head_size)."""

    @staticmethod
    def parts(tiles: Sequence[Tile]) -> Sequence[VarlenCall]:
        return varlen_calls(tiles)

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, part: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        if _is_for_cudnn(q, k, v, part):
            return _cudnn_forward(q, k, v, part, scale)
        batch = len(q)
        q_ends, k_ends, idle = part.on(q.device, batch)
        left, right = part.band
        out, lse, *_ = _ops._flash_attention_forward(
            *map(_in_rows, (q, k, v)), q_ends, k_ends, *part.longest, 0.0, False, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        lse = lse.view(-1, batch, q.shape[2]).transpose(0, 1)
        if idle is not None:  # flash says infinity
            lse = lse.masked_fill(idle, -torch.inf)
        return _by_head(out, batch), lse

    @staticmethod
    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        part: VarlenCall, scale: float,
    ) -> Gradients:  # fmt: skip
        if _is_for_cudnn(q, k, v, part):
            return _cudnn_backward(gradient, q, k, v, out, lse, part, scale)
        batch = len(q)
        q_ends, k_ends, _ = part.on(q.device, batch)
        left, right = part.band
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout there is not
        found = _ops._flash_attention_backward(
            *map(_in_rows, (gradient, q, k, v, out)), lse.transpose(0, 1).flatten(1).contiguous(),
            q_ends, k_ends, *part.longest, 0.0, False, state, state, scale=scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        dq, dk, dv = (_by_head(x, batch) for x in found)
        return dq, dk, dv


def _is_for_cudnn(q: Tensor, k: Tensor, v: Tensor, part: VarlenCall) -> bool:
    """Whether torch, with its present settings, would take cuDNN's kernel for such tensors.

    Of heads above 128 cuDNN may have no backward, which torch does not look at here.
    """
    if not part.recurs or q.shape[-1] > 128:
        return False
    choice = torch._fused_sdp_choice(q, k, v, is_causal=part.is_causal, enable_gqa=True)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, part: VarlenCall, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _ops._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, part.is_causal, False, scale=scale
    )
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: VarlenCall,
    scale: float,
) -> Gradients:  # fmt: skip
    state = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout there is not
    dq, dk, dv = _ops._scaled_dot_product_cudnn_attention_backward(
        gradient, q, k, v, out, lse.unsqueeze(-1).contiguous(), state, state, None, None, None,
        q.shape[2], k.shape[2], 0.0, part.is_causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


class _Efficient(Kernel):
    """Takes as many heads of keys as of queries: one query head of each group at a time.

    For fp32 only: in half precision its backward ignores the output's strides and reads it by row,
    then by head.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        group = q.shape[1] // k.shape[1]
        for head in range(group):
            part = q[:, head::group]
            found = _ops._scaled_dot_product_efficient_attention(
                part, k, v, _Efficient._mask(tile, part), True, 0.0, tile.is_causal, scale=scale
            )
            out[:, head::group] = found[0]
            lse[:, head::group] = found[1][:, :, : q.shape[2]]  # it gives whole blocks of rows
        return out, lse

    @staticmethod
    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile,
        scale: float,
    ) -> Gradients:  # fmt: skip
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        group, rows = q.shape[1] // k.shape[1], -q.shape[2] % 32
        for head in range(group):
            part = q[:, head::group]
            padded = torch.nn.functional.pad(lse[:, head::group], (0, rows), value=torch.inf)
            found = _ops._scaled_dot_product_efficient_attention_backward(
                gradient[:, head::group], part, k, v, _Efficient._mask(tile, part),
                out[:, head::group], padded.contiguous(), state, state, 0.0,
                [True, True, True, False], tile.is_causal, scale=scale,
            )  # fmt: skip
            dq[:, head::group] = found[0]
            dk += found[1]
            dv += found[2]
        return dq, dk, dv

    @staticmethod
    def _mask(tile: Tile, q: Tensor) -> Tensor | None:
        bias = _bias(tile, q, align=16)
        return None if bias is None else bias.expand(q.shape[0], q.shape[1], -1, -1)


class _Products(Kernel):
    """Plain matrix products, where torch has no kernel."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        scores = _Products._scores(q, k, tile, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        out = weights @ v.unsqueeze(2).to(weights.dtype)
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    @staticmethod
    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile,
        scale: float,
    ) -> Gradients:  # fmt: skip
        groups, kind = (k.shape[1], -1), wide(q.dtype)
        weights = _Products._scores(q, k, tile, scale)
        weights = (weights - torch.unflatten(lse, 1, groups).unsqueeze(-1)).exp()
        q, gradient, out = (torch.unflatten(x.to(kind), 1, groups) for x in (q, gradient, out))
        k, v = k.to(kind).unsqueeze(2), v.to(kind).unsqueeze(2)
        rest = gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)
        of_scores = weights * rest * scale
        dk, dv = of_scores.mT @ q, weights.mT @ gradient
        return (of_scores @ k).flatten(1, 2), dk.sum(2), dv.sum(2)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, tile: Tile, scale: float) -> Tensor:
        """(batch, kv_heads, group, queries, keys), wide."""
        kind = wide(q.dtype)
        queries = torch.unflatten(q.to(kind), 1, (k.shape[1], -1))
        scores: Tensor = queries @ k.to(kind).unsqueeze(2).mT * scale
        if tile.offset is None:
            return scores
        return scores.masked_fill(~_allowed(tile, q.device), -torch.inf)
