"""Execution: one walk of a stage through its program of computations and exchanges."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from commgrid.errors import CommGridError, ShapeError
from commgrid.pipeline.backward import backward_input
from commgrid.pipeline.p2p import StageLinks, differentiable, specs_of
from commgrid.pipeline_schedules.messages import Exchange, Program
from commgrid.pipeline_schedules.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Computation,
    Forward,
    Schedule,
    StageMessage,
)
from commgrid.pipeline_schedules.simulator import Span

Loss = Callable[[Any, Any], Tensor]
"""From the last chunk's output and a target to a scalar."""

_SAID = {
    Forward: "the forward",
    Backward: "the backward",
    BackwardInput: "the input gradients",
    BackwardWeight: "the weight gradients",
}


@dataclass(frozen=True)
class _Live:
    """A microbatch between its forward and its backward.

    Args:
        inputs: the received tensors that can have a gradient.
        edges: the graph's edge for each output that can have a gradient; None: it has none.
        loss_grad: the loss's gradient, 1; None: not the last part.
    """

    inputs: list[Tensor]
    edges: list[GradientEdge | None]
    loss_grad: Tensor | None


class Execution:
    """One walk of a stage through its program of computations and exchanges.

    exchange       post the sends and receives of this time, and continue
    forward        take the activation, run the chunk, keep the graph's end and the inputs
    backward       take the gradient, run autograd, let the microbatch go
    backward input, backward weight    the two halves of a backward, with other work in between

    After a forward only the output's edge of the graph is kept. The output's memory is freed once
    it is sent, unless autograd has saved it.

    Args:
        chunks: of the model that this stage runs.
        links: to the other stages.
        schedule: of the program.
        inputs, targets, kwargs: a microbatch each, as `Pipeline.step` takes them.
        loss: None: the last part's output is the result.
        final: the context of a backward; None: there are no backwards.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        links: StageLinks,
        schedule: Schedule,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        kwargs: Sequence[Mapping[str, Any]] | None,
        *,
        loss: Loss | None,
        final: Callable[[Computation], AbstractContextManager[None]] | None,
    ) -> None:
        self.chunks, self.links, self.schedule = chunks, links, schedule
        self.inputs, self.targets, self.kwargs = inputs, targets, kwargs
        self.loss, self.train = loss, final is not None
        self.final = final or (lambda action: nullcontext())
        self._action: Computation | None = None
        self._exchanges = False
        self._live: dict[tuple[int, int], _Live] = {}
        self._weights: dict[tuple[int, int], Callable[[], None]] = {}
        self._leaving: dict[StageMessage, Sequence[Tensor]] = {}
        self._found: dict[int, Any] = {}
        self._trained: set[int] = set()  # chunks whose output had a graph in some microbatch
        self._started = 0.0
        self.spans: dict[Computation, Span] = {}

    def where(self) -> str:
        """Describe the current action, for messages."""
        stage = f"stage {self.links.stage}"
        action = self._action
        if action is None:
            return f"an exchange of {stage}" if self._exchanges else f"a step of {stage}"
        after = "the exchange after " if self._exchanges else ""
        chunk = f" in chunk {action.chunk}" if self.schedule.num_chunks > 1 else ""
        return f"{after}{_SAID[type(action)]} of microbatch {action.microbatch}{chunk} of {stage}"

    def check(self) -> None:
        """Refuses a pass that this stage cannot run.

        Raises:
            CommGridError: gradients are switched off.
            ShapeError: another number of microbatches than the schedule's.
        """
        if self.train and not torch.is_grad_enabled():
            raise CommGridError(
                "step computes gradients, but they are switched off (torch.no_grad); call "
                "evaluate or forward there"
            )
        stage, stages = self.links.stage, self.links.num_stages
        wanted = self.schedule.num_microbatches
        for key, given, is_needed in (
            ("inputs", self.inputs, stage == 0),
            ("targets", self.targets, stage == stages - 1 and self.loss is not None),
            ("kwargs", self.kwargs, self.kwargs is not None),
        ):
            if is_needed and (given is None or len(given) != wanted):
                count = "none" if given is None else len(given)
                raise ShapeError(
                    f"{key}: {count} given on stage {stage} of {stages}; "
                    f"expected {wanted} microbatches, as {self.schedule} takes them"
                )

    def without_graph(self) -> str:
        """Describe the first chunk with trained parameters that had no graph, or ""."""
        for index, chunk in enumerate(self.chunks):
            trains = next((n for n, p in chunk.named_parameters() if p.requires_grad), None)
            if trains is not None and index not in self._trained:
                return (
                    f"has not trained chunk {index}: in no microbatch did its output, or the loss, "
                    f"depend on {trains!r} for autograd; it was detached, computed under "
                    "torch.no_grad(), or behind a checkpoint with use_reentrant=True whose inputs "
                    "need no gradient; freeze the chunk with requires_grad_(False) if that is meant"
                )
        return ""

    def through(self, program: Program) -> dict[int, Any]:
        """Runs the program; returns losses or outputs by microbatch, on the last stage."""
        work: dict[type[Computation], Callable[[Computation], Sequence[Tensor]]] = {
            Forward: self._forward,
            BackwardWeight: self._backward_weight,
        }
        for step in program:
            self._exchanges = isinstance(step, Exchange)
            if isinstance(step, Exchange):
                self.links.start(step, lambda send: self._leaving.pop(send.message))
                continue
            self._action, self._started = step, time.perf_counter()
            made = work.get(type(step), self._backward)(step)
            self.spans[step] = self._started, time.perf_counter()
            message = self.schedule.sent(step)
            if message is not None and self.schedule.num_stages == 1:
                self.links.hand_over(message, made)
            elif message is not None:
                self._leaving[message] = made
            del made  # its memory is free as soon as it has left
        self._exchanges = True
        self.links.finish()
        return self._found

    def _forward(self, action: Computation) -> Sequence[Tensor]:
        part, microbatch = self.schedule.part(action), action.microbatch
        given, received = self._inputs(part, microbatch)
        self._started = time.perf_counter()
        kwargs = self.kwargs[microbatch] if self.kwargs is not None else {}
        output = self.chunks[action.chunk](*given, **kwargs)
        is_last = part + 1 == self.schedule.num_parts
        if is_last:
            if self.loss is not None:
                assert self.targets is not None
                output = self.loss(output, self.targets[microbatch])
            if not self.train:
                self._found[microbatch] = _copied(output)
                return ()
        outputs = self._as_tensors(output, action, is_last=is_last)
        if is_last:
            self._found[microbatch] = outputs[0].detach().clone()
        if self.train:
            edges = [
                get_gradient_edge(t) if t.requires_grad else None for t in differentiable(outputs)
            ]
            if any(edge is not None for edge in edges):
                self._trained.add(action.chunk)
            loss_grad = torch.ones_like(outputs[0]) if is_last else None
            self._live[action.chunk, microbatch] = _Live(received, edges, loss_grad)
        return outputs

    def _inputs(self, part: int, microbatch: int) -> tuple[Sequence[Any], list[Tensor]]:
        """The arguments of a part, and those of them that get a gradient."""
        if part == 0:
            assert self.inputs is not None
            given = self.inputs[microbatch]
            return (given if isinstance(given, tuple) else (given,)), []
        tensors = self.links.take(StageMessage("activation", part - 1, microbatch))
        received = differentiable(tensors)
        if self.train:
            for tensor in received:
                tensor.requires_grad_()
        return tensors, received

    def _as_tensors(self, output: Any, action: Computation, *, is_last: bool) -> Sequence[Tensor]:
        outputs: Sequence[Any] = output if isinstance(output, tuple | list) else (output,)
        for one in outputs:
            if not isinstance(one, Tensor):
                raise ShapeError(
                    f"{self._part(action)} returned a {type(one).__name__}; expected a tensor, or "
                    "a tuple of tensors"
                )
        if is_last and (len(outputs) != 1 or outputs[0].dim() or not differentiable(outputs)):
            said = " and ".join(map(repr, specs_of(outputs)))
            raise ShapeError(
                f"{self._part(action)}: its loss is {said}; expected one floating-point scalar"
            )
        return outputs

    def _part(self, action: Computation) -> str:
        part, parts = self.schedule.part(action), self.schedule.num_parts
        return f"part {part} of {parts} (stage {action.stage}, chunk {action.chunk})"

    def _backward(self, action: Computation) -> Sequence[Tensor]:
        """A whole backward, or only its first half, which leaves the weights for later."""
        live = self._live.pop((action.chunk, action.microbatch))
        if live.loss_grad is not None:
            arrived = [live.loss_grad]
        else:
            message = StageMessage("gradient", self.schedule.part(action), action.microbatch)
            arrived = self.links.take(message)
            self._started = time.perf_counter()
        pairs = zip(live.edges, arrived, strict=True)
        if roots := [(edge, gradient) for edge, gradient in pairs if edge is not None]:
            edges, gradients = zip(*roots, strict=True)
            with self.final(action):
                if isinstance(action, BackwardInput):
                    weights = backward_input(edges, gradients, live.inputs)
                    self._weights[action.chunk, action.microbatch] = weights
                else:
                    torch.autograd.backward(edges, gradients)
        return _gradients(live.inputs)

    def _backward_weight(self, action: Computation) -> Sequence[Tensor]:
        weights = self._weights.pop((action.chunk, action.microbatch), None)
        if weights is not None:
            with self.final(action):
                weights()
        return ()


def _copied(output: Any) -> Any:
    """The output with tensors of its own, which no later microbatch overwrites.

    Tensors are found in tuples, lists, dicts and dataclasses.
    """
    if isinstance(output, Tensor):
        return output.clone()
    if isinstance(output, tuple | list):
        make = getattr(type(output), "_make", type(output))  # _make: of named tuples
        return make([_copied(item) for item in output])
    if isinstance(output, dict):
        made: Any = copy.copy(output)
        for key, value in output.items():  # Transformers' outputs refuse update()
            made[key] = _copied(value)
        return made
    if is_dataclass(output) and not isinstance(output, type):
        made = copy.copy(output)
        for field in fields(output):
            object.__setattr__(made, field.name, _copied(getattr(output, field.name)))
        return made
    return output


def _gradients(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Take the gradients that go to the part before off the inputs, which are then free."""
    found = []
    for tensor in inputs:
        found.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        tensor.grad = None
    return found
