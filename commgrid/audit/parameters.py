"""A model's parameters by their names in the whole model, and where this rank's parts lie.

A pipeline's parts are named alike by commgrid; Megatron-core says `layer_number` of a layer, and
its rank of ep says which of the experts are a rank's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from commgrid.errors import CommGridError
from commgrid.parameters import Placement, placements
from commgrid.parameters.foreign import foreign_cut, megatron_cut
from commgrid.resharding.item import HeldBoxes, held_boxes
from commgrid.runtime.grid import HyperCommGrid

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*|$)")


@dataclass(frozen=True)
class AuditedParameter(HeldBoxes):
    """A parameter, and this rank's boxes of the full one.

    Args:
        shape, held, boxes: as HeldBoxes'.
        name: in the whole model.
        parameter: this rank's.
        region: whose axes say which ranks have copies.
        partial: the group over which its gradients are marked as parts of a sum; "": none.
    """

    name: str
    parameter: nn.Parameter
    region: str = "dense"
    partial: str = ""


def names_of(root: nn.Module, grid: HyperCommGrid | None) -> dict[nn.Module, str]:
    """Every module of a model by the name that it has in the whole one."""
    found: dict[nn.Module, str] = {}
    own: dict[str, str] = {"": ""}
    for path, module in root.named_modules(remove_duplicate=False):
        parent, _, last = path.rpartition(".")
        number = getattr(module, "layer_number", None)
        if last.isdecimal() and isinstance(number, int):
            last = str(number - 1)
        own[path] = name = ".".join(each for each in (own[parent], last) if each)
        if last in _WRAPPERS:
            own[path] = name = own[parent]
        found.setdefault(module, _global_expert(name, root, path, grid))
    return found


def _global_expert(name: str, root: nn.Module, path: str, grid: HyperCommGrid | None) -> str:
    """The number that a local expert of Megatron-core's has among all."""
    match = _EXPERT.fullmatch(name)
    if match is None or grid is None or "ep" not in grid.shape:
        return name
    head = re.fullmatch(r"(.*\.local_experts)\.\d+(\..*|$)", path)
    assert head is not None
    count = len(list(root.get_submodule(head[1]).children()))
    return f"{match[1]}{int(match[2]) + grid.get_local_rank('ep') * count}{match[3]}"


def audited_parameters(
    root: nn.Module, grid: HyperCommGrid | None, notes: list[str]
) -> Iterator[AuditedParameter]:
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
            name = "embedding.word_embeddings.weight"  # the copy of Megatron-core's last stage
        try:
            yield _audited(name, modules[path], placement, grid)
        except CommGridError as error:
            notes.append(f"{name} is not compared: {error}")


def _audited(
    name: str, module: nn.Module, placement: Placement, grid: HyperCommGrid | None
) -> AuditedParameter:
    parameter: Any = placement.parameter
    region, cut = placement.region, None
    if ".experts." in name and not placement.shards:
        if grid is not None and "ep" in grid.shape:
            region = "expert"
        if getattr(module, "_hf_tp_plan", None) and grid is not None:
            cut = foreign_cut(module, parameter, grid)
        elif getattr(parameter, "tensor_model_parallel", False):
            axis = "etp" if grid is not None and "etp" in grid.shape else "tp"
            cut = megatron_cut(module, parameter, grid, axis)
    elif grid is not None:
        cut = foreign_cut(module, parameter, grid)
    boxes = held_boxes(placement, cut)
    partial = placement.partial.name if placement.partial is not None else ""
    if getattr(parameter, "sequence_parallel", False):  # as Megatron-core marks it
        partial = partial or "tp"
    return AuditedParameter(boxes.shape, boxes.held, boxes.boxes, name, parameter, region, partial)
