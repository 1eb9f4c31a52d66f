"""The grid's communicators seen as torch DeviceMesh.

Each region has one root mesh with all of its axes, slowest first as torch lists them, and every
mesh of a grid is a slice of one, so that torch sees that they belong together: tp for layers and
dp_shard for FSDP2, taken apart, meet in one DTensor. Nothing here creates a process group. The
region's other names are registered with the root as torch's flattened axes, so that torch finds
them where it would create a group:

    root of a dense region      pp dp cp tp          from_group, over the grid's groups
    its flattened axes          dp_cp, pp_dp, …      with the grid's groups
    device_mesh("dp_cp", "tp")  dp_cp tp             both of the same root

Flattening to a name that the grid does not have is torch's own: collective, with new groups.
`read_mesh` goes the other way, from a mesh to a grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks, get_rank
from torch.distributed.device_mesh import DeviceMesh

from commgrid.errors import NotInGridError, SpecError, UnknownGroupError
from commgrid.planning.groups import GroupDef, GroupEntry
from commgrid.planning.ranks import RankTuple
from commgrid.planning.region import Region
from commgrid.planning.spec import GridSpec
from commgrid.runtime import torch_groups
from commgrid.runtime.torch_patches import answered_with, mend_uneven_gathers


class GridMeshes:
    """The meshes of one grid.

    Args:
        spec: the resolved spec.
        created: the names that were created on any rank, with their meaning.
        groups: this rank's communicators by canonical name.
    """

    def __init__(
        self, spec: GridSpec, created: Mapping[str, GroupDef], groups: Mapping[str, ProcessGroup]
    ) -> None:
        self._spec, self._created, self._groups = spec, created, groups
        self._roots: dict[str, DeviceMesh] = {}

    def mesh(self, names: Sequence[str], drop_size_1: bool) -> DeviceMesh:
        """A mesh with these axes; see `HyperCommGrid.device_mesh`."""
        dense = self._spec.regions[0]
        wanted = {self._canonical(name): name for name in names or reversed(dense.axes)}
        region = self._region_of(list(wanted))
        axes = {name: self._axes(name) for name in wanted}
        self._check_order(region, axes)
        root = self._root(region)
        if drop_size_1:
            sizes = dict(region.numbers)
            kept = [n for n in axes if any(sizes[axis] > 1 for axis in axes[n])]
            axes = {name: axes[name] for name in kept or list(axes)[-1:]}
        if tuple(axes) == root.mesh_dim_names:
            return root
        if set(axes) <= set(root.mesh_dim_names or ()):
            return root[tuple(axes)]
        parts = [
            root[name] if name in (root.mesh_dim_names or ()) else root._flatten_mapping[name]
            for name in axes
        ]
        return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)

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

    def _axes(self, name: str) -> tuple[str, ...]:
        return self._spec.definitions[name].axes

    def _region_of(self, names: Sequence[str]) -> Region:
        """The first region that has all of their axes."""
        wanted = {axis for name in names for axis in self._axes(name)}
        for region in self._spec.regions:
            own = {n for n in names if self._spec.definitions[n].region == region.name}
            shared = {n for n in names if set(self._axes(n)) <= set(region.axes)}
            if wanted <= set(region.axes) and own | shared == set(names):
                return region
        told = " | ".join(f"{r.name}: {', '.join(reversed(r.axes))}" for r in self._spec.regions)
        raise SpecError(
            f"device_mesh({', '.join(map(repr, names))}): axes of two regions are not one mesh; "
            f"take a mesh of each region's ({told})"
        )

    def _check_order(self, region: Region, axes: Mapping[str, tuple[str, ...]]) -> None:
        slowest_first = list(reversed(region.axes))
        used = [axis for own in axes.values() for axis in own]
        for axis in used:
            if used.count(axis) > 1:
                raise SpecError(
                    f"device_mesh({', '.join(map(repr, axes))}): axis {axis!r} is in it twice; "
                    "expected names that have no axis in common"
                )
        ordered = sorted(axes, key=lambda name: min(slowest_first.index(a) for a in axes[name]))
        if ordered != list(axes):
            raise SpecError(
                f"device_mesh({', '.join(map(repr, axes))}): a mesh lists its axes slowest first; "
                f"expected device_mesh({', '.join(map(repr, ordered))})"
            )

    # -- roots --------------------------------------------------------------------------

    def _root(self, region: Region) -> DeviceMesh:
        if region.name not in self._roots:
            self._roots[region.name] = self._make_root(region)
        return self._roots[region.name]

    def _make_root(self, region: Region) -> DeviceMesh:
        names = tuple(reversed(region.axes))
        for axis in names:
            if axis not in self._groups:
                raise UnknownGroupError(
                    f"device_mesh: a mesh needs every axis of its region, but {axis!r} of region "
                    f"{region.name!r} was not created; add it to create="
                )
        sizes = dict(region.numbers)
        groups = [self._groups[axis] for axis in names]
        root = DeviceMesh.from_group(
            groups,
            "cuda" if any(d.type == "cuda" for d in torch_groups.devices_of(groups[0])) else "cpu",
            torch.tensor(self._spec.grid_ranks).view([sizes[a] for a in names]),
            mesh_dim_names=names,
        )
        mend_uneven_gathers()
        for name, definition in self._created.items():
            axes = definition.axes
            if name in names or not definition.is_whole or not set(axes) <= set(names):
                continue
            source = root if axes == names else root[axes]
            with answered_with(self._groups[name]):
                source._flatten(name)
        return root


def read_mesh(mesh: DeviceMesh) -> tuple[GridSpec, dict[str, ProcessGroup]]:
    """What grid a mesh is, and its groups by name, also those that were flattened from it.

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
        covered = RankTuple(ranks).describe()
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
    table: dict[str, str] = {}
    combined = {
        "_".join(axes): mesh if axes == names else mesh[axes]
        for count in range(1, len(names) + 1)
        for axes in combinations(names, count)
    }
    for name, flat in mesh._get_root_mesh()._flatten_mapping.items():
        candidates = [name] if name in combined else list(combined)
        for of in candidates:
            listed = combined[of].mesh.flatten().tolist()
            if flat.mesh.tolist() == listed == get_process_group_ranks(flat.get_group()):
                groups[name] = flat.get_group()
                if of != name:
                    table[name] = of
                    groups.setdefault(of, groups[name])
                break
    region = Region("dense", tuple(zip(reversed(names), reversed(mesh.shape), strict=True)))
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
