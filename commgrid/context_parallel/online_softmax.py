"""Online softmax: attention over keys that come in parts, forward and backward.

A kernel gives the output o and the log-sum-exp l of each query over the keys it was given. Those of
two sets of keys are joined by l = log(exp l₁ + exp l₂), o = o₁ · exp(l₁ - l) + o₂ · exp(l₂ - l)
(arXiv 2310.01889). Backward, a kernel that is given the joint o and l makes of each rectangle the
part of the gradients that comes of it, so that these only have to be added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commgrid.context_parallel.kernels import kernel_for, no_autocast, readable, wide
from commgrid.context_parallel.tiles import Tile


class OnlineSoftmax:
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
        for part in self.kernel.parts(tiles):
            rows, columns = part.rows, part.columns
            q, k_part, v_part = self.q[:, :, rows], k[:, :, columns], v[:, :, columns]
            out, lse = self.kernel.forward(q, k_part, v_part, part, self.scale)
            self._join(out, lse, rows.start, rows.stop)

    def _join(self, out: Tensor, lse: Tensor, start: int, stop: int) -> None:
        if self._out is None or self._lse is None:
            if stop - start == self.q.shape[2]:
                self._out, self._lse = out, lse  # widened where more is to come
                self._seen.append((start, stop))
                return
            self._out, self._lse = self._empty()
        self._out = self._out.to(wide(self.q.dtype))
        own, own_lse = self._out[:, :, start:stop], self._lse[:, :, start:stop]
        if all(stop <= first or last <= start for first, last in self._seen):
            own.copy_(out)
            own_lse.copy_(lse)
        else:
            joint = torch.logaddexp(own_lse, lse)
            base = joint.masked_fill(joint == -torch.inf, 0)  # of queries that neither has keys for
            own.mul_((own_lse - base).exp_().unsqueeze(-1))
            own.addcmul_(out.to(own.dtype), (lse - base).exp_().unsqueeze(-1))
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


class SoftmaxBackward:
    """Gradients of the queries, added up over the keys that are asked for one after the other.

    Args:
        gradient: of the output.
        q, out, lse: the queries, and what `OnlineSoftmax.result` gave.
        scale: as `OnlineSoftmax`'s.
    """

    def __init__(self, gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        self.gradient, self.q, self.out, self.lse = readable(gradient), q, out, lse
        self.scale, self.kernel = scale, kernel_for(q)
        self._dq: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> tuple[Tensor, Tensor]:
        """The gradients of some keys and values, wide; what they contribute to `dq` is added."""
        dk, dv = None, None
        for part in self.kernel.parts(tiles):
            rows, columns = part.rows, part.columns
            gradient, q, out, lse = (
                x[:, :, rows] for x in (self.gradient, self.q, self.out, self.lse)
            )
            k_part, v_part = k[:, :, columns], v[:, :, columns]
            with no_autocast(self.q):
                dq, dk_part, dv_part = self.kernel.backward(
                    gradient, q, k_part, v_part, out, lse, part, self.scale
                )
            self._dq = _summed(self._dq, self.q, rows, dq)
            dk, dv = _summed(dk, k, columns, dk_part), _summed(dv, v, columns, dv_part)
        return _summed(dk, k), _summed(dv, v)

    @property
    def dq(self) -> Tensor:
        """The gradients of the queries over the keys so far, wide."""
        return _summed(self._dq, self.q)


def _summed(
    total: Tensor | None, of: Tensor, at: slice = slice(0), part: Tensor | None = None
) -> Tensor:
    """A sum of gradients of a tensor with one more part; the first is taken as it is, if whole."""
    if total is None and part is not None and part.shape == of.shape:
        return part.to(wide(of.dtype))
    total = torch.zeros_like(of, dtype=wide(of.dtype)) if total is None else total
    if part is not None:
        total[:, :, at] += part
    return total
