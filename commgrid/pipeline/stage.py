"""Pipeline: this rank's stage, its agreement with the other stages, and its steps."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from commgrid.collectives.objects import gathered
from commgrid.data_parallel.norm import device_of
from commgrid.errors import CommGridError, GridMismatchError, ShapeError, SpecError
from commgrid.observe.stages import check_schedule
from commgrid.pipeline.backward import WeightGradients, backward_input
from commgrid.pipeline.exchange import Exchange, Program, message_of, programs
from commgrid.pipeline.p2p import StageLinks
from commgrid.pipeline.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Computation,
    Forward,
    Message,
    Order,
    Schedule,
    Send,
    forward_only,
    make_schedule,
)
from commgrid.pipeline.shared import add_up, check_reduced, check_shared, set_aside
from commgrid.pipeline.simulator import Span
from commgrid.runtime.failures import named_failures
from commgrid.runtime.registry import get_grid, is_initialized

if TYPE_CHECKING:
    from commgrid.data_parallel.reducer import GradientReducer
    from commgrid.runtime.grid import HyperCommGrid

Loss = Callable[[Any, Any], Tensor]
"""From the last chunk's output and a target to a scalar."""

_SAID = {
    Forward: "the forward",
    Backward: "the backward",
    BackwardInput: "the input gradients",
    BackwardWeight: "the weight gradients",
}


class Pipeline:
    """This rank's stage of a pipeline.

    Chunk c of stage s is part c · p + s of the model, p being the number of stages. The first
    part is called with a microbatch's inputs, every other with the tensors that the one before it
    returned, one or a tuple.

    Args:
        chunks: this stage's modules, on their device; a single one, or several in order, also as
            an nn.ModuleList.
        schedule: gpipe, 1f1b, interleaved, zb-h1, or a custom Schedule.
        num_microbatches: number of microbatches per step.
        loss: from the last part's output and a microbatch's target to a scalar; None: the last
            part returns the scalar itself.
        reducer: of the data-parallel gradients of all chunks; it starts to reduce a chunk's when
            the backward of the last microbatch has passed. Call its `finish` after `step`.
        group: the axis whose ranks are the stages.
        grid: where the group is looked up; None: the default grid.

    Raises:
        SpecError: a schedule that does not fit the sizes, or that deadlocks; chunks that do not fit
            the schedule; a chunk in DistributedDataParallel, or with parameters that are not in
            the reducer's model.
        GridMismatchError: the stages were given different schedules, microbatches or chunks.

    Example:
        >>> import commgrid, torch
        >>> grid = commgrid.initialize()
        >>> pipeline = Pipeline(
        ...     torch.nn.Linear(2, 1), "1f1b", num_microbatches=2,
        ...     loss=lambda y, target: (y - target).square().sum(),
        ... )
        >>> microbatches = torch.ones(2, 3, 2)
        >>> losses = pipeline.step(microbatches, targets=torch.zeros(2, 3, 1))
        >>> losses.shape
        torch.Size([2])
        >>> commgrid.shutdown()
    """

    def __init__(
        self,
        chunks: nn.Module | Sequence[nn.Module],
        schedule: str | Schedule = "1f1b",
        *,
        num_microbatches: int,
        loss: Loss | None = None,
        reducer: GradientReducer | None = None,
        group: str = "pp",
        grid: HyperCommGrid | None = None,
    ) -> None:
        grid = grid or get_grid()
        self._grid = grid
        many = not isinstance(chunks, nn.Module) or isinstance(chunks, nn.ModuleList)
        self.chunks: list[nn.Module] = list(chunks) if many else [chunks]  # type: ignore[arg-type,list-item]
        self.loss, self.reducer = loss, reducer
        device = next((device_of(chunk) for chunk in self.chunks), torch.device("cpu"))
        self.links = StageLinks(group, grid, device=device)
        self.stage, stages = self.links.stage, self.links.num_stages
        said = f"schedule {schedule!r}"
        if isinstance(schedule, Schedule):
            said = f"{schedule} (orders {zlib.crc32(repr(schedule.orders).encode()):08x})"
        self._agree(f"{said}, num_microbatches={num_microbatches}, {len(self.chunks)} chunks")
        self.schedule = (
            make_schedule(schedule, stages, num_microbatches, len(self.chunks))
            if isinstance(schedule, str) else schedule
        )  # fmt: skip
        sizes = (stages, num_microbatches, len(self.chunks))
        theirs = self.schedule
        if (theirs.num_stages, theirs.num_microbatches, theirs.num_chunks) != sizes:
            raise SpecError(
                f"{theirs} does not fit group {group!r} of {stages} ranks with "
                f"num_microbatches={num_microbatches} and {len(self.chunks)} chunks on this one"
            )
        if isinstance(schedule, Schedule):
            check_schedule(schedule)
        self._model = nn.ModuleList(self.chunks)
        splits = any(
            isinstance(a, BackwardInput) for order in self.schedule.orders for a in order
        )  # fmt: skip
        check_reduced(self.chunks, reducer, self.links.group.group, splits=splits)
        check_shared(self._model, self.links.group.group)
        self._program = programs(self.schedule)[self.stage]
        self._final = _final_backwards(self.schedule.orders[self.stage])
        uses = Counter(id(p) for chunk in self.chunks for p in {*chunk.parameters()})
        self._alone = [all(uses[id(p)] == 1 for p in chunk.parameters()) for chunk in self.chunks]
        self._evaluations: dict[int, tuple[Schedule, Program]] = {}
        self._has_trained = False
        self.spans: dict[Computation, Span] = {}
        """When each computation of the last step ran, without what it waited for: seconds of
        `time.perf_counter`, which on the CPU is when it was done and on CUDA when it was issued."""

    @property
    def is_first(self) -> bool:
        """Whether this stage has the first part, which takes the inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last part, which takes the targets."""
        return self.stage == self.schedule.num_stages - 1

    def write_spans(self, path: str | Path) -> None:
        """Writes this stage's `spans` as JSON lines, for `commgrid show --schedule … --spans`.

        Clocks of ranks on one machine agree; of ranks on several each file has its own zero.

        Args:
            path: a file of this stage's own; written anew.
        """
        rows = (
            {"stage": action.stage, "action": str(action), "start": start, "end": end}
            for action, (start, end) in self.spans.items()
        )
        Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

    # -- what a step does ---------------------------------------------------------------

    def step(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> Tensor | None:
        """Run forward and backward of all microbatches; add the gradients to `.grad`.

        Call it on all stages. Each argument matters only on its own stages.

        Args:
            inputs: a microbatch each, on the first stage: a tensor, or a tuple of arguments.
            targets: a microbatch each, on the last stage; with `loss`.
            kwargs: further arguments of every chunk on this stage, a microbatch each.

        Returns:
            On the last stage the losses, of shape (num_microbatches,); elsewhere None.

        Raises:
            ShapeError: another number of microbatches, or tensors whose shapes change between
                microbatches.
            PeerFailedError: another stage failed, or is gone; names it. The grid is then destroyed,
                also on the failing stage, which raises its own error.
        """
        run = _Pass(
            self, self.schedule, inputs, targets, kwargs, loss=self.loss, train=True
        )  # fmt: skip
        with named_failures(self._live_grid(), run.where):
            run.check()
            before = set_aside(self._model) if self.reducer is None else {}
            found = run.through(self._program)
            if not self._has_trained:
                self._check_graphs(run.without_graph())
            self.spans = run.spans
            if self.reducer is None:
                add_up(self._model, before)
        return torch.stack([found[i].detach() for i in sorted(found)]) if found else None

    def evaluate(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any] | None = None,
        *,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> Tensor | None:
        """The losses of any number of microbatches, forward only; otherwise as `step`.

        Args:
            inputs: on every stage as many microbatches.
        """
        found = self._run_forward(inputs, targets, kwargs, self.loss)
        return torch.stack([found[i] for i in sorted(found)]) if found else None

    def forward(
        self, inputs: Sequence[Any], *, kwargs: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Any] | None:
        """The last part's outputs, forward only, without the loss; otherwise as `evaluate`."""
        found = self._run_forward(inputs, None, kwargs, None)
        return [found[i] for i in sorted(found)] if found else None

    def forget_shapes(self) -> None:
        """Lets the next microbatches have other shapes; on all stages, between two calls."""
        self.links.forget_shapes()

    def _run_forward(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any] | None,
        kwargs: Sequence[Mapping[str, Any]] | None,
        loss: Loss | None,
    ) -> dict[int, Any]:
        count = len(inputs) if inputs is not None else 0
        run = _Pass(self, self.schedule, inputs, targets, kwargs, loss=loss, train=False)
        with named_failures(self._live_grid(), run.where), torch.no_grad():
            self._agree(f"{count} microbatches to evaluate")
            if count not in self._evaluations:
                schedule = forward_only(self.schedule.num_stages, count, self.schedule.num_chunks)
                self._evaluations[count] = schedule, programs(schedule)[self.stage]
            run.schedule, program = self._evaluations[count]
            run.check()
            return run.through(program)

    def _live_grid(self) -> HyperCommGrid:
        """The grid, or the one of its name that was made after it."""
        if self._grid.is_destroyed and is_initialized(self._grid.name):
            self._grid = get_grid(self._grid.name)
            self.links.reset()
        return self._grid

    def final_backward(self, action: Computation) -> AbstractContextManager[None]:
        """The context of a backward, in which a reducer sends complete gradients alone."""
        if self.reducer is None:
            return nullcontext()
        if action in self._final and self._alone[action.chunk]:
            return nullcontext()
        return self.reducer.no_sync()

    # -- what could be wrong ------------------------------------------------------------

    def _agree(self, given: str) -> None:
        """Check that all stages were given the same, or they would wait for missing messages."""
        found = gathered(given, self.links.group.group)
        usual = max(found, key=found.count)
        for rank, theirs in zip(self.links.ranks, found, strict=True):
            if theirs != usual:
                raise GridMismatchError(
                    f"rank {rank} was given {theirs}, but others of ranks {list(self.links.ranks)} "
                    f"{usual}; give every stage the same"
                )

    def _check_graphs(self, mine: str) -> None:
        """Refuse, after the first step, chunks with trained parameters that had no graph.

        Raises:
            CommGridError: on every stage; names the first such stage and chunk.
        """
        found = gathered(mine, self.links.group.group)
        for stage, (rank, told) in enumerate(zip(self.links.ranks, found, strict=True)):
            if told:
                raise CommGridError(
                    f"Pipeline: stage {stage} (rank {rank}) {told}; it was detached, computed "
                    "under torch.no_grad(), or behind a checkpoint with use_reentrant=True whose "
                    "inputs need no gradient; freeze the chunk with requires_grad_(False) if that "
                    "is meant"
                )
        self._has_trained = True


def _final_backwards(order: Order) -> set[Computation]:
    """The backwards of each chunk after which its weights get no further gradients."""
    final = set()
    for chunk in {action.chunk for action in order}:
        backwards = [a for a in order if a.chunk == chunk and not isinstance(a, Forward)]
        final |= set(backwards[-1:])
        if not any(isinstance(action, Backward) for action in backwards):
            final |= set([a for a in backwards if isinstance(a, BackwardInput)][-1:])
    return final


# -- one pass ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Live:
    """A microbatch between its forward and its backward.

    Args:
        inputs: the received tensors that can have a gradient.
        edges: the graph's edge for each output that can have a gradient; None: it has none.
        ones: the loss's gradient; None: not the last part.
    """

    inputs: list[Tensor]
    edges: list[GradientEdge | None]
    ones: Tensor | None


class _Pass:
    """One walk of a stage through its program of computations and exchanges.

    exchange       post the sends and receives of this time, and continue
    forward        take the activation, run the chunk, keep the graph's end and the inputs
    backward       take the gradient, run autograd, let the microbatch go
    backward input, backward weight    the two halves of a backward, with other work in between

    Of an output only its place in the graph is kept. Once it has left, its memory is free unless
    the graph needs it.

    Args:
        pipeline: whose chunks run.
        schedule: of the program.
        inputs, targets, kwargs: a microbatch each, as `Pipeline.step` takes them.
        loss: None: the last part's output is the result.
        train: whether there will be backwards.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        kwargs: Sequence[Mapping[str, Any]] | None,
        *,
        loss: Loss | None,
        train: bool,
    ) -> None:
        self.pipeline, self.schedule, self.links = pipeline, schedule, pipeline.links
        self.inputs, self.targets, self.kwargs = inputs, targets, kwargs
        self.loss, self.train = loss, train
        self._action: Computation | None = None
        self._live: dict[tuple[int, int], _Live] = {}
        self._weights: dict[tuple[int, int], WeightGradients] = {}
        self._leaving: dict[Message, Sequence[Tensor]] = {}
        self._found: dict[int, Any] = {}
        self._trained: set[int] = set()  # chunks that some microbatch had a graph of
        self._started = 0.0
        self.spans: dict[Computation, Span] = {}

    def where(self) -> str:
        """Describe the current action, for messages."""
        stage = f"stage {self.links.stage}"
        if self._action is None:
            return f"a step of {stage}"
        chunk = f" in chunk {self._action.chunk}" if self.schedule.num_chunks > 1 else ""
        return (
            f"{_SAID[type(self._action)]} of microbatch {self._action.microbatch}{chunk} of {stage}"
        )

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
        for index, chunk in enumerate(self.pipeline.chunks):
            trains = next((n for n, p in chunk.named_parameters() if p.requires_grad), None)
            if trains is not None and index not in self._trained:
                return (
                    f"has not trained chunk {index}: in no microbatch did its output, or the loss, "
                    f"depend on {trains!r} for autograd"
                )
        return ""

    def through(self, program: Program) -> dict[int, Any]:
        """Runs the program; returns losses or outputs by microbatch, on the last stage."""
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
        kwargs = self.kwargs[microbatch] if self.kwargs is not None else {}
        output = self.pipeline.chunks[action.chunk](*given, **kwargs)
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
            self._found[microbatch] = output.detach().clone()
        if self.train:
            edges = [
                get_gradient_edge(t) if t.requires_grad else None for t in _differentiable(outputs)
            ]
            if any(edge is not None for edge in edges):
                self._trained.add(action.chunk)
            ones = torch.ones_like(output) if is_last else None
            self._live[action.chunk, microbatch] = _Live(received, edges, ones)
        return outputs

    def _inputs(self, part: int, microbatch: int) -> tuple[Sequence[Any], list[Tensor]]:
        """The arguments of a part, and those of them that get a gradient."""
        if part == 0:
            assert self.inputs is not None
            given = self.inputs[microbatch]
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
        if is_last and not _differentiable([output]):
            raise ShapeError(f"{who}: its loss is {output.dtype}; expected a floating-point dtype")
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
            with self.pipeline.final_backward(action):
                torch.autograd.backward(edges, gradients)
        return _gradients(live.inputs)

    def _backward_input(self, action: Computation) -> Sequence[Tensor]:
        live, edges, gradients = self._arrived(action)
        if edges:
            with self.pipeline.final_backward(action):
                self._weights[action.chunk, action.microbatch] = backward_input(
                    edges, gradients, live.inputs
                )
        return _gradients(live.inputs)

    def _backward_weight(self, action: Computation) -> Sequence[Tensor]:
        weights = self._weights.pop((action.chunk, action.microbatch), None)
        if weights is not None:
            with self.pipeline.final_backward(action):
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
    """Take the gradients that go to the part before off the inputs, which are then free."""
    found = []
    for tensor in inputs:
        found.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        tensor.grad = None
    return found
