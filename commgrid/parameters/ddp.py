"""Refusal of DistributedDataParallel over ranks that have different slices of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import nn

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import GridNotInitializedError, SpecError
from commgrid.layout.rank_text import describe_ranks
from commgrid.parameters.layout import layout_of
from commgrid.parameters.placement import Placement, placements
from commgrid.runtime.registry import get_grid


def refuse_copying_over_slices(module: nn.Module, ranks: Sequence[int]) -> None:
    """Refuses DDP over ranks with different slices of a parameter, which it would make equal.

    Raises:
        SpecError: names the parameter and the ranks.
    """
    for placement in placements(module):
        for dim, group, members in placement.within(ranks):
            raise SpecError(
                f"DistributedDataParallel over {describe_ranks(ranks)} would make "
                f"{placement} equal on {describe_ranks(members)}, which have different slices "
                f"of it, cut along dim {dim} over {group.name!r}; give it the ranks that have "
                f"copies: {_copies_group(placement, group)}, or use GradientReducer"
            )


def _copies_group(placement: Placement, cut: GroupRef) -> str:
    """Suggested `process_group=` of DistributedDataParallel for a sliced parameter."""
    with suppress(SpecError, GridNotInitializedError):  # a bare group, or a grid not registered
        grid = get_grid(cut.grid_name or "default")
        axes = [a for a in layout_of(placement, grid).copied_axes if grid.size(a) > 1]
        if axes:
            return f"process_group=commgrid.get_group({'_'.join(reversed(axes))!r})"
    return "no other rank has one"
