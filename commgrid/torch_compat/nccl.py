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

import os
import pickle
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.utils
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import SpecError
from commgrid.planning.group_row import GroupOptions

NAMES = ("nccl", "nccl-legacy", "nccl2", "nccl-lazy")

_SUSPENDS = (2, 29, 7)
_HANDLES_ERRORS, _DUMPS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT"
_DUMP_WAIT = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_BLOCKS = "TORCH_NCCL_BLOCKING_WAIT"
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


def device_name(host: str) -> str:
    """Return the name of this rank's GPU, the same in all processes; as NCCL, by host and serial.

    Args:
        host: NCCL_HOSTID takes its place, as it does in NCCL.
    """
    serial = torch.cuda.get_device_properties(rank_device()).uuid
    return f"{os.environ.get('NCCL_HOSTID') or host} {serial}"


def device_for(kinds: Collection[str]) -> torch.device | None:
    """The device to create a group of these backends on; None: they take it from the first tensors.

    torchcomms, if torch is switched to it, takes any index if none is given.
    """
    comms = getattr(getattr(dist, "config", None), "use_torchcomms", False)
    asks = is_bound(kinds) or (comms and {*kinds} - {"gloo", "fake"})
    if not asks or not torch.cuda.is_available():
        return None
    return rank_device()


def make_options(asked: GroupOptions, kinds: Collection[str], timeout: timedelta) -> Any:
    """torch's options for NCCL; None where nothing is asked of it.

    Communicators block while they connect, as by torch's default: its C++ takes the "in progress"
    of others for an error in some calls, and they hung at random (pytorch#153960).

    Args:
        asked: what the groups table says.
        kinds: the group's backends.
        timeout: of its collectives.

    Raises:
        SpecError: an option that this torch does not have.
    """
    bound = is_bound(kinds)
    if not (asked.nccl or bound) or not dist.is_nccl_available():
        return None
    made: Any = dist.ProcessGroupNCCL.Options()
    made._timeout = timeout  # torch warns where this and its argument differ
    if bound:
        made.lazy_init = True  # what is to connect at start does so in the exchange of ranks
    for key, value in asked.nccl:
        target = made if key == "is_high_priority_stream" else made.config
        if not hasattr(target, key):
            raise SpecError(
                f"nccl.{key}: the NCCL of torch {torch.__version__} does not have it; leave it out"
            )
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
    keeps the communicator until then. After a timeout it also sleeps four times as long as a dump
    of the flight recorder may take, also where none is written.
    """
    return _set({_HANDLES_ERRORS: "0", _DUMPS: "0", _DUMP_WAIT: "1"})


def dumps_nothing() -> AbstractContextManager[None]:
    """Within it, WORLD is made so that a timeout of any group does not end the process.

    Otherwise a thread of torch's, which begins with the first group of a process, waits for the
    ranks to write their flight recorders, and ends the process after 480 s.
    """
    return _set({_DUMPS: "0"})


@contextmanager
def _set(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables of torch's that the environment does not set.

    Once for many groups: to change the environment while a thread of NCCL's reads it is a race.
    """
    ours = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            del os.environ[key]


def what_disables_the_watch(started_here: bool) -> list[str]:
    """Return what the environment does to a watched grid on NCCL, and what to set instead.

    Args:
        started_here: whether commgrid has started WORLD.
    """
    told = []
    if os.environ.get(_HANDLES_ERRORS, "0") != "0":
        told.append(
            f"{_HANDLES_ERRORS}={os.environ[_HANDLES_ERRORS]} lets torch end this process after a "
            "failure, before the failed rank is named; unset it"
        )
    if os.environ.get(_BLOCKS, "0") != "0":
        told.append(
            f"{_BLOCKS}={os.environ[_BLOCKS]} lets no thread of torch's see a timeout, so that a "
            "late rank is not named; unset it"
        )
    if not started_here and os.environ.get(_DUMPS) != "0":
        told.append(
            f"torch.distributed was started without {_DUMPS}=0: torch ends each survivor of a "
            "failure some minutes after it (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, 480 s), also after "
            "commgrid.rebuild; set it in the job's script, or let commgrid.initialize start "
            "torch.distributed"
        )
    return told


def error_of(backend: Any) -> str:
    """Return the error that a backend has found by itself: `timeout`, `connection`, or empty."""
    if not hasattr(backend, "get_error"):
        return ""
    found = str(backend.get_error().name).lower()
    return {"success": "", "timeout": "timeout"}.get(found, "connection")


class Progress(NamedTuple):
    """The numbers of a backend's last calls, as torch's flight recorder has them.

    Collectives and messages are counted apart, so that numbers of the two do not compare.

    Args:
        enqueued: that a device has been given.
        completed: that a device has ended.
    """

    enqueued: int
    completed: int


def progress_of(backend: Any) -> Progress | None:
    """Return a backend's progress; None where torch does not record it, or it made no call."""
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    if dump is None or not hasattr(backend, "uid"):
        return None
    found = pickle.loads(dump(False, False, False)).get("pg_status", {}).get(str(backend.uid))
    if not found:
        return None
    return Progress(int(found["last_enqueued_collective"]), int(found["last_completed_collective"]))


def held_call(backend: Any, group: dist.ProcessGroup) -> int:
    """Return the number of a collective that holds a thread, and that no device has; 0: none.

    NCCL makes some connections within the first call that needs them, and torch counts the call
    before.
    """
    if not is_called_on(group):  # asked first: a dump names all ranks of all groups
        return 0
    number, progress = backend._get_sequence_number_for_group(), progress_of(backend)
    return 0 if progress is None or number <= progress.enqueued else int(number)


def is_called_on(group: dist.ProcessGroup) -> bool:
    """Whether a thread is within a function of torch.distributed on a group."""
    for frame in sys._current_frames().values():
        each: FrameType | None = frame
        while each is not None:
            if each.f_code.co_filename in _THAT_CALL and any(
                each.f_locals.get(name) is group for name in ("group", "process_group", "pg")
            ):
                return True
            each = each.f_back
    return False


_THAT_CALL = (c10d.__file__, torch.distributed.utils.__file__)
"""Modules whose functions call groups, and none of the program's functions."""


def has_call_under_way(backend: Any) -> bool | None:
    """Whether a call of this rank has not ended; None where torch does not record it."""
    progress = progress_of(backend)
    if progress is not None:
        return progress.enqueued != progress.completed
    return None if backend._get_sequence_number_for_group() else False  # it was never used


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
