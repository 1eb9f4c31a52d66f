"""Torch's attention kernels on rectangles, and how their partial results become one.

A kernel gives the output o and the log-sum-exp l of each query over the keys it was given. Those of
two sets of keys are joined by l = log(exp l₁ + exp l₂), o = o₁ · exp(l₁ - l) + o₂ · exp(l₂ - l)
(arXiv 2310.01889). Backward, a kernel that is given the joint o and l makes of each rectangle the
part of the gradients that comes of it, so that these only have to be added.

| device | dtype | kernel |
|---|---|---|
| CPU | any | `_scaled_dot_product_flash_attention_for_cpu` |
| CUDA | bf16, fp16 | `_scaled_dot_product_flash_attention`; with a mask the next |
| CUDA | fp32 | `_scaled_dot_product_efficient_attention` |
| else | any | matrix products |

A head of keys serves its group of query heads without a copy: torch's flash kernels take them as
they are, the efficient one is called for each query head of the groups in turn. Every rectangle is
a call, small ones too: on the CPU one call with a mask over eight documents of eight tokens takes
as long as eight calls, and reads all the pairs between them for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from commgrid.context_parallel.tiles import Tile

_ops = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]


class Partial:
    """Output and log-sum-exp of queries over the keys that were added so far.

    Args:
        q: (batch, heads, queries, head_size).
        scale: of the products of queries and keys.
    """

    def __init__(self, q: Tensor, scale: float) -> None:
        self.q, self.scale, self.kernel = q, scale, kernel_for(q)
        self._seen: list[tuple[int, int]] = []
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> None:
        """Adds keys and values (batch, kv_heads, keys, head_size), in the tiles of a buffer."""
        for tile in tiles:
            q, k_part, v_part = _rows(self.q, tile), _columns(k, tile), _columns(v, tile)
            out, lse = self.kernel.forward(q, k_part, v_part, tile, self.scale)
            self._join(out, lse, tile)

    def _join(self, out: Tensor, lse: Tensor, tile: Tile) -> None:
        start, stop = tile.q_start, tile.q_stop
        if self._out is None or self._lse is None:
            if stop - start == self.q.shape[2]:
                self._out, self._lse = out.to(wide(self.q.dtype)), lse
                self._seen.append((start, stop))
                return
            self._out, self._lse = self._empty()
        own, own_lse = self._out[:, :, start:stop], self._lse[:, :, start:stop]
        if all(stop <= first or last <= start for first, last in self._seen):
            own.copy_(out)
            own_lse.copy_(lse)
        else:
            joint = torch.logaddexp(own_lse, lse)
            own.mul_((own_lse - joint).exp_().unsqueeze(-1))
            own.addcmul_(out.to(own.dtype), (lse - joint).exp_().unsqueeze(-1))
            own_lse.copy_(joint)
        if self._seen and self._seen[-1][1] == start:
            self._seen[-1] = (self._seen[-1][0], stop)
        elif not any(first <= start and stop <= last for first, last in self._seen):
            self._seen.append((start, stop))

    def _empty(self) -> tuple[Tensor, Tensor]:
        """Of no keys at all."""
        kind = wide(self.q.dtype)
        lse = self.q.new_full(self.q.shape[:3], -torch.inf, dtype=kind)
        return torch.zeros_like(self.q, dtype=kind), lse

    def result(self) -> tuple[Tensor, Tensor]:
        """The output, of the queries' dtype, and the log-sum-exp (batch, heads, queries)."""
        if self._out is None or self._lse is None:
            self._out, self._lse = self._empty()
        return self._out.to(self.q.dtype), self._lse


class Backward:
    """Gradients of the queries, added up over the keys that are asked for one after the other.

    Args:
        gradient: of the output.
        q, out, lse: the queries, and what `Partial.result` gave.
        scale: as `Partial`'s.
    """

    def __init__(self, gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        self.gradient, self.q, self.out, self.lse = gradient, q, out, lse
        self.scale, self.kernel = scale, kernel_for(q)
        self.dq = torch.zeros_like(q, dtype=wide(q.dtype))

    def add(self, k: Tensor, v: Tensor, tiles: Sequence[Tile], dk: Tensor, dv: Tensor) -> None:
        """Adds what some keys and values contribute to `dq`, and to their own `dk` and `dv`."""
        for tile in tiles:
            dq, dk_part, dv_part = self.kernel.backward(
                _rows(self.gradient, tile), _rows(self.q, tile), _columns(k, tile),
                _columns(v, tile), _rows(self.out, tile), _rows(self.lse, tile), tile, self.scale,
            )  # fmt: skip
            _rows(self.dq, tile).add_(dq)
            _columns(dk, tile).add_(dk_part)
            _columns(dv, tile).add_(dv_part)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results of a dtype are added up in."""
    return torch.promote_types(dtype, torch.float32)


def _rows(tensor: Tensor, tile: Tile) -> Tensor:
    return tensor[:, :, tile.q_start : tile.q_stop]


def _columns(tensor: Tensor, tile: Tile) -> Tensor:
    return tensor[:, :, tile.k_start : tile.k_stop]


def _allowed(tile: Tile, device: torch.device) -> Tensor:
    """Which keys each query attends, (queries, keys)."""
    rows = torch.arange(tile.q_stop - tile.q_start, device=device)
    columns = torch.arange(tile.k_stop - tile.k_start, device=device)
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


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """Query heads by the head of keys that they use: dim 1 becomes (groups, heads of each)."""
    return tensor.view(tensor.shape[0], groups, -1, *tensor.shape[2:])


class Kernel(Protocol):
    """One of torch's attention kernels."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the tile's queries over its keys."""

    @staticmethod
    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile,
        scale: float,
    ) -> Gradients:  # fmt: skip
        """What the tile adds to the gradients of its queries, keys and values."""


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


class _OnCpu:
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


class _Flash:
    """Its causal mask starts in the corner of queries and keys, as many of both in such a tile."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        if tile.offset is not None and not tile.is_causal:
            return _Efficient.forward(q, k, v, tile, scale)
        found = _ops._scaled_dot_product_flash_attention(
            q, k, v, 0.0, tile.is_causal, False, scale=scale
        )
        return found[0], found[1]

    @staticmethod
    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile,
        scale: float,
    ) -> Gradients:  # fmt: skip
        if tile.offset is not None and not tile.is_causal:
            return _Efficient.backward(gradient, q, k, v, out, lse, tile, scale)
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout there is not
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0,
            tile.is_causal, state, state, scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class _Efficient:
    """Takes as many heads of keys as of queries: one query head of each group at a time."""

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


class _Products:
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
        groups, kind = k.shape[1], wide(q.dtype)
        weights = _Products._scores(q, k, tile, scale)
        weights = (weights - _grouped(lse.contiguous(), groups).unsqueeze(-1)).exp()
        q, gradient, out = (_grouped(x.to(kind).contiguous(), groups) for x in (q, gradient, out))
        k, v = k.to(kind).unsqueeze(2), v.to(kind).unsqueeze(2)
        rest = gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)
        of_scores = weights * rest * scale
        dk, dv = of_scores.mT @ q, weights.mT @ gradient
        return (of_scores @ k).flatten(1, 2), dk.sum(2), dv.sum(2)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, tile: Tile, scale: float) -> Tensor:
        """(batch, kv_heads, group, queries, keys), wide."""
        kind = wide(q.dtype)
        queries = _grouped(q.to(kind).contiguous(), k.shape[1])
        scores: Tensor = queries @ k.to(kind).unsqueeze(2).mT * scale
        if tile.offset is None:
            return scores
        return scores.masked_fill(~_allowed(tile, q.device), -torch.inf)
