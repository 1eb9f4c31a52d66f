"""Edits of gradients between finish and step: refused if ranks scaled them by different factors.

torch's clip_grad_norm_ takes the norm of this rank's gradients. Where ranks have slices or experts,
each scales by a different factor, so the step is not one for the whole model.

    finish          largest number and norm of each gradient
    step            the same again: all of them times one factor?
    next finish     factors of all ranks, which must be equal

Other edits, such as clamping each number, are not one factor and are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.plain import all_gather
from commgrid.data_parallel.bucket import GradientPart
from commgrid.data_parallel.slot import KeptGradient
from commgrid.errors import GridMismatchError
from commgrid.torch_compat.messages import version_of

_TOLERANCE, _HALF_TOLERANCE = 1e-4, 1e-2  # of a factor: rounding of fp32, and of bf16 gradients
_UNKNOWN = math.nan

Held = Callable[[GradientPart], Tensor | None]


class Edits:
    """Compares the factors by which ranks have scaled their gradients.

    Args:
        pieces: of the reducer.
        group: the ranks of the stage that have parts or copies of it; None: this rank alone.
        steps: number of steps after which it stops, unless gradients are edited then.
    """

    def __init__(
        self, pieces: Sequence[GradientPart], group: ProcessGroup | None, steps: int
    ) -> None:
        self._pieces, self._group = pieces, group
        self._left = steps if group is not None else 0
        kinds = {piece.slot.parameter.dtype for piece in pieces}
        self._tolerance = _HALF_TOLERANCE if kinds & {torch.bfloat16, torch.float16} else _TOLERANCE
        self._sizes: Tensor | None = None
        self._versions: list[tuple[int, int | None]] = []
        self._row: Tensor | None = None

    @torch.no_grad()
    def finished(self, held: Held) -> None:
        """Record the gradients that `finish` has left, or that the reducer has clipped."""
        if self._left:
            self._sizes, self._versions = self._measure(held), self._seen(held)

    @torch.no_grad()
    def before_step(self, held: Held) -> None:
        """Record the gradients that an optimizer is about to use."""
        if not self._left or self._sizes is None:
            return
        edited = self._seen(held) != self._versions
        sizes = self._measure(held) if edited else self._sizes
        factor = self._factor(self._sizes, sizes)
        self._row = torch.tensor([float(edited), factor], dtype=torch.float64)

    def compare(self) -> GridMismatchError | None:
        """The error if ranks have scaled apart, on all ranks of the group; collective over it."""
        if not self._left or self._group is None:
            return None
        mine, self._row = self._row, None
        if mine is None:
            mine = torch.tensor([0.0, _UNKNOWN], dtype=torch.float64)
        device = "cuda" if "nccl" in dist.get_backend(self._group) else "cpu"
        rows = all_gather(mine.to(device), self._group).view(-1, 2).tolist()
        is_edited = any(edited for edited, _ in rows)
        self._left = max(self._left - 1, int(is_edited))
        if not is_edited:
            return None
        return self._apart([factor for _, factor in rows])

    def _measure(self, held: Held) -> Tensor:
        """(pieces, 2): the largest absolute value and the norm of each gradient; 0: none."""
        found = [held(piece) for piece in self._pieces]
        found = [None if isinstance(g, KeptGradient) else g for g in found]
        sizes = torch.zeros(len(found), 2, dtype=torch.float64)
        own = [(i, g) for i, g in enumerate(found) if g is not None and g.numel()]
        rows = []
        for _, gradient in own:
            exact = torch.promote_types(gradient.dtype, torch.float32)
            norms = [torch.linalg.vector_norm(gradient, n, dtype=exact) for n in (torch.inf, 2)]
            rows.append(torch.stack(norms).double())
        if rows:
            sizes[[i for i, _ in own]] = torch.stack(rows).cpu()
        return sizes

    def _seen(self, held: Held) -> list[tuple[int, int | None]]:
        """Identity and version of each gradient, which an edit changes."""
        found = (held(piece) for piece in self._pieces)
        return [(id(g), version_of(g)) for g in found if g is not None]

    def _factor(self, before: Tensor, after: Tensor) -> float:
        """The one factor between all sizes; NaN if there is none."""
        rows = before[:, 1] > 0
        if not rows.any() or not (before.isfinite().all() and after.isfinite().all()):
            return _UNKNOWN
        ratios = after[rows] / before[rows]
        low, high = float(ratios.min()), float(ratios.max())
        return high if high - low <= self._tolerance * high else _UNKNOWN

    def _apart(self, factors: list[float]) -> GridMismatchError | None:
        assert self._group is not None
        ranks = dist.get_process_group_ranks(self._group)
        known = [(f, rank) for f, rank in zip(factors, ranks, strict=True) if not math.isnan(f)]
        if not known:
            return None
        (least, low), (most, high) = min(known), max(known)
        if most - least <= 2 * self._tolerance * most:
            return None
        return GridMismatchError(
            f"rank {low} has scaled its gradients by {least:.4g} after finish(), and rank {high} "
            f"by {most:.4g}, as torch's clip_grad_norm_ does, which takes the norm of one rank's "
            "slices or experts; use the reducer's clip_gradients(), or scale by one factor on all "
            "ranks"
        )
