"""Leftovers of a test: resources and settings of a process that a test has not given back."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

_OWNERS = (
    "torch", "torch.Tensor", "torch.autograd", "torch.autograd.Function", "torch.nn.Module",
    "torch.nn.functional", "torch.optim.Optimizer", "torch.distributed",
    "torch.distributed.ProcessGroup", "torch.distributed.Work",
    "torch.distributed.distributed_c10d",
)  # fmt: skip
"""Modules and classes of torch whose members are compared."""

_HOOKS = ("torch.nn.modules.module", "torch.optim.optimizer")
"""Modules that keep hooks for every module or optimizer in dicts named `_global_…`."""

_SETTINGS = {
    "default dtype": "get_default_dtype",
    "default device": "get_default_device",
    "grad mode": "is_grad_enabled",
    "deterministic algorithms": "are_deterministic_algorithms_enabled",
    "anomaly detection": "is_anomaly_enabled",
}
"""Settings of the process, and the function of torch that reads each."""

_VARIABLES_OF_LIBRARIES = (
    "PYTEST_", "COV_", "_TORCHINDUCTOR_", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "CUDA_MODULE_LOADING",
)  # fmt: skip
"""Beginnings of the names of environment variables that pytest and torch set on their own."""

_THREADS_OF_LIBRARIES = ("tqdm_monitor", "commgrid waits for ")
"""Beginnings of the names of threads that a library keeps on purpose: tqdm's lives as long as the
process, and a wait for a key that commgrid has given up lives until the store answers."""

_FILES_OF_LIBRARIES = ("/dev/", "/proc/", "/sys/", "/memfd:")
"""Devices, and shared memory of tensors, which lives as long as they do."""

_KEYS_KEPT = (
    "commgrid/trace/job", "commgrid/questions/count", "commgrid/failures/",
    "commgrid/match/board", "commgrid/rebuild/",
)  # fmt: skip
"""Keys that commgrid keeps in the store for as long as the job lives."""

_PATCHING_ITSELF = ("torch", "commgrid.torch_compat.suspended_groups")
"""Modules whose patches stay until the process ends: torch's own at the first `torch.compile`, and
the redirection of old handles after the first `suspend`."""

_ENDING_SECONDS = 1.0  # that a thread which was told to end gets to do so
_MOST_NAMES = 4  # of patched attributes in one sentence


KINDS = (
    "grids", "groups", "threads", "files", "hooks", "patches", "environment", "settings", "keys",
)  # fmt: skip
"""Kinds of leftovers, in the order in which they are named."""


def kinds_of(leftovers: str | Sequence[str]) -> frozenset[str]:
    """The kinds of leftovers that are no error.

    Args:
        leftovers: "ignore" for all, or a list of kinds.

    Raises:
        ValueError: an unknown kind.

    Example:
        >>> sorted(kinds_of(["threads", "environment"]))
        ['environment', 'threads']
    """
    if leftovers == "ignore":
        return frozenset(KINDS)
    wrong = [leftovers] if isinstance(leftovers, str) else [*{*leftovers} - {*KINDS}]
    if wrong:
        raise ValueError(
            f'leftovers has {wrong[0]!r}; expected "ignore", or a list of {", ".join(KINDS)}'
        )
    return frozenset(leftovers)


class Snapshot:
    """Resources and settings of this process at one time, to find what is left since.

    It holds no grid, process group or file, so none of them lives longer because of it. torch is
    looked at only where the program has imported it. Open files are found through `/proc` and are
    not checked on systems without it. Not checked either are sockets and pipes, since torch keeps
    those of its stores and of WORLD; threads that Python has not started, such as gloo's; and keys
    of stores that cannot list them.

    Args:
        store: a `torch.distributed` store to look for commgrid's keys in; None looks at no store.

    Example:
        >>> import os
        >>> from commgrid.testing import Snapshot
        >>> before = Snapshot()
        >>> os.environ["MODE"] = "fast"
        >>> before.left()
        ["environment variable 'MODE' was set"]
        >>> before.left(["environment"])
        []
        >>> del os.environ["MODE"]
    """

    def __init__(self, store: Any = None) -> None:
        self._store = store
        self._grids = [weakref.ref(grid) for grid in _grids().values()]
        self._groups = set(_groups())
        self._threads = set(threading.enumerate())
        self._files = _files()
        self._hooks = set(_hooks())
        self._attributes = _attributes()
        self._recorder = _recorder()
        self._environment = dict(os.environ)
        self._settings = _settings()
        self._keys = _keys(store)

    def left(self, leftovers: str | Sequence[str] = ()) -> list[str]:
        """Return a sentence for each leftover since the snapshot.

        Args:
            leftovers: kinds that are not looked for, of `KINDS`; or "ignore".

        Call it once all ranks have destroyed their grids: until then the store has keys of theirs.
        A thread that is about to end is given a second.
        """
        looked_for = [kind for kind in KINDS if kind not in kinds_of(leftovers)]
        return [said for kind in looked_for for said in getattr(self, f"_{kind}_left")()]

    def _grids_left(self) -> list[str]:
        known = [grid() for grid in self._grids]
        return [
            f"grid {name!r} is still alive: call commgrid.shutdown()"
            for name, grid in _grids().items()
            if not any(grid is each for each in known)
        ]

    def _groups_left(self) -> list[str]:
        found = {name: group for name, group in _groups().items() if name not in self._groups}
        registry = _loaded("commgrid.runtime.registry._registry")
        tables = registry.tables.values() if registry else ()
        of_grids = {id(group) for table in list(tables) for group in table.values()}
        own = _loaded("torch.distributed")
        if any(group is own.GroupMember.WORLD for group in found.values()):  # others end with it
            return [
                "torch.distributed is still initialized: call commgrid.shutdown() if commgrid "
                "started it, else torch.distributed.destroy_process_group()"
            ]
        return [
            f"process group {_called(name, group)!r} is still registered: call "
            "torch.distributed.destroy_process_group(group)"
            for name, group in found.items()
            if id(group) not in of_grids
        ]

    def _threads_left(self) -> list[str]:
        until = time.monotonic() + _ENDING_SECONDS
        of_grids = "commgrid " if self._grids_left() else None  # they end with the grid
        found = [
            thread
            for thread in threading.enumerate()
            if thread not in self._threads
            and not _is_kept(thread)
            and not (of_grids and thread.name.startswith(of_grids))
        ]
        for thread in found:
            thread.join(max(until - time.monotonic(), 0.0))
        return [
            f"thread {thread.name!r} was started and still runs"
            for thread in found
            if thread.is_alive()
        ]

    def _files_left(self) -> list[str]:
        if self._opened():
            gc.collect()  # closes unreachable files
        return [f"file {path} is still open (fd {fd})" for fd, path in self._opened().items()]

    def _opened(self) -> dict[int, str]:
        now = _files()
        streams = {now.get(fd) for fd in range(3)}  # pytest keeps copies of them
        return {
            fd: path
            for fd, path in now.items()
            if fd > 2
            and self._files.get(fd) != path
            and path not in streams
            # torch's FileStore opens its file for each call, which any thread may be at.
            and path != _file_of(self._store)
        }

    def _hooks_left(self) -> list[str]:
        if _hooks().keys() - self._hooks:
            gc.collect()  # with an unreachable GradientReducer its hooks go
            gc.collect()  # and with an unreachable graph, what its functions have kept
        return [
            f"hook {getattr(hook, '__qualname__', hook)} is still in {place}: call remove() on "
            "the handle that registering it returned"
            for (place, number), hook in _hooks().items()
            if (place, number) not in self._hooks
        ]

    def _patches_left(self) -> list[str]:
        said = []
        traced = _recorder() is not None and _recorder() is not self._recorder
        # Asked for by the environment, it records until the process ends.
        if traced and not _loaded("commgrid.recording.recorder.asked_by_environment")()[0]:
            said.append("commgrid.trace still records: call commgrid.trace.stop()")
        for owner, before in self._attributes.items():
            now = vars(_loaded(owner))
            changed = [name for name in before if now.get(name) is not before[name]]
            removed = [name for name in changed if name not in now]
            patched = [name for name in changed if name in now and not _is_own(now[name], traced)]
            said += [f"{owner}.{name} was removed" for name in removed]
            if len(patched) == 1:
                said.append(f"{owner}.{patched[0]} is still patched")
            elif patched:
                listed = ", ".join(patched[:_MOST_NAMES])
                more = f" and {len(patched) - _MOST_NAMES} more" * (len(patched) > _MOST_NAMES)
                said.append(f"{owner} is still patched: {listed}{more}")
        return said

    def _environment_left(self) -> list[str]:
        before, now, said = self._environment, os.environ, []
        for name in sorted({*before, *now}):
            if before.get(name) == now.get(name) or name.startswith(_VARIABLES_OF_LIBRARIES):
                continue
            how = "set" if name not in before else "removed" if name not in now else "changed"
            said.append(f"environment variable {name!r} was {how}")
        return said

    def _keys_left(self) -> list[str]:
        left = sorted(_keys(self._store) - self._keys)
        return [f"store key {key!r} was left" for key in left]

    def _settings_left(self) -> list[str]:
        now = _settings()
        return [
            f"{what} is {now[what]}, was {before}"
            for what, before in self._settings.items()
            if now[what] != before
        ]


def _loaded(name: str, default: Any = None) -> Any:
    """A module or something in it by its full name, where the module is imported already."""
    for cut in (name, name.rpartition(".")[0]):
        if cut in sys.modules:
            rest = name.removeprefix(cut).lstrip(".")
            return getattr(sys.modules[cut], rest, default) if rest else sys.modules[cut]
    return default


def _grids() -> dict[str, Any]:
    """The live grids, by name."""
    registry = _loaded("commgrid.runtime.registry._registry")
    grids = dict(registry.grids) if registry else {}
    return {name: grid for name, grid in grids.items() if grid.is_alive}


def _recorder() -> Any:
    """The recorder of this process's collectives, or None."""
    current: Callable[[], Any] | None = _loaded("commgrid.recording.recorder.current")
    return current() if current else None


def _groups() -> dict[str, Any]:
    """torch's process groups, by the names that torch gives them."""
    c10d = _loaded("torch.distributed.distributed_c10d")
    return {name: group for group, name in c10d._world.pg_names.items()} if c10d else {}


def _called(name: str, group: Any) -> str:
    described: str = getattr(group, "group_desc", "")
    return name if described in ("", "undefined") else described


def _is_kept(thread: threading.Thread) -> bool:
    """Whether a library keeps a thread until the process ends."""
    if type(thread).__name__ == "_DummyThread":  # one of C++ that has called Python
        return True
    if thread.name.startswith(_THREADS_OF_LIBRARIES):
        return True
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and name.endswith(".async_compile"):  # inductor's pool
            threads = getattr(module, "get_compile_threads", lambda: 1)()
            pool = module.AsyncCompile.pool() if threads > 1 else None  # one core has none
            return thread in getattr(pool, "_threads", ())
    return False


def _files() -> dict[int, str]:
    """Paths of this process's open files, by descriptor; {} where there is no /proc."""
    found: dict[int, str] = {}
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for number in numbers:
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # it was the folder's own
            continue
        standard = int(number) <= 2
        if standard or (path.startswith("/") and not path.startswith(_FILES_OF_LIBRARIES)):
            found[int(number)] = path
    return found


def _file_of(store: Any) -> str | None:
    """The file of torch's FileStore, beneath its prefixes; None: another store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "path", None)


def _hooks() -> dict[tuple[str, int], Any]:
    """Hooks that run for every module or optimizer, by their place and number."""
    found = {}
    for name in _HOOKS:
        for member, hooks in vars(_loaded(name, object)).items():
            if member.startswith("_global_") and isinstance(hooks, dict):
                for number, hook in hooks.items():
                    if callable(hook):  # some dicts hold flags of the hooks in others
                        found[f"{name}.{member}", number] = hook
    return found


def _attributes() -> dict[str, dict[str, Any]]:
    """The functions, classes and descriptors of each owner in `_OWNERS`."""
    return {
        name: {
            member: value
            for member, value in vars(owner).items()
            if callable(value) or hasattr(type(value), "__get__")
        }
        for name in _OWNERS
        if (owner := _loaded(name)) is not None
    }


_TRACING = ("commgrid.torch_compat.interposer", "commgrid.torch_compat.world")
"""Modules that put functions in place of torch's while calls are recorded."""


def _is_own(value: Any, traced: bool) -> bool:
    """Whether a module that may do so has put this in place of a member of torch's."""
    function = getattr(value, "__func__", value)
    # functools.wraps copies the module's name, but not the globals.
    names = getattr(function, "__globals__", None)
    module: str = names.get("__name__", "") if names else getattr(function, "__module__", "") or ""
    if traced and module in _TRACING:  # the trace has a sentence of its own
        return True
    return any(module == each or module.startswith(f"{each}.") for each in _PATCHING_ITSELF)


def _settings() -> dict[str, Any]:
    torch = _loaded("torch")
    return {what: getattr(torch, read)() for what, read in _SETTINGS.items()} if torch else {}


def _keys(store: Any) -> frozenset[str]:
    """commgrid's keys in a store that can list them, without those it keeps for the whole job."""
    if not hasattr(store, "list_keys"):
        return frozenset()
    try:
        names = store.list_keys()
    except RuntimeError:  # the rank that served it has gone
        return frozenset()
    own = (name[at:] for name in names if (at := name.find("commgrid/")) >= 0)
    return frozenset(name for name in own if not name.startswith(_KEYS_KEPT))
