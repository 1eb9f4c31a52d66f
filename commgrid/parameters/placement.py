"""Layout of each parameter of a model on the grid: sliced, replicated, or with partial gradients.

Gradient reduction, norms, sharded optimizers and checkpoints all read it here, so that a layer
declares it once. Modules declare it rather than parameters, because attributes of a parameter
are lost when a model is deep-copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.utils import parametrize

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import SpecError
from commgrid.parameters.slices import Slice, check_mesh, watch
from commgrid.planning.rank_lists import describe_ranks
from commgrid.runtime.registry import get_grid
from commgrid.runtime.torch_patches import before_ddp

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

REGIONS = ("dense", "expert")
_SLICES = "commgrid_slices"  # the key of a module's slices in a state_dict's metadata
Module = TypeVar("Module", bound=nn.Module)


class ShardedModule(nn.Module):
    """A module that declares which of its parameters are slices.

    Subclasses set `group` and `shard_dims`, parameter name to the dim it is sliced along;
    parameters not in it are equal on all ranks of the group. `partial` names equal parameters
    whose gradient is this rank's part of a sum over the group. A module sliced over several
    groups overrides `shards_of`.
    """

    group: GroupRef
    shard_dims: ClassVar[Mapping[str, int]] = {}
    partial: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        watch(self)
        self.register_state_dict_post_hook(_record_slices)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_check_slices)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copied or unpickled module
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch(self)

    def shards_of(self, name: str) -> tuple[tuple[int, GroupRef], ...]:
        """The dims along which a parameter is sliced, each with its group."""
        return ((self.shard_dims[name], self.group),) if name in self.shard_dims else ()

    @property
    def sliced_names(self) -> tuple[str, ...]:
        """Names of the parameters that are slices; override it together with `shards_of`."""
        return tuple(self.shard_dims)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the unsharded parameter; override it for padded slices."""
        shape = list(self.get_parameter(name).shape)
        for dim, group in self.shards_of(name):
            shape[dim] *= group.size
        return tuple(shape)


def _slices_of(module: ShardedModule) -> dict[str, list[tuple[int, str, int, int]]]:
    """Dim, group name, index and number of slices of each sliced parameter."""
    return {
        name: [(dim, g.name, g.rank, g.size) for dim, g in module.shards_of(name)]
        for name in module.sliced_names
    }


def _record_slices(
    module: ShardedModule, state_dict: Any, prefix: str, metadata: dict[str, Any]
) -> None:
    """Adds this rank's slices to the metadata of a state_dict."""
    metadata[_SLICES] = _slices_of(module)


def _check_slices(
    module: ShardedModule, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Refuses a state_dict of another rank's slices.

    Raises:
        SpecError: names the first such parameter.
    """
    theirs, mine = metadata.get(_SLICES, {}), _slices_of(module)
    for name in (name for name in mine if name in theirs):
        for (dim, group, here, size), saved in zip(mine[name], theirs[name], strict=False):
            there, count = saved[2:]
            if there != here and count == size:
                raise SpecError(
                    f"{prefix}{name} of this state_dict is slice {there} of {size} along dim "
                    f"{dim}, and this rank has slice {here} of group {group!r}; load each rank's "
                    "own state_dict, or save and load with commgrid.checkpoint; if you have put "
                    "the right slices into it, give dict(state_dict)"
                )


@dataclass(frozen=True)
class Foreign:
    """The library that has sliced a parameter.

    Args:
        what: description for a message: `is a slice of Megatron-core's`.
        instead_of_saving, instead_of_reducing: the library's own function for that.
    """

    what: str
    instead_of_saving: str
    instead_of_reducing: str


def foreign_slice(
    module: nn.Module, parameter: nn.Parameter, grid: HyperCommGrid
) -> Foreign | None:
    """The library that sliced a parameter that looks whole; None: it is no such slice.

    Args:
        module: the parameter's module.
        parameter: sharded by FSDP2 or not.
        grid: its grid; without tensor parallelism there a marked parameter is whole.
    """
    mesh = getattr(module, "_hf_device_mesh", None)
    if type(parameter).__name__ == "FlatParameter":
        return Foreign("is FSDP1's", "use fully_shard, FSDP2", "FSDP's own gradient reduction")
    if isinstance(module, ShardedModule):
        return None
    cut = "tp" not in grid.shape or grid.size("tp") > 1
    if cut and getattr(parameter, "tensor_model_parallel", False):
        return Foreign(
            "is a slice of Megatron-core's",
            "save it with megatron.core.dist_checkpointing",
            "megatron.core's DistributedDataParallel",
        )
    if getattr(module, "_hf_tp_plan", None) and (mesh is None or mesh.size() > 1):
        return Foreign(
            "is a slice of Transformers' tp_plan's",
            "save it with its save_pretrained",
            "torch's FSDP2 or DistributedDataParallel",
        )
    return None


@dataclass(frozen=True)
class Mark:
    """The arguments of `mark_parameters` for a module."""

    partial: GroupRef | None = None
    region: str = "dense"
    shared: GroupRef | None = None


@dataclass(frozen=True)
class Placement(Slice):
    """A parameter and its layout on the grid.

    Args:
        name, parameter, shards: as for `Slice`.
        partial: the group over which its gradients are parts of a sum; None: none.
        region: "dense" or "expert": selects the data-parallel group that holds copies of it.
        shape: of the full parameter.
        shared: the group whose ranks each use a copy of it differently, as first and last stage
            use tied embeddings, so that its gradient is the sum over them; None: none.
    """

    partial: GroupRef | None
    region: str
    shape: tuple[int, ...]
    shared: GroupRef | None = None


class Distinct:
    """Layout along an axis with other parameters at each index, such as a pipeline's stages."""

    def __repr__(self) -> str:
        return "Distinct()"


@dataclass(frozen=True)
class ParameterLayout:
    """Layout of one parameter along the axes of its region.

    Args:
        weight: by axis, `Shard(dim)`: this rank has a slice; `Replicate()`: a copy; `Distinct()`:
            other indices have other parameters.
        grad: by axis, `Partial()`: each rank has a part of a sum; `Replicate()`: all of it. Along
            data axes gradients are partial after backward too, and the reducer sums them.
        shape: of the full parameter.
        sizes: of the axes.
        sharers: number of stages that each use a copy of it differently.
    """

    weight: Mapping[str, Shard | Replicate | Distinct]
    grad: Mapping[str, Partial | Replicate]
    shape: tuple[int, ...]
    sizes: Mapping[str, int]
    sharers: int = 1

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have copies of this rank's tensor."""
        return tuple(axis for axis, kind in self.weight.items() if isinstance(kind, Replicate))

    @property
    def num_distinct(self) -> float:
        """Number of distinct shards or parameters held across the grid in this one's place."""
        apart = [axis for axis in self.weight if axis not in self.copied_axes]
        return math.prod(self.sizes[axis] for axis in apart) / self.sharers


def layout_of(
    placement: Placement, grid: HyperCommGrid, further: Iterable[tuple[str, int]] = ()
) -> ParameterLayout:
    """Layout of a parameter along the axes of a grid.

    Each pipeline stage has its own parameters, and so has each rank of an expert-parallel group.

    Args:
        placement: the parameter.
        grid: its grid.
        further: groups over which the layer's tensor is sliced once more, as by FSDP2 or a
            sharded optimizer: (name, dim) of each.

    Raises:
        SpecError: it is sliced over a group that is not one of the grid's names, that lists its
            ranks, or that is of another region.
    """
    regions = {region.name: region.axes for region in grid.spec.regions}
    own = regions.get(placement.region, grid.spec.regions[0].axes)
    weight: dict[str, Shard | Replicate | Distinct] = dict.fromkeys(own, Replicate())
    if "pp" in own:
        weight["pp"] = Distinct()
    if placement.region == "expert" and "ep" in own:
        weight["ep"] = Distinct()
    cut: dict[str, int] = {}
    for dim, group in placement.shards:
        cut |= dict.fromkeys(_axes_of(_name_in(group, placement, grid), placement, grid), dim)
    for name, dim in further:
        cut |= dict.fromkeys(_axes_of(name, placement, grid), dim)
    if not cut.keys() <= set(own):
        raise SpecError(
            f"{placement.name}: sliced over {', '.join(sorted(cut))}, but its region has the axes "
            f"{', '.join(own)}; expert parameters are sharded over axes of the expert region, such "
            "as edp, and others over those of the dense one"
        )
    weight |= {axis: Shard(dim) for axis, dim in cut.items()}
    partial = placement.partial
    summed: tuple[str, ...] = ()
    if partial is not None and partial.grid_name == grid.name:
        summed = grid.spec.definitions[grid.spec.resolve_name(partial.name)].axes
    return ParameterLayout(
        weight, {axis: Partial() if axis in summed else Replicate() for axis in own},
        placement.shape, {axis: grid.size(axis) for axis in own},
        placement.shared.size if placement.shared is not None else 1,
    )  # fmt: skip


def _name_in(group: GroupRef, placement: Placement, grid: HyperCommGrid) -> str:
    if group.grid_name != grid.name:
        raise SpecError(
            f"{placement.name}: sliced over {group}, which was not given as a name of grid "
            f"{grid.name!r}; give the layer the group's name"
        )
    return group.name


def _axes_of(name: str, placement: Placement, grid: HyperCommGrid) -> tuple[str, ...]:
    try:
        definition = grid.spec.definitions[grid.spec.resolve_name(name)]
    except LookupError as error:
        raise SpecError(
            f"{placement.name}: sliced over {name!r}, which grid {grid.name!r} does not have; take "
            f"meshes from grid.device_mesh ({error})"
        ) from error
    if definition.lists is not None:
        raise SpecError(
            f"{placement.name}: sliced over {name!r}, which lists its ranks, so that nobody knows "
            "which others have copies; give the layer, or the reducer that shards, an axis"
        )
    return definition.axes


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
            if None not in (now, before) and _name(now) != _name(before):
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


def placements(model: nn.Module) -> Iterator[Placement]:
    """Layout of every parameter of the model; a parameter shared by modules comes once.

    Raises:
        SpecError: modules that share a parameter declare different layouts, or a slice was
            replaced by a parametrization, weight_norm or pruning.
    """
    found: dict[int, Placement] = {}
    marks: dict[str, Mark] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            _check_declared(prefix, module)
            _check_unwrapped(prefix, module)
        mark = marks[prefix] = _mark_of(prefix, module, marks)
        for name, parameter in module.named_parameters(recurse=False):
            shards: tuple[tuple[int, GroupRef], ...] = ()
            partial, shape = mark.partial, tuple(parameter.shape)
            if isinstance(module, ShardedModule):
                shards, shape = module.shards_of(name), module.full_shape(name)
                if name in module.partial:
                    partial = module.group
                elif partial is not None and partial.name in _names_of(module, shards):
                    partial = None  # the layer's declaration precedes a mark on its parent
            full = f"{prefix}.{name}" if prefix else name
            placement = Placement(full, parameter, shards, partial, mark.region, shape, mark.shared)
            check_mesh(placement)
            first = found.setdefault(id(parameter), placement)
            if _told(first) != _told(placement):
                raise SpecError(
                    f"{first.name} and {full} are one parameter, but their modules say "
                    f"{_told(first)} and {_told(placement)} of its slices, partial "
                    "sums, region and copies"
                )
    yield from found.values()


def _names_of(module: ShardedModule, shards: Sequence[tuple[int, GroupRef]]) -> set[str]:
    """The groups along which a layer itself declares a parameter's layout."""
    return {module.group.name, *(group.name for _, group in shards)}


def _refuse_copying_over_slices(module: nn.Module, ranks: Sequence[int]) -> None:
    """Refuses DDP over ranks with different slices of a parameter, which it would make equal.

    Raises:
        SpecError: names the parameter and the ranks.
    """
    for placement in placements(module):
        for dim, group, both in placement.within(ranks):
            raise SpecError(
                f"DistributedDataParallel over {describe_ranks(ranks)} would make "
                f"{placement} equal on {describe_ranks(both)}, which have different slices "
                f"of it, cut along dim {dim} over {group.name!r}; give it the ranks that have "
                f"copies: {_copies_group(placement, group)}, or use GradientReducer"
            )


def _copies_group(placement: Placement, cut: GroupRef) -> str:
    """Suggested `process_group=` of DistributedDataParallel for a sliced parameter."""
    with suppress(SpecError):
        grid = get_grid(cut.grid_name or "default")
        axes = [a for a in layout_of(placement, grid).copied_axes if grid.size(a) > 1]
        if axes:
            return f"process_group=commgrid.get_group({'_'.join(reversed(axes))!r})"
    return "here no other rank has one"


def _mark_of(prefix: str, module: nn.Module, marks: Mapping[str, Mark]) -> Mark:
    """A module's mark; a parametrization added later takes its parent's."""
    mark: Mark | None = getattr(module, "_commgrid_mark", None)
    parent, inside, _ = f".{prefix}".rpartition(".parametrizations.")
    if mark is None and inside:
        mark = marks.get(parent.removeprefix("."))
    return mark or Mark()


def _check_declared(prefix: str, module: ShardedModule) -> None:
    """Refuses declarations for parameters or dims that a layer does not have."""
    who = f"{f'{prefix}: ' if prefix else ''}{type(module).__name__}"
    if not isinstance(getattr(module, "group", None), GroupRef):
        raise SpecError(
            f"{who}.group is {getattr(module, 'group', None)!r}: a ShardedModule keeps the group "
            "that its parameters are cut over as self.group = GroupRef('tp')"
        )
    for what, names in (("shard_dims", module.sliced_names), ("partial", module.partial)):
        for name in names:
            if name not in module._parameters and not hasattr(module, name):
                has = ", ".join(module._parameters) or "none"
                raise SpecError(
                    f"{who}.{what} names {name!r}, which is no parameter of it; it has {has}"
                )
    for name in module.sliced_names:
        parameter = module._parameters.get(name)
        for dim, _ in module.shards_of(name) if parameter is not None else ():
            if not 0 <= dim < parameter.dim():  # type: ignore[union-attr]
                raise SpecError(
                    f"{who}.shard_dims says that {name!r} is cut along dim {dim}; it has shape "
                    f"{tuple(parameter.shape)}"  # type: ignore[union-attr]
                )


def _check_unwrapped(prefix: str, module: ShardedModule) -> None:
    """Refuses a slice, or a partial parameter, that is now made of another parameter."""
    cut = [n for n in module.sliced_names if any(g.size > 1 for _, g in module.shards_of(n))]
    for name in (*cut, *(module.partial if module.group.size > 1 else ())):
        if name in module._parameters or not hasattr(module, name):
            continue
        made_of = [key for key in module._parameters if key.startswith(f"{name}_")]
        if parametrize.is_parametrized(module, name):
            made_of = [f"parametrizations.{name}.original"]
        if not made_of:
            continue
        raise SpecError(
            f"{f'{prefix}.' if prefix else ''}{name} of {type(module).__name__} is no parameter of "
            f"the layer any more, but computed from {', '.join(made_of)} (a parametrization, "
            "weight_norm or pruning), of which nothing says how ranks share it; take that off "
            "(torch.nn.utils.parametrize.remove_parametrizations), or put it into a ShardedModule "
            "of your own"
        )


def _told(placement: Placement) -> tuple[Any, ...]:
    shards = tuple((dim, group.name, group.size) for dim, group in placement.shards)
    return shards, _name(placement.partial), placement.region, _name(placement.shared)


def _name(group: GroupRef | None) -> str | None:
    return group.name if group is not None else None


def own_slice(full: Tensor, dim: int, group: GroupRef, size: int) -> Tensor:
    """This rank's slice of `full` of length `size` along `dim`, zero past the end of `full`."""
    shape = list(full.shape)
    start = min(group.rank * size, shape[dim])
    real = min(size, shape[dim] - start)
    if real == size:
        return full.narrow(dim, start, size)
    shape[dim] = size
    part = full.new_zeros(shape)
    part.narrow(dim, 0, real).copy_(full.narrow(dim, start, real))
    return part


before_ddp(_refuse_copying_over_slices)
