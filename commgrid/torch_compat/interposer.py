"""Listening to every collective that Python issues on a torch process group.

All functions of `torch.distributed` call a method of `ProcessGroup`, and waits call `Work.wait`.
While there is a listener, these methods are replaced by ours, which tell it and call torch's. When
the last listener stops they are torch's own again and cost nothing.

Not seen is what never comes through Python: DistributedDataParallel's own all-reduces, functional
collectives (DTensor's, and what torch.compile has taken in), and a backend called by itself.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from inspect import unwrap
from operator import index
from types import FrameType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.call_records.operations import TRANSFERS, Alike, Operation, alike, methods
from commgrid.torch_compat import mesh
from commgrid.torch_compat.mesh import Replaced, replace
from commgrid.torch_compat.world import is_joint, seeing


class Arguments(NamedTuple):
    """Arguments that this rank gives to torch in a call (recorded as `commgrid.call_records.call`).

    Args:
        operation: such as `all_reduce` (`commgrid.call_records.operations`).
        tensors: what the rank hands in; of `recv` and `scatter` what it gets.
        peer: group rank of a transfer's other side, or of the root of a collective with one.
        output: bytes that the rank gets, where all ranks have to get as many.
        reduction: such as `SUM`; "": nothing is reduced.
        tag: of a message on gloo; 0 on backends that match messages by order alone.
        sizes: bytes that an all-to-all sends to each member, then those it expects from each.
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
        return str(self.tensors[0].dtype).removeprefix("torch.") if self.tensors else ""

    @property
    def shape(self) -> Sequence[int]:
        """Of its first tensor."""
        return self.tensors[0].shape if self.tensors else ()

    @property
    def alike(self) -> Alike:
        """The properties that must agree on all ranks."""
        return alike(self.operation, self.dtype, self.size, self.output, self.peer, self.reduction)


class Listener(Protocol):
    """Whom calls are told. A subclass leaves out what it need not know."""

    def begins(self, its_group: dist.ProcessGroup, made: Arguments) -> object:
        """A call that is about to be made; what is returned comes back with its end.

        Where it raises, the call is not made.
        """
        ...

    def issued(self, call: object, work: dist.Work | None) -> None:
        """The call has returned what can be waited for."""
        return

    def failed(self, call: object) -> None:
        """The call was not made, since torch or another listener has raised; this may raise another
        error. `issued` is not called then."""
        return

    def waits(self, work: dist.Work) -> None:
        """It is about to be waited for. An error raised here prevents the wait."""
        return

    def waited(self, work: dist.Work, failed: bool) -> None:
        """It has been waited for, or the wait has failed."""
        return


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


class _Batching(threading.local):
    """The batch of a thread.

    Args:
        number: of the batch; 0: none.
        next: the number of torch's batch of messages, for the calls that it makes.
        last: the values that listeners returned for its last call that had no work.
    """

    number = 0
    next = 0
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
        _batching.number = 0


def batch() -> int:
    """The number of the batch that this thread starts; 0: none."""
    return _batching.number


_lock = threading.Lock()
_listeners: tuple[Listener, ...] = ()
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
    # Not torch's batch itself, which programs may have imported by name.
    module, group = dist.distributed_c10d, dist.ProcessGroup
    _replace(module, "_check_p2p_op_list", _beginning(module._check_p2p_op_list))
    _replace(group, "_end_coalescing", _ending(group._end_coalescing))


def _replace(kind: Any, name: str, ours: Callable[..., Any]) -> None:
    if not ((found := _replaced.get((kind, name))) and found.is_in_place):
        _replaced[kind, name] = replace(kind, name, ours)


def _telling(method: Callable[..., Any], operation: Operation) -> Callable[..., Any]:
    is_transfer = operation.name in TRANSFERS

    @wraps(method)
    def call(its_group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        # Not `group`: errors name the caller's function (`commgrid.recording.places`).
        if is_joint(its_group):
            return method(its_group, *args, **options)
        made = _read(operation, its_group, args, options)
        began: list[tuple[Listener, object]] = []
        in_batch = is_transfer and not _batching.number and _is_in_batch(sys._getframe(1))
        if in_batch:
            _batching.number = _batching.next
        try:
            for listener in _listeners:
                began.append((listener, listener.begins(its_group, made)))
            with _span(its_group, made) if _is_profiling() else _NO_SPAN:
                work = method(its_group, *args, **options)
        except BaseException:
            for listener, call in began:
                listener.failed(call)
            raise
        else:
            for listener, call in began:
                listener.issued(call, work)
            if work is None and _batching.number:
                _batching.last = began
        finally:
            if in_batch:
                _batching.number = 0
        return work

    return call


_NO_SPAN = nullcontext()
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def _span(its_group: dist.ProcessGroup, made: Arguments) -> AbstractContextManager[Any]:
    """The call by its group's first name in the timeline of torch's profiler."""
    described, name = its_group.group_desc, its_group.group_name
    first = name if described in ("", "undefined") else described.split(",")[0]
    return torch.profiler.record_function(f"{first} {made.operation}")


# -- arguments --------------------------------------------------------------------------

_OPTIONS = {
    kind for name, kind in vars(dist.distributed_c10d).items() if name.endswith("Options")
}  # fmt: skip
_REDUCTIONS = {dist.ReduceOp, type(dist.ReduceOp.SUM)}
_PLACES = {
    **dict.fromkeys(
        ("tensors", "tensor", "output_tensors", "output_tensor", "output", "outputs",
         "outputTensor", "output_lists"), 0,
    ),
    **dict.fromkeys(
        ("input_tensors", "input_tensor", "input", "inputs", "inputTensor", "input_list"), 1
    ),
    "dstRank": 1, "srcRank": 1, "tag": 2, "output_split_sizes": 2, "input_split_sizes": 3,
}  # fmt: skip
"""Places of arguments that have a keyword; those of roots differ, and options have none."""


def _read(
    operation: Operation, its_group: dist.ProcessGroup, args: Sequence[Any], options: dict[str, Any]
) -> Arguments:
    """Read the arguments of a call, in any form that torch's methods take."""
    try:
        found = _in_place(operation, args, options) if options else args
        name = operation.name
        tensors = _flat(_at(found, operation.tensors))
        peer = _at(found, operation.peer)
        reduction, held = "SUM" if operation.reduces else "", None
        for each in found:
            if type(each) in _OPTIONS:
                held = each
                each = getattr(held, "reduceOp", None)
            if operation.reduces and type(each) in _REDUCTIONS:
                reduction = getattr(each, "op", each).name
        if operation.peer is not None:
            peer = held.rootRank if held is not None else index(peer)
        output: int | None = None
        tag, sizes = 0, tuple[int, ...]()
        if operation.sizes == "outputs":
            output = sum(each.nbytes for each in _flat(found[operation.outputs or 0]))
        elif name == "all_to_all":
            splits = (found[3], found[2]) if len(found) > 3 else (None, None)
            sizes = (
                *_sizes(tensors, splits[0], its_group),
                *_sizes(_flat(found[operation.outputs or 0]), splits[1], its_group),
            )
        elif name in TRANSFERS:
            tag = _tag(index(found[1 if operation.peer is None else 2]), its_group, tensors)
        return Arguments(name, tensors, peer, output, reduction, tag, sizes)
    except Exception:  # torch says what is wrong with it, or takes more than is known here
        return Arguments(operation.name, (), None, None, "")


def _at(found: Sequence[Any], place: int | None) -> Any:
    return found[place] if place is not None and place < len(found) else None


def _in_place(operation: Operation, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Any]:
    """Arguments in the places in which they stand without keywords."""
    found = dict(enumerate(args))
    others = itertools.count(_MOST_ARGUMENTS)
    for name, value in options.items():
        place = operation.peer if name == "root" else _PLACES.get(name)
        found[next(others) if place is None else place] = value
    return [found.get(place) for place in range(max(found, default=-1) + 1)]


_MOST_ARGUMENTS = 5


def _sizes(
    tensors: Sequence[Tensor], split: Sequence[int] | None, its_group: dist.ProcessGroup
) -> tuple[int, ...]:
    """Bytes for each member, from a list of tensors or from the parts of one."""
    members = its_group.size()
    if split is None and len(tensors) == members:
        return tuple(each.nbytes for each in tensors)
    (tensor,) = tensors
    if not split:
        return (tensor.nbytes // members,) * members
    row = tensor.nbytes // max(len(tensor), 1)
    return tuple(int(each) * row for each in split)


def _tag(tag: int, its_group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> int:
    """A message's tag, where the backend matches by it."""
    if not tag or its_group._get_backend(tensors[0].device).name().lower() != "gloo":
        return 0
    return tag


def _flat(given: Any) -> Sequence[Tensor]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if isinstance(given, Tensor):
        return (given,)
    if isinstance(given, list | tuple):
        if given and isinstance(given[0], list | tuple):
            return [tensor for inner in given for tensor in inner]
        return given
    return ()


# -- batches ----------------------------------------------------------------------------

_BATCH = unwrap(dist.batch_isend_irecv).__code__


def _is_in_batch(frame: FrameType | None) -> bool:
    """Whether a function of torch's that sends or receives was called by torch's batch."""
    return frame is not None and frame.f_back is not None and frame.f_back.f_code is _BATCH


def _beginning(check: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(check)
    def checked(*args: Any, **options: Any) -> Any:
        _batching.next = next(_batches)
        return check(*args, **options)

    return checked


def _ending(method: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL has one work for all messages of a batch: the last one gets it."""

    @wraps(method)
    def end(its_group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        work = method(its_group, *args, **options)
        last, before = _batching.last, _batching.number
        _batching.last, _batching.number = (), before or _batching.next
        for listener, call in last if work is not None else ():
            listener.issued(call, work)
        _batching.number = before
        return work

    return end


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


def plain_wait(work: dist.Work, timeout: timedelta) -> None:
    """torch's own wait, which tells no listener."""
    held = _replaced.get((dist.Work, "wait"))
    (dist.Work.wait if held is None else held.before)(work, timeout)
