"""Pipeline: this rank's stage, its agreement with the other stages, and its steps."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from commgrid.collectives.objects import gathered
from commgrid.data_parallel.norm import device_of
from commgrid.data_parallel.reducer import GradientReducer
from commgrid.errors import GridMismatchError, SpecError
from commgrid.pipeline.execution import Execution, Loss
from commgrid.pipeline.p2p import StageLinks
from commgrid.pipeline.tied import check_reduced, check_shared, refuse_first, refuse_unsummed
from commgrid.pipeline_schedules.messages import Program, programs
from commgrid.pipeline_schedules.proof import check_schedule
from commgrid.pipeline_schedules.schedule import (
    Backward,
    BackwardInput,
    Computation,
    Forward,
    Order,
    Schedule,
    forward_only,
    make_schedule,
)
from commgrid.pipeline_schedules.simulator import Span
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.named_failures import named_failures
from commgrid.runtime.registry import get_grid, is_initialized


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
        said, sizes = f"schedule {schedule!r}", (stages, num_microbatches, len(self.chunks))
        if isinstance(schedule, Schedule):
            said = f"{schedule} (orders {zlib.crc32(repr(schedule.orders).encode()):08x})"
        self._agree(f"{said}, num_microbatches={num_microbatches}, {len(self.chunks)} chunks")
        if isinstance(schedule, str):
            schedule = make_schedule(schedule, *sizes)
        elif (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks) != sizes:
            raise SpecError(
                f"{schedule} does not fit group {group!r} of {stages} ranks with "
                f"num_microbatches={num_microbatches} and {len(self.chunks)} chunks on this one"
            )
        else:
            check_schedule(schedule)
        self.schedule = schedule
        self._model = nn.ModuleList(self.chunks)
        splits = any(isinstance(a, BackwardInput) for a in self.schedule.orders[self.stage])
        check_reduced(self.chunks, reducer, self.links.group.group, splits=splits)
        self._shares = check_shared(self._model, self.links.group.group)
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
            SpecError: stages share a parameter, and have no reducer; or a chunk had no graph.
            ShapeError: another number of microbatches, or tensors whose shapes change between
                microbatches.
            PeerFailedError: another stage failed, or is gone; names it. The grid is then destroyed,
                also on the failing stage, which raises its own error.
        """
        if self._shares and self.reducer is None:
            with named_failures(self._live_grid(), agreed=(SpecError,)):
                refuse_unsummed(self._model, self.links.group.group)
        run = Execution(
            self.chunks, self.links, self.schedule, inputs, targets, kwargs, loss=self.loss,
            final=self.final_backward,
        )  # fmt: skip
        with named_failures(self._live_grid(), run.where):
            run.check()
            found = run.through(self._program)
            if not self._has_trained:
                refuse_first(run.without_graph(), self.links.group.group)
                self._has_trained = True
            self.spans = run.spans
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
        run = Execution(
            self.chunks, self.links, self.schedule, inputs, targets, kwargs, loss=loss, final=None
        )
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
        self._grid.refuse_if_failed()
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


def _final_backwards(order: Order) -> set[Computation]:
    """The backwards of each chunk after which its weights get no further gradients."""
    final = set()
    for chunk in {action.chunk for action in order}:
        backwards = [a for a in order if a.chunk == chunk and not isinstance(a, Forward)]
        final |= set(backwards[-1:])
        if not any(isinstance(action, Backward) for action in backwards):
            final |= set([a for a in backwards if isinstance(a, BackwardInput)][-1:])
    return final
