"""Where this rank's part of a parameter lies in the full one, whoever has cut it.

| who cuts it | where it is read |
|---|---|
| a layer of commgrid's, or of the user's | `ShardedModule.shards_of` |
| torch (FSDP2, `parallelize_module`) | the DTensor's own chunks |
| megatron-core | `tensor_model_parallel`, `partition_dim`, `partition_stride` |

Names are those of the whole model: a pipeline's parts are named alike by
commgrid; megatron-core says `layer_number` of a layer, and its rank of ep says which of the experts
are a rank's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from commgrid.errors import CommGridError
from commgrid.parameters import Placement, placements
from commgrid.planning.boxes import Box, Shape, boxes_of_range, common

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*|$)")


@dataclass(frozen=True)
class Held:
    """A parameter, and which boxes of the full one this rank has.

    Args:
        name: in the whole model.
        parameter: this rank's.
        shape: of the full one.
        boxes: of this rank's tensor, each with its offset in the full one.
        region: whose axes say which ranks have copies.
        partial: the group over which its gradients are marked as parts of a sum; "": none.
    """

    name: str
    parameter: nn.Parameter
    shape: Shape
    boxes: tuple[tuple[Box, Shape], ...]
    region: str = "dense"
    partial: str = ""

    def chunks(self, data: Tensor, start: int = 0, stop: int | None = None) -> list[Any]:
        """Offsets in the full parameter, and the tensors that lie there.

        Args:
            data: of this rank's shape; with `stop`, its elements start … stop - 1 in one dim.
        """
        local = data.to_local() if isinstance(data, DTensor) else data
        found = []
        for offset, part in _split(local.detach(), self._local_shape(), start, stop):
            for (inner, size), place in self.boxes:
                both = common((offset, tuple(part.shape)), (inner, size))
                if both is None:
                    continue
                piece = part
                for dim in range(part.dim()):
                    piece = piece.narrow(dim, both[0][dim] - offset[dim], both[1][dim])
                where = [p + b - i for p, b, i in zip(place, both[0], inner, strict=True)]
                for dim, (begin, whole) in enumerate(zip(where, self.shape, strict=True)):
                    piece = piece.narrow(dim, 0, min(max(whole - begin, 0), piece.shape[dim]))
                if piece.numel():
                    found.append((tuple(where), piece))
        return found

    def _local_shape(self) -> Shape:
        parameter = self.parameter
        return tuple((parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape)


def _split(
    data: Tensor, shape: Shape, start: int, stop: int | None
) -> Iterator[tuple[Shape, Tensor]]:
    if stop is None:
        yield (0,) * len(shape), data.reshape(shape)
        return
    done, flat = 0, data.reshape(-1)
    for offset, size in boxes_of_range(start, stop, shape):
        count = 1
        for extent in size:
            count *= extent
        yield offset, flat[done : done + count].view(size)
        done += count


def names_of(root: nn.Module, grid: HyperCommGrid | None) -> dict[nn.Module, str]:
    """Every module of a model by the name that it has in the whole one."""
    found: dict[nn.Module, str] = {}
    own: dict[str, str] = {"": ""}
    for path, module in root.named_modules(remove_duplicate=False):
        parent, _, last = path.rpartition(".")
        number = getattr(module, "layer_number", None)
        if last.isdigit() and isinstance(number, int):
            last = str(number - 1)
        own[path] = name = ".".join(each for each in (own[parent], last) if each)
        if last in _WRAPPERS:
            own[path] = name = own[parent]
        found.setdefault(module, _global_expert(name, root, path, grid))
    return found


def _global_expert(name: str, root: nn.Module, path: str, grid: HyperCommGrid | None) -> str:
    """The number that a local expert of megatron-core's has among all."""
    match = _EXPERT.fullmatch(name)
    if match is None or grid is None or "ep" not in grid.shape:
        return name
    head = re.fullmatch(r"(.*\.local_experts)\.\d+(\..*|$)", path)
    assert head is not None
    count = len(list(root.get_submodule(head[1]).children()))
    return f"{match[1]}{int(match[2]) + grid.get_local_rank('ep') * count}{match[3]}"


def held_by(root: nn.Module, grid: HyperCommGrid | None, notes: list[str]) -> Iterator[Held]:
    """Every parameter of a model, each once.

    Args:
        root: the model, or a pipeline stage's part of it.
        grid: where it lies; None: the program has none.
        notes: what is not compared, and why, is added to.
    """
    names = names_of(root, grid)
    modules = dict(root.named_modules(remove_duplicate=False))
    for placement in placements(root):
        path, _, last = placement.name.rpartition(".")
        name = ".".join(each for each in (names[modules[path]], last) if each)
        if getattr(placement.parameter, "shared_embedding", False) and name.endswith(
            "output_layer.weight"
        ):
            name = "embedding.word_embeddings.weight"  # the copy of megatron-core's last stage
        try:
            yield _held(name, placement, grid)
        except CommGridError as error:
            notes.append(f"{name} is not compared: {error}")


def _held(name: str, placement: Placement, grid: HyperCommGrid | None) -> Held:
    parameter: Any = placement.parameter
    partial = placement.partial.name if placement.partial is not None else ""
    region = placement.region
    offset, size, shape = [0] * parameter.dim(), tuple(parameter.shape), placement.shape
    if isinstance(parameter, DTensor):
        chunks = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
        if len(chunks) != 1:
            raise CommGridError(f"its DTensor has {len(chunks)} chunks on this rank, {parameter}")
        offset, size = list(chunks[0].offsets), tuple(chunks[0].sizes)
    for dim, group in placement.shards:
        offset[dim] += group.rank * parameter.shape[dim]
    begin = (0,) * len(size)
    boxes = [((begin, size), tuple(offset))]
    is_expert = ".experts." in name and not placement.shards
    if is_expert and grid is not None and "ep" in grid.shape:
        region = "expert"
    if not placement.shards and getattr(parameter, "tensor_model_parallel", False):
        axis = "etp" if is_expert and grid is not None and "etp" in grid.shape else "tp"
        count = grid.size(axis) if grid is not None and axis in grid.shape else 1
        mine = grid.get_local_rank(axis) if grid is not None and count > 1 else 0
        shape, boxes = _megatron_boxes(parameter, count, mine)
    if getattr(parameter, "sequence_parallel", False):  # as megatron-core marks it
        partial = partial or "tp"
    return Held(name, parameter, tuple(shape), tuple(boxes), region, partial)


def _megatron_boxes(parameter: Any, count: int, mine: int) -> tuple[Shape, list[Any]]:
    """A slice of megatron-core's: with a stride s, the i-th of count in each of s parts."""
    dim, strides = int(parameter.partition_dim), max(int(parameter.partition_stride), 1)
    size = tuple(parameter.shape)
    shape = tuple(n * count if d == dim else n for d, n in enumerate(size))
    each = size[dim] // strides
    boxes = []
    for stride in range(strides):
        local = tuple(stride * each if d == dim else 0 for d in range(len(size)))
        extent = tuple(each if d == dim else n for d, n in enumerate(size))
        place = tuple((stride * count + mine) * each if d == dim else 0 for d in range(len(size)))
        boxes.append(((local, extent), place))
    return shape, boxes
