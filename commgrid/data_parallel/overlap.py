"""Collectives under way beside computation.

`Reductions` sums gradients during backward, bucket by bucket. `WeightGathers` gathers updated
weights after a step, during the next forward if that is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import (
    Pending,
    start_all_gather_,
    start_all_reduce_,
    start_reduce_scatter_,
)
from commgrid.data_parallel.accumulation import fill
from commgrid.data_parallel.buckets import Bucket
from commgrid.errors import CommGridError, GridDestroyedError, SpecError
from commgrid.parameters import Placement

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

_IN_FLIGHT = 2  # buckets whose exchange buffers exist at once on the CPU


class Reductions:
    """The sums of a step's gradients, each started when its bucket and those before are complete.

    Args:
        buckets: in launch order, the same on all ranks.
        grid: whose groups are used.
        shard: whether each rank keeps 1/n of the sums.
        defers: whether all sums start in `finish` only.
    """

    def __init__(
        self, buckets: Sequence[Bucket], grid: HyperCommGrid, *, shard: bool, defers: bool
    ) -> None:
        self._buckets, self._grid, self._shard, self._defers = buckets, grid, shard, defers
        self._next, self._has_begun = 0, False
        self._in_flight: list[Bucket] = []

    def arrived(self, bucket: Bucket, index: int) -> None:
        """Records a complete gradient, and starts the sums of complete buckets.

        Args:
            bucket, index: of the gradient's slot.
        """
        bucket.missing.discard(index)
        self._has_begun = True
        if not self._defers:
            self._launch(all_of_them=False)

    def finish(self) -> None:
        """Starts the sums of the remaining buckets, and waits for all."""
        self._launch(all_of_them=True)
        for bucket in self._buckets:
            bucket.wait()

    def abandon(self) -> None:
        """Ends a step that is given up."""
        if self._has_begun:  # other ranks may have launched a bucket that is incomplete here
            self._launch(all_of_them=True)
        for bucket in self._buckets:
            bucket.wait()
        self.reset()

    def reset(self) -> None:
        """Prepares for the next backward."""
        for bucket in self._buckets:
            bucket.launched, bucket.missing = False, set(range(len(bucket.slots)))
        self._in_flight.clear()
        self._next, self._has_begun = 0, False

    def _launch(self, *, all_of_them: bool) -> None:
        if self._grid.is_destroyed:
            raise GridDestroyedError(
                f"grid {self._grid.name!r} of this GradientReducer was destroyed; close() the "
                "reducer and make a new one, also if a grid of that name exists again"
            )
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.missing and not all_of_them:
                return
            self._next += 1
            bucket.launched = True
            fill(bucket)
            if bucket.prescale > 1:
                with torch.no_grad():
                    bucket.gradient.div_(bucket.prescale)
            if bucket.shared is not None:
                bucket.pending = self._start_shared(bucket, bucket.shared)
            elif bucket.group.size() > 1:
                bucket.pending = self._start(bucket)
            if bucket.pending is not None:
                for slot in bucket.slots:
                    if slot.sent:
                        slot.parameter.grad = slot.in_flight

    def _start_shared(self, bucket: Bucket, sharers: ProcessGroup) -> Pending:
        """The sum over the copies of other stages, and only then the sum over other data."""
        adding = start_all_reduce_(bucket.gradient, sharers)

        def then() -> Tensor:
            return self._start(bucket).wait() if bucket.group.size() > 1 else bucket.gradient

        return Pending(adding.work, then, adding.group)

    def _start(self, bucket: Bucket) -> Pending:
        if not self._shard:
            return start_all_reduce_(bucket.gradient, bucket.group)
        if bucket.gradient.device.type == "cpu":
            while len(self._in_flight) >= _IN_FLIGHT:
                self._in_flight.pop(0).wait()
            self._in_flight.append(bucket)
        return start_reduce_scatter_(bucket.gradient, bucket.group)


class WeightGathers:
    """Gathers of weights of which each rank has updated a part.

    Args:
        model: whose forwards wait for them.
        weights: of each bucket the flat buffer of its parameters; gathers start with the last.
        overlap: whether they continue during the next forward; else `start` waits.
        units: modules that each wait for their own parameters only.

    Raises:
        SpecError: units without overlap, or that are not modules of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[Bucket, Tensor],
        *,
        overlap: bool,
        units: Sequence[nn.Module],
    ) -> None:
        self._weights = {b: flat for b, flat in weights.items() if b.group.size() > 1}
        self._overlap = overlap
        self.pending: dict[int, Pending] = {}
        """Gathers under way, by id of the bucket."""
        self._awaited = _awaited(model, self._weights, units, overlap)
        end = weakref.finalize(self, _end, self._watch(model), self.pending)
        end.atexit = False

    def start(self) -> None:
        """Starts all gathers, of the parameters that forward uses first before the others."""
        for bucket in reversed(self._weights):
            self.pending[id(bucket)] = start_all_gather_(self._weights[bucket], bucket.group)
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """Returns when every parameter is gathered."""
        for bucket in list(self.pending):
            self.pending.pop(bucket).wait()

    def check(self, bucket: Bucket, placement: Placement) -> None:
        """Refuses a gradient of a parameter that was read before it was gathered.

        Args:
            bucket, placement: of the parameter.

        Raises:
            CommGridError: names the parameter.
        """
        if id(bucket) in self.pending:
            raise CommGridError(
                f"{placement} has a gradient, but was read before it was gathered after the last "
                "step, by code that does not call the module which waits for it, or that "
                "torch.compile made before this optimizer was; use overlap=False, or call the "
                "optimizer's wait() before each forward"
            )

    def disable_overlap(self) -> None:
        """Waits in `start` from now on: compiled code does not wait for what it reads."""
        self._overlap = False
        self.wait()

    def _watch(self, model: nn.Module) -> list[Any]:
        whole, before = _Hook(self._wait_for_all), _Hook(self._wait_for_module)
        hooks: list[Any] = []
        module: Any  # torch does not annotate these methods
        for module in model.modules():
            if self._overlap and (module is model or module._parameters):
                hooks.append(module.register_load_state_dict_pre_hook(whole))
                hooks.append(module.register_state_dict_pre_hook(whole))
            if module in self._awaited:
                hooks.append(module.register_forward_pre_hook(before))
        return hooks

    def _wait_for_all(self, *_: object) -> None:
        self.wait()

    def _wait_for_module(self, module: nn.Module, *_: object) -> None:
        """Waits for the parameters that a module about to run may read."""
        if self.pending:
            for bucket in self._awaited[module]:
                pending = self.pending.pop(bucket, None)
                if pending is not None:
                    pending.wait()


class _Hook:
    """Calls a method of live WeightGathers; the hook of a copied or pickled model does nothing."""

    def __init__(self, method: Callable[..., object] | None = None) -> None:
        self._method = weakref.WeakMethod(method) if method is not None else None
        self.traced = False

    def __call__(self, *given: Any) -> None:
        if torch.compiler.is_compiling():
            self.trace()
            if self.traced:  # always true; a guard, so that torch.compile retraces another model
                return
        method = self._method() if self._method is not None else None
        if method is not None:
            method(*given)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def trace(self) -> bool:
        """Called once, while torch.compile traces a forward; not part of the compiled code."""
        method: Any = self._method() if self._method is not None else None
        if method is not None:
            method.__self__.disable_overlap()
        self.traced = True
        return True

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _end(hooks: list[Any], pending: dict[int, Pending]) -> None:
    """Leaves a model with whole weights, and without hooks."""
    for hook in hooks:
        hook.remove()
    while pending:
        pending.popitem()[1].wait()


def _awaited(
    model: nn.Module, buckets: Iterable[Bucket], units: Sequence[nn.Module], overlap: bool
) -> dict[nn.Module, tuple[int, ...]]:
    """For each module, the ids of the buckets that its forward waits for; empty if `step` waits.

    Covers a module's whole subtree, except units below it, which wait for their own.
    """
    if units and not overlap:
        raise SpecError("units= says what waits for what with overlap=True; give both, or neither")
    modules = set(model.modules())
    for unit in units:
        if unit not in modules:
            raise SpecError(
                f"units: {type(unit).__name__} is not a module of the reducer's model; expected "
                "some of its own, such as list(model.blocks)"
            )
    if not overlap:
        return {}
    places = {id(slot.parameter): id(bucket) for bucket in buckets for slot in bucket.slots}
    found: dict[nn.Module, tuple[int, ...]] = {}

    def below(module: nn.Module) -> dict[int, None]:
        own = {places[id(p)]: None for p in module.parameters(recurse=False) if id(p) in places}
        for child in module.children():
            theirs = below(child)
            if child not in units:
                own |= theirs
        if own:
            found[module] = tuple(own)
        return own

    below(model)
    return found
