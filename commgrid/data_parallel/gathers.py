"""Gathers of updated weights after a step, during the next forward if that is asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from commgrid.collectives.asynchronous import Pending, start_all_gather_
from commgrid.data_parallel.bucket import Bucket, GradientPart
from commgrid.errors import CommGridError, SpecError
from commgrid.parameters import Placement


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


class Updater(Protocol):
    """A ShardedOptimizer, as its reducer sees it."""

    @property
    def gathers(self) -> WeightGathers: ...
    def parts(self) -> list[tuple[GradientPart, Tensor, str | None]]: ...
    def reload(self) -> None: ...
    def wait(self) -> None: ...
