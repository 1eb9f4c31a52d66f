"""Marks: layout that a user declares for the parameters of a plain module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import SpecError
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid

REGIONS = ("dense", "expert")
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Mark:
    """The arguments of `mark_parameters` for a module."""

    partial: GroupRef | None = None
    region: str = "dense"
    shared: GroupRef | None = None


def mark_parameters(
    module: Module,
    *,
    partial: str | ProcessGroup | None = None,
    region: str = "dense",
    shared: str | ProcessGroup | None = None,
    grid: HyperCommGrid | None = None,
) -> Module:
    """Declares the layout of the parameters of a plain module and of all modules in it.

    Earlier marks on these modules stay: marks add up.

    Args:
        module: such as an nn.LayerNorm.
        partial: the group whose ranks each see a part of the input, as a norm under sequence
            parallelism does, so that its gradients are summed over that group.
        region: "expert" for parameters that other expert-parallel ranks do not have.
        shared: the group whose ranks each use a copy in another place, such as the embedding group
            of first and last stage for tied embeddings; their gradients are summed, so that the
            copies stay equal.
        grid: where to look the group's name up; None: the default grid.

    Returns:
        The module itself.

    Raises:
        SpecError: an unknown region, a module marked with another group before, or copies shared
            over an axis other than pp.

    Example:
        >>> import commgrid
        >>> from torch import nn
        >>> from commgrid.parameters import placements
        >>> grid = commgrid.initialize()
        >>> norm = mark_parameters(nn.LayerNorm(8), partial="tp")
        >>> [placement.partial for placement in placements(norm)]
        ['tp' (1 ranks), 'tp' (1 ranks)]
        >>> commgrid.shutdown()
    """
    if region not in REGIONS:
        raise SpecError(f"region={region!r}: expected one of {', '.join(REGIONS)}")
    owner = f"{type(module).__name__}"
    group = None if partial is None else GroupRef(partial, grid, owner=owner)
    sharing = None if shared is None else GroupRef(shared, grid, owner=owner)
    if isinstance(shared, str):
        spec = (grid or get_grid()).spec
        axes = spec.definitions[spec.resolve_name(shared)].axes
        if axes != ("pp",):
            raise SpecError(
                f"shared={shared!r}: a group of axes {', '.join(axes)}; copies that are used "
                "differently are on stages, so expected one of pp, such as an embedding group"
            )
    for part in module.modules():
        mark: Mark = getattr(part, "_commgrid_mark", Mark())
        for said, before, now in (
            ("partial over", mark.partial, group), ("shared with", mark.shared, sharing)
        ):  # fmt: skip
            if now is not None and before is not None and now.name != before.name:
                raise SpecError(
                    f"{type(part).__name__}: its gradients were marked as {said} {before} and are "
                    f"now to be {said} {now}; mark it once, with a group that has all axes"
                )
        part._commgrid_mark = Mark(  # type: ignore[assignment]
            group or mark.partial,
            region if region != "dense" else mark.region,
            sharing or mark.shared,
        )
    return module


def mark_of(prefix: str, module: nn.Module, marks: Mapping[str, Mark]) -> Mark:
    """A module's mark; a parametrization added later takes its parent's."""
    mark: Mark | None = getattr(module, "_commgrid_mark", None)
    parent, inside, _ = f".{prefix}".rpartition(".parametrizations.")
    if mark is None and inside:
        mark = marks.get(parent.removeprefix("."))
    return mark or Mark()
