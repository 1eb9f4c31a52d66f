"""ShardingSpec: how a tensor lies on a grid, axis by axis; DTensor does what it says.

    spec = ShardingSpec({"dp": Replicate(), "tp": Shard(1)})     full tensor (4, 6), tp 2 · dp 2
    rank         0 (dp 0, tp 0)   1 (dp 0, tp 1)   2 (dp 1, tp 0)   3 (dp 1, tp 1)
    local shape  (4, 3)           (4, 3)           (4, 3)           (4, 3)
    offset       (0, 0)           (0, 3)           (0, 0)           (0, 3)

Axes that are not named hold copies. A dim that several axes shard is cut by the slowest
first. Pieces are torch.chunk's: of 5 rows on 4 ranks the first three have 2, 2, 1, the last none.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from commgrid.errors import ShapeError, SpecError
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid
from commgrid.torch_compat.dtensor import steps_of

Shape = Sequence[int]


@dataclass(frozen=True)
class RedistributionStep:
    """One step of a redistribution.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, or local, which sends nothing.
        axis: the axis or combination over whose group it runs.
        size: how many ranks that has.
        sent: the bytes a rank sends at least, as a ring or an exchange of pieces does: with n
            ranks (n − 1) pieces, of an all-reduce twice as many.
    """

    kind: str
    axis: str
    size: int
    sent: int


class ShardingSpec:
    """What each axis of a grid does with a tensor.

    Args:
        placements: axis, or combination such as `dp_cp`, to `Shard(dim)`, `Replicate()` or
            `Partial()`, all of one region, in any order; axes that are not named hold copies.
        grid: None: the default grid.

    Raises:
        SpecError: axes of two regions, one axis twice, or no placement.
        UnknownGroupError: an axis that the grid does not have.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize()
        >>> spec = ShardingSpec({"tp": Shard(1), "dp": Replicate()})
        >>> spec.axes, spec.local_shape((4, 6)), spec.offset((4, 6))
        (('dp', 'tp'), (4, 6), (0, 0))
        >>> commgrid.shutdown()
    """

    def __init__(
        self, placements: Mapping[str, Placement], grid: HyperCommGrid | None = None
    ) -> None:
        self.grid = grid or get_grid()
        if not placements:
            raise SpecError("ShardingSpec({}): expected a placement for at least one axis")
        spec = self.grid.spec
        given: dict[str, Placement] = {}
        for name, placement in placements.items():
            if not isinstance(placement, Placement):
                raise SpecError(
                    f"ShardingSpec: {name}={placement!r}: expected Shard(dim), Replicate() or "
                    "Partial() of torch.distributed.tensor"
                )
            given[spec.resolve_name(name)] = placement
        slowest = [axis for region in spec.regions for axis in reversed(region.axes)]
        self.axes = tuple(
            sorted(given, key=lambda n: min(slowest.index(a) for a in spec.definitions[n].axes))
        )
        self.mesh: DeviceMesh = self.grid.device_mesh(*self.axes)
        self.placements = tuple(given[name] for name in self.axes)
        self.sizes = tuple(self.mesh.shape)

    # -- arithmetic ---------------------------------------------------------------------

    def local_shape(self, shape: Shape, rank: int | None = None) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor; without communication.

        Args:
            shape: of the full tensor.
            rank: global; None: this one.

        Raises:
            ShapeError: a shard of a dim that the tensor does not have.
            NotInGridError: the rank is not in the grid.
        """
        return tuple(size for _, size in self._spans(shape, rank))

    def offset(self, shape: Shape, rank: int | None = None) -> tuple[int, ...]:
        """Where a rank's part begins in the full tensor; at the end of a dim it has nothing of."""
        return tuple(start for start, _ in self._spans(shape, rank))

    def local_shard(self, full: Tensor, rank: int | None = None) -> Tensor:
        """A rank's part of the full tensor, as a view; of a Partial() axis the first rank's is all
        of it and the others' is zero."""
        part = full
        for dim, (start, size) in enumerate(self._spans(full.shape, rank)):
            part = part.narrow(dim, start, size)
        places = zip(self.placements, self._coordinate(rank), strict=True)
        others = any(isinstance(p, Partial) and index > 0 for p, index in places)
        return torch.zeros_like(part) if others else part

    def _spans(self, shape: Shape, rank: int | None) -> list[tuple[int, int]]:
        """Start and size in each dim."""
        self._check(shape)
        spans = [(0, size) for size in shape]
        coordinate = self._coordinate(rank)
        for placement, ranks, index in zip(self.placements, self.sizes, coordinate, strict=True):
            if isinstance(placement, Shard):
                start, size = spans[placement.dim]
                piece = math.ceil(size / ranks)
                begin = min(index * piece, size)
                spans[placement.dim] = start + begin, min(piece, size - begin)
        # torch says of an empty part that it begins where the tensor ends.
        return [
            (start, size) if size else (whole, 0)
            for (start, size), whole in zip(spans, shape, strict=True)
        ]

    def _coordinate(self, rank: int | None) -> tuple[int, ...]:
        rank = self.grid.rank if rank is None else rank
        spec, found = self.grid.spec, []
        for name in self.axes:
            definition = spec.definitions[name]
            found.append(list(definition.ranks(spec.layout(definition.region), rank)).index(rank))
        return tuple(found)

    def _check(self, shape: Shape) -> None:
        for axis, placement in zip(self.axes, self.placements, strict=True):
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(shape):
                raise ShapeError(
                    f"{self}: axis {axis!r} shards dim {placement.dim}, but the tensor of shape "
                    f"{tuple(shape)} has dims 0 to {len(shape) - 1}; name one of these"
                )

    # -- tensors ------------------------------------------------------------------------

    def distribute(self, full: Tensor) -> DTensor:
        """A DTensor of a full tensor that is equal on all ranks; without communication."""
        return self.from_local(self.local_shard(full).clone(), full.shape)

    def from_local(self, local: Tensor, shape: Shape) -> DTensor:
        """A DTensor whose part on this rank is `local`; without communication.

        Raises:
            ShapeError: it is not of the shape of this rank's part.
        """
        if tuple(local.shape) != self.local_shape(shape):
            raise ShapeError(
                f"{self}: a part of shape {tuple(local.shape)} on rank {self.grid.rank}; of a "
                f"tensor of shape {tuple(shape)} it should be {self.local_shape(shape)}"
            )
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False,
            shape=torch.Size(shape), stride=torch.empty(tuple(shape), device="meta").stride(),
        )  # fmt: skip

    def redistribute(self, tensor: DTensor) -> DTensor:
        """The same tensor as this spec says; collective over the axes on which it changes.

        Args:
            tensor: on any mesh of the same region of the same grid, such as from another spec.

        Raises:
            SpecError: a tensor of another grid or region.
            ShapeError: a shard of a dim that the tensor does not have.
        """
        self._check(tensor.shape)
        source = self._spec_of(tensor)
        both = self._with_axes_of(source)
        wide = source._with_axes_of(self)
        local = DTensor.from_local(
            tensor.to_local(), wide.mesh, wide.placements, run_check=False,
            shape=tensor.shape, stride=tensor.stride(),
        )  # fmt: skip
        moved = local.redistribute(both.mesh, both.placements)
        if both.mesh is self.mesh or both.axes == self.axes:
            return moved
        return DTensor.from_local(
            moved.to_local(), self.mesh, self.placements, run_check=False,
            shape=tensor.shape, stride=tensor.stride(),
        )  # fmt: skip

    def plan(
        self, source: ShardingSpec, shape: Shape, dtype: torch.dtype
    ) -> list[RedistributionStep]:
        """What torch will do to bring a tensor from another spec to this one.

        Args:
            source: where it is.
            shape: of the full tensor.
            dtype: of its numbers.

        Raises:
            CommGridError: this version of torch plans in another way than is known here.
        """
        wide, both = source._with_axes_of(self), self._with_axes_of(source)
        begin, end = ((spec.mesh, spec.placements) for spec in (wide, both))
        steps = steps_of(begin, end, shape, dtype)
        numel = math.prod(wide.local_shape(shape))
        found = []
        for step in steps:
            mesh = getattr(step, "mesh", wide.mesh)
            ranks = mesh.size(step.mesh_dim)
            kind, before, after = _kind(*step.src_dst_placements)
            whole = numel * ranks if before == "piece" else numel
            piece = math.ceil(whole / ranks)
            sent = {"local": 0, "all_reduce": 2}.get(kind, 1) * (ranks - 1) * piece
            numel = {"piece": piece, "whole": whole, "same": numel}[after]
            name = (mesh.mesh_dim_names or ())[step.mesh_dim]
            found.append(
                RedistributionStep(
                    kind if ranks > 1 else "local", name, ranks, sent * dtype.itemsize
                )
            )
        return found

    def _with_axes_of(self, other: ShardingSpec) -> ShardingSpec:
        """The same, with copies along the axes that only the other names."""
        if other.grid is not self.grid:
            raise SpecError(f"{self} and {other} are of two grids; expected one")
        missing = {axis: Replicate() for axis in other.axes if axis not in self.axes}
        if not missing:
            return self
        return ShardingSpec(
            {**dict(zip(self.axes, self.placements, strict=True)), **missing}, self.grid
        )

    def _spec_of(self, tensor: DTensor) -> ShardingSpec:
        names = tensor.device_mesh.mesh_dim_names or ()
        try:
            found = ShardingSpec(dict(zip(names, tensor.placements, strict=True)), self.grid)
        except (SpecError, LookupError) as error:
            raise SpecError(f"{self}: a tensor on {tensor.device_mesh}: {error}") from error
        if found.mesh.mesh.tolist() != tensor.device_mesh.mesh.tolist():
            raise SpecError(
                f"{self}: a tensor on {tensor.device_mesh}, which is not a mesh of grid "
                f"{self.grid.name!r}; take meshes from grid.device_mesh"
            )
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardingSpec):
            return NotImplemented
        mine, theirs = ((s.grid, s.axes, s.placements) for s in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash((id(self.grid), self.axes, self.placements))

    def __repr__(self) -> str:
        said = ", ".join(f"{a}: {p}" for a, p in zip(self.axes, self.placements, strict=True))
        return f"ShardingSpec({said})"


def _kind(source: Placement, target: Placement) -> tuple[str, str, str]:
    """The collective; what a rank has of the tensor before, and after."""
    if isinstance(source, Partial):
        return (
            ("reduce_scatter", "whole", "piece")
            if isinstance(target, Shard)
            else ("all_reduce", "whole", "same")
        )
    if isinstance(source, Shard):
        return (
            ("all_to_all", "same", "same")
            if isinstance(target, Shard)
            else ("all_gather", "piece", "whole")
        )
    return ("local", "whole", "piece") if isinstance(target, Shard) else ("local", "whole", "same")


def __getattr__(name: str) -> type[RedistributionStep]:
    """The earlier name of `RedistributionStep`, until release 0.3."""
    if name != "Transfer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    said = "commgrid.sharding.Transfer is RedistributionStep now; its earlier name goes with 0.3"
    warnings.warn(said, DeprecationWarning, stacklevel=2)
    return RedistributionStep
