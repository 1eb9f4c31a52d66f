"""A model's parameters and buffers as items of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from commgrid.checkpoint.items import Item, Value, whole
from commgrid.checkpoint.layout import Layout, Turns, lay_out
from commgrid.errors import SpecError
from commgrid.parameters import Placement, ShardedModule, placements

if TYPE_CHECKING:
    from commgrid.grid import HyperCommGrid

_EXTRA = "_extra_state"  # torch's name for what get_extra_state returns


class ModelState:
    """This rank's part of a model, by the names that parameters have in the whole.

    Args:
        model: a module, or a pipeline stage's chunks, whose modules have the names that they have
            in the whole model.
        grid: where it lies.

    Raises:
        SpecError: two chunks have different parameters of one name, or a parameter is sliced over
            something that is not of the grid.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], grid: HyperCommGrid) -> None:
        self.grid = grid
        self.chunks = [model] if isinstance(model, nn.Module) else list(model)
        for chunk in self.chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # so that parameters are the sharded ones
                _check_known(name, module)
        self.placements: dict[str, Placement] = {}
        known: set[int] = set()
        for chunk in self.chunks:
            for placement in placements(chunk):
                name = placement.name
                if id(placement.parameter) in known:
                    continue
                if name in self.placements:
                    raise SpecError(
                        f"two chunks have a parameter {name!r}, and not the same one; modules of a "
                        "chunk need the names that they have in the whole model"
                    )
                known.add(id(placement.parameter))
                self.placements[name] = placement
        self.layouts = {name: lay_out(p, grid) for name, p in self.placements.items()}

    def layout_of(self, placement: Placement, cut_over: str | None) -> Layout:
        """The layout of a parameter, cut further by a sharded optimizer or not."""
        if cut_over is None:
            return self.layouts[placement.name]
        return lay_out(placement, self.grid, cut_over)

    def items(self, turns: Turns) -> Iterator[Item | Value]:
        """Every parameter, persistent buffer and extra state."""
        for name, placement in self.placements.items():
            layout, parameter = self.layouts[name], placement.parameter
            chunks = layout.chunks(parameter)
            size = sum(chunk.data.nbytes for chunk in chunks)
            mine = turns.is_mine(layout.copies, size) and layout.is_owner
            yield Item(("model", name), layout.shape, chunks, parameter.dtype, mine)
        everywhere = tuple(axis for axis in self.grid.spec.regions[0].axes if axis != "pp")
        for name, _, held in self._others():
            if isinstance(held, Tensor):
                mine = turns.is_mine(everywhere, held.nbytes)
                yield whole(("model", name), held, writes=mine, repeats=True)
            else:
                yield Value(("model", name), held, turns.is_mine(everywhere, 0))

    def set_value(self, name: str, value: Any) -> None:
        """Gives a module its extra state."""
        for other, module, _ in self._others():
            if other == name:
                module.set_extra_state(value)

    def tell_loaded(self) -> None:
        """Calls what waits for load_state_dict, such as an optimizer with fp32 copies to renew."""
        for chunk in self.chunks:
            chunk.load_state_dict({}, strict=False)

    def _others(self) -> Iterator[tuple[str, nn.Module, Any]]:
        """What state_dict has beside parameters, once where chunks share it."""
        seen: set[str] = set()
        for chunk in self.chunks:
            own = {name for name, _ in chunk.named_parameters(remove_duplicate=False)}
            for name, held in chunk.state_dict(keep_vars=True).items():
                if name in own or name in seen:
                    continue
                seen.add(name)
                module, _, last = name.rpartition(".")
                yield name, chunk.get_submodule(module) if last == _EXTRA else chunk, held


def _check_known(name: str, module: nn.Module) -> None:
    """Refuses slices that look like whole parameters, of which one rank's would be saved."""
    for key, parameter in module.named_parameters(recurse=False):
        theirs = ""
        if getattr(parameter, "tensor_model_parallel", False):
            theirs = "Megatron-core's; save it with megatron.core.dist_checkpointing"
        elif getattr(module, "_hf_tp_plan", None) and getattr(module, "_hf_device_mesh", None):
            theirs = "Transformers' tp_plan's; save it with its save_pretrained"
        if theirs and not isinstance(module, ShardedModule):
            raise SpecError(
                f"{name}.{key} of shape {tuple(parameter.shape)} is a slice of {theirs}, as this "
                "does not know of what it is a slice"
            )
