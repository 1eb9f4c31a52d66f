"""Parameters that other libraries' layers have cut, where their own attributes say how.

| whose | says | cut |
|---|---|---|
| Megatron-core | `tensor_model_parallel`, `partition_dim`, `partition_stride` s | over tp, into s pieces a rank that lie n apart |
| Transformers | `_hf_tp_plan` of the module: `colwise…` | the last dim but one, of a bias the last |
| | `rowwise…` | the last dim; a bias is whole |
| | `embedding_rowwise`, `embedding_colwise` | dim 0, dim 1 |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from commgrid.checkpoint.boxes import Chunk
from commgrid.errors import SpecError

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

_COLUMNS = ("colwise", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_split_input")
_EMBEDDINGS = {"embedding_rowwise": 0, "embedding_colwise": 1}
_WHOLE = ("sequence_parallel", "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce")


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

    def full_shape(self, held: Tensor) -> tuple[int, ...]:
        """Of the full parameter."""
        shape = list(held.shape)
        shape[self.dim] *= self.num_ranks
        return tuple(shape)

    def chunks(self, held: Tensor) -> Iterator[Chunk]:
        """The boxes of a rank's slice: piece i is the full parameter's piece i · n + rank."""
        length = held.shape[self.dim] // self.pieces
        for piece in range(self.pieces if length else 0):
            offset = [0] * held.dim()
            offset[self.dim] = (piece * self.num_ranks + self.rank) * length
            yield Chunk(tuple(offset), held.narrow(self.dim, piece * length, length))


def foreign_cut(module: nn.Module, parameter: Any, grid: HyperCommGrid) -> ForeignCut | None:
    """How another library's layer has cut a parameter; None: it has not.

    Args:
        module: whose parameter it is.
        parameter: of it.
        grid: whose tp cuts Megatron's.

    Raises:
        SpecError: it is cut in a way that its attributes do not say.
    """
    if isinstance(parameter, DTensor):  # which says itself where it lies
        return None
    if getattr(parameter, "allreduce", True) is False:
        raise SpecError(
            f"a parameter of shape {tuple(parameter.shape)} of {type(module).__name__} is an "
            "expert's of Megatron-core's, whose name says nothing of which expert it is; give a "
            "mapping of names in the whole model to Part(tensor, shape, offset)"
        )
    if getattr(parameter, "tensor_model_parallel", False):
        return _megatrons(module, parameter, grid)
    plan, mesh = (getattr(module, name, None) for name in ("_hf_tp_plan", "_hf_device_mesh"))
    if not plan or (mesh is not None and mesh.size() == 1):
        return None
    return _transformers(module, parameter, plan, mesh)


def _megatrons(module: nn.Module, parameter: Any, grid: HyperCommGrid) -> ForeignCut | None:
    if "tp" not in grid.shape or grid.size("tp") == 1:
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
    return ForeignCut(dim, pieces, grid.size("tp"), grid.get_local_rank("tp"))


def _transformers(module: nn.Module, parameter: Any, plan: str, mesh: Any) -> ForeignCut | None:
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
