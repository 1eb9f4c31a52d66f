"""Run: a stage's way through one step, or one evaluation.

It walks down its program of computations and exchanges:

    exchange       post what the program sends and receives now, and go on
    forward        take the activation, run the chunk, keep the graph's end and the inputs
    backward       take the gradient, run autograd, let the microbatch go
    backward input, backward weight    the two halves of a backward, with other work in between

Of an output nothing is kept but its place in the graph: once it has left, its memory is free
unless the graph needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from commgrid.errors import CommGridError, ShapeError
from commgrid.pipeline.backward import WeightGradients, backward_input
from commgrid.pipeline.exchange import Exchange, Program, message_of
from commgrid.pipeline.p2p import StageLinks
from commgrid.pipeline.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Computation,
    Forward,
    Message,
    Schedule,
    Send,
)
from commgrid.pipeline.simulator import Span

Loss = Callable[[Any, Any], Tensor]
"""From the last chunk's output and a target to a scalar."""

_SAID = {
    Forward: "the forward",
    Backward: "the backward",
    BackwardInput: "the input gradients",
    BackwardWeight: "the weight gradients",
}


@dataclass(frozen=True)
class StageParts:
    """What a run needs of a stage.

    Args:
        chunks: its modules.
        links: to the stages before and after.
        loss: of the last part's output and a microbatch's target; None: the last part returns it.
        during_backward: what a backward runs in.
    """

    chunks: Sequence[nn.Module]
    links: StageLinks
    loss: Loss | None
    during_backward: Callable[[Computation], AbstractContextManager[None]]


@dataclass(frozen=True)
class Batch:
    """A step's microbatches.

    Args:
        inputs: of the first part; elsewhere they do not matter.
        targets: of the loss, on the last stage.
        kwargs: of every chunk on this stage; None: none.
    """

    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    kwargs: Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class _Live:
    """A microbatch between its forward and its backward.

    Args:
        inputs: what was received and can have a gradient.
        edges: where the graph begins, for each output that can have a gradient; None: it has none.
        ones: the loss's gradient; None: not the last part.
    """

    inputs: list[Tensor]
    edges: list[GradientEdge | None]
    ones: Tensor | None


class Run:
    """One pass of a stage through its program.

    Args:
        stage: whose modules run.
        schedule: that the program is of.
        batch: what they run on.
        train: whether there will be backwards.
        with_loss: False: the last part's output is what is found, also where there is a loss.
    """

    def __init__(
        self,
        stage: StageParts,
        schedule: Schedule,
        batch: Batch,
        *,
        train: bool,
        with_loss: bool = True,
    ) -> None:
        self.stage, self.schedule, self.batch, self.train = stage, schedule, batch, train
        self.links = stage.links
        self._takes_targets = with_loss and stage.loss is not None
        self._action: Computation | None = None
        self._live: dict[tuple[int, int], _Live] = {}
        self._weights: dict[tuple[int, int], WeightGradients] = {}
        self._leaving: dict[Message, Sequence[Tensor]] = {}
        self._found: dict[int, Any] = {}
        self._started = 0.0
        self.spans: dict[Computation, Span] = {}

    def where(self) -> str:
        """What this stage is at, for messages."""
        stage = f"stage {self.links.stage}"
        if self._action is None:
            return f"a step of {stage}"
        chunk = f" in chunk {self._action.chunk}" if self.schedule.num_chunks > 1 else ""
        return (
            f"{_SAID[type(self._action)]} of microbatch {self._action.microbatch}{chunk} of {stage}"
        )

    def check(self) -> None:
        """Refuses what this stage cannot run.

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
        wanted, batch = self.schedule.num_microbatches, self.batch
        for key, given, is_needed in (
            ("inputs", batch.inputs, stage == 0),
            ("targets", batch.targets, stage == stages - 1 and self._takes_targets),
            ("kwargs", batch.kwargs, batch.kwargs is not None),
        ):
            if is_needed and (given is None or len(given) != wanted):
                count = "none" if given is None else len(given)
                raise ShapeError(
                    f"{key}: {count} given on stage {stage} of {stages}; "
                    f"expected {wanted} microbatches, as {self.schedule} takes them"
                )

    def through(self, program: Program) -> dict[int, Any]:
        """Runs it all; losses or outputs by microbatch, on the last stage."""
        work: dict[type[Computation], Callable[[Computation], Sequence[Tensor]]] = {
            Forward: self._forward,
            Backward: self._backward,
            BackwardInput: self._backward_input,
            BackwardWeight: self._backward_weight,
        }
        for step in program:
            if isinstance(step, Exchange):
                self.links.start(step, self._pop)
                continue
            self._action, self._started = step, time.perf_counter()
            made = work[type(step)](step)
            self.spans[step] = self._started, time.perf_counter()
            message = message_of(self.schedule, step)
            if message is None:
                continue
            later = message.boundary + (message.kind == "activation")
            if self.schedule.place(later)[0] == self.links.stage:
                self.links.hand_over(message, made)
            else:
                self._leaving[message] = made
            del made  # its memory is free as soon as it has left
        self.links.finish()
        return self._found

    def _pop(self, send: Send) -> Sequence[Tensor]:
        return self._leaving.pop(send.message)

    def _forward(self, action: Computation) -> Sequence[Tensor]:
        part, microbatch = self.schedule.part(action), action.microbatch
        given, received = self._inputs(part, microbatch)
        self._started = time.perf_counter()
        kwargs = self.batch.kwargs[microbatch] if self.batch.kwargs is not None else {}
        output = self.stage.chunks[action.chunk](*given, **kwargs)
        is_last = part + 1 == self.schedule.num_parts
        if is_last:
            if self._takes_targets:
                assert self.stage.loss is not None
                assert self.batch.targets is not None
                output = self.stage.loss(output, self.batch.targets[microbatch])
            if not self.train:
                self._found[microbatch] = _copied(output)
                return ()
        outputs = self._as_tensors(output, action, is_last=is_last)
        if is_last:
            self._found[microbatch] = output.detach().clone()
        if self.train:
            self._live[action.chunk, microbatch] = _Live(
                received,
                [
                    get_gradient_edge(t) if t.requires_grad else None
                    for t in _differentiable(outputs)
                ],
                torch.ones_like(output) if is_last else None,
            )
        return outputs

    def _inputs(self, part: int, microbatch: int) -> tuple[Sequence[Any], list[Tensor]]:
        """What a part is called with, and what of it is given a gradient."""
        if part == 0:
            assert self.batch.inputs is not None
            given = self.batch.inputs[microbatch]
            return (given if isinstance(given, tuple) else (given,)), []
        tensors = self.links.take(Message("activation", part - 1, microbatch))
        differentiable = _differentiable(tensors)
        if self.train:
            for tensor in differentiable:
                tensor.requires_grad_()
        return tensors, differentiable

    def _as_tensors(self, output: Any, action: Computation, *, is_last: bool) -> Sequence[Tensor]:
        outputs: Sequence[Any] = output if isinstance(output, tuple | list) else (output,)
        who = (
            f"part {self.schedule.part(action)} of {self.schedule.num_parts} (stage {action.stage}"
        )
        who += f", chunk {action.chunk})"
        if is_last and (len(outputs) != 1 or not isinstance(output, Tensor) or output.dim() != 0):
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ShapeError(f"{who}: its loss is {shape}; expected one scalar tensor")
        for one in outputs:
            if not isinstance(one, Tensor):
                raise ShapeError(
                    f"{who} returned a {type(one).__name__}; expected a tensor, or a tuple of "
                    "tensors, for the next part"
                )
        return outputs

    def _backward(self, action: Computation) -> Sequence[Tensor]:
        live, edges, gradients = self._arrived(action)
        if edges:
            with self.stage.during_backward(action):
                torch.autograd.backward(edges, gradients)
        return _gradients(live.inputs)

    def _backward_input(self, action: Computation) -> Sequence[Tensor]:
        live, edges, gradients = self._arrived(action)
        if edges:
            with self.stage.during_backward(action):
                self._weights[action.chunk, action.microbatch] = backward_input(
                    edges, gradients, live.inputs
                )
        return _gradients(live.inputs)

    def _backward_weight(self, action: Computation) -> Sequence[Tensor]:
        weights = self._weights.pop((action.chunk, action.microbatch), None)
        if weights is not None:
            with self.stage.during_backward(action):
                weights()
        return ()

    def _arrived(self, action: Computation) -> tuple[_Live, list[GradientEdge], list[Tensor]]:
        """A microbatch, and the gradients that its graph begins with."""
        live = self._live.pop((action.chunk, action.microbatch))
        if live.ones is not None:
            arrived = [live.ones]
        else:
            message = Message("gradient", self.schedule.part(action), action.microbatch)
            arrived = self.links.take(message)
            self._started = time.perf_counter()
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(live.edges, arrived, strict=True)
            if edge is not None
        ]
        return live, [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def _copied(output: Any) -> Any:
    """The output with tensors of its own, which no later microbatch overwrites."""
    if isinstance(output, Tensor):
        return output.clone()
    if type(output) in (tuple, list):
        return type(output)(map(_copied, output))
    if type(output) is dict:
        return {key: _copied(value) for key, value in output.items()}
    return output


def _differentiable(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t.is_floating_point() or t.is_complex()]


def _gradients(inputs: Sequence[Tensor]) -> list[Tensor]:
    """What goes back to the part before; the input is then free."""
    found = []
    for tensor in inputs:
        found.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        tensor.grad = None
    return found
