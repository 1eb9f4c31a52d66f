"""GradientReducer: gradients averaged over the ranks that saw different data, beside backward.

Each parameter's gradient goes into a slice of a flat bucket, written there by the layer itself
(`main_grad`) or by a hook. When the last gradient of a bucket has arrived, its collective
starts, while backward goes on:

| parameter | summed over | by default |
|---|---|---|
| dense | `group` | `dp_cp` |
| dense with partial gradients, as norms under sequence parallelism | `group` and their group at once | `dp_cp_tp` |
| expert | `expert_group` | `edp` |
| with copies on other stages, as tied embeddings | their group, then as above | `embedding`, `dp_cp` |

The sum is then divided by the size of `group`, or by what `finish(count)` says.

A layer that writes its gradient to `main_grad` itself returns one that means nothing, for autograd
to pass on: commgrid's return `no_gradient`, which is dropped before it is added anywhere. Layers of
others (Megatron-core's gradient accumulation fusion, Transformer Engine) add to `main_grad`, set
`grad_added_to_main_grad` and return a dummy, which is dropped as well; they find zeros there.

On CUDA, reductions run beside backward on the stream of their communicator. They start late where
all streams share few hardware queues: CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron's tensor
parallelism asks for, keeps kernels in the order in which they are issued; without tensor
parallelism leave it at 8 or more. `groups: {dp_cp: {nccl: {is_high_priority_stream: true}}}` lets
the reductions' kernels go before those of backward that wait for a free multiprocessor.
"""  # noqa: E501

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from commgrid.collectives.asynchronous import Pending, start_all_reduce_, start_reduce_scatter_
from commgrid.data_parallel.arrivals import Owner, detach, take_in, wait_for, zero
from commgrid.data_parallel.buckets import Bucket, Slot, make_lanes, pieces_of
from commgrid.data_parallel.consistency import (
    axes_in_use,
    broadcast_values,
    changed,
    check_own,
    compare_models,
    compare_values,
)
from commgrid.data_parallel.kept import KeptGradient
from commgrid.data_parallel.norm import norm_group, num_parts
from commgrid.data_parallel.verdict import Verdict, check_finite
from commgrid.errors import CommGridError, ShapeError, SpecError, UnknownGroupError
from commgrid.parameters import Placement, placements
from commgrid.runtime.registry import get_grid
from commgrid.tensor_parallel.main_grad import is_capturing, is_no_gradient

if TYPE_CHECKING:
    from commgrid.data_parallel.sharded_optimizer import ShardedOptimizer
    from commgrid.runtime.grid import HyperCommGrid

_IN_FLIGHT = 2  # buckets whose exchange buffers exist at once on the CPU
NOT_FINITE = ("keep", "skip", "raise")


class GradientReducer:
    """Averages a model's gradients over its data-parallel group, overlapped with backward.

    Args:
        model: on its device already, the same on all ranks of the group. Parameters shared by
            modules count once; registration order stands for order of use.
        group: the ranks that saw different data.
        expert_group: the same for parameters marked as the expert region's.
        grid: where the names are looked up; None: the default grid.
        shard: each rank keeps 1/n of the sums (reduce-scatter instead of all-reduce), for a
            ShardedOptimizer.
        bucket_bytes: how much travels at once; None: 25 MiB, or 4 MB for each rank of the group
            where that is more.
        dtype: of the buffers; None: fp32 for half-precision parameters, else the parameter's.
        broadcast: make copies of a parameter equal to those of the first rank that has one, and
            buffers to those of the group's first rank, instead of refusing copies that differ.
        not_finite: what `finish` does where any gradient of the whole model is infinite or NaN:
            "keep" it, "skip" the step (no rank has any gradient, so that optimizers do nothing;
            `is_finite` is then False), or "raise" on all ranks.

    Raises:
        SpecError: the model has a reducer already, is sharded by FSDP2, has slices that somebody
            else's layers have cut, or partial gradients over a group that cannot be combined with
            `group`.
        GridMismatchError: the ranks of a group have other parameters, shapes or dtypes, or other
            values of what should be copies. These are compared once, when the reducer is made, and
            by checkpoint.save: slices that begin equal, such as zeros, are not told from copies.

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
    ) -> None:
        if not_finite not in NOT_FINITE:
            raise SpecError(f"not_finite={not_finite!r}: expected one of {', '.join(NOT_FINITE)}")
        self._grid = grid or get_grid()
        self.model, self.shard, self._not_finite = model, shard, not_finite
        self._name, self._expert_name = group, expert_group
        self.group = self._grid.get_group(group)
        everything = list(placements(model))
        trained = [p for p in everything if p.parameter.requires_grad]
        for placement in trained:
            if isinstance(placement.parameter, DTensor):
                raise SpecError(
                    f"{placement} is a DTensor, whose gradients FSDP2 averages itself; leave the "
                    "GradientReducer out, and take data_parallel.clip_gradients for the norm"
                )
            if getattr(placement.parameter, "main_grad_owner", None) is not None:
                raise SpecError(
                    f"{placement} has another GradientReducer already; call its close() first"
                )
        check_own(model, self._grid)
        self.lanes, self.buckets = make_lanes(
            trained, self._group_of, shard=shard, bucket_bytes=bucket_bytes, dtype=dtype
        )
        options = (shard, bucket_bytes, str(dtype), broadcast, not_finite)
        compare_models(self.lanes, options, model, self._grid)
        lane_of = {id(s.parameter): lane.group for lane in self.lanes for s in lane.slots}
        used = axes_in_use(everything, self._grid, group, expert_group)
        if broadcast:
            broadcast_values(model, everything, self._grid, lane_of, self.group, used)
        else:
            compare_values(everything, self._grid, lane_of, used)
        self.pieces = pieces_of(self.buckets)
        self.keeps_gradients = shard
        self.is_finite = True
        """Whether the last `finish` found finite gradients only, on all ranks of the grid; always
        True with `not_finite="keep"`, which does not look."""
        self._optimizer: weakref.ref[ShardedOptimizer] | None = None
        self._next = 0
        self._begun = self._clears = False
        self._synchronizing = True
        self._in_flight: list[Bucket] = []
        parts = [self._parts_of(piece.slot.placement) for piece in self.pieces]
        whole, self._has_whole = self._whole_group()
        self._verdict = Verdict(
            self.lanes, self.buckets, self.pieces, self.group, self._name,
            whole=whole, parts=parts, model=model,
        )  # fmt: skip
        self._uses = Counter(
            id(p) for module in model.modules() for p in module._parameters.values()
        )
        self._handles = [
            self._attach(bucket, index)
            for bucket in self.buckets for index in range(len(bucket.slots))
        ]  # fmt: skip
        self._detach = weakref.finalize(self, detach, self._handles, self.slots)

    @property
    def slots(self) -> list[Slot]:
        """Every parameter's place, in the order in which gradients are sent."""
        return [slot for bucket in self.buckets for slot in bucket.slots]

    def close(self) -> None:
        """Takes its hooks and buffers off the model, and gradients that it keeps off `.grad`."""
        self._detach()

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        """The ShardedOptimizer that was made over it, if it still is there."""
        return self._optimizer() if self._optimizer is not None else None

    def attach(self, optimizer: ShardedOptimizer) -> None:
        """Keeps all gradients for a ShardedOptimizer from now on."""
        self._optimizer, self.keeps_gradients = weakref.ref(optimizer), True

    def weights_loaded(self) -> None:
        """Tells the optimizer that weights were set otherwise than by load_state_dict."""
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.reload()

    def wait_for_weights(self) -> None:
        """Returns when no parameter is half gathered any more."""
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.wait()

    # -- groups -------------------------------------------------------------------------

    def _group_of(self, placement: Placement) -> tuple[ProcessGroup, str]:
        name = self._expert_name if placement.region == "expert" else self._name
        partial = placement.partial
        if partial is None or partial.size == 1:
            return self._grid.get_group(name), name
        spec = self._grid.spec
        if partial.grid_name != self._grid.name:
            raise SpecError(
                f"{placement}: its gradients are partial over {partial}, which was not given as a "
                f"name of grid {self._grid.name!r} and so cannot be combined with {name!r}"
            )
        axes = dict.fromkeys(
            axis for part in (name, partial.name)
            for axis in spec.definitions[spec.resolve_name(part)].axes
        )  # fmt: skip
        return self._grid.get_group(*axes), "_".join(axes)

    def cut_over(self, placement: Placement) -> str | None:
        """The group whose ranks each keep a part of a parameter's gradient; None: all keep it."""
        return self._group_of(placement)[1] if self.shard else None

    def _parts_of(self, placement: Placement) -> float:
        """How many different pieces of gradient there are in the places of this rank's."""
        parts = self._group_of(placement)[0].size() if self.shard else 1
        return num_parts(placement, self._grid) * parts

    def _whole_group(self) -> tuple[ProcessGroup | None, bool]:
        """The ranks that together hold every gradient, and whether that group was created."""
        try:
            return norm_group(self._grid, self._name, sharded=self.shard), True
        except UnknownGroupError:
            if self._not_finite != "keep":
                raise
            return None, False

    # -- during backward ----------------------------------------------------------------

    def _attach(self, bucket: Bucket, index: int) -> tuple[Any, ...]:
        slot = bucket.slots[index]
        parameter: Any = slot.parameter
        parameter.main_grad, parameter.overwrite_main_grad = slot.view, True
        parameter.main_grad_written = parameter.grad_added_to_main_grad = False
        if self._uses[id(parameter)] > 1:  # a dummy that meets another gradient has to be zero
            parameter.zero_out_wgrad = True
        parameter.main_grad_owner = Owner(self)
        slot.handed_out = vars(parameter).pop("handed_out_grad", None)
        me = weakref.ref(self)

        def before(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
            if parameter.grad is not None and parameter.grad is slot.handed_out:
                parameter.grad = None  # of the step before: the buffer begins anew
            return (None,) if is_no_gradient(gradients[0]) else None

        def after(*_: object) -> None:
            reducer = me()
            if reducer is not None:
                reducer._arrived(bucket, index)

        with torch.enable_grad():
            node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        # The node lives as long as somebody holds it; its hooks need it to.
        return node, node.register_prehook(before), node.register_hook(after)

    def _arrived(self, bucket: Bucket, index: int) -> None:
        slot = bucket.slots[index]
        if is_capturing(slot.parameter):
            raise CommGridError(
                f"backward reached {slot.placement} while a CUDA graph is being captured; a replay "
                "repeats kernels, but not the hooks that decide what is overwritten and when "
                "gradients are sent. Capture the forward and backward of parts without a "
                "GradientReducer, or train without graphs"
            )
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.check_whole(bucket, slot.placement)
        was_foreign = slot.foreign
        take_in(slot)
        if slot.foreign and not was_foreign:
            self._prepare_for_foreign()
        if not self._synchronizing:
            return
        if bucket.launched:
            raise CommGridError(
                f"backward reached {slot.placement} again before finish(); call finish() after "
                "each backward, wrap all microbatches but the last in no_sync(), and checkpoint "
                "activations with use_reentrant=False"
            )
        bucket.missing.discard(index)
        self._begun = True
        self._launch(all_of_them=False)

    def _prepare_for_foreign(self) -> None:
        """Zeroes the buffers that others' layers add to, as soon as a step's forward begins."""
        if self._clears:
            return
        self._clears = True
        hook = _Clear(weakref.ref(self))
        for module in self.model.modules():
            self._handles.append((module, module.register_forward_pre_hook(hook)))

    def _launch(self, *, all_of_them: bool) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing and not all_of_them:
                return
            self._next += 1
            bucket.launched = True
            # No gradient here: nothing of the step before either.
            zero(slot for slot in bucket.slots if not slot.arrived)
            for slot in bucket.slots:
                slot.is_zero = False  # others' gradients come in, even where this rank has none
            if bucket.shared is not None:
                bucket.pending = self._start_shared(bucket, bucket.shared)
            elif bucket.group.size() > 1:
                bucket.pending = self._start(bucket)

    def _start_shared(self, bucket: Bucket, sharers: ProcessGroup) -> Pending:
        """The sum over the copies of other stages, and only then the sum over other data."""
        adding = start_all_reduce_(bucket.gradient, sharers)

        def then() -> Tensor:
            return self._start(bucket).wait() if bucket.group.size() > 1 else bucket.gradient

        return Pending(adding.work, then)

    def _start(self, bucket: Bucket) -> Pending:
        if not self.shard:
            return start_all_reduce_(bucket.gradient, bucket.group)
        if bucket.gradient.device.type == "cpu":
            while len(self._in_flight) >= _IN_FLIGHT:
                wait_for(self._in_flight.pop(0))
            self._in_flight.append(bucket)
        return start_reduce_scatter_(bucket.gradient, bucket.group)

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
    def finish(self, count: float | Tensor | None = None) -> None:
        """Waits until every gradient is the average; once a step, on all ranks of the grid.

        Afterwards `.grad` holds it, or None for a parameter that no rank used. Where `shard`, or
        with a ShardedOptimizer, the reducer holds it, and reading `.grad` is an error. The next
        backward begins anew. The host waits for the device once.

        Args:
            count: what this rank's gradients are a sum over, such as samples or tokens, also as a
                tensor of shape () on the model's device; the sum over all ranks is divided by the
                sum of the counts, so that ranks with more microbatches or longer ones weigh more. A
                rank that counts 0 needs no backward. None: every rank counts the same, and its
                gradients are averages already.

        Raises:
            GridMismatchError: a parameter has a gradient on some ranks only.
            ShapeError: the counts add up to zero.
            SpecError: gradients are sharded, and nobody has made a ShardedOptimizer for them.
            CommGridError: the model was moved, or its parameters replaced, frozen or unfrozen; with
                `not_finite="raise"`, a gradient is infinite or NaN, and then names parameter and
                ranks.
        """
        self._check_before_finish()
        for module in self.model.modules() if count is not None else ():
            check: Any = getattr(module, "check_losses", None)
            if check is not None:
                check(counted=True)
        for bucket in self.buckets:
            if not bucket.launched:
                for slot in bucket.slots:  # what was put into `.grad` without a backward
                    if slot.parameter.grad is not slot.handed_out:
                        take_in(slot)
        self._launch(all_of_them=True)
        for bucket in self.buckets:
            wait_for(bucket)
        divisor, wrong = self._verdict.reach(count, look=self._not_finite != "keep")
        self.is_finite = self._verdict.is_finite
        if divisor != 1 and self.buckets:
            torch._foreach_div_([b.gradient[b.own] for b in self.buckets], divisor)
        skips = self._not_finite == "skip" and not self.is_finite
        for slot in self.slots:
            slot.is_zero = not slot.used  # then it is a sum of zeros
        self._reset()
        for bucket in self.buckets:
            if skips:
                for slot in bucket.slots:
                    slot.used = False
            self._hand_out(bucket)
        wrong = wrong or changed(self.model, self.slots)
        if wrong is None and self._not_finite == "raise" and not self.is_finite:
            wrong = check_finite(self.pieces, self._verdict.whole, self.model)
        if wrong is not None:
            raise wrong

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
        """Forgets what backward has accumulated, for a step that is given up.

        On all ranks of the group, or on none, once backward has begun on all of them or on none:
        what some have begun to send the others have to take. After `finish` it is not needed.
        """
        if self._begun:  # on some ranks a bucket may be under way that is not full on this one
            self._launch(all_of_them=True)
        for bucket in self.buckets:
            wait_for(bucket)
        self._reset()
        for slot in self.slots:
            slot.used = False
            slot.handed_out = slot.parameter.grad = None
        self.gradients_are_done()

    def gradients_are_done(self) -> None:
        """Nobody needs the reduced gradients any more: where others add to them, zeros are due."""
        if not self._clears:
            return
        foreign = [slot for slot in self.slots if slot.foreign and not slot.arrived]
        zero(foreign)
        for slot in foreign:
            slot.parameter.overwrite_main_grad = False  # type: ignore[attr-defined]

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.launched, bucket.missing = False, set(range(len(bucket.slots)))
            for slot in bucket.slots:
                slot.arrived = False
                slot.parameter.overwrite_main_grad = True  # type: ignore[attr-defined]
                slot.parameter.main_grad_written = False  # type: ignore[attr-defined]
        self._in_flight.clear()
        self._next, self._begun = 0, False

    def _hand_out(self, bucket: Bucket) -> None:
        """Sets `.grad`: to the buffer's own memory where it has the parameter's dtype."""
        flat = bucket.gradient
        if not self.keeps_gradients:
            flat = flat.to(bucket.slots[0].parameter.dtype)
        for slot in bucket.slots:
            slot.handed_out = None
            if slot.used and self.keeps_gradients:
                slot.handed_out = KeptGradient(slot.parameter)
            elif slot.used:
                own = slot.view if flat is bucket.gradient else slot.of(flat)
                # Others' layers find zeros in the buffer, so that it cannot be what is handed out.
                slot.handed_out = own.clone() if slot.foreign and own is slot.view else own
            slot.parameter.grad = slot.handed_out

    # -- norm ---------------------------------------------------------------------------

    def gradient_norm(self) -> Tensor:
        """The 2-norm of all averaged gradients of the unsharded model, the same on every rank.

        One all-reduce of one number. Call it after `finish`.

        Returns:
            A float64 tensor of shape () on the model's device.

        Raises:
            UnknownGroupError: the grid has no group of the ranks that hold the model.
        """
        if not self._has_whole:
            norm_group(self._grid, self._name, sharded=self.shard)  # which says what is missing
        return self._verdict.squares().sqrt()

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; returns what it was.

        Args:
            max_norm: above 0.

        Raises:
            ShapeError: max_norm is not above 0.
        """
        if not max_norm > 0:
            raise ShapeError(f"clip_gradients(max_norm={max_norm}): expected above 0")
        norm = self.gradient_norm()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        held = self.gradients()
        if held and (norm.device.type != "cpu" or not scale >= 1):  # also where it is NaN
            torch._foreach_mul_(held, scale)
        return norm

    def gradients_of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """What this rank has of some parameters' reduced gradients; of others nothing."""
        wanted = {id(parameter) for parameter in parameters}
        held = [p.gradient for p in self.pieces if id(p.slot.parameter) in wanted]
        return held + self._copies(slot for slot in self.slots if id(slot.parameter) in wanted)

    def gradients(self) -> list[Tensor]:
        """What this rank has of the reduced gradients: flat parts, and copies in `.grad`."""
        held = [bucket.gradient[bucket.own] for bucket in self.buckets]
        return held + self._copies(self.slots)

    @staticmethod
    def _copies(slots: Iterable[Slot]) -> list[Tensor]:
        """What was handed out in memory of its own."""
        given = [slot.handed_out for slot in slots if slot.handed_out is not slot.view]
        return [one for one in given if one is not None and not isinstance(one, KeptGradient)]


class _Clear:
    """A forward pre-hook of a reducer that is alive; a copied or pickled model's does nothing."""

    def __init__(self, reducer: Callable[[], GradientReducer | None]) -> None:
        self._reducer = reducer

    def __call__(self, *_: Any) -> None:
        reducer = self._reducer()
        if reducer is not None and not reducer.keeps_gradients and torch.is_grad_enabled():
            reducer.gradients_are_done()

    def __reduce__(self) -> tuple[type[_Clear], tuple[type[None]]]:
        return _Clear, (type(None),)
