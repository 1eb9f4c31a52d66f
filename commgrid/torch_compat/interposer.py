"""Listening to every collective that Python issues on a torch process group.

All functions of `torch.distributed` call a method of `ProcessGroup`, and waits call `Work.wait`.
While there is a listener, these methods are replaced by ours, which tell it and call torch's. When
the last listener stops they are torch's own again and cost nothing.

Not seen is what never comes through Python: DistributedDataParallel's own all-reduces, functional
collectives (DTensor's, and what torch.compile has taken in), and a backend called by itself.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.call_records.operations import Alike, Operation, alike, methods
from commgrid.torch_compat import mesh
from commgrid.torch_compat.mesh import Replaced, replace
from commgrid.torch_compat.world import seeing


class Arguments(NamedTuple):
    """What this rank hands to torch in a call (`commgrid.call_records.call` is its record).

    Args:
        operation: such as `all_reduce` (`commgrid.call_records.operations`).
        tensors: what the rank hands in; of `recv` and `scatter` what it gets.
        peer: group rank of a transfer's other side, or of the root of a collective with one.
        output: bytes that the rank gets, where all ranks have to get as many.
        reduction: such as `SUM`; "": nothing is reduced.
        tag: of a message on gloo; 0 on backends that match messages by order alone.
        sizes: bytes that an all-to-all sends to each member.
    """

    operation: str
    tensors: Sequence[Tensor]
    peer: int | None
    output: int | None
    reduction: str
    tag: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(each.nbytes for each in self.tensors)

    @property
    def dtype(self) -> str:
        """Of its first tensor; "": it has none."""
        if not self.tensors:
            return ""
        dtype = self.tensors[0].dtype
        return DTYPES.get(dtype) or str(dtype)

    @property
    def shape(self) -> Sequence[int]:
        """Of its first tensor."""
        return self.tensors[0].shape if self.tensors else ()

    @property
    def alike(self) -> Alike:
        """The properties that must agree on all ranks."""
        return alike(self.operation, self.dtype, self.size, self.output, self.peer, self.reduction)


DTYPES = {
    getattr(torch, name): name
    for name in (
        "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8",
        "bool",
    )
}  # fmt: skip


class Listener(Protocol):
    """Whom calls are told."""

    def begins(self, its_group: dist.ProcessGroup, made: Arguments) -> object:
        """A call that is about to be made; what is returned comes back with its end.

        Where it raises, the call is not made.
        """
        ...

    def issued(self, call: object, work: dist.Work | None) -> None:
        """The call has returned what can be waited for."""
        ...

    def failed(self, call: object) -> None:
        """The call, or the wait for it, has raised torch's error; this may raise another."""
        ...

    def waits(self, work: dist.Work) -> None:
        """It is about to be waited for. An error raised here prevents the wait."""
        ...

    def waited(self, work: dist.Work, failed: bool) -> None:
        """It has been waited for, or the wait has failed."""
        ...


Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """Values by objects that can be referred to weakly, found while the object lives.

    A WeakKeyDictionary does the same in five times the time, and every call looks here. Dead
    entries are not removed, only overwritten when an address is used again.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[ref[Any], Value]] = {}

    def __setitem__(self, key: object, value: Value) -> None:
        self._held[id(key)] = ref(key), value

    def get(self, key: object) -> Value | None:
        held = self._held.get(id(key))
        return held[1] if held is not None and held[0]() is key else None

    def pop(self, key: object) -> Value | None:
        """Return a value, and forget it."""
        found = self.get(key)
        if found is not None:  # another thread may have done it meanwhile
            self._held.pop(id(key), None)
        return found


class _None:
    """Stands for a missing reduction."""

    name = ""


_NONE = _None()


class _Batching(threading.local):
    """The batch of a thread.

    Args:
        number: of the batch; 0: none.
        last: the values that listeners returned for its last call.
    """

    number = 0
    last: Sequence[tuple[Listener, object]] = ()


_batching, _batches = _Batching(), itertools.count(1)


@contextmanager
def batched() -> Iterator[None]:
    """Within it, this thread's calls are started as one batch, on any backend."""
    if not _listeners or _batching.number:
        yield
        return
    _batching.number = next(_batches)
    try:
        yield
    finally:
        _batching.number, _batching.last = 0, ()


def batch() -> int:
    """The number of the batch that this thread starts; 0: none."""
    return _batching.number


_lock = threading.Lock()
_listeners: tuple[Listener, ...] = ()
_now = threading.local()
_replaced: dict[tuple[Any, str], Replaced] = {}
"""By class and method."""


def listen(listener: Listener) -> None:
    """Tell a listener of every call from now on. A second registration changes nothing."""
    global _listeners
    with _lock:
        if not any(each is listener for each in _listeners):
            _listeners = (*_listeners, listener)
        _put_in_place()


def stop(listener: Listener) -> None:
    """Remove a listener; with the last one, torch's methods are its own again."""
    global _listeners
    with _lock:
        _listeners = tuple(each for each in _listeners if each is not listener)
        if not _listeners:
            for key, replaced in list(_replaced.items()):
                # If another library has wrapped ours since, ours stays, and tells no listener.
                if replaced.is_on_top:
                    replaced.remove()
                    del _replaced[key]


def put_back() -> None:
    """Undo all changes to torch; with a listener left, its methods are replaced again."""
    with _lock:
        mesh.put_back()
        if _listeners:
            _put_in_place()


def _put_in_place() -> None:
    for name, operation in methods():
        if name in vars(dist.ProcessGroup):  # some are of later versions of torch
            method = getattr(dist.ProcessGroup, name)
            _replace(dist.ProcessGroup, name, _telling(method, operation))
    module = dist.distributed_c10d
    _replace(module, "_update_default_pg", seeing(module._update_default_pg))
    kinds: list[Any] = [dist.Work, *dist.Work.__subclasses__()]
    for kind in kinds:
        if "wait" in vars(kind):  # that of the fake world has its own
            _replace(kind, "wait", _telling_wait(kind.wait))
    batched = _as_batch(dist.batch_isend_irecv)
    for module in (dist, dist.distributed_c10d):
        _replace(module, "batch_isend_irecv", batched)


def _replace(kind: Any, name: str, ours: Callable[..., Any]) -> None:
    if not ((found := _replaced.get((kind, name))) and found.is_in_place):
        _replaced[kind, name] = replace(kind, name, ours)


def _telling(method: Callable[..., Any], operation: Operation) -> Callable[..., Any]:
    at, peer_at, reduces = operation.tensors, operation.peer, operation.reduces
    output_at = operation.outputs if operation.sizes == "outputs" else None

    @wraps(method)
    def call(its_group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        # Not `group`: errors name the caller's function (`commgrid.recording.places`).
        given = args[at] if at is not None and len(args) > at else ()
        options_given = args[-1] if args else options.get("opts")
        peer = output = None
        if peer_at is not None and len(args) > peer_at:
            held = args[peer_at]
            peer = held if isinstance(held, int) else getattr(held, "rootRank", None)
        if output_at is not None and len(args) > output_at:
            output = sum(each.nbytes for each in _flat(args[output_at]))
        reduction = ""
        if reduces:
            reduction = getattr(getattr(options_given, "reduceOp", None), "op", _NONE).name
        made = Arguments(operation.name, _flat(given), peer, output, reduction)
        listeners = _listeners
        _now.blocking = options_given is not None and not getattr(options_given, "asyncOp", True)
        began = [(each, each.begins(its_group, made)) for each in listeners]
        span = _span(its_group, made) if _is_profiling() else _NO_SPAN
        try:
            with span:
                work = method(its_group, *args, **options)
        except RuntimeError:
            for listener, call in began:
                listener.failed(call)
            raise
        for listener, call in began:
            listener.issued(call, work)
        if _batching.number:
            _batching.last = began
        return work

    return call


_NO_SPAN = nullcontext()
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def _span(its_group: dist.ProcessGroup, made: Arguments) -> AbstractContextManager[Any]:
    """The call by its group's first name in the timeline of torch's profiler."""
    described, name = its_group.group_desc, its_group.group_name
    first = name if described in ("", "undefined") else described.split(",")[0]
    return torch.profiler.record_function(f"{first} {made.operation}")


def _as_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def batch_isend_irecv(ops: list[dist.P2POp], *args: Any, **options: Any) -> Any:
        with batched():
            works = function(ops, *args, **options)
            if len(works) == 1:  # NCCL's for all of them: the last call gets it
                for listener, call in _batching.last:
                    listener.issued(call, works[0])
        return works

    return batch_isend_irecv


def _telling_wait(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def wait(work: dist.Work, *args: Any, **options: Any) -> Any:
        listeners = _listeners
        for each in listeners:
            each.waits(work)
        try:
            found = method(work, *args, **options)
        except BaseException:
            for each in listeners:
                each.waited(work, True)
            raise
        for each in listeners:
            each.waited(work, False)
        return found

    return wait


def is_blocking() -> bool:
    """Within `begins`: whether the call is known to be waited for at once; no transfer is."""
    return bool(_now.blocking)


def plain_wait(work: dist.Work, timeout: timedelta) -> None:
    """torch's own wait, which tells no listener."""
    held = _replaced.get((dist.Work, "wait"))
    (dist.Work.wait if held is None else held.before)(work, timeout)


def _flat(given: Any) -> Sequence[Tensor]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if isinstance(given, Tensor):
        return (given,)
    if isinstance(given, list | tuple):
        if given and isinstance(given[0], list | tuple):
            return [tensor for inner in given for tensor in inner]
        return given
    return ()
