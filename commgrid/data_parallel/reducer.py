"""GradientReducer: averages gradients over data-parallel ranks, overlapped with backward.

Each parameter's `.grad` is a view of a flat bucket (`slot`). When the last gradient of a bucket has
arrived, its collective starts (`reduction`), while backward continues:

| parameter | summed over | by default |
|---|---|---|
| dense | `group` | `dp_cp` |
| dense with partial gradients, as norms under sequence parallelism | `group` and their group at once | `dp_cp_tp` |
| expert | `expert_group` | `edp` |
| with copies on other stages, as tied embeddings | their group, then as above | `embedding`, `dp_cp` |

The sum is then divided by the size of `group`, or by the sum of the counts given to `finish`.

On CUDA, reductions run in parallel with backward on the stream of their communicator. They start
late if all streams share few hardware queues: CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron's
tensor parallelism requires, keeps kernels in the order of issue; without tensor parallelism leave
it at 8 or more. With `groups: {dp_cp: {nccl: {is_high_priority_stream: true}}}`, the reductions'
kernels precede backward's kernels that wait for a free multiprocessor.
"""  # noqa: E501

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.data_parallel.bucket import make_lanes, pieces_of
from commgrid.data_parallel.gathers import Updater
from commgrid.data_parallel.groups import ReductionGroups
from commgrid.data_parallel.model_checks import (
    ParameterGroup,
    broadcast_statistics,
    broadcast_values,
    changed,
    changed_after_sending,
    check_free,
    check_grid,
    check_known,
    check_lanes,
    check_own,
    compare_models,
    compare_slices,
    compare_values,
    copies_of,
)
from commgrid.data_parallel.norm import (
    SquareSum,
    check_max_norm,
    clip_factor,
    device_of,
    norm_group,
)
from commgrid.data_parallel.reduction import Reductions
from commgrid.data_parallel.slot import Slot, is_capturing
from commgrid.data_parallel.step_checks import STEP_HOOKS
from commgrid.data_parallel.step_comparison import StepComparison
from commgrid.data_parallel.sync_result import SyncResult, check_finite
from commgrid.errors import CommGridError, SpecError, UnknownGroupError
from commgrid.layout.axis_names import check_word
from commgrid.parameters import placements
from commgrid.parameters.loss_owner import losses_not_told
from commgrid.parameters.placement import shared_last
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid

Count = float | Tensor | None


class GradientReducer:
    """Averages a model's gradients over its data-parallel group, overlapped with backward.

    The model's modules keep it, until its `close`.

    Args:
        model: on its device already, the same on all ranks of the group. Parameters shared by
            modules count once; registration order stands for order of use.
        group: the ranks that saw different data.
        expert_group: the same for parameters marked as the expert region's.
        grid: where the names are looked up; None: the default grid.
        shard: each rank keeps 1/n of the sums (reduce-scatter instead of all-reduce), for a
            ShardedOptimizer.
        bucket_bytes: bytes per collective; None: the larger of 25 MiB and 4 MB per rank of the
            group.
        dtype: of the buffers; None: fp32 for half-precision parameters, else the parameter's.
        broadcast: make copies of a parameter equal to those of the first rank that has one, and
            buffers to those of the group's first rank, instead of refusing copies that differ.
        not_finite: what `finish` does if any gradient of the whole model is infinite or NaN:
            "keep" it, "skip" the step (no rank has any gradient, so that optimizers do nothing;
            `is_finite` is then False), or "raise" on all ranks.
        unused: what `finish` does with a parameter that some ranks of the group have used in a step
            and others have not, as with LayerDrop: "refuse" it, or count it as "zero" on those.
        frozen: also take parameters that are frozen now, to train them later with the optimizer
            that is made now; they need buffers as the others do.

    Raises:
        SpecError: the model has a reducer already, is sharded by FSDP2, has slices made by another
            library's layers, or partial gradients over a group that cannot be combined with
            `group`.
        GridMismatchError: the ranks of a group differ in parameters, shapes or dtypes, or in the
            values of replicas. Values are compared once, when the reducer is made, and by
            checkpoint.save: slices that begin equal, such as zeros, are mistaken for replicas.

    Example:
        >>> import commgrid, torch
        >>> grid = commgrid.initialize()
        >>> model = torch.nn.Linear(2, 1)
        >>> reducer = GradientReducer(model)
        >>> with reducer.no_sync():                        # all microbatches but the last
        ...     model(torch.ones(3, 2)).sum().backward()
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> reducer.finish(count=4)                        # summed losses of 4 samples
        >>> model.weight.grad
        tensor([[1., 1.]])
        >>> commgrid.shutdown()
    """

    def __init__(
        self,
        model: nn.Module,
        group: str = "dp_cp",
        *,
        expert_group: str = "edp",
        grid: HyperCommGrid | None = None,
        shard: bool = False,
        bucket_bytes: int | None = None,
        dtype: torch.dtype | None = None,
        broadcast: bool = False,
        not_finite: str = "keep",
        unused: str = "refuse",
        frozen: bool = False,
    ) -> None:
        check_word("not_finite=", not_finite, ("keep", "skip", "raise"))
        check_word("unused=", unused, ("refuse", "zero"))
        self._grid = grid or get_grid()
        self.model, self.shard, self._not_finite = model, shard, not_finite
        self.group = self._grid.get_group(group)
        everything = shared_last(placements(model))
        self.groups = ReductionGroups(self._grid, everything, group, expert_group, shard=shard)
        trained = [
            p for p in everything
            if p.parameter.requires_grad or (frozen and p.parameter.is_floating_point())
        ]  # fmt: skip
        check_free(trained)
        if STEP_HOOKS.users:
            gc.collect()  # models that are gone take theirs with them
        check_own(model, self._grid)
        check_grid(everything, self._grid)
        self.lanes, self.buckets = make_lanes(
            trained, self.groups.of, shard=shard, bucket_bytes=bucket_bytes, dtype=dtype
        )
        check_lanes(self.lanes)
        options = (shard, bucket_bytes, str(dtype), broadcast, not_finite, unused, frozen)
        compare_models(self.lanes, options, model, self.groups)
        lane_of = {id(s.parameter): lane.group for lane in self.lanes for s in lane.slots}
        copies = copies_of(everything, self.groups, lane_of)
        if broadcast:
            broadcast_values(model, copies, self.group)
        else:
            compare_values(copies, self.groups.stage())
        compare_slices(everything)
        self.pieces = pieces_of(self.buckets)
        self.is_finite = True
        """Whether the last `finish` found only finite gradients, on all ranks of the grid; always
        True with `not_finite="keep"`, which does not check."""
        self._optimizer: weakref.ref[Updater] | None = None
        self.after_step, self._synchronizing = False, True
        distinct = [self.groups.num_distinct(piece.slot.placement) for piece in self.pieces]
        whole, self._missing = self._whole_group()
        self._squares = SquareSum(distinct, whole, device_of(model))
        self._verdict = SyncResult(
            self.lanes, self.buckets, self.pieces, self.group, self.groups.dense,
            squares=self._squares, lopsided=unused == "zero",
        )  # fmt: skip
        # Ranks may run two models in different orders, so a reducer that shares a group with an
        # earlier one starts its sums in finish().
        defers = any(
            lane.group is other.group
            for reducer in STEP_HOOKS.users for other in reducer.lanes for lane in self.lanes
        )  # fmt: skip
        self.reductions = Reductions(self.buckets, self._grid, defers=defers)
        STEP_HOOKS.add_user(self)
        self._comparison = StepComparison(model, self.pieces, self.slots, self.groups)
        self.reductions.sending = self._comparison.sent
        self._bucket_of = {slot: bucket for bucket in self.buckets for slot in bucket.slots}
        for slot in self.slots:
            slot.attach(self)
        self._detach = weakref.finalize(self, _detach, self.slots)
        self._modules = list(model.modules())
        self.keep()

    @property
    def slots(self) -> list[Slot]:
        """Every parameter's place, in the order in which gradients are sent."""
        return [slot for bucket in self.buckets for slot in bucket.slots]

    def close(self) -> None:
        """Removes its hooks and buffers from the model, and placeholders from `.grad`."""
        self._detach()
        self._comparison.close()
        STEP_HOOKS.remove_user(self)
        self.keep(False)

    def keep(self, keeps: bool = True) -> None:
        """Has the model's modules keep it, or lets it end with the last variable that has it."""
        for module in self._modules:
            own = vars(module)
            kept = own["_gradient_reducers"] = own.get("_gradient_reducers") or _Kept()
            kept.pop(self, None)
            if keeps:
                kept[self] = None

    @property
    def optimizer(self) -> Updater | None:
        """The ShardedOptimizer over this reducer, if it still exists."""
        return self._optimizer() if self._optimizer is not None else None

    def attach(self, optimizer: Updater) -> None:
        """Leaves `.grad` in the buffers' dtype from now on, for a ShardedOptimizer."""
        self._optimizer = weakref.ref(optimizer)

    def weights_loaded(self) -> None:
        """Tells the optimizer that weights were set without load_state_dict."""
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.reload()

    def wait_for_weights(self) -> None:
        """Returns when every parameter is gathered."""
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.wait()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer is about to use gradients."""
        self._comparison.before_step(optimizer, is_first=not self.after_step)

    def _whole_group(self) -> tuple[ProcessGroup | None, UnknownGroupError | None]:
        """The ranks that together hold every gradient, and the error if there is no such group."""
        used = self.groups.used
        try:
            return norm_group(self._grid, self.groups.dense, used, sharded=self.shard), None
        except UnknownGroupError as error:
            if self._not_finite != "keep":
                raise
            return None, error.with_traceback(None)

    # -- during backward ----------------------------------------------------------------

    def arrived(self, slot: Slot) -> None:
        """Called when backward has added a gradient to `.grad`."""
        if is_capturing(slot.parameter):
            raise CommGridError(
                f"backward reached {slot.placement} while a CUDA graph is being captured; a replay "
                "repeats kernels, but not the hooks that decide what is overwritten and when "
                "gradients are sent. Capture the forward and backward of parts without a "
                "GradientReducer, or train without graphs"
            )
        bucket = self._bucket_of[slot]
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.gathers.check(bucket, slot.placement)
        slot.take_in()
        if self._synchronizing:
            self.reductions.arrived(bucket, slot)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward only accumulates; for all microbatches of a step but the last."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    # -- after backward -----------------------------------------------------------------

    @torch.no_grad()
    def finish(self, count: Count = None) -> None:
        """Waits until every gradient is the average; once a step, on all ranks of the grid.

        Afterwards `.grad` holds the average, or None for a parameter that no rank used. With
        `shard`, the reducer holds a part of it, and reading `.grad` raises an error. If backward
        has added nothing since the last `finish`, its result stays. After the optimizer's step, the
        next backward starts a new gradient; a backward before the step raises an error. The host
        waits for the device once.

        Args:
            count: number of samples or tokens that this rank's gradients are a sum over, also as a
                tensor of shape () on the model's device; the sum over all ranks is divided by the
                sum of the counts, so that ranks with more or longer microbatches weigh more. A
                rank that counts 0 needs no backward. None: every rank counts the same, and its
                gradients are averages already.

        Raises:
            GridMismatchError: a parameter has a gradient on some ranks only, replicas have
                different gradients, or only some ranks gave a count.
            ShapeError: the counts add up to zero.
            SpecError: gradients are sharded without a ShardedOptimizer over this reducer.
            CommGridError: the model was moved, or its parameters replaced, or others unfrozen; with
                `not_finite="raise"`, a gradient is infinite or NaN (names parameter and ranks); a
                gradient was changed after backward had sent it.
        """
        self._check_before_finish()
        told = [check(self, count) for check in FINISH]  # collective, so none is left out
        for error in told:
            if error is not None:
                raise error

    def _reduce(self, count: Count) -> CommGridError | None:
        """Sums, agrees on the divisor, and hands out the averages."""
        self.reductions.finish()
        self._divisor, wrong = self._verdict.reach(count, look=self._not_finite != "keep")
        self.is_finite = self._verdict.is_finite
        divisors = [self._divisor / bucket.prescale for bucket in self.buckets]
        if any(each != 1 for each in divisors):
            torch._foreach_div_([b.gradient[b.own] for b in self.buckets], divisors)
        skips, self.after_step = self._not_finite == "skip" and not self.is_finite, False
        self.reductions.reset()
        exact = self._optimizer is not None
        for bucket in self.buckets:
            bucket.hand_out(self._verdict.used, skips=skips, exact=exact)
        broadcast_statistics(self.model, self.group)
        return wrong

    def _look(self, _: Count) -> CommGridError | None:
        """The error of gradients that are not finite; all ranks know alike whether any is."""
        if self._not_finite != "raise" or self.is_finite:
            return None
        return check_finite(self.pieces, self._squares.group)

    def _check_before_finish(self) -> None:
        if self.shard and self.optimizer is None:
            raise SpecError(
                "GradientReducer(shard=True) leaves each rank a part of the gradients, which only "
                "a ShardedOptimizer updates weights with, and there is none over this reducer: "
                "make ShardedOptimizer(reducer, torch.optim.AdamW, …), or leave shard=True out "
                "for a plain torch.optim optimizer"
            )
        if self.buckets and is_capturing(self.buckets[0].gradient):
            raise CommGridError(
                "finish() was called while a CUDA graph is being captured; what it decides, "
                "such as which parameters have a gradient, a replay would not decide again"
            )

    def zero_grad(self) -> None:
        """Drops the accumulated gradients, to abandon a step.

        Call it on all ranks of the group, or on none, once backward has begun on all of them or on
        none: a reduction that some ranks have started needs all of them. Not needed after `finish`.
        """
        self.reductions.abandon()
        for slot in self.slots:
            slot.drop()

    # -- norm ---------------------------------------------------------------------------

    def gradient_norm(self, group: ParameterGroup | None = None) -> Tensor:
        """The 2-norm of averaged gradients of the unsharded model, the same on every rank.

        One all-reduce of one number. Call it after `finish`.

        Args:
            group: the parameters of this rank that count: a group of an optimizer, or some of
                `model.parameters()`; [] on a rank that has none of them. None: all.

        Returns:
            A float64 tensor of shape () on the model's device.

        Raises:
            UnknownGroupError: the grid has no group of the ranks that hold the model.
            CommGridError: a gradient is not reduced.
            SpecError: a parameter that the reducer does not have.
        """
        for slot in self.slots:
            if slot.is_unreduced:
                raise CommGridError(
                    f"gradient_norm() or clip_gradients() was called while {slot.placement} has a "
                    "gradient that no finish() has reduced; call finish() first, once a step, "
                    "after the last backward"
                )
        if self._missing is not None:
            raise self._missing
        return self._squares.of(self._held_of(group)).sqrt()

    @torch.no_grad()
    def clip_gradients(self, max_norm: float, group: ParameterGroup | None = None) -> Tensor:
        """Scales gradients so that their norm is at most `max_norm`; returns the norm before.

        Args:
            max_norm: above 0.
            group: the parameters that are clipped together, as for `gradient_norm`. Groups are
                clipped in one order on all ranks.

        Returns:
            A float64 tensor of shape () on the model's device.

        Raises:
            ShapeError: max_norm is not above 0.
            UnknownGroupError, CommGridError, SpecError: as `gradient_norm`.
        """
        check_max_norm(max_norm)
        norm = self.gradient_norm(group)
        scale = clip_factor(norm, max_norm)
        held = self.gradients_of(group)
        if held and (norm.device.type != "cpu" or not scale >= 1):  # also where it is NaN
            torch._foreach_mul_(held, scale)
            self.rescaled()
        return norm

    def rescaled(self) -> None:
        """Called after gradients were scaled in place by one factor, the same on all ranks."""
        self._comparison.rescaled()

    def gradients_of(self, group: ParameterGroup | None = None) -> list[Tensor]:
        """This rank's parts of the reduced gradients of some parameters; None: of all."""
        return [gradient for gradient in self._held_of(group) if gradient is not None]

    def _held_of(self, group: ParameterGroup | None) -> list[Tensor | None]:
        """For each piece, its gradient if it is of these parameters, and there is one."""
        wanted = {id(slot.parameter) for slot in self.slots}
        if group is not None:
            wanted = check_known(group, wanted)
        return [p.held if id(p.slot.parameter) in wanted else None for p in self.pieces]


FINISH: tuple[Callable[[GradientReducer, Count], CommGridError | None], ...] = (
    lambda reducer, _: changed_after_sending(reducer.slots),
    lambda reducer, count: losses_not_told(reducer.model.modules(), counted=count is not None),
    GradientReducer._reduce,
    lambda reducer, _: changed(reducer.model, reducer.slots),
    lambda reducer, _: reducer._comparison.compare(reducer._divisor),
    GradientReducer._look,
)
"""What `finish` does, in order; of the errors that these return it raises the first."""


class _Kept(dict[GradientReducer, None]):
    """Reducers that live as long as a module; not copied or pickled with it."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _detach(slots: list[Slot]) -> None:
    for slot in slots:
        slot.release()
