"""SubGrid: part of a grid, with the grid's own communicators."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.distributed import ProcessGroup

from commgrid.errors import NotInGroupError, UnknownGroupError
from commgrid.layout.rank_layout import RankLayout
from commgrid.layout.rank_text import describe_ranks
from commgrid.planning.spec import GridSpec


class SubGrid:
    """Part of a grid: some axes fixed, the others as they are.

    Its groups are the grid's own communicators; on ranks outside it there are none.

    Args:
        spec: the grid's.
        rank: this process's global rank.
        find: the grid's communicator of a canonical name.
        layouts: the remaining axes of each region that has the fixed ones.
        fixed: axis to index.
    """

    def __init__(
        self,
        spec: GridSpec,
        rank: int,
        find: Callable[[str], ProcessGroup],
        layouts: list[RankLayout],
        fixed: Mapping[str, int],
    ) -> None:
        self._spec, self._rank, self._find = spec, rank, find
        self._fixed = ", ".join(f"{axis}={index}" for axis, index in fixed.items())
        self._layouts = layouts

    @property
    def layout(self) -> RankLayout:
        """The remaining axes, of the first region that has the fixed ones."""
        return self._layouts[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks in it, in the grid's order."""
        return tuple(self.layout.ranks)

    @property
    def shape(self) -> dict[str, int]:
        """Remaining axis to size, fastest-varying first."""
        return self.layout.shape

    @property
    def is_member(self) -> bool:
        """Whether this process's rank is in it."""
        return self._rank in self.layout.ranks

    def get_group(self, *names: str) -> ProcessGroup:
        """The grid's communicator of remaining axes; without a name, of all of them.

        Raises:
            UnknownGroupError: a name that uses a fixed axis, or that the grid does not know.
            NotInGroupError: this rank is not in the sub-grid.
        """
        name = self._spec.resolve_name(*(names or self.layout.shape))
        axes = self._spec.definitions[name].axes
        if not axes:
            raise UnknownGroupError(
                f"group {name!r} lists its ranks and runs along no axes, so that it is of no "
                "sub-grid; take it from the grid"
            )
        if not any(set(axes) <= set(layout.shape) for layout in self._layouts):
            known = " | ".join(", ".join(layout.shape) for layout in self._layouts)
            raise UnknownGroupError(
                f"group {name!r} runs along an axis that is fixed here ({self._fixed}); the "
                f"remaining axes are {known}"
            )
        if not self.is_member:
            raise NotInGroupError(
                f"rank {self._rank} is not in this sub-grid, which has "
                f"{describe_ranks(self.layout.ranks)}; call it on these alone"
            )
        return self._find(name)

    def __repr__(self) -> str:
        return f"SubGrid({self._fixed}; {describe_ranks(self.layout.ranks)})"
