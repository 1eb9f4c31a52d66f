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
        self.dq = torch.zeros_like(q, dtype=wide(q.dtype))

    def add(self, k: Tensor, v: Tensor, tiles: Sequence[Tile], dk: Tensor, dv: Tensor) -> None:
        """Adds what some keys and values contribute to `dq`, and to their own `dk` and `dv`."""
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
            self.dq[:, :, rows] += dq
            dk[:, :, columns] += dk_part
            dv[:, :, columns] += dv_part
