"""One communicator for each set of ranks in commgrid's own data-parallel collectives.

Several names can have the same ranks: at cp=1, dp and dp_cp; with as many experts as tensor slices,
dp and edp. Each name has its own communicator, so that calls on two names need no common order; it
takes memory at first use. Reducers, optimizers, norms and comparisons of replicas issue their
collectives in one order on all ranks, so they use one of them:

    dp=16            the reducer sums over dp_cp; replicas are compared over dp_cp, not over dp
    tp=2 dp=8        norms are summed over dp_cp_tp, as partial gradients are, not over dp_tp

Layers and the user's own calls keep the group that they name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from commgrid.errors import UnknownGroupError

if TYPE_CHECKING:
    from commgrid.runtime.communicator import Communicator
    from commgrid.runtime.grid import HyperCommGrid


def common_group(group: ProcessGroup, grid: HyperCommGrid, data: str = "dp_cp") -> ProcessGroup:
    """The communicator for commgrid's own collectives over the ranks of a group.

    Args:
        group: one of the grid's; any other group is returned as it is.
        grid: where others with the same ranks and options are looked for.
        data: name of the group over which gradients are summed. Preferred is the communicator with
            this name, else the one that contains its axes with fewest others, else the one with
            fewest axes. Groups with listed ranks are left to the program.
    """
    everyone = [each for each in grid.communicators if not each.suspended]
    own = next((each for each in everyone if each.group is group), None)
    if own is None or group.size() == 1:
        return group
    wanted = _axes_of(data, grid)

    def preference(one: Communicator) -> tuple[bool, bool, bool, int]:
        axes = [found for name in one.names if (found := _axes_of(name, grid))]
        fits = [each for each in axes if wanted and each >= wanted]
        fewest = min((len(each) for each in fits or axes), default=0)
        return data not in one.names, not axes, not fits, fewest

    same = [e for e in everyone if e.ranks == own.ranks and e.options == own.options]
    return min(same, key=preference).group


def _axes_of(name: str, grid: HyperCommGrid) -> set[str]:
    """Axes of a group of several ranks; empty for one rank and for listed ranks."""
    spec = grid.spec
    try:
        axes = set(spec.definitions[spec.resolve_name(name)].axes)
    except UnknownGroupError:
        return set()
    return axes if any(grid.size(axis) > 1 for axis in axes) else set()
