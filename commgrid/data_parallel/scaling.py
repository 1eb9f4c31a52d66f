"""Factors by which gradients were scaled between `finish` and a step.

torch's clip_grad_norm_ takes the norm of this rank's gradients. Where ranks have slices, experts or
stages, each rank then scales by a factor of its own. Different factors alone are allowed, since a
program may halve the gradients of one layer, or zero those of one slice. Different factors that
lead to the same norm mean clipping by each rank's norm, which is refused.

| one rank | and another | refused |
|---|---|---|
| scales all gradients by one factor | of its stage all by another | yes |
| scales some gradients by one factor | other slices of these by another, to the same norm | yes |
| | leaves other slices of these, of a smaller norm | yes |
| scales an optimizer's group on its stage | the group with these options on another stage | yes |
| edits a copy in another way, such as clamping | the copy of it otherwise, or not | yes |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.group_ref import described
from commgrid.data_parallel.bucket import GradientPart
from commgrid.data_parallel.groups import ReductionGroups
from commgrid.data_parallel.slot import KeptGradient
from commgrid.equality.comparison import ByRank, Fact, ends_of, first_place
from commgrid.errors import GridMismatchError
from commgrid.torch_compat.messages import version_of

_TOLERANCE, _HALF_TOLERANCE = 1e-4, 1e-2  # of a factor: rounding of fp32, and of bf16 gradients
_GROUPS = 8  # of an optimizer's, that stages compare

# Columns of a row: the factor; 2-norm and largest absolute value of all gradients with that factor,
# after scaling; the same two if the factor is 1.
_FACTOR, _NORMS, _UNSCALED = 0, slice(1, 3), slice(3, 5)


class Scaling:
    """Factors between two measurements of a step's gradients.

    Args:
        pieces, groups: of the reducer.
        stage: the ranks that have slices or copies of them; None: no others.
    """

    def __init__(
        self, pieces: Sequence[GradientPart], groups: ReductionGroups, stage: ProcessGroup | None
    ) -> None:
        self._pieces, self._groups, self._stage = pieces, groups, stage
        self._summed: dict[ProcessGroup, list[int]] = {}
        for index, piece in enumerate(pieces if stage is not None else ()):
            self._summed.setdefault(piece.bucket.group, []).append(index)
        kinds = {piece.slot.parameter.dtype for piece in pieces}
        self._tolerance = _HALF_TOLERANCE if kinds & {torch.bfloat16, torch.float16} else _TOLERANCE
        placements = [piece.slot.placement for piece in pieces]
        split = any(each.num_slices > 1 or each.region == "expert" for each in placements)
        self._has_parts = split or groups.stages is not None  # else only copies can be edited apart
        self._is_open = False
        self._before: Tensor | None = None
        self._versions: list[tuple[int, int | None]] = []
        self._after: Tensor | None = None
        self.is_edited = False
        """Whether gradients were edited before the last step, even if no value changed."""

    @property
    def _is_needed(self) -> bool:
        """Whether there are others, and gradients that can be edited."""
        return not self._groups.shard and bool(self._stage or self._groups.stages)

    @torch.no_grad()
    def finished(self) -> None:
        """Measure the gradients that `finish` has left, or that the reducer has clipped."""
        if self._is_needed:
            self._before = self._measure() if self._has_parts else None
            self._versions, self._is_open = self._seen(), True
            self._after, self.is_edited = None, False

    @torch.no_grad()
    def before_step(self) -> None:
        """Measure the gradients that an optimizer is about to use."""
        if self._is_open:
            before, self._after = self._before, self._measure()
            self.is_edited = self._seen() != self._versions
            if before is not None and not torch.equal(
                self._after.nan_to_num(), before.nan_to_num()
            ):
                self.is_edited = True

    def facts(self, options: Sequence[float]) -> Iterator[Fact]:
        """The factors as facts, along the ranks of the stage and along stages; then forget them.

        Args:
            options: of each piece, a number for the options of its optimizer's group; NaN: none.
        """
        if not self._is_needed:
            return
        none = torch.full((len(self._pieces), 2), torch.nan, dtype=torch.float64)
        before = none if self._before is None else self._before
        after = none if self._after is None else self._after
        self._before, self._after, self._is_open = None, None, False
        factors = self._factors(before, after)
        if self._stage is not None:
            whole = self._of_all(factors, before) if len(factors) > 1 else _none()
            rows = torch.cat([whole, self._rows(factors, before)])
            yield Fact(self._stage, rows.view(-1), _apart, partial(_differs, self._tolerance))
        for group, own in self._summed.items():
            if group.size() > 1:
                error = partial(_edited_apart, group, [self._pieces[index] for index in own])
                differs = partial(_other_sizes, self._tolerance)
                yield Fact(group, after[own].view(-1), error, differs)
        if self._groups.stages is not None:
            table = torch.full((_GROUPS, 6), torch.nan, dtype=torch.float64)
            known = sorted({each for each in options if not math.isnan(each)})[:_GROUPS]
            for row, number in enumerate(known):
                alike = torch.tensor([each == number for each in options])
                table[row, 0] = number
                table[row, 1:] = self._of_all(factors[alike], before[alike])[0]
            judge = partial(_stages_apart, self._tolerance)
            yield Fact(self._groups.stages, table.view(-1), judge, _any_scaled)

    def _measure(self) -> Tensor:
        """(pieces, 2): 2-norm and largest absolute value of each gradient; 0: none."""
        sizes = torch.zeros(len(self._pieces), 2, dtype=torch.float64)
        by_kind: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
        for index, piece in enumerate(self._pieces):
            gradient = piece.held
            if gradient is not None and not isinstance(gradient, KeptGradient) and gradient.numel():
                by_kind.setdefault((gradient.dtype, gradient.device), {})[index] = gradient
        for (dtype, _), own in by_kind.items():
            exact = torch.promote_types(dtype, torch.float32)
            gradients = [*own.values()]
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=exact))
            rows = torch.stack([norms, _largest(gradients).to(norms.dtype)], 1)
            sizes[[*own]] = rows.double().cpu()
        return sizes

    def _seen(self) -> list[tuple[int, int | None]]:
        """Identity and version of each gradient, which most edits change."""
        found = (piece.held for piece in self._pieces)
        return [(id(g), version_of(g)) for g in found if g is not None]

    def _factors(self, before: Tensor, after: Tensor) -> Tensor:
        """(pieces,): the factor of each gradient; NaN: it was zero, is zero, or has no factor."""
        ratios = after / before
        spread = (ratios[:, 0] - ratios[:, 1]).abs()
        is_known = ratios.isfinite().all(1) & (spread <= self._tolerance * ratios[:, 0])
        known = torch.where(is_known & (ratios[:, 0] > 0), ratios[:, 0], torch.nan)
        return torch.where((known - 1).abs() <= self._tolerance, 1.0, known)

    def _of_all(self, factors: Tensor, before: Tensor) -> Tensor:
        """(1, 5): the columns above, if all gradients but zeros have one factor; else NaN."""
        has = before[:, 0] > 0
        own = factors[has]
        if not len(own) or own.isnan().any() or own.max() - own.min() > self._tolerance * own.max():
            return _none()
        return _row(float(own.mean()), before[has])[None]

    def _rows(self, factors: Tensor, before: Tensor) -> Tensor:
        """(pieces, 5): the columns above, of each piece."""
        rows = torch.full((len(factors), 5), torch.nan, dtype=torch.float64)
        left = ~factors.isnan()
        while left.any():
            factor = float(factors[left][0])
            alike = left & ((factors - factor).abs() <= self._tolerance * factor)
            rows[alike] = _row(factor, before[alike])
            left &= ~alike
        return rows


def _largest(gradients: list[Tensor]) -> Tensor:
    """(gradients,): the largest absolute value of each; all have one dtype and device.

    On the CPU by the smallest and largest value: an infinity norm takes 18 times as long there.
    """
    if gradients[0].device.type != "cpu" or gradients[0].is_complex():
        return torch.stack(torch._foreach_norm(gradients, torch.inf))
    return torch.stack([torch.stack(each.aminmax()) for each in gradients]).abs().amax(1)


def _row(factor: float, before: Tensor) -> Tensor:
    norms = factor * torch.stack([before[:, 0].square().sum().sqrt(), before[:, 1].max()])
    none = torch.full_like(norms, torch.nan)
    both = [none, norms] if factor == 1 else [norms, none]
    return torch.cat([torch.tensor([factor], dtype=torch.float64), *both])


def _none() -> Tensor:
    return torch.full((1, 5), torch.nan, dtype=torch.float64)


def _differs(tolerance: float, largest: Tensor, smallest: Tensor) -> int | None:
    """The row in which slices were scaled apart; row 0 is of all gradients."""
    high, low = largest.view(-1, 5), smallest.view(-1, 5)
    apart = high[:, _FACTOR] - low[:, _FACTOR] > 2 * tolerance * high[:, _FACTOR]
    same = high[:, _NORMS] - low[:, _NORMS] <= 4 * tolerance * high[:, _NORMS]
    above = high[:, _UNSCALED] > (1 + 4 * tolerance) * low[:, _NORMS]
    is_clipped = (same & ~above).any(1)
    is_clipped[0] = True
    return first_place(apart & is_clipped)


def _apart(row: int, by_rank: ByRank) -> GridMismatchError:
    (least, low), (most, high) = ends_of(by_rank, 5 * row + _FACTOR)
    return GridMismatchError(
        f"rank {low} has scaled its gradients by {least:.4g} after finish(), and rank {high} "
        f"by {most:.4g}; torch's clip_grad_norm_ takes the norm of one rank's slices, experts or "
        "stage. Use the reducer's clip_gradients(), or scale by one factor on all ranks"
    )


def _other_sizes(tolerance: float, largest: Tensor, smallest: Tensor) -> int | None:
    """The first gradient that differs at the step; after `finish` all were equal."""
    is_known = largest.isfinite() & smallest.isfinite()
    return first_place(is_known & (largest - smallest > tolerance * largest))


def _edited_apart(
    group: ProcessGroup, pieces: Sequence[GradientPart], place: int, _: ByRank
) -> GridMismatchError:
    return GridMismatchError(
        f"the gradient of {pieces[place // 2].slot.placement} was equal on the ranks of "
        f"{described(group)} after finish(), and was not when the optimizer used it; make the same "
        "edit on all of them, with noise of one seed, or edit before finish()"
    )


# -- stages -------------------------------------------------------------------------------


def _any_scaled(largest: Tensor, _: Tensor) -> int | None:
    """Whether any stage has scaled a whole group, so that all look at all rows."""
    return first_place(~largest.view(-1, 6)[:, 1:][:, _NORMS].isnan().any(1))


def _stages_apart(tolerance: float, _: int, by_rank: ByRank) -> GridMismatchError | None:
    """The error if stages have scaled gradients of one optimizer group to the same norm."""
    groups: dict[float, dict[int, list[float]]] = {}
    for rank, numbers in by_rank.items():
        for start in range(0, len(numbers), 6):
            group, *row = numbers[start : start + 6]
            if not math.isnan(group) and not math.isnan(row[_FACTOR]):
                groups.setdefault(group, {})[rank] = row
    for rows in groups.values():
        factors = [row[_FACTOR] for row in rows.values()]
        if max(factors) - min(factors) <= 2 * tolerance * max(factors):
            continue
        for norm in range(2):
            scaled = [row[_NORMS][norm] for row in rows.values() if row[_FACTOR] != 1]
            others = [row[_UNSCALED][norm] for row in rows.values() if row[_FACTOR] == 1]
            is_same = max(scaled) - min(scaled) <= 4 * tolerance * max(scaled)
            is_norm = len(scaled) > 1 or _is_short(scaled[0], tolerance)
            below = all(other <= (1 + 4 * tolerance) * min(scaled) for other in others)
            if is_same and is_norm and below:
                return _apart(0, rows)
    return None


def _is_short(norm: float, tolerance: float) -> bool:
    """Whether a norm looks like a given limit, such as 0.5: a norm by chance has more digits."""
    return tolerance <= _TOLERANCE and abs(float(f"{norm:.1e}") - norm) <= 1e-5 * norm
