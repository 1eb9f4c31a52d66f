"""Marks: layout that a user declares for the parameters and buffers of a plain module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import SpecError
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid
from commgrid.torch_compat.dtensor import gradient_divisors

REGIONS = ("dense", "expert")
MERGES = ("mean", "max", "min")
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Mark:
    """The arguments of `mark_parameters` for a module."""

    partial: GroupRef | None = None
    region: str = "dense"
    shared: GroupRef | None = None


@dataclass(frozen=True)
class BufferMark:
    """The arguments of `mark_buffers` for one buffer."""

    cut: tuple[tuple[int, GroupRef], ...] = ()
    own: GroupRef | None = None
    merge: str | None = None


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


def mark_buffers(
    module: Module,
    names: str | Iterable[str] = "*",
    *,
    cut: Mapping[str, int] | None = None,
    own: str | None = None,
    merge: str | None = None,
    grid: HyperCommGrid | None = None,
) -> Module:
    """Declares the layout of buffers of a plain module and of all modules in it.

    Unmarked buffers are equal on all ranks. A ShardedModule lists its sliced buffers in
    `shard_dims`, next to its parameters.

    Args:
        module: such as an nn.BatchNorm1d.
        names: patterns of the buffers' names within the module, as `*.running_mean`.
        cut: group names, each with the dim along which its ranks have slices.
        own: the group whose ranks each have a buffer of their own, such as running statistics of
            their samples. A checkpoint has them all, stacked along a first dim.
        merge: what each rank gets on a grid where that group has another size: the "mean", "max" or
            "min" of all; None: such a load is refused. A single saved buffer goes to all ranks.
        grid: where to look the groups' names up; None: the default grid.

    Returns:
        The module itself.

    Raises:
        SpecError: a pattern is the name of no buffer, or options that mean nothing.

    Example:
        >>> import commgrid
        >>> from torch import nn
        >>> from commgrid.parameters import mark_buffers
        >>> grid = commgrid.initialize()
        >>> norm = mark_buffers(nn.BatchNorm1d(8), "running_*", own="dp", merge="mean")
        >>> commgrid.shutdown()
    """
    owner, patterns = type(module).__name__, [names] if isinstance(names, str) else list(names)
    if (cut is None and own is None) or (
        merge is not None and (own is None or merge not in MERGES)
    ):
        raise SpecError(
            f"mark_buffers(cut={cut!r}, own={own!r}, merge={merge!r}): expected cut={{group: "
            f"dim}}, or own=group with merge= one of {', '.join(MERGES)} or None"
        )
    slices = tuple((dim, GroupRef(name, grid, owner=owner)) for name, dim in (cut or {}).items())
    mark = BufferMark(slices, GroupRef(own, grid, owner=owner) if own else None, merge)
    found = {
        f"{prefix}.{name}" if prefix else name: (part, name)
        for prefix, part in module.named_modules() for name in part._buffers
    }  # fmt: skip
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise SpecError(
                f"{owner}: {pattern!r} is the name of no buffer; it has "
                f"{', '.join(list(found)[:3]) or 'none'}"
            )
    for full, (part, name) in found.items():
        buffer = part._buffers[name]
        if buffer is None or not any(fnmatchcase(full, pattern) for pattern in patterns):
            continue
        for dim, group in slices:
            if not 0 <= dim < buffer.dim():
                raise SpecError(
                    f"{full} is cut along dim {dim} over {group}, and has shape "
                    f"{tuple(buffer.shape)}"
                )
        part._commgrid_buffers = {**buffer_marks(part), name: mark}
    return module


def buffer_marks(module: nn.Module) -> Mapping[str, BufferMark]:
    """The marks of a module's own buffers, by name."""
    found: Mapping[str, BufferMark] = getattr(module, "_commgrid_buffers", {})
    return found


def check_averages(modules: Iterable[nn.Module]) -> None:
    """Refuses experts whose gradients FSDP2 divides by another number than those of the rest.

    It divides by the ranks of its mesh: experts' has fewer, but they see the tokens of all.

    Args:
        modules: of a model after a forward, sharded by FSDP2 or not.

    Raises:
        SpecError: names the experts and both numbers.
    """
    divisors: dict[nn.Module, float] = {}
    for module in modules:
        if isinstance(module, FSDPModule) and module not in divisors:
            divisors |= gradient_divisors(module)
    experts = {m: d for m, d in divisors.items() if mark_of("", m, {}).region == "expert"}
    others = {divisor for module, divisor in divisors.items() if module not in experts}
    for module, divisor in experts.items():
        if others and divisor not in others:
            raise SpecError(
                f"FSDP2 divides the gradients of {type(module).__name__} by {divisor:g} and those "
                f"of the rest of the model by {max(others):g}, so that the experts' are "
                f"{max(others) / divisor:g} times as large; call set_gradient_divide_factor(1.0) "
                "and set_force_sum_reduction_for_comms(True) on every FSDPModule, and divide the "
                "loss by the number of ranks with other data, grid.size('dp_cp')"
            )


def mark_of(prefix: str, module: nn.Module, marks: Mapping[str, Mark]) -> Mark:
    """A module's mark; a parametrization added later takes its parent's."""
    mark: Mark | None = getattr(module, "_commgrid_mark", None)
    parent, inside, _ = f".{prefix}".rpartition(".parametrizations.")
    if mark is None and inside:
        mark = marks.get(parent.removeprefix("."))
    return mark or Mark()
