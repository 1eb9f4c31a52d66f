"""Audited parameters: names in the whole model, and boxes of this rank's shards.

If a program calls parts of its model one by one, the model is the outermost module around them.
Pipeline chunks name their layers as the whole model does. Megatron-core's layers are numbered by
`layer_number`, its local experts by the rank in ep.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from commgrid.data_parallel.reducer import GradientReducer
from commgrid.data_parallel.slot import slot_of
from commgrid.errors import CommGridError
from commgrid.parameters import Placement, placements
from commgrid.parameters.foreign import foreign_cut, megatron_cut
from commgrid.pipeline import Pipeline
from commgrid.resharding.item import HeldBoxes, held_boxes
from commgrid.runtime.grid import HyperCommGrid

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
"""Attributes of wrappers such as DistributedDataParallel, which have no other child."""
_EXPERT = re.compile(r"((?:.*\.)?local_experts\.)(\d+)(\..*|$)")
_IN_EXPERTS = re.compile(r"(?:.*\.)?(?:local_)?experts\..*")


@dataclass(frozen=True)
class AuditedParameter(HeldBoxes):
    """A parameter, and this rank's boxes of the full one.

    Args:
        shape, held, boxes: as HeldBoxes'.
        name: in the whole model.
        parameter: this rank's.
        region: whose axes say which ranks have copies.
    """

    name: str
    parameter: nn.Parameter
    region: str = "dense"


def whole_model(part: nn.Module) -> tuple[nn.Module, str]:
    """The model that a module belongs to, and the name of that model in an optimizer.

    Returns:
        The outermost module with this part in it, up to a pipeline's chunk; of several, the one
        that a reducer was given; else the part itself. The name is "" unless only an optimizer,
        which was given named parameters, has one.
    """
    objects = gc.get_objects()
    slots = [slot for slot in map(slot_of, part.parameters()) if slot is not None]
    reducers = [slot.reducer for slot in slots if isinstance(slot.reducer, GradientReducer)]
    given = {id(reducer.model): reducer.model for reducer in reducers}
    live = [each for each in objects if issubclass(type(each), nn.Module)]
    live += [module for model in given.values() for module in model.modules()]
    pipelines = [each for each in objects if issubclass(type(each), Pipeline)]
    chunks = {id(chunk) for pipeline in pipelines for chunk in pipeline.chunks}
    above: dict[int, dict[int, nn.Module]] = {}
    for module in live:
        for child in (vars(module).get("_modules") or {}).values():
            if id(child) not in chunks:
                above.setdefault(id(child), {})[id(module)] = module
    reached = {id(part): part}
    left = [part]
    while left:
        outer = above.get(id(left.pop()), {})
        left += [each for key, each in outer.items() if key not in reached]
        reached |= outer
    tops = [each for key, each in reached.items() if key not in above]
    chosen = tops if len(tops) == 1 else [each for each in tops if id(each) in given]
    if len(chosen) == 1 and chosen[0] is not part:
        return chosen[0], ""
    return part, _name_in_an_optimizer(part, objects)


def _name_in_an_optimizer(model: nn.Module, objects: list[Any]) -> str:
    """The beginning of its parameters' names in an optimizer; "": it was given none."""
    name, parameter = next(iter(model.named_parameters()), ("", None))
    for optimizer in (each for each in objects if issubclass(type(each), Optimizer)):
        said_by = [group.get("param_names", ()) for group in optimizer.param_groups]
        names = [said.split(".") for given in said_by for said in given]
        for group in optimizer.param_groups:
            for said, each in zip(group.get("param_names", ()), group["params"], strict=False):
                if each is parameter and said.endswith(f".{name}"):
                    words = said.removesuffix(f".{name}").split(".")
                    return ".".join(
                        word
                        for place, word in enumerate(words)
                        if word not in _WRAPPERS or _has_siblings(words[: place + 1], names)
                    )
    return ""


def _has_siblings(words: list[str], names: list[list[str]]) -> bool:
    """Whether a module of some parameters' names is not the only child of its parent."""
    *parent, last = words
    return any(name[:-1][: len(parent)] == parent and name[len(parent)] != last for name in names)


def names_of(root: nn.Module, grid: HyperCommGrid | None, of: str = "") -> dict[nn.Module, str]:
    """Every module of a model by the name that it has in the whole one.

    Args:
        root: the model.
        grid: where it lies; None: the program has none.
        of: the model's own name.
    """
    found: dict[nn.Module, str] = {}
    own: dict[str, str] = {"": of}
    modules = dict(root.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        if path:
            parent, _, last = path.rpartition(".")
            number = getattr(module, "layer_number", None)
            if last.isdecimal() and isinstance(number, int):
                last = str(number - 1)
            own[path] = ".".join(each for each in (own[parent], last) if each)
            around = modules[parent]
            own_weights = [*nn.Module.parameters(around, False)]
            is_around = not own_weights and len([*nn.Module.children(around)]) == 1
            if last in _WRAPPERS and is_around:
                own[path] = own[parent]
        found.setdefault(module, _global_expert(own[path], root, path, grid))
    return found


def _global_expert(name: str, root: nn.Module, path: str, grid: HyperCommGrid | None) -> str:
    """Return a name with the global number of one of Megatron-core's local experts.

    If the model is an expert itself, the number of local experts is not known: the name says its
    rank in ep, and is compared with no other grid's.
    """
    match = _EXPERT.fullmatch(name)
    if match is None or grid is None or "ep" not in grid.shape:
        return name
    rank, local = grid.get_local_rank("ep"), _EXPERT.fullmatch(path)
    if local is None:
        return f"{match[1]}{match[2]} (ep {rank}){match[3]}" if grid.size("ep") > 1 else name
    count = len(list(root.get_submodule(local[1].removesuffix(".")).children()))
    return f"{match[1]}{int(match[2]) + rank * count}{match[3]}"


def audited_parameters(
    root: nn.Module, names: Mapping[nn.Module, str], grid: HyperCommGrid | None, notes: list[str]
) -> Iterator[AuditedParameter]:
    """Every parameter of a model, each once.

    Args:
        root: the model, or a pipeline stage's part of it.
        names: of its modules, in the whole model.
        grid: where it lies; None: the program has none.
        notes: list to which a line is added for each parameter that is not compared.
    """
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
    if _IN_EXPERTS.fullmatch(name) and not placement.shards:
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
    return AuditedParameter(boxes.shape, boxes.held, boxes.boxes, name, parameter, region)
