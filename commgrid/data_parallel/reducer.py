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
"""  # noqa: E501

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from commgrid.collectives import all_gather
from commgrid.collectives.asynchronous import Pending, start_all_reduce_, start_reduce_scatter_
from commgrid.data_parallel.buckets import Bucket, Lane, Slot, make_lanes, pieces_of
from commgrid.data_parallel.norm import device_of, norm_group, num_parts, total_norm
from commgrid.errors import (
    CommGridError,
    GridMismatchError,
    ShapeError,
    SpecError,
    UnknownGroupError,
)
from commgrid.parameters import Placement, drop_main_grad, placements
from commgrid.runtime.registry import get_grid

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

_IN_FLIGHT = 2  # buckets whose exchange buffers exist at once on the CPU


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
        bucket_bytes: how much travels at once.
        dtype: of the buffers; None: fp32 for half-precision parameters, else the parameter's.

    Raises:
        SpecError: the model has a reducer already, is sharded by FSDP2, or has partial gradients
            over a group that cannot be combined with `group`.
        GridMismatchError: the ranks of a group have other parameters, shapes or dtypes.

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
        bucket_bytes: int = 25 * 2**20,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._grid = grid or get_grid()
        self.model, self.shard = model, shard
        self._name, self._expert_name = group, expert_group
        self.group = self._grid.get_group(group)
        trained = [p for p in placements(model) if p.parameter.requires_grad]
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
        self.lanes, self.buckets = make_lanes(
            trained, self._group_of, shard=shard, bucket_bytes=bucket_bytes, dtype=dtype
        )
        self._compare((shard, bucket_bytes, str(dtype)))
        self.pieces = pieces_of(self.buckets)
        self.keeps_gradients = shard
        self.weights_loaded: Callable[[], object] = _nothing
        """Called when the model's weights were set otherwise than by load_state_dict."""
        self._next = 0
        self._synchronizing = True
        self._in_flight: list[Bucket] = []
        handles = [
            handle
            for bucket in self.buckets
            for index in range(len(bucket.slots))
            for handle in self._attach(bucket, index)
        ]
        self._detach = weakref.finalize(self, _detach, handles, self.slots)

    @property
    def slots(self) -> list[Slot]:
        """Every parameter's place, in the order in which gradients are sent."""
        return [slot for bucket in self.buckets for slot in bucket.slots]

    def close(self) -> None:
        """Takes its hooks and buffers off the model, which is then as it was before."""
        self._detach()

    def _compare(self, options: tuple[object, ...]) -> None:
        """Refuses a model that is another one on other ranks, whose collectives would not meet."""
        mine = [
            (placement.name if placement.region == "dense" else "", tuple(slot.parameter.shape),
             str(slot.parameter.dtype), lane.name)
            for lane in self.lanes for slot in lane.slots for placement in [slot.placement]
        ]  # fmt: skip
        digest = int.from_bytes(hashlib.sha256(repr((mine, options)).encode()).digest()[:7], "big")
        dense = self._grid.spec.regions[0].axes
        axes = [axis for axis in dense if axis != "pp" and self._grid.size(axis) > 1]
        try:  # all that may share a lane; where no such group was created, those that do
            group = self._grid.get_group(*axes) if axes else None
        except UnknownGroupError:
            group = self.group
        if group is None:
            return
        told = torch.tensor([digest], device=device_of(self.model))
        found = all_gather(told, group).tolist()
        if len(set(found)) > 1:
            ranks = dist.get_process_group_ranks(group)
            usual = max(found, key=found.count)
            odd = [rank for rank, theirs in zip(ranks, found, strict=True) if theirs != usual]
            raise GridMismatchError(
                f"ranks {odd} of {ranks} have other parameters than the rest, in names, shapes, "
                "dtypes, order or marks, or other arguments of GradientReducer; this rank has "
                f"{len(mine)} parameters"
            )

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

    # -- during backward ----------------------------------------------------------------

    def _attach(self, bucket: Bucket, index: int) -> Iterator[Any]:
        slot = bucket.slots[index]
        parameter: Any = slot.parameter
        parameter.main_grad, parameter.overwrite_main_grad = slot.view, True
        parameter.main_grad_owner = _Owner(self)
        me = weakref.ref(self)

        def before(_: object) -> None:
            if parameter.grad is not None and parameter.grad is slot.handed_out:
                parameter.grad = None  # of the step before: the buffer begins anew

        def after(*_: object) -> None:
            reducer = me()
            if reducer is not None:
                reducer._arrived(bucket, index)

        with torch.enable_grad():
            node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        # The node lives as long as somebody holds it; its hooks need it to.
        yield node, node.register_prehook(before), node.register_hook(after)

    def _arrived(self, bucket: Bucket, index: int) -> None:
        slot = bucket.slots[index]
        parameter: Any = slot.parameter
        gradient = parameter.grad
        _take_in(slot)
        if not self._synchronizing:
            return
        if bucket.launched:
            raise CommGridError(
                f"backward reached {slot.placement} again before finish(); call finish() after "
                "each backward, wrap all microbatches but the last in no_sync(), and checkpoint "
                "activations with use_reentrant=False"
            )
        bucket.missing.discard(index)
        # A gradient that its layer wrote may be reported from another thread than autograd's for
        # this GPU; collectives start from that one only, in one order.
        if gradient is not None or parameter.device.type == "cpu":
            self._launch(all_of_them=False)

    def _launch(self, *, all_of_them: bool) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing and not all_of_them:
                return
            self._next += 1
            bucket.launched = True
            for slot in bucket.slots:
                if getattr(slot.parameter, "overwrite_main_grad", False):
                    slot.view.zero_()  # no gradient here: nothing of the step before either
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
                _wait(self._in_flight.pop(0))
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

    def finish(self, count: float | Tensor | None = None) -> None:
        """Waits until every gradient is the average; once a step, on all ranks.

        Afterwards `.grad` holds it (where `shard`, or with a ShardedOptimizer, the reducer
        does), or None for a parameter that no rank used. The next backward begins anew.

        Args:
            count: what this rank's gradients are a sum over, such as samples or tokens; the sum
                over all ranks is divided by the sum of the counts, so that ranks with more
                microbatches or longer ones weigh more. A rank that counts 0 needs no backward.
                None: every rank counts the same, and its gradients are averages already.

        Raises:
            GridMismatchError: a parameter has a gradient on some ranks only.
            ShapeError: the counts add up to zero.
            CommGridError: the model was moved, or its parameters replaced, frozen or unfrozen.
        """
        for bucket in self.buckets:
            if not bucket.launched:
                for slot in bucket.slots:  # what was put into `.grad` without a backward
                    if slot.parameter.grad is not slot.handed_out:
                        _take_in(slot)
        self._launch(all_of_them=True)
        divisor, wrong = self._agree(count)
        self._reset()
        for bucket in self.buckets:
            if divisor != 1:
                bucket.gradient[bucket.own].div_(divisor)
            for slot in bucket.slots:
                self._hand_out(slot)
        wrong = wrong or self._changed()
        if wrong is not None:
            raise wrong

    def zero_grad(self) -> None:
        """Forgets what backward has accumulated, for a step that is given up.

        On all ranks of the group, or on none. After `finish` it is not needed.
        """
        self._reset()
        for slot in self.slots:
            slot.used = False
            self._hand_out(slot)

    def _reset(self) -> None:
        for bucket in self.buckets:
            _wait(bucket)
            bucket.launched, bucket.missing = False, set(range(len(bucket.slots)))
        self._in_flight.clear()
        self._next = 0

    def _changed(self) -> CommGridError | None:
        """Whether the model still trains the parameters that the buckets were made for."""
        now = {id(p): p for p in self.model.parameters() if p.requires_grad}
        for slot in self.slots:
            parameter = now.pop(id(slot.parameter), None)
            if parameter is None or slot.kind != (parameter.dtype, parameter.device):
                return CommGridError(
                    f"{slot.placement} was moved, replaced or frozen after its GradientReducer was "
                    "made; close() that and make a new one, once the model is as it stays"
                )
        for parameter in now.values():
            return CommGridError(
                f"a parameter of shape {tuple(parameter.shape)} was added or unfrozen after the "
                "GradientReducer was made; close() that and make a new one"
            )
        return None

    def _hand_out(self, slot: Slot) -> None:
        parameter: Any = slot.parameter
        parameter.overwrite_main_grad = True
        slot.handed_out = None
        if slot.used and not self.keeps_gradients:
            slot.handed_out = slot.view.to(parameter.dtype)  # the view itself if that is its own
        parameter.grad = slot.handed_out

    def _agree(self, count: float | Tensor | None) -> tuple[float, CommGridError | None]:
        """What to divide by, and what is wrong: a gradient is there on all ranks or on none."""
        told: dict[ProcessGroup, list[float]] = {}
        for slot in self.slots:
            slot.used = not getattr(slot.parameter, "overwrite_main_grad", False)
        self._share_use()
        for lane in self.lanes:
            absent = float(count is not None and float(count) == 0)
            told[lane.group] = [*[float(slot.used) for slot in lane.slots], absent]
        if count is not None:
            told.setdefault(self.group, []).append(float(count))
        heard: dict[ProcessGroup, list[float]] = dict(told)
        sent = {
            group: start_all_reduce_(self._vector(numbers), group)
            for group, numbers in told.items() if group.size() > 1
        }  # fmt: skip
        for group, pending in sent.items():
            heard[group] = pending.wait().tolist()
        total = float(self.group.size()) if count is None else heard[self.group].pop()
        if total <= 0:
            return 1, ShapeError(
                f"finish(count={count}): the counts of the {self.group.size()} ranks of group "
                f"{self._name!r} add up to {total:g}; expected above 0"
            )
        lopsided = [self._lopsided(lane, heard[lane.group]) for lane in self.lanes]
        return total, next((error for error in lopsided if error), None)

    def _share_use(self) -> None:
        """A parameter that one stage uses has a gradient on every stage with a copy of it."""
        for bucket in self.buckets:
            if bucket.shared is not None:
                uses = self._vector([float(slot.used) for slot in bucket.slots])
                found = start_all_reduce_(uses, bucket.shared).wait().tolist()
                for slot, used in zip(bucket.slots, found, strict=True):
                    slot.used = used > 0

    def _vector(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=device_of(self.model))

    def _lopsided(self, lane: Lane, heard: list[float]) -> CommGridError | None:
        *ranks, absent = heard
        size = lane.group.size()
        for slot, having in zip(lane.slots, ranks, strict=True):
            mine, slot.used = "one" if slot.used else "none", having > 0
            if 0 < having < size - absent:
                return GridMismatchError(
                    f"{slot.placement}: {int(having)} of the {size} ranks of group {lane.name!r} "
                    f"({dist.get_process_group_ranks(lane.group)}) have a gradient for it, and "
                    f"this rank has {mine}; every rank must use it in a step, or none"
                )
        return None

    # -- norm ---------------------------------------------------------------------------

    def gradient_norm(self) -> Tensor:
        """The 2-norm of all averaged gradients of the unsharded model, the same on every rank.

        One all-reduce of one number. Call it after `finish`.

        Returns:
            A float64 tensor of shape () on the model's device.
        """
        held = []
        for piece in self.pieces:
            if piece.slot.used:
                group, _ = self._group_of(piece.slot.placement)
                parts = group.size() if self.shard else 1
                held.append((piece.gradient, num_parts(piece.slot.placement, self._grid) * parts))
        whole = norm_group(self._grid, self._name, sharded=self.shard)
        return total_norm(held, whole, device_of(self.model))

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
        if norm.device.type == "cpu" and scale == 1:
            return norm
        for bucket in self.buckets:
            bucket.gradient[bucket.own].mul_(scale)
            for slot in bucket.slots:
                if slot.handed_out is not None and slot.handed_out is not slot.view:
                    slot.handed_out.mul_(scale)
        return norm


class _Owner:
    """Who a parameter's buffer belongs to; a copy or a pickle of the parameter has none."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = weakref.ref(reducer)

    @property
    def reducer(self) -> GradientReducer | None:
        """That one, if it still is there."""
        return self._reducer()

    @property
    def keeps_gradients(self) -> bool:
        """Whether that reducer keeps the gradients to itself."""
        reducer = self._reducer()
        return reducer is not None and reducer.keeps_gradients

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _nothing() -> None:
    """What a reducer without an optimizer has to do when weights were loaded."""


def _take_in(slot: Slot) -> None:
    """Moves a parameter's `.grad` into its place in the bucket."""
    parameter: Any = slot.parameter
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    if parameter.overwrite_main_grad:
        slot.view.copy_(gradient)
        parameter.overwrite_main_grad = False
    else:
        slot.view.add_(gradient)


def _wait(bucket: Bucket) -> None:
    if bucket.pending is not None:
        pending, bucket.pending = bucket.pending, None
        pending.wait()


def _detach(handles: list[tuple[Any, Any, Any]], slots: list[Slot]) -> None:
    for _, *hooks in handles:
        for hook in hooks:
            hook.remove()
    handles.clear()
    for slot in slots:
        drop_main_grad(slot.parameter)
