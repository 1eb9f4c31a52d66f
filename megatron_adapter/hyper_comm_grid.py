"""megatron-core's HyperCommGrid by its own interface, on commgrid's layouts and communicators.

Where Megatron's class creates every group on every rank, here members alone create theirs, and
a rank that asks for something else, or never comes, is an error that names it. Where Megatron's
is lax (names twice, sizes below 1, a tuple of dims, which it takes for one name) this refuses.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from commgrid.errors import GridNotInitializedError, SpecError
from commgrid.layout.axis_names import nearest
from commgrid.layout.rank_layout import RankLayout
from commgrid.layout.ranks import as_index
from commgrid.planning.spec import GridSpec
from commgrid.runtime.grid import HyperCommGrid as Grid
from commgrid.torch_compat import world as torch_world
from megatron_adapter.errors import MegatronSizeError, UnknownViewError

_BASE = "base"
_STARTUP_SECONDS = 60.0


class MegatronHyperCommGrid:
    """Named dims over a range of ranks, and process groups along any of them.

    Args:
        shape: sizes of the dims, the fastest-varying first.
        dim_names: their names.
        rank_offset: the first rank.
        backend: of its groups; None: WORLD's.

    Raises:
        SpecError: names and sizes that do not go together, names twice, sizes below 1 (a
            ValueError, as Megatron's).
        MegatronSizeError: more ranks than there are (a RuntimeError, as Megatron's).
        GridNotInitializedError: neither WORLD_SIZE nor torch.distributed says how many there
            are (a RuntimeError, as Megatron's).

    Example:
        >>> os.environ["WORLD_SIZE"] = "8"
        >>> grid = HyperCommGrid([2, 4], ["tp", "dp"])
        >>> grid.get_rank_enum("tp")
        [[0, 1], [2, 3], [4, 5], [6, 7]]
        >>> grid.register_view("expert", [8], ["ep"])
        >>> grid.get_rank_enum("ep", view="expert")
        [[0, 1, 2, 3, 4, 5, 6, 7]]
        >>> del os.environ["WORLD_SIZE"]
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
    ) -> None:
        layout = _layout("HyperCommGrid", shape, dim_names, rank_offset)
        self.rank_offset, self.backend = layout.ranks[0], backend
        self.shape, self.dim_names = list(layout.shape.values()), list(dim_names)
        self.size = math.prod(self.shape)
        world = _world_size()
        if self.size > world - rank_offset:
            raise MegatronSizeError(
                f"HyperCommGrid of shape {self.shape} is over sized: it has {self.size} ranks "
                f"from rank_offset={rank_offset}, and the world has {world}; "
                "give a smaller shape, or start more ranks"
            )
        self._views = {_BASE: layout}
        self._shared: dict[str, frozenset[str]] = {_BASE: frozenset(self.dim_names)}
        # None on ranks outside the grid, as Megatron's create_pg answers there.
        self._made: dict[tuple[str, str], Grid | None] = {}

    def register_view(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        shared_dims: Sequence[str] | None = None,
    ) -> None:
        """Another factorization of the same ranks, as the experts' beside the dense one.

        Args:
            name: what `view=` asks for.
            shape, dim_names: as the grid's.
            shared_dims: dims of both with the same groups, which then are created once.

        Raises:
            SpecError: a name that is taken, sizes that do not make the grid's ranks, or shared
                dims that are not in both or whose groups differ (a ValueError, as Megatron's).
        """
        who = f"view {name!r}"
        if name in self._views:
            raise SpecError(f"{who} is registered already; choose another name")
        layout = _layout(who, shape, dim_names, self.rank_offset)
        if len(layout) != self.size:
            raise SpecError(
                f"{who} of shape {list(shape)} has {len(layout)} ranks, and the grid {self.size}; "
                "expected as many"
            )
        shared = list(shared_dims or ())
        base = self._views[_BASE]
        for dim in shared:
            if dim not in base.shape or dim not in layout.shape or shared.count(dim) > 1:
                raise SpecError(
                    f"{who}: shared dim {dim!r} is not once in both {list(base.shape)} and "
                    f"{list(layout.shape)}; name each dim once"
                )
        for dims in [[dim] for dim in shared] + [shared] * (len(shared) > 1):
            if _enumerate(base, dims) != _enumerate(layout, dims):
                raise SpecError(
                    f"{who}: the groups of {'-'.join(dims)} are {_enumerate(layout, dims)}, those "
                    f"of the grid {_enumerate(base, dims)}; dims that differ cannot be shared"
                )
        self._views[name], self._shared[name] = layout, frozenset(shared)

    def create_pg(
        self,
        dims: str | list[str],
        *,
        view: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> dist.ProcessGroup | None:
        """Creates the group along some dims; every rank of the grid calls it.

        Args:
            dims: the name of a dim, or a list of them in any order.
            view: a registered view; None: the grid's own dims.
            timeout: of collectives; None: torch's default.
            pg_options: torch's options for the backend.
            group_desc: what torch's logs call it; None: the dims.

        Returns:
            This rank's group; None on a rank outside the grid.

        Raises:
            KeyError: it was created already.
            SpecError: unknown dims or view.
            GridMismatchError, PeerTimeoutError, PeerFailedError: a rank asks for another, does
                not come, or fails.
        """
        key = view_name, name = self._key(dims, view)
        if key in self._made:
            raise KeyError(
                f"process group {name} of view {view_name} has already been created; get_pg gives "
                "it, whatever its options"
            )
        if not self.is_current_rank_in_grid():
            self._made[key] = None
            return None
        layout = self._views[view_name]
        axes = {dim: f"axis{i}" for i, dim in enumerate(layout.shape)}  # a dim may have any name
        label = re.sub(r"\W|^(?=\d)", "_", group_desc or name)
        label += "_" * (label in axes.values())
        along = "_".join(axes[dim] for dim in name.split("-"))
        spec = GridSpec.from_dict({
            "axes": {axes[dim]: size for dim, size in layout.shape.items()},
            "order": "-".join(axes.values()),
            "create": [],
            "connect": "none",
            "groups": {label: {"of": along, "own": True}},
        }).resolve(ranks=layout.ranks)  # fmt: skip
        sizes = "-".join(f"{d}{n}" for d, n in zip(self.dim_names, self.shape, strict=True))
        self._made[key] = Grid(
            spec, name=f"HyperCommGrid {sizes}", backend=self.backend, timeout=timeout,
            startup_timeout=_STARTUP_SECONDS, watch=False, pg_options=pg_options,
        )  # fmt: skip
        return self.get_pg(dims, view=view)

    def get_pg(self, dims: str | list[str], *, view: str | None = None) -> dist.ProcessGroup | None:
        """A group that `create_pg` made.

        Raises:
            KeyError: it has not been created.
            SpecError: unknown dims or view.
        """
        key = self._key(dims, view)
        if key not in self._made:
            raise KeyError(
                f"process group {key[1]} of view {key[0]} hasn't been created; call create_pg first"
            )
        made = self._made[key]
        return None if made is None else made.get_group(*made.group_names)

    def get_rank_enum(self, dims: str | list[str], *, view: str | None = None) -> list[list[int]]:
        """The ranks of every group along some dims, groups ordered by the dims they do not have."""
        layout = self._views[self._view(view)]
        return _enumerate(layout, self._ordered(layout, dims))

    def _gen_rank_enum(self, dims: list[str]) -> list[list[int]]:
        """The interface that megatron-core's bridge and multi-module communicators use."""
        return self.get_rank_enum(dims)

    def is_current_rank_in_grid(self) -> bool:
        """Whether this process's rank is one of the grid's."""
        return self.rank_offset <= torch_world.world_rank() < self.rank_offset + self.size

    def destroy(self) -> None:
        """Destroys the groups it made, once."""
        made, self._made = self._made, {}
        for grid in made.values():
            if grid is not None:
                grid.destroy()

    # -- names --------------------------------------------------------------------------

    def _view(self, view: str | None) -> str:
        name = _BASE if view is None else view
        if name not in self._views:
            raise UnknownViewError(
                f"view={view!r} is not registered, expected one of {', '.join(self._views)}"
                f"{nearest(name, self._views)}"
            )
        return name

    def _ordered(self, layout: RankLayout, dims: str | list[str]) -> list[str]:
        """The dims slowest first, as Megatron's keys list them."""
        if not isinstance(dims, str | list) or not dims:
            raise SpecError(f"dims={dims!r}: expected the name of a dim, or a list of names")
        given = [dims] if isinstance(dims, str) else dims
        for dim in given:
            if dim not in layout.shape or given.count(dim) > 1:
                raise SpecError(
                    f"dims={dims!r}: {dim!r} is no dim, or there twice; the dims are "
                    f"{', '.join(layout.shape)}{nearest(str(dim), layout.shape)}"
                )
        return [dim for dim in reversed(layout.shape) if dim in given]

    def _key(self, dims: str | list[str], view: str | None) -> tuple[str, str]:
        """Where a group is kept; groups of shared dims are the grid's own."""
        name = self._view(view)
        ordered = self._ordered(self._views[name], dims)
        if set(ordered) <= self._shared[name]:
            name, ordered = _BASE, self._ordered(self._views[_BASE], ordered)
        return name, "-".join(ordered)


def _world_size() -> int:
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if not torch_world.is_initialized():
        raise GridNotInitializedError(
            "how many ranks there are is unknown: set WORLD_SIZE, or initialize torch.distributed, "
            "before making a HyperCommGrid"
        )
    return torch_world.world_size()


def _layout(who: str, shape: Sequence[int], dim_names: Sequence[str], offset: int) -> RankLayout:
    sizes, names = list(shape), list(dim_names)
    if len(sizes) != len(names):
        raise SpecError(f"{who}: len(shape) {sizes} != len(dim_names) {names}; one size a name")
    for name, size in zip(names, sizes, strict=True):
        if not isinstance(name, str) or not name or "-" in name or names.count(name) > 1:
            raise SpecError(f"{who}: dim_names={names}: {name!r} is no name, or there twice")
        if (as_index(size) or 0) < 1:
            raise SpecError(f"{who}: shape={sizes}: {name} has size {size!r}; expected 1 or more")
    first = as_index(offset)
    if first is None or first < 0:
        raise SpecError(f"{who}: rank_offset={offset!r}; expected 0 or more")
    numbers = (as_index(size) or 0 for size in sizes)
    return RankLayout.from_sizes(dict(zip(names, numbers, strict=True)), offset=first)


def _enumerate(layout: RankLayout, dims: Sequence[str]) -> list[list[int]]:
    return sorted(list(group) for group in layout.groups(*dims))


HyperCommGrid = MegatronHyperCommGrid
"""Megatron's own name of it."""
