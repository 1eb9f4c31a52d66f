"""Other releases of megatron-core than the installed one, each unpacked into a folder of its own.

They are wheels for another Python, but what is Python in them runs here. A folder in the user's
cache keeps them.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.abc
import importlib.machinery
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
import types
import typing
import warnings
import zipfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from commgrid.testing import Ranks, RanksFailed, run_on_ranks

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "commgrid/megatron-core"


def folder(version: str) -> Path:
    """Where a release lies; fetched the first time. Skips the test if the download fails."""
    place = CACHE / version
    if not (place / "megatron").is_dir():
        why = _fetch_once(version, place)
        if why is not None:
            pytest.skip(f"needs a download of megatron-core {version}, which failed: {why}")
    return place


@functools.cache
def _fetch_once(version: str, place: Path) -> str | None:
    """Why it cannot be had; a process asks the index once."""
    try:
        _fetch(version, place)
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
        return _last_line(error)
    return None


def _last_line(error: Exception) -> str:
    said = getattr(error, "stderr", None) or str(error)
    return (said.strip().splitlines() or [""])[-1]


def _fetch(version: str, place: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--python-version",
             "3.12", "--only-binary=:all:", "--dest", made, f"megatron-core=={version}"],
            check=True, timeout=300, capture_output=True, text=True,
        )  # fmt: skip
        (wheel,) = Path(made).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(Path(made) / "unpacked")
        if not place.exists():  # another process may have been faster
            (Path(made) / "unpacked").rename(place)


def vendors(version: str, made: Path) -> Path:
    """A copy of a release as a vendor may change it, in an empty folder.

    One getter, argument, field and ended thing more, and other defaults.
    """
    core = folder(version) / "megatron" / "core"
    place = made / "megatron" / "core"
    place.mkdir(parents=True)
    for each in core.iterdir():
        if each.name not in ("__pycache__", *VENDORS):
            (place / each.name).symlink_to(each)
    for name, edits in VENDORS.items():
        text = (core / name).read_text()
        for old, new in edits:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (place / name).write_text(text)
    return made


VENDORS = {
    "parallel_state.py": (
        ("    sharp_enabled_group: Optional[str] = None,\n",
         "    sharp_enabled_group: Optional[str] = None,\n    rings: int = 1,\n"),
        ('    order: str = "tp-cp-ep-dp-pp",\n', '    order: str = "tp-cp-ep-pp-dp",\n'),
        ("    create_gloo_process_groups: bool = True,\n",
         "    create_gloo_process_groups: bool = False,\n"),
        ("def get_data_parallel_group(\n    with_context_parallel=False,",
         "def get_data_parallel_group(\n    with_context_parallel=True,"),
        ("    _set_global_memory_buffer()\n\n",
         "    _set_global_memory_buffer(); _make_rings()\n\n"),
        ("    SymmetricMemoryManager.destroy()\n",
         "    SymmetricMemoryManager.destroy()\n    _RINGS_ENDED.append(1)\n"),
        ("def get_all_ranks():\n", """
_RING_GROUP, _RINGS_ENDED = None, [0]

def _make_rings():
    global _RING_GROUP
    _RING_GROUP = _TENSOR_MODEL_PARALLEL_GROUP

def get_ring_group(check_initialized=True):
    assert _RING_GROUP is not None or not check_initialized, "no rings"
    return _RING_GROUP

def get_ring_and_tensor_size():
    return _TENSOR_MODEL_PARALLEL_GROUP.size() * get_ring_group().size()

def get_all_ranks():
"""),
    ),
    "process_groups_config.py": (
        ("    hcp: List[torch.distributed.ProcessGroup] = field(init=False)\n",
         "    hcp: List[torch.distributed.ProcessGroup] = field(init=False)\n"
         "    ring: torch.distributed.ProcessGroup = field(init=False)\n"),
    ),
}  # fmt: skip


def on_release(
    version: str | Path, module: str, function: str, *args: Any, timeout: float = 240.0
) -> Any:
    """What a function answers in a process whose megatron-core is another release.

    That process is forked, for each call, from one that has imported the release once.

    Args:
        version: of megatron-core, or a folder that has one.
        module: where the function is; imported anew, with everything that has to do with Megatron.
        function: its name.
        timeout: seconds until the process is killed.

    Raises:
        RanksFailed: what the function raised.
    """
    pipe = _imported(folder(version) if isinstance(version, str) else version)
    try:
        pipe.send((module, function, args, timeout))
        failed, answer = pipe.recv()
    except (EOFError, OSError) as error:
        _imported.cache_clear()
        raise RanksFailed(f"the process that had megatron-core {version} is gone") from error
    if failed:
        raise RanksFailed(answer)
    return answer


@functools.cache
def _imported(place: Path) -> Connection:
    """The pipe to a process that has imported the release in a folder; it ends with this one."""
    mine, its = multiprocessing.Pipe()
    server = Ranks(_serve, 1, place, mine, its, backend=None, check=False).start()
    its.close()
    atexit.register(server.close)
    return mine


def _serve(place: Path, theirs: Connection, pipe: Connection) -> None:
    """Answers what is asked through the pipe, each in a child of its own, until it is closed."""
    theirs.close()
    warnings.simplefilter("ignore")  # of Megatron, which has many
    use(place)
    while True:
        try:
            module, function, args, timeout = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            call = getattr(importlib.import_module(module), function)
            pipe.send(
                (False, run_on_ranks(call, 1, *args, backend=None, timeout=timeout, check=False)[0])
            )
        except Exception:
            pipe.send((True, traceback.format_exc()))


def use(place: Path) -> None:
    """Makes this process import megatron-core from a folder, and forget the one it had."""
    prefixes = ("megatron", "megatron_adapter", "tests.megatron_adapter", "tests.peers", "examples")
    for name in list(sys.modules):
        if name != __name__ and any(name == one or name.startswith(f"{one}.") for one in prefixes):
            del sys.modules[name]
    sys.path.insert(0, str(place))
    importlib.invalidate_caches()
    stand_in()


class Anything(types.ModuleType):
    """A package that has whatever is asked of it; called with a function, it gives it back."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getitem__(self, _: Any) -> Anything:
        return self


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `triton` and whatever is under it."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Anything:
        return Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__version__"] = "3.0.0"


def stand_in() -> None:
    """What releases from 0.18 on import, and a Python 3.11 without a GPU has not."""
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    torch.utils._triton.has_triton_package()  # torch remembers that there is none
    for name in ("torch.utils.flop_counter", "torch._inductor.runtime.triton_compat"):
        importlib.import_module(name)
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.append(Finder())
