"""Parameters that other libraries' layers have cut, which look whole.

| whose | says | cut |
|---|---|---|
| Megatron-core | `tensor_model_parallel`, `partition_dim`, `partition_stride` s | over tp, into s pieces a rank that lie n apart |
| Transformers | `_hf_tp_plan` of the module: `colwise…` | the last dim but one, of a bias the last |
| | `rowwise…` | the last dim; a bias is whole |
| | `embedding_rowwise`, `embedding_colwise` | dim 0, dim 1 |
| FSDP1 | `FlatParameter` | in a way that it does not say |
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from commgrid.errors import SpecError
from commgrid.layout.box import Box, Shape
from commgrid.parameters.sharded_module import ShardedModule
from commgrid.runtime.grid import HyperCommGrid

_COLUMNS = ("colwise", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_split_input")
_EMBEDDINGS = {"embedding_rowwise": 0, "embedding_colwise": 1}
_WHOLE = ("sequence_parallel", "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce")


@dataclass(frozen=True)
class Foreign:
    """The library that has sliced a parameter.

    Args:
        what: description for a message: `is a slice of Megatron-core's`.
        instead_of_saving, instead_of_reducing: the library's own function for that.
        says_how: whether `foreign_cut` reads how.
    """

    what: str
    instead_of_saving: str
    instead_of_reducing: str
    says_how: bool = True


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
        return Foreign(
            "is FSDP1's", "use fully_shard, FSDP2", "FSDP's own gradient reduction", says_how=False
        )
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
class ForeignCut:
    """How a rank's slice lies in the full parameter.

    Args:
        dim: that is cut.
        pieces: that a rank has of it.
        num_ranks, rank: size of the group that cut it, and this rank's place in it.
    """

    dim: int
    pieces: int
    num_ranks: int
    rank: int

    def full_shape(self, held: Shape) -> Shape:
        """Of the full parameter.

        Args:
            held: shape of this rank's slice.
        """
        return self._with(held, held[self.dim] * self.num_ranks)

    def boxes(self, held: Shape) -> tuple[tuple[Box, Shape], ...]:
        """The boxes of a slice, each with its offset in the full parameter.

        Piece i is the full parameter's piece i · num_ranks + rank.
        """
        length, start = held[self.dim] // self.pieces, (0,) * len(held)
        size = self._with(held, length)
        return tuple(
            (
                (self._with(start, piece * length), size),
                self._with(start, (piece * self.num_ranks + self.rank) * length),
            )
            for piece in range(self.pieces)
        )

    def _with(self, numbers: Shape, of_dim: int) -> Shape:
        return (*numbers[: self.dim], of_dim, *numbers[self.dim + 1 :])


def foreign_cut(module: nn.Module, parameter: Any, grid: HyperCommGrid) -> ForeignCut | None:
    """How another library's layer has cut a parameter; None: it has not.

    Args:
        module: whose parameter it is.
        parameter: of it.
        grid: whose tp cuts Megatron's.

    Raises:
        SpecError: it is cut in a way that its attributes do not say.
    """
    if isinstance(module, ShardedModule) or isinstance(parameter, DTensor):
        return None  # which say themselves where it lies
    if getattr(parameter, "allreduce", True) is False:
        raise SpecError(
            f"a parameter of shape {tuple(parameter.shape)} of {type(module).__name__} is an "
            "expert's of Megatron-core's, whose name says nothing of which expert it is; give a "
            "mapping of names in the whole model to Part(tensor, shape, offset)"
        )
    if getattr(parameter, "tensor_model_parallel", False):
        return megatron_cut(module, parameter, grid, "tp")
    plan, mesh = (getattr(module, name, None) for name in ("_hf_tp_plan", "_hf_device_mesh"))
    if not plan or (mesh is not None and mesh.size() == 1):
        return None
    return _transformers_cut(module, parameter, plan, mesh)


def megatron_cut(
    module: nn.Module, parameter: Any, grid: HyperCommGrid | None, axis: str
) -> ForeignCut | None:
    """How Megatron-core has cut a parameter that it has marked; None: it is whole.

    Args:
        module, parameter: as `foreign_cut` takes them.
        grid: None: there is one rank.
        axis: along which it is cut.

    Raises:
        SpecError: its attributes do not say how.
    """
    if grid is None or axis not in grid.shape or grid.size(axis) == 1:
        return None
    dim: Any = getattr(parameter, "partition_dim", None)
    pieces: Any = getattr(parameter, "partition_stride", None)
    whole = isinstance(dim, int) and isinstance(pieces, int) and pieces > 0
    if not whole or not 0 <= dim < parameter.dim() or parameter.shape[dim] % pieces:
        raise SpecError(
            f"a parameter of shape {tuple(parameter.shape)} of {type(module).__name__} is marked "
            f"tensor_model_parallel with partition_dim={dim!r} and partition_stride={pieces!r}; "
            "expected one of its dims, and pieces that divide it"
        )
    return ForeignCut(dim, pieces, grid.size(axis), grid.get_local_rank(axis))


def _transformers_cut(module: nn.Module, parameter: Any, plan: str, mesh: Any) -> ForeignCut | None:
    dims, dim = parameter.dim(), None
    if plan in _COLUMNS:
        dim = max(dims - 2, 0)
    elif plan in _ROWS:
        dim = dims - 1 if dims > 1 else None
    elif plan in _EMBEDDINGS:
        dim = _EMBEDDINGS[plan]
    if (dim is None and plan not in (*_ROWS, *_WHOLE)) or mesh is None or mesh.ndim != 1:
        raise SpecError(
            f"{type(module).__name__} has the tp_plan {plan!r} of Transformers on {mesh}, of which "
            f"nothing here says how its parameters are cut; expected {', '.join(_COLUMNS)}, "
            f"{', '.join(_ROWS)}, {', '.join(_EMBEDDINGS)} on a mesh of one dim, or give a mapping "
            "of names to Part(tensor, shape, offset)"
        )
    return None if dim is None else ForeignCut(dim, 1, mesh.size(), mesh.get_local_rank())
