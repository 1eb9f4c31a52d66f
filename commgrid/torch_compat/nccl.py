"""NCCL in torch: which of its two backends a name means, and what that one has to be told.

| name | torch 2.11 to 2.13 | 2.14 | 2.15 |
|---|---|---|---|
| `nccl` | first | first (second where TORCH_DIST_USE_NCCL2=1) | second (first where it is 0) |
| `nccl-legacy` | | first | first |
| `nccl2`, `nccl-lazy` | | second | second |

The first connects when it is first used, on the device of the tensors. The second does so
too in 2.14. In 2.15 it is bound to a device when it is created (the group's, else LOCAL_RANK's,
else the global rank modulo the number of devices, which it then writes into the group, WORLD
too), and connects there and then, unless its options say `lazy_init`. So from 2.15 on it gets the
current device, which is the one this rank has taken, and connects at first use like the first.
`nccl-lazy` has a communicator more for each pair of ranks that send to each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import SpecError
from commgrid.planning.group_row import GroupOptions

NAMES = ("nccl", "nccl-legacy", "nccl2", "nccl-lazy")

CONNECTS_WITHIN = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""torch's own, in seconds; the first backend reads it once in a process."""
_SUSPENDS = (2, 29, 7)
_HANDLES_ERRORS, _DUMPS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT"
_SECOND_IS_NCCL = "TORCH_DIST_USE_NCCL2"


def is_bound(kinds: Collection[str]) -> bool:
    """Whether one of these backends takes its device when it is created."""
    if not dist.is_nccl_available() or not hasattr(dist.ProcessGroupNCCL.Options, "lazy_init"):
        return False
    first_is_nccl = os.environ.get(_SECOND_IS_NCCL) == "0"
    return bool({"nccl2", "nccl-lazy"} & set(kinds)) or ("nccl" in kinds and not first_is_nccl)


def ending_at_abort(kinds: Collection[str]) -> list[str]:
    """Return those of some backends that end the process when a group is aborted: 2.14's second.

    See https://github.com/pytorch/pytorch/pull/192105.
    """
    options = getattr(getattr(dist, "ProcessGroupNCCL", None), "Options", None)
    return [] if hasattr(options, "lazy_init") else sorted({"nccl2", "nccl-lazy"} & set(kinds))


def rank_device() -> torch.device:
    """This rank's CUDA device: WORLD's where it is bound to one, else the current one.

    A program may start WORLD with a device that is not the current one.
    """
    world = dist.group.WORLD
    bound = None if world is None else world.bound_device_id
    if bound is not None and bound.type == "cuda":
        return torch.device(bound)
    return torch.device("cuda", torch.cuda.current_device())


def device_for(kinds: Collection[str]) -> torch.device | None:
    """The device to create a group of these backends on; None: they take it from the first tensors.

    torchcomms, if torch is switched to it, takes any index if none is given.
    """
    comms = getattr(getattr(dist, "config", None), "use_torchcomms", False)
    asks = is_bound(kinds) or (comms and {*kinds} - {"gloo", "fake"})
    if not asks or not torch.cuda.is_available():
        return None
    return rank_device()


def make_options(
    asked: GroupOptions,
    kinds: Collection[str],
    timeout: timedelta,
    connect_within: float | None = None,
) -> Any:
    """torch's options for NCCL; None where nothing is asked of it.

    Args:
        asked: what the groups table says.
        kinds: the group's backends.
        timeout: of its collectives.
        connect_within: seconds that members may take to connect; None: as long as NCCL waits.

    Raises:
        SpecError: an option that this torch does not have.
    """
    bounded = connect_within is not None and "blocking" not in dict(asked.nccl)
    bound = is_bound(kinds)
    if not (asked.nccl or bounded or bound) or not dist.is_nccl_available():
        return None
    made: Any = dist.ProcessGroupNCCL.Options()
    made._timeout = timeout  # torch warns where this and its argument differ
    if bound:
        made.lazy_init = True  # what is to connect at start does so in the exchange of ranks
    if bounded and hasattr(made.config, "blocking"):
        # NCCL then returns while it connects, and torch waits for it only so many seconds: the
        # second backend the group's timeout, the first what this variable says.
        made.config.blocking = 0
        os.environ.setdefault(CONNECTS_WITHIN, str(math.ceil(connect_within or 1)))
    for key, value in asked.nccl:
        target = made if key == "is_high_priority_stream" else made.config
        if not hasattr(target, key):
            raise SpecError(f"nccl.{key}: the NCCL of torch {torch.__version__} does not have it")
        setattr(target, key, value)
    return made


def is_connected(backend: Any) -> bool | None:
    """Whether a backend of a group has connected; None: it does not say.

    The second backend says it only in 2.15, and indirectly: what connects at first use cannot be
    split before.
    """
    if hasattr(backend, "_is_initialized"):
        return bool(backend._is_initialized())
    names = ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
    second = [getattr(c10d, name) for name in names if hasattr(c10d, name)]
    if type(backend) not in second:
        return True
    if not hasattr(dist.ProcessGroupNCCL.Options, "lazy_init"):
        return None
    return bool(backend.supports_splitting)


def errors_are_ours() -> AbstractContextManager[None]:
    """Within it, groups of NCCL's first backend leave their errors to a watch.

    Otherwise torch's watchdog thread ends the process some seconds after an error or a timeout, and
    keeps the communicator until then.
    """
    return _off(_HANDLES_ERRORS, _DUMPS)


def dumps_nothing() -> AbstractContextManager[None]:
    """Within it, WORLD is made so that a timeout of any group does not end the process.

    Otherwise a thread of torch's, which begins with the first group of a process, waits for the
    ranks to write their flight recorders, and ends the process after 480 s.
    """
    return _off(_DUMPS)


@contextmanager
def _off(*keys: str) -> Iterator[None]:
    """Set switches of torch's to 0 that the environment does not set."""
    ours = {key: "0" for key in keys if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            del os.environ[key]


def error_of(backend: Any) -> str:
    """Return the error that a backend has found by itself: `timeout`, `connection`, or empty."""
    if not hasattr(backend, "get_error"):
        return ""
    found = str(backend.get_error().name).lower()
    return {"success": "", "timeout": "timeout"}.get(found, "connection")


def can_suspend() -> bool:
    """Whether torch and NCCL free a communicator's memory and take it again (2.12, 2.29.7)."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return False
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return hasattr(dist.ProcessGroupNCCL, "suspend") and version >= _SUSPENDS


def check_device(key: str, backend: str, kind: str) -> None:
    """Refuses NCCL where torch has none, or no device for it.

    Raises:
        SpecError: names the key and its value.
    """
    if kind not in NAMES:
        return
    if not dist.is_nccl_available():
        raise SpecError(f"{key}={backend!r}: this torch was built without NCCL; use gloo")
    if not torch.cuda.is_available():
        raise SpecError(
            f"{key}={backend!r}: NCCL needs a CUDA device, and this process sees none "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); use gloo, or give "
            "it one"
        )


_METHODS = ("alltoall_base", "all_to_all_single")  # torch 2.11 has the first, and later the other
_groups: WeakSet[dist.ProcessGroup] = WeakSet()


def fill_in_sizes(group: dist.ProcessGroup) -> None:
    """Give an all-to-all without sizes on this group equal ones from now on.

    Communicators do not block, so that connecting has a limit: NCCL answers "in progress", and
    torch waits. `all_to_all_single` without sizes does not wait (seen in torch 2.11 with NCCL
    2.28), and "NCCL operation in progress" is then an error. It can go when torch waits there.
    """
    _groups.add(group)
    for name in _METHODS:
        method = vars(dist.ProcessGroup).get(name)
        if method is not None and not hasattr(method, "fills_in_sizes"):
            mended = _filling(getattr(dist.ProcessGroup, name))
            mended.fills_in_sizes = True  # type: ignore[attr-defined]
            setattr(dist.ProcessGroup, name, mended)


def _filling(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        if group in _groups and len(args) >= 4 and not args[2] and not args[3]:
            output, given, _, _, *more = args
            args = (output, given, _shares(output, group), _shares(given, group), *more)
        return method(group, *args, **options)

    return call


def _shares(tensor: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Of equal ranks; none where it cannot be shared equally, which torch then says."""
    each, rest = divmod(tensor.shape[0] if tensor.dim() else 0, group.size())
    return [] if rest or not each else [each] * group.size()
