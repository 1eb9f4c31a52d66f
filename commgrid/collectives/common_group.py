"""One communicator for each set of ranks in commgrid's own data-parallel collectives.

Several names can have the same ranks: at cp=1, dp and dp_cp; with ep as large as cp, dp and edp.
Each name has its own communicator, so that calls on two names need no common order; it takes memory
at first use. Reducers, optimizers, norms and comparisons of replicas issue their collectives in one
order on all ranks, so they use one of them:

    dp=16            the reducer sums over dp_cp; replicas are compared over dp_cp, not over dp
    tp=2 dp=8        norms are summed over dp_cp_tp, as partial gradients are, not over dp_tp
    cp=2 ep=2 dp=4   dp and edp have the same ranks; replicas are compared over edp

Layers and the user's own calls keep the group that they name.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from commgrid.errors import UnknownGroupError
from commgrid.runtime.grid import HyperCommGrid

DATA = ("dp_cp", "edp")
"""Names of the groups over which gradients of dense and of expert parameters are summed."""


def common_group(
    group: ProcessGroup, grid: HyperCommGrid, data: Sequence[str] = DATA
) -> ProcessGroup:
    """The communicator for commgrid's own collectives over the ranks of a group.

    Args:
        group: one of the grid's; any other group is returned as it is.
        grid: where others with the same ranks and options are looked for.
        data: names of the groups over which gradients are summed, the dense one first. Preferred is
            a communicator with one of these names, then the one that contains the axes of the first
            with fewest others. If there is none, the group stays, since layers may use others with
            the same ranks.
    """
    own = next((each for each in grid.communicators if each.group is group), None)
    if own is None or group.size() == 1:
        return group
    wanted = _axes_of(data[0], grid)
    found: list[tuple[int, int, ProcessGroup]] = []
    for each in grid.communicators:
        if each.ranks == own.ranks and each.options == own.options and not each.suspended:
            named = [data.index(name) for name in each.names if name in data]
            axes = [_axes_of(name, grid) for name in each.names]
            fits = [len(some) for some in axes if wanted and some >= wanted]
            if named or fits:
                found.append((min(named, default=len(data)), min(fits, default=0), each.group))
    return min(found, key=lambda one: one[:2])[2] if found else group


def _axes_of(name: str, grid: HyperCommGrid) -> set[str]:
    """Axes of a group of several ranks; empty for parts of axes and for listed ranks."""
    spec = grid.spec
    try:
        definition = spec.definitions[spec.resolve_name(name)]
    except UnknownGroupError:
        return set()
    is_long = any(grid.size(axis) > 1 for axis in definition.axes)
    return set(definition.axes) if definition.is_whole and is_long else set()
