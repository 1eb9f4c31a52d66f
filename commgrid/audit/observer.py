"""Writes down what a training program computes, step by step, without a line of it changed.

It uses torch's public hooks of modules, gradients and optimizers, and while it runs it wraps
`torch.autograd.backward`, `Pipeline.step`, dropout and scaled_dot_product_attention. A step lies
between two updates, and is written when the next one begins: by then its weights are updated and
gathered.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers

from commgrid.audit.parameters import AuditedParameter, audited_parameters, names_of, whole_model
from commgrid.audit.records import (
    About,
    StepRecord,
    await_all,
    first_weights,
    mark_done,
    thinned,
    write_about,
    write_step,
)
from commgrid.audit.reductions import ReductionListener
from commgrid.data_parallel.norm import clip_factor
from commgrid.data_parallel.reducer import GradientReducer
from commgrid.data_parallel.slot import KeptGradient, State, slot_of
from commgrid.equality.digest import digest
from commgrid.equality.values import tensors_in
from commgrid.errors import CommGridError
from commgrid.parameters.marks import buffer_marks
from commgrid.pipeline import Pipeline
from commgrid.resharding.item import local_part
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid, is_initialized
from commgrid.torch_compat import autograd_nodes
from commgrid.torch_compat import interposer as torch_calls

_CLIPS = ((nn.utils, "clip_grad_norm_"), (GradientReducer, "clip_gradients"))


class Observer:
    """Records the steps of one process.

    Args:
        folder: where it is written.
        steps: how many; in the one after them the process ends, together with the others.
        beginning: another grid's folder, whose weights the model begins with; None: its own.
    """

    def __init__(self, folder: Path, steps: int, beginning: Path | None = None) -> None:
        self.folder, self.steps = folder, steps
        self._beginning = beginning
        self.step = 1
        self.record = StepRecord()
        self.about = About(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        self._models: dict[nn.Module, tuple[nn.Module, str]] = {}  # of modules that are called
        self._names: dict[nn.Module, str] = {}
        self._held: dict[int, AuditedParameter] = {}
        self._before: dict[int, Tensor] = {}
        self._stack: list[nn.Module] = []
        self._hooked: set[int] = set()
        self._updated = False
        self._reductions = ReductionListener(self._inside)
        self._undo: list[Callable[[], object]] = []

    def start(self) -> None:
        """Looks from now on."""
        torch_calls.listen(self._reductions)
        handles = [
            torch_modules.register_module_forward_pre_hook(self._before_forward),
            torch_modules.register_module_forward_hook(self._after_forward, always_call=True),
            torch_optimizers.register_optimizer_step_pre_hook(self._before_update),
            torch_optimizers.register_optimizer_step_post_hook(self._after_update),
        ]
        self._undo += [handle.remove for handle in handles]
        self._undo.append(lambda: torch_calls.stop(self._reductions))
        self._put(torch.autograd, "backward", self._seeing_backward(torch.autograd.backward))
        self._put(Pipeline, "step", self._seeing_losses(Pipeline.step))
        for owner, name in _CLIPS:
            self._put(owner, name, self._seeing_clips(getattr(owner, name)))
        for name in ("dropout", "scaled_dot_product_attention"):
            self._put(functional, name, self._seeing_drops(getattr(functional, name)))

    def finish(self) -> None:
        """Writes what is left, and looks no more. Rank 0, which may serve the store, waits."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._flush()
        mark_done(self.folder, self.about.rank)
        if self.about.rank == 0:
            await_all(self.folder, self.about.world_size)

    def _put(self, owner: Any, name: str, ours: Any) -> None:
        theirs = getattr(owner, name)
        setattr(owner, name, ours)
        self._undo.append(lambda: setattr(owner, name, theirs))

    # -- forward ------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # what is compiled has no hooks
            return
        if not self._stack and torch.is_grad_enabled():
            self._flush()
            if module not in self._names:
                self._adopt(module)
            if module in self._names and self.step <= self.steps:
                of = f" of {self._names[module]}" if self._names[module] else ""
                for index, each in enumerate(given):
                    if isinstance(each, Tensor) and not each.is_floating_point():
                        _add(self.record.inputs, f"input {index}{of}", each)
        if torch.is_grad_enabled():
            autograd_nodes.note_new(tensors_in(given), self._inside())
        self._stack.append(module)

    def _after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._stack.pop()
        name = self._names.get(module)
        if torch.is_grad_enabled():
            autograd_nodes.note_new(tensors_in(output), name or "")
        outermost = self._stack[0] if self._stack else module
        if not name or outermost not in self._names or self.step > self.steps:
            return
        if not torch.is_grad_enabled():
            return
        outputs = output if isinstance(output, tuple | list) else (output,)
        for index, each in enumerate(outputs):
            if isinstance(each, Tensor) and each.is_floating_point() and each.numel() > 1:
                _add(self.record.modules, f"{name}#{index}", each)

    def _seeing_drops(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Record dropout's input, and the state of the generator that it draws from."""

        def draws(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **options)
            before = _random_state()
            found = function(*args, **options)
            given = next(iter((*args, *options.values())))
            if before != _random_state() and self.step <= self.steps:
                number = len(self.record.drawn)
                key = f"{number} {self._inside()}"
                self.record.drawn[key] = [before, int(digest(local_part(given)))]
            return found

        return draws

    def _adopt(self, part: nn.Module) -> None:
        """Name the whole model of a module that the program calls by itself, if it is trained."""
        if part not in self._models:
            self._models[part] = whole_model(part)
        model, own = self._models[part]
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        names = names_of(model, _grid(), own)
        first: dict[str, nn.Module] = {}
        for module, name in (*self._names.items(), *names.items()):
            # Megatron-core's DDP has an attribute `buffers`.
            kinds = nn.Module.parameters, nn.Module.buffers
            own_tensors = [tensor for kind in kinds for tensor in kind(module, False)]
            if own_tensors and first.setdefault(name, module) is not module:
                self.about.twice.append(name)
            self._names.setdefault(module, name)
        for parameter in model.parameters():
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                leaf: Any = parameter  # torch does not annotate the next
                self._undo.append(leaf.register_hook(self._gradient_hook(leaf)).remove)
        self._hold(model, names)
        if self._beginning is not None:
            self._begin_alike(model)

    @torch.no_grad()
    def _begin_alike(self, model: nn.Module) -> None:
        """Gives the model the weights that the reference began with."""
        assert self._beginning is not None
        held = [self._held[id(p)] for p in model.parameters() if id(p) in self._held]
        for each, boxes in first_weights(self._beginning, held):
            for mine, theirs in boxes:
                mine.copy_(theirs)
            slot = slot_of(each.parameter)
            if slot is not None and slot.reducer is not None:
                slot.reducer.weights_loaded()

    def _inside(self) -> str:
        """The module whose forward is under way."""
        return self._names.get(self._stack[-1], "") if self._stack else ""

    # -- backward -----------------------------------------------------------------------

    def _gradient_hook(self, parameter: Any) -> Callable[[Tensor], None]:
        def arrives(gradient: Tensor) -> None:
            """The parts so far are in `.grad`, or in the buffer of a layer that fuses them."""
            if self.step > self.steps:
                return
            if id(parameter) not in self._before:
                self._reductions.arrived(str(id(parameter)))
            slot = slot_of(parameter)
            total = _local(gradient, parameter)
            # Megatron-core's, or of a layer that fuses its gradient.
            earlier: Any = getattr(parameter, "main_grad", None)
            if getattr(parameter, "grad_added_to_main_grad", False):
                total, earlier = earlier.detach(), None  # what such a layer returns means nothing
            elif earlier is None and (slot is None or slot.state is not State.USED):
                earlier = parameter.grad
            if total is not None and type(earlier) in (Tensor, DTensor):
                earlier = _local(earlier, parameter)
                total = None if earlier is None else earlier + total
            if total is not None:
                self._before[id(parameter)] = total.detach().clone()

        return arrives

    def _seeing_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def begins(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> Any:
            given = grad_tensors if isinstance(grad_tensors, list | tuple) else [grad_tensors]
            is_loss = all(gradient is None for gradient in given)
            for each in [tensors] if isinstance(tensors, Tensor) else tensors:
                if is_loss and isinstance(each, Tensor) and each.numel() == 1:
                    self._lose(each)
            return backward(tensors, grad_tensors, *args, **options)

        return begins

    def _seeing_losses(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def runs(pipeline: Any, *args: Any, **options: Any) -> Any:
            losses = step(pipeline, *args, **options)
            if losses is not None:
                for each in losses:
                    self._lose(each)
            return losses

        return runs

    def _seeing_clips(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def clips(*args: Any, **options: Any) -> Tensor:
            norm = function(*args, **options)
            max_norm = options["max_norm"] if "max_norm" in options else args[1]
            self.record.clip *= float(clip_factor(local_part(norm), float(max_norm)))
            return norm

        return clips

    def _lose(self, loss: Tensor) -> None:
        local = loss.full_tensor() if isinstance(loss, DTensor) else loss
        self.record.loss += float(local.detach())
        self.record.backwards += 1

    # -- updates ------------------------------------------------------------------------

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._settle()
        if self.step > self.steps:
            self._leave()
            return
        known = self._updated_tensors()
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                gradient = tensor.grad
                if gradient is None or isinstance(gradient, KeptGradient):
                    continue
                found = known.get(id(tensor)) or self._by_memory(tensor)
                if found is None:
                    continue
                held, start, stop = found
                local = _local(gradient, held.parameter)
                if local is None:
                    continue
                chunks = held.chunks(local, start, stop)
                self.record.after[held.name] = thinned(chunks, held.shape)
                slot = slot_of(held.parameter)
                memory = getattr(held.parameter, "main_grad", local if slot is None else slot.view)
                self.record.reduced[held.name] = self._reductions.over(memory)

    def _updated_tensors(self) -> dict[int, tuple[AuditedParameter, int, int | None]]:
        """By id, the tensors that optimizers update: of which parameter, and which elements."""
        found: dict[int, tuple[AuditedParameter, int, int | None]] = {}
        for held in self._held.values():
            parameter: Any = held.parameter
            found[id(parameter)] = held, 0, None
            main = getattr(parameter, "main_param", None)
            if isinstance(main, Tensor) and main.numel() == parameter.numel():
                found[id(main)] = held, 0, None
            slot = slot_of(parameter)
            reducer = slot.reducer if slot is not None else None
            if isinstance(reducer, GradientReducer) and reducer.optimizer is not None:
                for piece, tensor, _ in reducer.optimizer.parts():
                    its = self._held.get(id(piece.slot.parameter))
                    if its is not None:
                        extent = (0, None) if piece.is_whole else (piece.start, piece.stop)
                        found[id(tensor)] = its, *extent
        return found

    def _by_memory(self, tensor: Tensor) -> tuple[AuditedParameter, int, int | None] | None:
        """The parameter of which a tensor of an optimizer is a range, as megatron-core's are."""
        place = tensor.data_ptr()
        for held in self._held.values():
            data = held.parameter.detach()
            first = place - data.data_ptr()
            if isinstance(data, DTensor) or tensor.dtype != data.dtype:
                continue
            if 0 <= first < max(data.nbytes, 1) and data.is_contiguous():
                start = first // data.element_size()
                return held, start, start + tensor.numel()
        return None

    def _after_update(self, *_: Any) -> None:
        self._updated = True

    # -- what is written ----------------------------------------------------------------

    def _settle(self) -> None:
        """Once, while the grid is there: who this is, and how every parameter lies."""
        about, grid = self.about, _grid()
        if about.coordinates:
            return
        if dist.is_initialized():
            about.rank, about.world_size = dist.get_rank(), dist.get_world_size()
        if grid is None:
            about.coordinates = {"dense": {"rank": about.rank}}
            about.shapes = {"dense": {"rank": about.world_size}}
        else:
            for region, layout in grid.spec.layouts.items():
                about.coordinates[region] = dict(layout.coordinate(grid.rank))
                about.shapes[region] = dict(layout.shape)
        kinds = [held.parameter.dtype for held in self._held.values()]
        about.dtype = str(max(kinds, key=kinds.count)).removeprefix("torch.") if kinds else ""
        write_step(self.folder, about.rank, 0, self._state())

    def _hold(self, root: nn.Module, names: dict[nn.Module, str]) -> None:
        try:
            for held in audited_parameters(root, names, _grid(), self.about.notes):
                self._held.setdefault(id(held.parameter), held)
                self.about.parameters[held.name] = (list(held.shape), held.region)
        except CommGridError as error:  # what its layers say of themselves contradicts itself
            self.about.notes.append(f"{type(root).__name__} is not compared: {error}")

    def _state(self) -> StepRecord:
        """Weights and buffers, as they are now."""
        record = StepRecord()
        for held in self._held.values():
            chunks = thinned(held.chunks(held.parameter), held.shape)
            record.weights.setdefault(held.name, []).extend(chunks)
        for module, name in self._names.items():
            apart = {*module._non_persistent_buffers_set, *buffer_marks(module)}
            apart |= {*getattr(module, "sliced_names", ())}  # which are not compared
            for key, buffer in module.named_buffers(recurse=False):
                if key in apart or isinstance(buffer, DTensor):
                    continue
                full = f"{name}.{key}" if name else key
                whole = [((0,) * buffer.dim(), buffer)]
                record.buffers[full] = thinned(whole, tuple(buffer.shape))
        return record

    def _flush(self) -> None:
        """The step before is over."""
        if not self._updated or self.step > self.steps:
            return
        self._updated, record = False, self.record
        state = self._state()
        record.weights, record.buffers = state.weights, state.buffers
        for key, total in self._before.items():
            if key in self._held:
                held = self._held[key]
                record.before[held.name] = thinned(held.chunks(total), held.shape)
        names = {str(key): held.name for key, held in self._held.items()}
        record.backward = [
            [what, names.get(told, told), where] for what, told, where in self._reductions.events
        ]
        record.within = self._reductions.by_module()
        write_step(self.folder, self.about.rank, self.step, record)
        self.about.steps = self.step
        write_about(self.folder, self.about)
        self.record, self.step = StepRecord(), self.step + 1
        self._before.clear()
        self._reductions.forget()

    def _leave(self) -> None:
        """A rank that has come here has finished the step before; all end together."""
        mark_done(self.folder, self.about.rank)
        await_all(self.folder, self.about.world_size)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _grid() -> HyperCommGrid | None:
    return get_grid() if is_initialized() else None


def _local(gradient: Tensor, parameter: Any) -> Tensor | None:
    """This rank's part of a gradient; None where it lies otherwise than the parameter."""
    if not isinstance(gradient, DTensor):
        return gradient.detach()
    if isinstance(parameter, DTensor) and gradient.placements == parameter.placements:
        return gradient.to_local().detach()
    return None


def _random_state() -> int:
    """A digest of the states of the generators that dropout draws from."""
    found = int(digest(torch.get_rng_state()))
    if torch.cuda.is_available():
        found ^= int(digest(torch.cuda.get_rng_state()))
    return found


def _add(table: dict[str, list[float]], key: str, tensor: Tensor) -> None:
    """Add a tensor to the totals of its name: calls, elements, sum, squares."""
    local = local_part(tensor).double()
    found = table.setdefault(key, [0, 0, 0.0, 0.0])
    found[0] += 1
    found[1] += local.numel()
    found[2] += float(local.sum())
    found[3] += float(local.square().sum())
