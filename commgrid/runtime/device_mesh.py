"""The grid's communicators seen as torch DeviceMesh.

Nothing here creates a process group. A mesh has the axes that were asked for and is a root by
itself, as one of `init_device_mesh` is, so that torch flattens, slices and asks it as its own:

    device_mesh("dp", "tp")       dp tp       a root, also if the grid has other axes
    device_mesh("dp_cp", "tp")    dp_cp tp    a root; dp_cp is one dim, over the grid's group
    device_mesh("tp", "dp")       tp dp       a root, transposed
    device_mesh("tp")             tp          of the root of all axes above size 1, if there are
                                              others: DDP and FSDP1 ask their mesh for its parent

All meshes of a region that list axes slowest first number the same ranks in the same order, which
is what torch asks of meshes that meet in one DTensor: tp for layers and dp_shard for FSDP2.

The region's other names are offered to a root as torch's flattened axes, over the grid's groups, so
that torch finds them where it would create one (`dp_cp` of dp and cp, also where cp has size 1 and
is not in the mesh). Who flattens something else to such a name takes it over. Flattening to a name
that the grid does not have is torch's own: collective, with new groups; so is unflattening, always.
They outlive the grid: torch names groups by counting those there are, so that the next one after
one that was destroyed would meet at the store under its name again, and wait for ever.

FSDP1 of two dims beside tp asks its mesh's root for tp, and fails on a root of dp_replicate and
dp_shard alone: it takes a slice, `device_mesh("dp_replicate", "dp_shard", "tp")["dp_replicate",
"dp_shard"]`, as of torch's own mesh.

`read_mesh` goes the other way, from a mesh to a grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import combinations
from typing import Any

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks, get_rank
from torch.distributed.device_mesh import DeviceMesh

from commgrid.errors import NotInGridError, SpecError, UnknownGroupError
from commgrid.layout.rank_text import describe_ranks
from commgrid.layout.ranks import RankTuple
from commgrid.planning.group import GroupDef, find_name
from commgrid.planning.group_row import GroupEntry
from commgrid.planning.region import Region
from commgrid.planning.spec import GridSpec
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat.mesh import answered_with, let_names_be_taken, mend_uneven_gathers, offer

Dims = Mapping[str, tuple[str, ...]]
"""The dims of a mesh, in its order, with the axes that each runs along, slowest first."""


class GridMeshes:
    """The meshes of one grid; the same names are answered with the same mesh.

    Args:
        spec: the resolved spec.
        created: the names that were created on any rank, with their meaning.
        groups: this rank's communicators by canonical name.
    """

    def __init__(
        self, spec: GridSpec, created: Mapping[str, GroupDef], groups: Mapping[str, ProcessGroup]
    ) -> None:
        self._spec, self._created, self._groups = spec, created, groups
        self._made: dict[tuple[str, tuple[str, ...]], DeviceMesh] = {}
        self._bases: dict[tuple[str, ...], DeviceMesh] = {}
        self._registry: dict[Any, ProcessGroup] = {}

    def mesh(self, names: Sequence[str], drop_size_1: bool) -> DeviceMesh:
        """A mesh with these axes; see `HyperCommGrid.device_mesh`."""
        dense = self._spec.regions[0]
        wanted = [self._canonical(name) for name in names or reversed(dense.axes)]
        dims = {name: self._spec.definitions[name].axes for name in wanted}
        region = self._region_of(wanted)
        self._check_once(wanted)
        if drop_size_1:
            sizes = dict(region.numbers)
            kept = [n for n in dims if any(sizes[axis] > 1 for axis in dims[n])]
            dims = {name: dims[name] for name in kept or list(dims)[-1:]}
        return self._mesh(region, dims)

    def replace(self, group: ProcessGroup) -> None:
        """Has every mesh find this group under its name, which another one had before."""
        roots = (*self._bases.values(), *self._made.values())
        known = (m for root in roots for m in (root, *root._flatten_mapping.values()))
        for mesh in known:
            if group.group_name in mesh._pg_registry:
                mesh._pg_registry[group.group_name] = group

    # -- names --------------------------------------------------------------------------

    def _canonical(self, name: str) -> str:
        found = self._spec.resolve_name(name)
        definition = self._spec.definitions[found]
        if not definition.is_whole:
            what = "picks some members" if definition.pick is not None else "is a part of a split"
            if definition.lists is not None:
                what = "lists its ranks"
            raise SpecError(
                f"device_mesh: group {name!r} {what}, and a mesh has all ranks along its axes; "
                f"expected axes or combinations of them, such as {self._spec.regions[0].axes[0]!r}"
            )
        if found not in self._created:
            raise UnknownGroupError(
                f"device_mesh: group {found!r} was not created; add it to create="
            )
        return found

    def _region_of(self, names: Sequence[str]) -> Region:
        """The first region that has all of their axes."""
        definitions = self._spec.definitions
        wanted = {axis for name in names for axis in definitions[name].axes}
        for region in self._spec.regions:
            own = {n for n in names if definitions[n].region == region.name}
            shared = {n for n in names if set(definitions[n].axes) <= set(region.axes)}
            if wanted <= set(region.axes) and own | shared == set(names):
                return region
        told = " | ".join(f"{r.name}: {', '.join(reversed(r.axes))}" for r in self._spec.regions)
        raise SpecError(
            f"device_mesh({', '.join(map(repr, names))}): axes of two regions are not one mesh; "
            f"take a mesh of each region's ({told})"
        )

    def _check_once(self, names: Sequence[str]) -> None:
        used = [axis for name in names for axis in self._spec.definitions[name].axes]
        for axis in used:
            if used.count(axis) > 1:
                raise SpecError(
                    f"device_mesh({', '.join(map(repr, names))}): axis {axis!r} is in it twice; "
                    "expected names that have no axis in common"
                )

    # -- meshes -------------------------------------------------------------------------

    def _mesh(self, region: Region, dims: Dims) -> DeviceMesh:
        key = region.name, tuple(dims)
        if key not in self._made:
            self._made[key] = self._make(region, dims)
        return self._made[key]

    def _make(self, region: Region, dims: Dims) -> DeviceMesh:
        sizes, base = dict(region.numbers), self._base(region, dims)
        parts = {name: self._dim(base, name, axes) for name, axes in dims.items()}
        made = _joined(parts.values(), None)
        used = {axis for axes in dims.values() for axis in axes}
        above_1 = {axis for axis in region.axes if sizes[axis] > 1}
        if len(dims) == 1 and not above_1 <= used:
            asked = above_1 if used & above_1 else above_1 | used
            parent = {axis: (axis,) for axis in reversed(region.axes) if axis in asked}
            return _joined(parts.values(), self._mesh(region, parent))
        made._pg_registry = self._registry
        self._offer_names(region, dims, made)
        return made

    def _base(self, region: Region, dims: Dims) -> DeviceMesh:
        """An internal mesh of single axes, from which others are put together.

        It has the axes above size 1 and those in `dims`, slowest first; where `dims` has
        another order the axes of `dims` come last, in that order.
        """
        slowest, sizes = list(reversed(region.axes)), dict(region.numbers)
        used = [axis for axes in dims.values() for axis in axes]
        names = tuple(axis for axis in slowest if sizes[axis] > 1 or axis in used)
        if not self._is_slowest_first(region, dims):
            names = (*(axis for axis in names if axis not in used), *used)
        if names in self._bases:
            return self._bases[names]
        for axis in names:
            if axis not in self._groups:
                raise UnknownGroupError(
                    f"device_mesh: a mesh needs every axis of its region above size 1, but "
                    f"{axis!r} of region {region.name!r} was not created; add it to create="
                )
        groups = [self._groups[axis] for axis in names]
        ranks = torch.tensor(self._spec.grid_ranks).view([sizes[axis] for axis in slowest])
        left = [slowest.index(axis) for axis in slowest if axis not in names]
        ranks = ranks.permute(*left, *(slowest.index(axis) for axis in names))
        mend_uneven_gathers()
        let_names_be_taken()
        base = DeviceMesh.from_group(
            groups,
            "cuda" if any(d.type == "cuda" for d in torch_groups.devices_of(groups[0])) else "cpu",
            ranks.reshape([sizes[axis] for axis in names]),
            mesh_dim_names=names,
        )
        # Compiled code looks groups up in the root, which may be another's where meshes meet.
        self._registry.update(base._pg_registry)
        base._pg_registry = self._registry
        return self._bases.setdefault(names, base)

    @staticmethod
    def _is_slowest_first(region: Region, dims: Dims) -> bool:
        slowest = list(reversed(region.axes))
        places = [min(slowest.index(axis) for axis in axes) for axes in dims.values()]
        return places == sorted(places)

    def _dim(self, base: DeviceMesh, name: str, axes: tuple[str, ...]) -> DeviceMesh:
        """One dim along these axes of the base, over the grid's group of that name."""
        if axes == (name,):
            return base[name]
        if name not in base._flatten_mapping:
            source = _joined([base[axis] for axis in axes], base)
            with answered_with(self._groups[name]):
                source._flatten(name)
        return base._flatten_mapping[name]

    def _offer_names(self, region: Region, dims: Dims, root: DeviceMesh) -> None:
        """Offer the grid's names for all dims that can be flattened from a root."""
        sizes, base = dict(region.numbers), self._base(region, dims)
        slowest_first = self._is_slowest_first(region, dims)
        for name, definition in self._created.items():
            axes = set(definition.axes)
            if name in dims or not definition.is_whole or not axes <= set(region.axes):
                continue
            inside = {axis for own in dims.values() if set(own) <= axes for axis in own}
            if not inside or any(sizes[axis] > 1 for axis in axes - inside):
                continue
            above_1 = tuple(axis for axis in definition.axes if sizes[axis] > 1)
            if above_1 and slowest_first:  # the same of every mesh: made once
                made = self._dim(self._base(region, {}), name, above_1)
            else:
                made = self._dim(base, name, tuple(a for a in definition.axes if a in inside))
            offer(root, name, made)


def _joined(parts: Iterable[DeviceMesh], root: DeviceMesh | None) -> DeviceMesh:
    """Meshes side by side in a new one, which belongs to `root`, or else is one itself."""
    whole = list(parts)
    if len(whole) == 1:  # torch to 2.12 makes a nested layout of one, which equals no other mesh's
        made = copy(whole[0])
        made._flatten_mapping = {}
    else:
        made = DeviceMesh._concatenate(whole)
    made._root_mesh = root
    return made


def read_mesh(mesh: DeviceMesh) -> tuple[GridSpec, dict[str, ProcessGroup]]:
    """Return a mesh as a spec, and its groups by name, with its flattened dims.

    Raises:
        SpecError: a mesh without names, or whose groups have their ranks in another order.
        NotInGridError: this rank is not in it.
    """
    names, ranks = mesh.mesh_dim_names, mesh.mesh.flatten().tolist()
    if not names:
        raise SpecError(
            f"from_device_mesh({mesh}): its dims have no names, by which a grid knows its axes; "
            "make it with mesh_dim_names="
        )
    if mesh.get_coordinate() is None:
        covered = describe_ranks(RankTuple(ranks))
        raise NotInGridError(f"rank {get_rank()} is not in this mesh, which covers {covered}")
    groups = {name: mesh.get_group(name) for name in names}
    for name in names:
        listed, held = mesh[name].mesh.tolist(), get_process_group_ranks(groups[name])
        if listed != held:
            raise SpecError(
                f"from_device_mesh({mesh}): along {name!r} the mesh has ranks {listed[:16]}, but "
                f"its group has them as {held[:16]}, so that a rank would have two places; make "
                "the mesh with ranks that rise along every dim, or take it from device_mesh of a "
                "grid"
            )
    region = Region("dense", tuple(zip(reversed(names), reversed(mesh.shape), strict=True)))
    table: dict[str, str] = {}
    combined = {
        "_".join(axes): mesh if axes == names else mesh[axes]
        for count in range(1, len(names) + 1)
        for axes in combinations(names, count)
    }
    known = GridSpec((region,), ranks=tuple(ranks))
    for name, flat in mesh._get_root_mesh()._flatten_mapping.items():
        # A name that spells axes, such as cp_dp, is theirs in a grid and no other's.
        meant = find_name(name, known.definitions, known.words)
        same_as = None if meant is None else known.definitions[meant].same_as or meant
        for of in combined if same_as is None else [same_as]:
            listed = combined[of].mesh.flatten().tolist()
            if flat.mesh.tolist() == listed == get_process_group_ranks(flat.get_group()):
                groups[name if meant is None else of] = flat.get_group()
                if meant is None:
                    table[name] = of
                    groups.setdefault(of, groups[name])
                break
    spec = GridSpec(
        (region,),
        create=tuple(name for name in groups if name not in table),
        groups=tuple(GroupEntry(name, of) for name, of in table.items()),
        ranks=tuple(ranks),
    )
    for name, definition in spec.definitions.items():
        if definition.same_as in groups:
            groups.setdefault(name, groups[definition.same_as])
    return spec, groups
